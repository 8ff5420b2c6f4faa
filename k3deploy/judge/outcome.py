"""From checks and gates to the outcome: of each arm, and of the candidate as a whole."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from k3deploy import stats, yamlfile
from k3deploy.errors import InputError, Problem
from k3deploy.facts import Facts
from k3deploy.judge.evidence import Evidence
from k3deploy.judge.findings import arm_findings, general_findings
from k3deploy.judge.gates import gates
from k3deploy.judge.memory import MEMORY_GATE
from k3deploy.judge.numbers import all_cells, rank_memory
from k3deploy.judge.planned import PlanView
from k3deploy.judge.rule import Rule
from k3deploy.judge.transport import BREAKS
from k3deploy.judge.validity import checks
from k3deploy.judge.verdict import ArmVerdict, Check, Comparison, GateResult, Outcome, Verdict


def judge(plan: Mapping[str, Any], facts: Facts) -> Verdict:
    """Judge every arm of ``plan`` (the content of ``plan.json``) by ``facts``.

    Raises ``InputError`` when the plan lacks what a verdict needs.
    """
    try:
        view = PlanView.model_validate(dict(plan))
    except ValidationError as error:
        problems = yamlfile.problems(PlanView, error, lambda _keys, message: Problem("plan.json", 0, message))
        raise InputError(problems) from None
    arms = _arm_verdicts(view, facts)
    outcome, best = _overall(arms)
    return Verdict(
        candidate=view.candidate,
        run_id=facts.run_id,
        outcome=outcome,
        reason=_overall_reason(outcome, best, arms),
        best_arm=best.arm if best is not None and outcome == "ACCEPT" else None,
        pairs=min(arm.pairs for arm in arms),
        looks=view.rule.looks,
        delta=view.rule.delta,
        arms=arms,
        findings=general_findings(view, facts),
    )


def _arm_verdicts(view: PlanView, facts: Facts) -> list[ArmVerdict]:
    """The arms in the plan's order. Several share the chance of a false ACCEPT as Holm divides it."""
    evidence = [Evidence.of(view, arm, facts) for arm in view.arms[1:]]
    if len(evidence) == 1:
        return [_arm_verdict(evidence[0], _rule(view, evidence[0], stats.ALPHA))]
    p_values = [_p_value(gates(one, _rule(view, one, stats.ALPHA))) for one in evidence]
    levels = stats.holm(p_values)
    return [_arm_verdict(one, _rule(view, one, level)) for one, level in zip(evidence, levels, strict=True)]


def _rule(view: PlanView, evidence: Evidence, alpha: float) -> Rule:
    return view.rule_for(len(evidence.pairs), alpha)


def _p_value(gated: Sequence[GateResult]) -> float:
    """An arm is accepted only if all its tests pass: the largest p-value is the arm's."""
    found = [comparison.p_value for gate in gated for comparison in gate.comparisons]
    return max((1.0 if value is None else value for value in found), default=1.0)


def _arm_verdict(evidence: Evidence, rule: Rule) -> ArmVerdict:
    checked, gated = checks(evidence), gates(evidence, rule)
    outcome, reasons = _outcome(evidence, rule, checked, gated)
    return ArmVerdict(
        arm=evidence.arm.name,
        slug=evidence.arm.slug,
        outcome=outcome,
        reasons=reasons,
        pairs=len(evidence.pairs),
        alpha=rule.alpha,
        checks=checked,
        gates=gated,
        cells=all_cells(evidence),
        memory=rank_memory(evidence),
        findings=arm_findings(evidence),
    )


def _outcome(
    evidence: Evidence, rule: Rule, checked: Sequence[Check], gated: Sequence[GateResult]
) -> tuple[Outcome, list[str]]:
    # A rank below its floor, and transfers that broke, are harm whatever else went wrong: often they are why.
    breaks = {name for name, gate in evidence.gates.items() if gate.observation == BREAKS}
    harm = [gate for gate in gated if gate.name in {MEMORY_GATE, *breaks} and gate.outcome == "fail"]
    failed_checks = [check for check in checked if not check.passed]
    if failed_checks and not harm:
        return "INVALID", [f"{check.name}: {problem}" for check in failed_checks for problem in check.problems]
    failed = harm or [gate for gate in gated if gate.outcome == "fail"]
    if failed:
        return "REJECT", [f"{gate.name}: {gate.reason}" for gate in failed]
    still_open = [gate for gate in gated if gate.outcome == "open"]
    if still_open:
        open_reasons = [f"{gate.name}: {gate.reason}" for gate in still_open]
        return "INCONCLUSIVE", [_what_it_takes(evidence, rule, still_open), *open_reasons]
    passed = [f"{gate.name}: {gate.reason}" for gate in gated]
    if evidence.plan.rule.no_accept:
        return "INCONCLUSIVE", [f"every gate passes, but {evidence.plan.rule.no_accept}", *passed]
    return "ACCEPT", passed


def _what_it_takes(evidence: Evidence, rule: Rule, still_open: Sequence[GateResult]) -> str:
    """Why nothing can be said yet, and how many pairs (and hours) would change that."""
    pairs = len(evidence.pairs)
    speeds = [comparison for gate in still_open for comparison in gate.comparisons]
    if not speeds:
        return f"not measured: {', '.join(gate.name for gate in still_open)}"
    least = stats.least_pairs(len(evidence.plan.arms) - 1)
    if pairs == 1:
        return (
            "one server start per arm says nothing about restart spread; "
            f"it takes at least {least} pairs{_hours(evidence, least)}, this was 1"
        )
    if pairs < rule.looks[-1]:
        planned = rule.looks[-1]
        rest = _hours(evidence, planned - pairs)
        return f"{pairs} of {planned} planned pairs are measured; {planned - pairs} are left{rest}"
    # A cell on the wrong side of its threshold leaves nothing to hope for; the others say how many it takes.
    known = [c.pairs_needed for c in speeds if not _clear(c)]
    if any(number is None for number in known):
        return f"{pairs} pairs: at this difference and this spread no affordable number of pairs decides"
    needed = max([number for number in known if number is not None] + [least, pairs + 1])
    return f"{pairs} pairs are too few: at the spread seen it takes about {needed}{_hours(evidence, needed)}"


def _clear(found: Comparison) -> bool:
    return found.low is not None and found.threshold is not None and found.low > found.threshold


def _hours(evidence: Evidence, pairs: int) -> str:
    """What that many pairs cost by the time that this run's blocks took."""
    took = [
        (datetime.fromisoformat(block.ended) - datetime.fromisoformat(block.started)).total_seconds()
        for block in evidence.both
        if block.ended
    ]
    if not took:
        return ""
    hours = pairs * len(evidence.plan.arms) * math.fsum(took) / len(took) / 3600
    return f", about {hours:.1f} h" if hours >= 0.1 else f", about {hours * 60:.0f} min"


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
