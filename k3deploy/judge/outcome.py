"""From checks and gates to the outcome: of each arm, and of the candidate as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from k3deploy import stats, yamlfile
from k3deploy.errors import InputError, Problem
from k3deploy.facts import Facts
from k3deploy.judge.evidence import Evidence
from k3deploy.judge.findings import arm_findings, general_findings
from k3deploy.judge.gates import MEMORY_GATE, gates
from k3deploy.judge.numbers import all_cells, rank_memory
from k3deploy.judge.planned import PlanView
from k3deploy.judge.validity import checks
from k3deploy.judge.verdict import ArmVerdict, Check, GateResult, Outcome, Verdict


def judge(plan: Mapping[str, Any], facts: Facts) -> Verdict:
    """Judge every arm of ``plan`` (the content of ``plan.json``) by ``facts``.

    Raises ``InputError`` when the plan lacks what a verdict needs.
    """
    try:
        view = PlanView.model_validate(dict(plan))
    except ValidationError as error:
        problems = yamlfile.problems(PlanView, error, lambda _keys, message: Problem("plan.json", 0, message))
        raise InputError(problems) from None
    arms = [_arm_verdict(Evidence.of(view, arm, facts)) for arm in view.arms[1:]]
    outcome, best = _overall(arms)
    return Verdict(
        candidate=view.candidate,
        run_id=facts.run_id,
        outcome=outcome,
        reason=_overall_reason(outcome, best, arms),
        best_arm=best.arm if best is not None and outcome == "ACCEPT" else None,
        pairs=min(arm.pairs for arm in arms),
        arms=arms,
        findings=general_findings(view, facts),
    )


def _arm_verdict(evidence: Evidence) -> ArmVerdict:
    checked, gated = checks(evidence), gates(evidence)
    outcome, reasons = _outcome(len(evidence.pairs), checked, gated)
    return ArmVerdict(
        arm=evidence.arm.name,
        slug=evidence.arm.slug,
        outcome=outcome,
        reasons=reasons,
        pairs=len(evidence.pairs),
        checks=checked,
        gates=gated,
        cells=all_cells(evidence),
        memory=rank_memory(evidence),
        findings=arm_findings(evidence),
    )


def _outcome(pairs: int, checked: Sequence[Check], gated: Sequence[GateResult]) -> tuple[Outcome, list[str]]:
    # A rank below its floor is harm whatever else went wrong: it is why the measurement may have ended early.
    floor = [gate for gate in gated if gate.name == MEMORY_GATE and gate.outcome == "fail"]
    failed_checks = [check for check in checked if not check.passed]
    if failed_checks and not floor:
        return "INVALID", [f"{check.name}: {problem}" for check in failed_checks for problem in check.problems]
    failed = floor or [gate for gate in gated if gate.outcome == "fail"]
    if failed:
        return "REJECT", [f"{gate.name}: {gate.reason}" for gate in failed]
    still_open = [gate for gate in gated if gate.outcome == "open"]
    if not still_open:
        return "ACCEPT", [f"{gate.name}: {gate.reason}" for gate in gated]
    return "INCONCLUSIVE", [
        _what_it_takes(pairs, still_open),
        *(f"{gate.name}: {gate.reason}" for gate in still_open),
    ]


def _what_it_takes(pairs: int, still_open: Sequence[GateResult]) -> str:
    """Why nothing can be said yet, and how many pairs would change that."""
    speeds = [comparison for gate in still_open for comparison in gate.comparisons]
    if not speeds:
        return f"not measured: {', '.join(gate.name for gate in still_open)}"
    known = [comparison.pairs_needed for comparison in speeds]
    if pairs == 1:
        return (
            "one server start per arm says nothing about restart spread; "
            f"it takes at least {stats.MIN_PAIRS} pairs, this was 1"
        )
    if any(number is None for number in known):
        return f"{pairs} pairs: at this difference and this spread no affordable number of pairs decides"
    needed = max(number for number in known if number is not None)
    return f"{pairs} pairs are too few: at the spread seen it takes about {needed}"


def _overall(arms: Sequence[ArmVerdict]) -> tuple[Outcome, ArmVerdict | None]:
    """One arm that passes is enough; a candidate is rejected only when every arm that counts is."""
    for outcome in ("ACCEPT", "INCONCLUSIVE"):
        chosen = [arm for arm in arms if arm.outcome == outcome]
        if chosen:
            return chosen[0].outcome, max(chosen, key=_gain)
    if any(arm.outcome == "REJECT" for arm in arms):
        if all(arm.outcome == "REJECT" for arm in arms):
            return "REJECT", arms[0]
        return "INCONCLUSIVE", None
    return "INVALID", arms[0]


def _gain(arm: ArmVerdict) -> float:
    ratios = [
        comparison.ratio
        for gate in arm.gates
        if gate.require == "faster"
        for comparison in gate.comparisons
        if comparison.ratio is not None
    ]
    return min(ratios, default=0.0)


def _overall_reason(outcome: Outcome, best: ArmVerdict | None, arms: Sequence[ArmVerdict]) -> str:
    if best is None:
        return "; ".join(f"{arm.arm} {arm.outcome}: {arm.reasons[0]}" for arm in arms)
    if outcome in ("REJECT", "INVALID") and len(arms) > 1:
        return "; ".join(f"{arm.arm}: {arm.reasons[0]}" for arm in arms)
    same = all(arm.reasons[0] == best.reasons[0] for arm in arms)
    lead = "" if same else f"{best.arm}: "
    return lead + best.reasons[0]
