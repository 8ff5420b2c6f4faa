"""Gates on what was measured: those of the rows, and those that hold for every row."""

from __future__ import annotations

from typing import Literal

from k3deploy import stats
from k3deploy.judge.evidence import Evidence, cell_names, observed, reused_tokens
from k3deploy.judge.numbers import NOT_INFERIOR, SUPERIOR, compare, rank_memory
from k3deploy.judge.planned import PlannedGate
from k3deploy.judge.verdict import Comparison, GateResult

MEMORY_GATE = "memory_floor"


def gates(evidence: Evidence) -> list[GateResult]:
    """The gates of the rows in their order, then the implied ones: warm speed, the memory floor, unchanged text."""
    rows = [_gate(evidence, name, gate) for name, gate in evidence.plan.gates.items()]
    return [*rows, *_warm_gate(evidence), *_memory_gate(evidence), *_prefix_gate(evidence)]


def _gate(evidence: Evidence, name: str, gate: PlannedGate) -> GateResult:
    if gate.cells:
        return _speed_gate(evidence, name, gate)
    if gate.suite:
        return _identity_gate(evidence, name, gate)
    return _observation_gate(evidence, name, gate)


def _speed_gate(evidence: Evidence, name: str, gate: PlannedGate, *, implied: bool = False) -> GateResult:
    threshold = SUPERIOR if gate.require == "faster" else NOT_INFERIOR
    comparisons = [compare(evidence, cell, gate.state, gate.metric, threshold) for cell in gate.cells]
    judged = [(comparison, *_judge_speed(comparison, gate.require)) for comparison in comparisons]
    outcomes = [outcome for _, outcome, _ in judged]
    outcome: Literal["pass", "fail", "open"] = (
        "fail" if "fail" in outcomes else "open" if "open" in outcomes or not outcomes else "pass"
    )
    telling = [text for _, result, text in judged if result == outcome] or ["no cell to judge"]
    return GateResult(
        name=name,
        require=gate.require,
        outcome=outcome,
        reason="; ".join(telling),
        implied=implied,
        comparisons=comparisons,
    )


def _judge_speed(found: Comparison, require: str) -> tuple[Literal["pass", "fail", "open"], str]:
    what = f"{found.cell} {found.state}" + (" time to first token" if found.metric == "ttft" else "")
    if found.ratio is None:
        return "open", f"{what} was not measured in both arms"
    change = f"{what} {_percent(found.ratio)}"
    if found.low is None or found.high is None:
        # However large: the spread between two starts of one arm is not known from one start.
        return "open", f"{change} in one pair"
    interval = f"{change} (95 % interval {_percent(found.low)} to {_percent(found.high)}, {found.pairs} pairs)"
    if found.high < NOT_INFERIOR:
        return "fail", f"{interval}: slower"
    if found.pairs < stats.MIN_PAIRS:
        return "open", interval
    if require == "faster":
        if found.low > SUPERIOR:
            return "pass", interval
        if found.high < SUPERIOR:
            return "fail", f"{interval}: no gain of {_percent(SUPERIOR)} is left to hope for"
        return "open", interval
    return ("pass", interval) if found.low > NOT_INFERIOR else ("open", interval)


def _identity_gate(evidence: Evidence, name: str, gate: PlannedGate) -> GateResult:
    """Greedy output on equal prompts. What was not run as a suite is judged by the texts of the cells."""
    differing, compared, unstable = evidence.texts()
    if differing and not unstable:
        text = f"greedy output differs in {len(differing)} of {compared} texts, first in {differing[0]}"
        return GateResult(name=name, require=gate.require, outcome="fail", reason=text, observed=False)
    if unstable:
        text = f"the baseline's own output differs between its starts ({unstable[0]}): identity cannot be judged"
    else:
        text = (
            f"the suite {gate.suite} was not run; the {compared} texts of the measured cells are identical"
            if compared
            else f"the suite {gate.suite} was not run, and no text could be compared"
        )
    return GateResult(name=name, require=gate.require, outcome="open", reason=text)


