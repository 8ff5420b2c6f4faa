"""Gates on what was measured: those of the rows, and those that hold for every row."""

from __future__ import annotations

from typing import Literal

from k3deploy import stats
from k3deploy.facts import State
from k3deploy.facts.logs import COUNTS
from k3deploy.judge import parity
from k3deploy.judge.evidence import Evidence, cell_names, observed, reused_tokens, unstable_texts
from k3deploy.judge.memory import memory_gate
from k3deploy.judge.numbers import compare
from k3deploy.judge.planned import PlannedGate
from k3deploy.judge.rule import Require, Rule, Speed
from k3deploy.judge.transport import TAKES
from k3deploy.judge.verdict import Comparison, GateResult

_OUTCOMES: dict[Speed, Literal["pass", "fail", "open"]] = {
    Speed.PASS: "pass",
    Speed.OPEN: "open",
    Speed.FUTILE: "fail",
    Speed.HARM: "fail",
}


def gates(evidence: Evidence, rule: Rule) -> list[GateResult]:
    """The gates of the rows in their order, then the implied ones: the speed of every other cold and warm cell, the
    memory floor, reuse of a moved prefix, the same text after every start, parity."""
    rows = [_gate(evidence, name, gate, rule) for name, gate in evidence.gates.items()]
    others = [*_other_cells(evidence, "cold", rule), *_other_cells(evidence, "warm", rule)]
    implied = [*memory_gate(evidence), *_prefix_gate(evidence), *_restart_gate(evidence)]
    return [*rows, *others, *implied, *parity.parity_gates(evidence)]


def requirements(gate: PlannedGate) -> list[tuple[str, Require]]:
    """What each cell of a speed gate must be. Of a gate that asks for a gain, the first cell is the primary one: it
    must be faster, the others must not be slower."""
    if gate.require != "faster":
        return [(cell, "not_slower") for cell in gate.cells]
    return [(cell, "faster" if place == 0 else "not_slower") for place, cell in enumerate(gate.cells)]


def _gate(evidence: Evidence, name: str, gate: PlannedGate, rule: Rule) -> GateResult:
    if gate.cells:
        return _speed_gate(evidence, name, gate, rule)
    if gate.suite:
        return _identity_gate(evidence, name, gate)
    return _observation_gate(evidence, name, gate)


def _speed_gate(evidence: Evidence, name: str, gate: PlannedGate, rule: Rule, *, implied: bool = False) -> GateResult:
    judged = []
    for cell, require in requirements(gate):
        found = compare(evidence, cell, gate.state, gate.metric, rule.threshold(require))
        judged.append((found, *_judge_speed(found, require, rule)))
    worst = max((speed for _, speed, _ in judged), default=Speed.OPEN)
    telling = [text for _, speed, text in judged if speed == worst] or ["no cell to judge"]
    return GateResult(
        name=name,
        require=gate.require,
        outcome=_OUTCOMES[worst],
        reason="; ".join(telling),
        implied=implied,
        comparisons=[found for found, _, _ in judged],
    )


def _judge_speed(found: Comparison, require: Require, rule: Rule) -> tuple[Speed, str]:
    import numpy as np

    what = f"{found.cell} {found.state}" + (" time to first token" if found.metric == "ttft" else "")
    if found.ratio is None:
        return Speed.OPEN, f"{what} was not measured in both arms"
    change = f"{what} {_percent(found.ratio)}"
    if found.low is None or found.high is None:
        # However large: the spread between two starts of one arm is not known from one start.
        return Speed.OPEN, f"{change} in one pair"
    speed = Speed(int(rule.speed(np.asarray(found.differences), require)))
    text = f"{change} (95 % interval {_percent(found.low)} to {_percent(found.high)}, {found.pairs} pairs)"
    threshold = rule.threshold(require)
    if speed is Speed.HARM:
        return speed, f"{text}: slower"
    if speed is Speed.FUTILE:
        return speed, f"{text}: no gain of {_percent(threshold)} is left to hope for"
    if speed is Speed.OPEN and found.low > threshold and found.pairs >= stats.MIN_PAIRS:
        return speed, f"{text}: {_not_yet(found, rule)}"
    return speed, text


