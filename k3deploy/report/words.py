"""How a report says a number: one place, so that page, terminal and Markdown agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from k3deploy import stats
from k3deploy.judge import Comparison, GateResult
from k3deploy.judge.verdict import RankMemory

OUTCOME_WORDS = {
    "ACCEPT": "every gate passed",
    "REJECT": "harm, or a gate that can no longer pass",
    "INCONCLUSIVE": "not enough to say either way",
    "INVALID": "what was measured is not what was planned",
}
REQUIRE_WORDS = {
    "faster": "faster",
    "not_slower": "not slower by more than 1 %",
    "identical": "identical text",
    "at_least": "at least",
    "at_most": "at most",
    "equals": "equal to",
    "not_higher": "not above the baseline",
}
CHECK_WORDS = {
    "blocks": "every block was measured to its end",
    "harness": "one harness measured all blocks",
    "samples": "every judged cell has samples that count (no prefix hit where none may be, all tokens evaluated)",
    "as planned": "every process runs with the planned command line and environment",
    "alone": "nobody else sent a request to the server while it was measured",
    "build": "every rank runs the planned build, the same file on all",
    "one build": "all blocks of an arm ran one build",
    "adjacent": "the blocks of each pair were measured beside each other",
    "floor": "the baseline stayed above the memory floor",
    "memory known": "the lowest available memory of every rank was recorded",
    "transport": "the transport that the cluster requires is proven",
}
GATE_WORDS = {"pass": "passed", "fail": "failed", "open": "open"}
STATE_WORDS = {
    "cold": "no prefix hit, first measurement of that size",
    "warm": "no prefix hit, the same size again in the same process",
    "cached": "the prompt's beginning was in the cache",
}
MISSING = "–"


def quantity(value: float | None, unit: str) -> str:
    """``1234.5 t/s``, ``56.7 ms``; a dash for what is not known."""
    if value is None:
        return MISSING
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2
    return f"{value:,.{digits}f} {unit}".replace(",", " ")


def percent(ratio: float | None) -> str:
    """``+3.1 %`` for the ratio 1.031."""
    return MISSING if ratio is None else f"{(ratio - 1) * 100:+.1f} %"


def interval(found: Comparison) -> str:
    """``-0.4 % to +6.7 %``, or why there is none."""
    if found.ratio is None:
        return MISSING
    if found.low is None or found.high is None:
        return "unknown: one pair"
    return f"{percent(found.low)} to {percent(found.high)}"


def bootstrap(found: Comparison) -> str:
    """The bootstrap's interval, which decides nothing; a dash where three pairs are not there."""
    if found.bootstrap_low is None or found.bootstrap_high is None:
        return MISSING
    return f"{percent(found.bootstrap_low)} to {percent(found.bootstrap_high)}"


def share(value: float | None) -> str:
    """``87 %`` for 0.87."""
    return MISSING if value is None else f"{value * 100:.0f} %"


def looks(planned: Sequence[int], alpha: float, pairs: int) -> str:
    """After how many pairs an ACCEPT may be spoken, and what chance of a wrong one is spent by then in all.

    alpha: the arm's own share where several arms divide it. pairs: how many are measured.
    """
    planned = planned or [pairs]  # a plan without looks is looked at once: at its end
    if planned[-1] < stats.MIN_PAIRS:
        return f"No ACCEPT can be spoken: it takes {stats.MIN_PAIRS} pairs, and {planned[-1]} were planned"
    steps = [f"{look} pairs ({stats.spent(look / planned[-1], alpha) * 100:.2f} %)" for look in planned]
    done = sum(look <= pairs for look in planned)
    spend = f"ACCEPT may be spoken after {', '.join(steps)}, in brackets the chance of a wrong one spent by then"
    return f"{spend}; {done} of {len(planned)} looks reached with {pairs} pairs"


def metric(found: Comparison) -> str:
    """What a comparison measures, in words."""
    if found.metric == "ttft":
        return "TTFT"
    return "decode" if found.cell.startswith("tg") else "prefill"


def requirement(gate: GateResult) -> str:
    """What the gate asks for, with its limit."""
    words = REQUIRE_WORDS.get(gate.require, gate.require)
    threshold = gate.comparisons[0].threshold if gate.comparisons else None
    if gate.require == "faster" and threshold:
        words += f" by more than {percent(threshold).lstrip('+')}"
    return f"{words} {plain(gate.limit)}" if gate.limit is not None else words


def plain(value: Any) -> str:
    """A value of the plan or of an observation as a person writes it."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(plain(item) for item in value)
    return str(value)


def memory(value: int | None) -> str:
    """MiB with a thin thousands separator."""
    return MISSING if value is None else f"{value:,} MiB".replace(",", " ")


def allocated(rank: RankMemory) -> str:
    """What llama.cpp allocated on a rank, and by how much the forecast of it was off."""
    if rank.allocated_mib is None or rank.forecast_error is None:
        return MISSING
    return f"{memory(round(rank.allocated_mib))} (forecast {rank.forecast_error * 100:+.0f} %)"


def trend(rank: RankMemory) -> str:
    """How available memory changes from one request to the next."""
    value = rank.trend_mib_per_request
    return MISSING if value is None else f"{value:+.2f} MiB"
