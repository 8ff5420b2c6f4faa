"""A campaign's end: the matrix with what came out of each row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from k3deploy.facts import Facts
from k3deploy.judge import ArmVerdict, Comparison, Verdict
from k3deploy.report import words


@dataclass(frozen=True, slots=True)
class MatrixRow:
    """One arm in words. ``cost`` is the time that its own server starts took; the baseline's are shared."""

    arm: str
    hypothesis: str
    verdict: str
    effect: str
    guards: str
    cost: str


HEADINGS = ("arm", "hypothesis", "verdict", "effect", "guards", "cost")


def matrix_rows(plan: Mapping[str, Any], facts: Facts, verdict: Verdict) -> list[MatrixRow]:
    """A row an arm, in the plan's order."""
    titles = {str(row.get("id")): str(row.get("title") or "") for row in plan.get("rows") or []}
    return [
        MatrixRow(
            arm=arm.arm,
            hypothesis=" + ".join(title for name in _rows(arm.arm) if (title := titles.get(name))) or words.MISSING,
            verdict=arm.outcome,
            effect=_effect(arm),
            guards=_guards(arm),
            cost=_cost(facts, arm.arm),
        )
        for arm in verdict.arms
    ]


def _rows(arm: str) -> list[str]:
    return [part.partition("@")[0] for part in arm.split("+")]


def _effect(arm: ArmVerdict) -> str:
    """The primary cell's change with its interval; the largest one where no gate judges a speed."""
    judged = [found for gate in arm.gates if gate.require == "faster" for found in gate.comparisons]
    primary: Comparison | None = next(iter(judged), None)
    if primary is None:
        return words.MISSING
    return f"{primary.cell} {primary.state} {words.percent(primary.ratio)} ({words.interval(primary)})"


def _guards(arm: ArmVerdict) -> str:
    """What fails or is open beside speed; the memory floor's number when all is well."""
    wrong = [
        f"{gate.name} {words.GATE_WORDS[gate.outcome]}"
        for gate in arm.gates
        if gate.outcome != "pass" and not gate.comparisons
    ]
    tightest = min((m.min_available_mib for m in arm.memory if m.min_available_mib is not None), default=None)
    return ", ".join(wrong) or f"all hold; at least {words.memory(tightest)} free"


def _cost(facts: Facts, arm: str) -> str:
    from k3deploy.progress import duration

    took = [
        (datetime.fromisoformat(block.ended) - datetime.fromisoformat(block.started)).total_seconds()
        for block in facts.of(arm)
        if block.ended
    ]
    return f"{duration(sum(took))}, {len(took)} start{'s' if len(took) > 1 else ''}" if took else words.MISSING