def _not_yet(found: Comparison, rule: Rule) -> str:
    """Why an interval that is clear of its threshold does not count yet."""
    if found.pairs not in rule.looks:
        planned = ", ".join(map(str, rule.looks))
        return f"an ACCEPT may be spoken only at a planned look (after {planned} pairs)"
    if not rule.alpha:
        return "an arm with a smaller p-value does not pass, and by Holm none after it may"
    share = stats.spent(found.pairs / rule.looks[-1], rule.alpha)
    p_value = 1.0 if found.p_value is None else found.p_value
    return f"the exact sign-flip test (p {p_value:.3f}) does not pass what may be spent here ({share:.3f})"


def _identity_gate(evidence: Evidence, name: str, gate: PlannedGate) -> GateResult:
    """Greedy output on equal prompts. What was not run as a suite is judged by the texts of the cells."""
    if found := parity.identity(evidence, gate):
        return GateResult(
            name=name, require=gate.require, outcome=found[0], reason=found[1], observed=found[0] == "pass"
        )
    differing, compared, unstable = evidence.texts()
    if differing and not unstable:
        text = f"greedy output differs in {len(differing)} of {compared} texts, first in {differing[0]}"
        return GateResult(name=name, require=gate.require, outcome="fail", reason=text, observed=False)
    if unstable:
        text = f"the baseline's own output differs between its starts ({unstable[0]}): identity cannot be judged"
    else:
        why = parity.refusal(evidence, "suites")
        text = f"the suite {gate.suite} was not run" + (f" ({why})" if why else "")
        text += (
            f"; the {compared} texts of the measured cells are identical"
            if compared
            else ", and no text could be compared"
        )
    return GateResult(name=name, require=gate.require, outcome="open", reason=text)


def _observation_gate(evidence: Evidence, name: str, gate: PlannedGate) -> GateResult:
    key = str(gate.observation)
    if (cut := _truncated(evidence, gate)) and not _settled(evidence, gate):
        text = f"{key} is not known: the logs of block {', '.join(cut)} are longer than what is kept of them"
        return GateResult(name=name, require=gate.require, outcome="open", reason=text, limit=gate.limit)
    if key in parity.LIMITS:
        error = parity.measured_error(evidence, key)
        values: list[float | bool] = [error[0]] if error else []
    else:
        values = observed(evidence.blocks, key)
        alone = getattr(evidence.verified, key, None)
        values += [alone] if isinstance(alone, float) else []
    if not values:
        text = f"nothing in the logs and probes speaks of {key}" + (f": {TAKES[key]}" if key in TAKES else "")
        if key in parity.LIMITS:
            text = parity.why_not(evidence, key)
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


def _truncated(evidence: Evidence, gate: PlannedGate) -> list[str]:
    """The blocks of which only a part of what the gate reads is known."""
    blocks = evidence.both if gate.require == "not_higher" else evidence.blocks
    return [str(block.index) for block in blocks if gate.observation in block.observations.truncated]


def _settled(evidence: Evidence, gate: PlannedGate) -> bool:
    """Whether what is left out cannot change the gate's answer: a count can only grow."""
    values = observed(evidence.blocks, str(gate.observation))
    if gate.observation not in COUNTS or not values:
        return False
    limit = float(gate.limit or 0)
    return (gate.require == "at_most" and max(values) > limit) or (gate.require == "at_least" and min(values) >= limit)


def _other_cells(evidence: Evidence, state: State, rule: Rule) -> list[GateResult]:
    """Nobody may pay for the gain with a slower cell, whatever the row judges."""
    judged = {
        cell
        for gate in evidence.gates.values()
        if gate.state == state and gate.metric == "speed"
        for cell in gate.cells
    }
    others = [name for name, of in cell_names(evidence.blocks) if of == state and name not in judged]
    if not others:
        return []
    gate = PlannedGate(cells=others, state=state, require="not_slower")
    return [_speed_gate(evidence, "warm" if state == "warm" else "other_cold", gate, rule, implied=True)]


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


def _restart_gate(evidence: Evidence) -> list[GateResult]:
    """The same prompts give the same texts in every start. What the baseline's do not either is not the arm's doing."""
    before, after = (unstable_texts(blocks) for blocks in (evidence.baseline_blocks, evidence.blocks))
    if before is None or after is None or before:
        return []
    reason = "every greedy text is the same after every start"
    if after:
        reason = f"the arm's own greedy text differs between its starts ({after[0]}), the baseline's does not"
    return [
        GateResult(
            name="same_after_restart",
            require="identical",
            outcome="fail" if after else "pass",
            reason=reason,
            implied=True,
            observed=not after,
        )
    ]


def _percent(ratio: float) -> str:
    return f"{(ratio - 1) * 100:+.1f} %"


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, int | float) else str(value)
