"""The filter that says whether production may be changed now."""

from __future__ import annotations

import time

from ansible_collections.k3.deploy.plugins.module_utils import production


def promotion_problems(head, owner, force, head_unit):
    """What forbids changing production: sentences; empty when the window is held by `owner` and production is drained in it.

    head: what k3.deploy.promotion reads of the head. force: the name of another holder whose window may be used.
    """
    window = head.get("window")
    if not window:
        return ["no maintenance window is open: k3deploy window open first, which drains production"]
    if window.get("damaged") or window.get("closing") or window.get("owner") not in {owner, force or owner}:
        return ["LOCKED: " + production.held_words(window, time.time())]
    if (head["units"].get(head_unit) or {}).get("active") in ("active", "activating", "reloading"):
        return [f"production's {head_unit} runs inside the window: k3deploy window open drains it"]
    return []


class FilterModule:
    """Registers the filter."""

    def filters(self):
        return {"promotion_problems": promotion_problems}
