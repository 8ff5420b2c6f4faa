"""The parity gates: exact output and state, greedy suites, chunks and reuse, each arm held against the baseline."""

from __future__ import annotations

from typing import Literal

from k3deploy import parity
from k3deploy.facts import Verified
from k3deploy.judge.evidence import Evidence
from k3deploy.judge.planned import PlannedGate
from k3deploy.judge.verdict import GateResult
from k3deploy.parity import Parity

Result = Literal["pass", "fail", "open"]
OUTPUT_ERROR = "max_output_error"
STATE_ERROR = "max_state_error"
# What a change of the program may do to the numbers (the runbook's limits), where the row does not set its own.
LIMITS = {OUTPUT_ERROR: 1e-3, STATE_ERROR: 1e-6}
NAMES = {OUTPUT_ERROR: "exact_output", STATE_ERROR: "exact_state"}
# Below this a token won by so little that another order of the same sums may turn it: a greedy text proves nothing.
NEAR_TIE = 0.1


def answers(evidence: Evidence) -> tuple[Parity, Parity] | None:
    """(baseline's, arm's) answers; ``None`` until both were asked."""
    both = []
    for blocks in (evidence.baseline_blocks, evidence.blocks):
        both.append(
            next((b.bench.parity for b in blocks if b.bench and not b.bench.error and b.bench.parity.asked), None)
        )
    baseline, arm = both
    return (baseline, arm) if baseline and arm else None


def measured_error(evidence: Evidence, observation: str) -> tuple[float, str] | None:
    """(error, on what it rests) of this arm: the larger of the server's against the baseline and the kernels' own
    against FP64, as far as they are known."""
    found = [error for error in (_of_server(evidence, observation), _of_kernels(evidence, observation)) if error]
    return max(found, default=None)


def _of_kernels(evidence: Evidence, observation: str) -> tuple[float, str] | None:
    verified = evidence.verified
    error: float | None = getattr(verified, observation, None)
    if verified is None or error is None:
        return None
    return error, f"the operator against FP64 on {verified.host} ({verified.device}), {verified.date[:10]}"


def _of_server(evidence: Evidence, observation: str) -> tuple[float, str] | None:
    both = answers(evidence)
    if both is None:
        return None
    baseline, arm = both
    if observation == OUTPUT_ERROR:
        output = parity.output_difference(baseline, arm)
        if output is None:
            return None
        return output.max_error, f"largest at position {output.position} of {output.positions} compared"
    state = parity.state_difference(baseline, evidence.baseline.slug, arm, evidence.arm.slug)
    return (state.relative_error, "relative to max|S|, by the server's slot save") if state else None


def parity_gates(evidence: Evidence) -> list[GateResult]:
    """The implied ones: errors where the program is another, suites that no row judges, the server against itself."""
    found = []
    if evidence.arm.build_key != evidence.baseline.build_key:
        judged = {gate.observation for gate in evidence.gates.values()}
        found += [_error_gate(evidence, key) for key in (OUTPUT_ERROR, STATE_ERROR) if key not in judged]
    if evidence.verified is not None:
        found.append(_operator_gate(evidence.verified))
    return [*found, _suites_gate(evidence), _consistency_gate(evidence)]


def _error_gate(evidence: Evidence, observation: str) -> GateResult:
    limit, error = LIMITS[observation], measured_error(evidence, observation)
    outcome: Result = "open"
    reason = why_not(evidence, observation)
    if error is not None:
        outcome = "pass" if error[0] <= limit else "fail"
        reason = f"{observation} is {error[0]:.3g} against the baseline, must be at most {limit:g} ({error[1]})"
    return GateResult(
        name=NAMES[observation],
        require="at_most",
        outcome=outcome,
        reason=reason,
        implied=True,
        limit=limit,
        observed=error[0] if error else None,
    )


