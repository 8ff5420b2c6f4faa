"""From an ACCEPT to production, and back: what is refused, what would run, and a plan that an operator applies.

Nothing here touches a rank. ``evidence`` says whether the runbook's gates are recorded, ``check`` what speaks against a
promotion, ``make`` what production would run, ``unit`` writes that as systemd drop-ins, ``text`` for people.
"""

from k3deploy.promotion.check import refusals
from k3deploy.promotion.evidence import GateRecord, runbook_gates
from k3deploy.promotion.make import demotion, promotion
from k3deploy.promotion.model import Promotion, RankNow
from k3deploy.promotion.text import layer, render

__all__ = [
    "GateRecord",
    "Promotion",
    "RankNow",
    "demotion",
    "layer",
    "promotion",
    "refusals",
    "render",
    "runbook_gates",
]