def _observation_gate(evidence: Evidence, name: str, gate: PlannedGate) -> GateResult:
    key = str(gate.observation)
    values = observed(evidence.blocks, key)
    if not values:
        text = f"nothing in the logs and probes speaks of {key}"
        return GateResult(name=name, require=gate.require, outcome="open", reason=text, limit=gate.limit)
    why = f" ({gate.why})" if gate.why else ""
    limit = gate.limit
    if gate.require == "equals":
        worst = next((value for value in values if value != limit), values[0])
        passed, wanted = worst == limit, f"must be {_shown(limit)}"
    elif gate.require == "at_least":
        worst = min(values)
        passed, wanted = worst >= float(limit or 0), f"must be at least {_shown(limit)}"
    elif gate.require == "at_most":
        worst = max(values)
        passed, wanted = worst <= float(limit or 0), f"must be at most {_shown(limit)}"
    else:
        baseline = observed(evidence.baseline_blocks, key)
        if not baseline:
            text = f"{key} of the baseline is not known"
            return GateResult(name=name, require=gate.require, outcome="open", reason=text)
        worst, limit = max(values), max(baseline)
        passed, wanted = worst <= limit, f"must not be above the baseline's {_shown(limit)}"
    return GateResult(
        name=name,
        require=gate.require,
        outcome="pass" if passed else "fail",
        reason=f"{key} is {_shown(worst)}, {wanted}" + ("" if passed else why),
        limit=limit,
        observed=worst,
    )


def _warm_gate(evidence: Evidence) -> list[GateResult]:
    """Nobody may pay for a faster cold prompt with slower warm ones, whatever the row judges."""
    judged = {cell for gate in evidence.plan.gates.values() if gate.state == "warm" for cell in gate.cells}
    warm = [name for name, state in cell_names(evidence.blocks) if state == "warm" and name not in judged]
    if not warm:
        return []
    gate = PlannedGate(cells=warm, state="warm", require="not_slower")
    return [_speed_gate(evidence, "warm", gate, implied=True)]


def _memory_gate(evidence: Evidence) -> list[GateResult]:
    known = [rank for rank in rank_memory(evidence) if rank.min_available_mib is not None and rank.guard_mib]
    if not known:
        return []
    tightest = min(known, key=lambda rank: (rank.min_available_mib or 0) - (rank.guard_mib or 0))
    available, guard = tightest.min_available_mib or 0, tightest.guard_mib or 0
    text = f"{tightest.rank} had {available} MiB available at its lowest, the floor is {guard} MiB"
    return [
        GateResult(
            name=MEMORY_GATE,
            require="at_least",
            outcome="fail" if available < guard else "pass",
            reason=text,
            implied=True,
            limit=guard,
            observed=available,
        )
    ]


def _prefix_gate(evidence: Evidence) -> list[GateResult]:
    """Reuse of a moved prefix that changes the text is harm, if the baseline does not do the same."""
    own = observed(evidence.blocks, "prefix_reuse_identical")
    if not own or False in observed(evidence.baseline_blocks, "prefix_reuse_identical"):
        return []
    identical = all(own)
    return [
        GateResult(
            name="prefix_reuse_text",
            require="identical",
            outcome="pass" if identical else "fail",
            reason=(
                "a prompt whose beginning was dropped gives the same text as from nothing"
                if identical
                else "a prompt whose beginning was dropped gives another text than the same prompt from nothing: "
                f"the server reused {reused_tokens(evidence.blocks)} tokens with the state of what was dropped "
                f"(the baseline: {reused_tokens(evidence.baseline_blocks)})"
            ),
            implied=True,
            observed=identical,
        )
    ]


def _percent(ratio: float) -> str:
    return f"{(ratio - 1) * 100:+.1f} %"


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, int | float) else str(value)