def _operator_gate(verified: Verified) -> GateResult:
    """The operators' own cases on a GPU: a kernel that failed one, or never ran, is not what was measured."""
    where = f"on {verified.host} ({verified.device}, driver {verified.driver})"
    if verified.failed:
        outcome: Result = "fail"
        tried = len(verified.failed) + verified.passed
        reason = f"{len(verified.failed)} of {tried} cases fail {where}: {verified.failed[0]}"
    elif not verified.active:
        outcome, reason = "fail", f"no case reached the kernels {where}: {'; '.join(verified.fallbacks) or 'no marker'}"
    else:
        outcome, reason = "pass", f"{verified.passed} cases of test-backend-ops pass {where}"
    return GateResult(name="operator_cases", require="identical", outcome=outcome, reason=reason, implied=True)


def why_not(evidence: Evidence, observation: str) -> str:
    """Why an error is not known."""
    both = answers(evidence)
    if both is None:
        return "the exact-output test was not run in both arms, and k3deploy verify never"
    part = "positions" if observation == OUTPUT_ERROR else "state"
    return refusal(evidence, part) or f"{observation} could not be compared"


def refusal(evidence: Evidence, *parts: str) -> str | None:
    """What kept an arm from answering these parts of the test (fields of ``Parity``): the first such words."""
    for answer, whose in zip(answers(evidence) or (), ("the baseline", "this arm"), strict=False):
        for part in parts:
            asked = getattr(answer, part)
            if asked is not None and asked.error:
                return f"{whose}: {asked.error}"
    return None


def identity(evidence: Evidence, gate: PlannedGate) -> tuple[Result, str] | None:
    """A row's own demand that a suite's texts are identical; ``None`` where the suite was not run."""
    both = answers(evidence)
    if both is None:
        return None
    parted, compared = parity.divergences(*both, str(gate.suite))
    if compared < parity.asked(*both, str(gate.suite)) and not parted:
        return "open", f"{compared} of {parity.asked(*both, str(gate.suite))} texts of {gate.suite} could be compared"
    if not compared:
        return None
    if parted:
        return "fail", f"{len(parted)} of {compared} texts of the suite {gate.suite} go on otherwise, first {parted[0]}"
    return "pass", f"all {compared} texts of the suite {gate.suite} go on alike"


def _suites_gate(evidence: Evidence) -> GateResult:
    judged = {gate.suite for gate in evidence.gates.values()}
    both = answers(evidence)
    outcome: Result = "open"
    reason = "no suite was run in both arms"
    if both is not None:
        suites = [name for name in (both[0].suites.texts if both[0].suites else {}) if name not in judged]
        results = [parity.divergences(*both, suite) for suite in suites]
        parted = [divergence for found, _ in results for divergence in found]
        compared = sum(count for _, count in results)
        asked = sum(parity.asked(*both, suite) for suite in suites)
        clear = [found for found in parted if found.margin is None or found.margin > NEAR_TIE]
        if clear:
            outcome = "fail"
            reason = f"{len(parted)} of {compared} greedy texts go on otherwise, not by a near tie: {clear[0]}"
        elif parted:
            reason = f"{len(parted)} of {compared} greedy texts part at a near tie, first {parted[0]}: read them"
        elif compared < asked:
            reason = refusal(evidence, "suites") or f"{compared} of {asked} greedy texts could be compared"
        elif compared:
            outcome, reason = "pass", f"all {compared} greedy texts of {', '.join(suites)} go on alike"
    return GateResult(name="suites", require="identical", outcome=outcome, reason=reason, implied=True)


def _consistency_gate(evidence: Evidence) -> GateResult:
    """Continuation in chunks and reuse of the slot. What the baseline does too is not the candidate's doing."""
    both = answers(evidence)
    outcome: Result = "open"
    reason = "chunks and reuse were not tried in both arms"
    if both is not None:
        before, after = (parity.inconsistencies(answer) for answer in both)
        own = [text for text in after if text not in before]
        if own:
            outcome, reason = "fail", own[0]
        elif refused := refusal(evidence, "continuation", "reuse"):
            reason = refused
        elif after:
            reason = f"the baseline does it too: {after[0]}"
        elif anew := parity.evaluated_anew(both[1]):
            reason = f"no continuation was tried: the server evaluated the prompt anew in chunks of {', '.join(anew)}"
        elif both[1].continuation and both[1].reuse:
            outcome, reason = "pass", "chunks, other prompts, an erased slot and a broken request change nothing"
    return GateResult(name="continuation_and_reuse", require="identical", outcome=outcome, reason=reason, implied=True)
