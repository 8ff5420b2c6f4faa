"""A candidate on a cluster, put together to a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from k3deploy import stats
from k3deploy.inventory import BuildSpec, Cluster
from k3deploy.judge import DELTA
from k3deploy.matrix import BASELINE, Finding, Matrix
from k3deploy.plan.again import CALIBRATE, calibrate_candidate
from k3deploy.plan.arms import ArmPlanner, processes_key
from k3deploy.plan.blocks import REPEATS, SEED, bench_request, evidence_of, order_blocks
from k3deploy.plan.checks import undecidable_notes
from k3deploy.plan.model import Known, Plan, PlanError, PlannedArm, PlannedRule, RowSummary
from k3deploy.plan.parity import parity_request
from k3deploy.plan.sidecar import read_facts, with_sidecar
from k3deploy.settings import merge, render

if TYPE_CHECKING:
    from k3deploy.model_facts import ModelFacts


def make_plan(
    matrix: Matrix,
    cluster: Cluster,
    candidate: str,
    *,
    pairs: int = 1,
    cells: Sequence[str] | None = None,
    repeats: int = REPEATS,
    delta: float = DELTA,
    seed: int = SEED,
    model_facts: ModelFacts | None = None,
    harness: Mapping[str, Any] | None = None,
) -> Plan:
    """Resolve ``candidate`` on ``cluster``.

    pairs: how often baseline and arms are measured beside each other. cells: names such as ``pp2048`` to measure
    instead of all. delta: the smallest gain that is worth a change. seed: of the order of the blocks.
    model_facts: facts of the model, instead of those that the inventory or the model's file give. harness: settings of
    every arm, beside the candidate's own.

    Raises ``CandidateError`` (unknown or impossible candidate), ``PlanError`` (not possible on this cluster) and
    ``InputError`` (the model's sidecar or facts are wrong).
    """
    if pairs < 1 or repeats < 1:
        raise PlanError("pairs and repeats must be at least 1")
    resolved = calibrate_candidate(cells) if candidate == CALIBRATE else matrix.resolve(candidate)
    resolved = replace(resolved, harness=merge(resolved.harness, harness or {}))
    model = with_sidecar(cluster.model)
    facts = model_facts or read_facts(model)
    planner = ArmPlanner(matrix, cluster, resolved, facts)
    arms = planner.arms()
    builds = {arm.build_key: {"name": arm.build, **_spec(planner.builds[arm.build])} for arm in arms}
    return Plan(
        candidate=candidate,
        cluster=cluster.name,
        inventory=cluster.inventory,
        ranks=[rank.name for rank in cluster.ranks],
        model=model,
        transport=cluster.transport,
        rows=[RowSummary.model_validate(row.model_dump(include=set(RowSummary.model_fields))) for row in resolved.rows],
        arms=arms,
        harness=planner.harness,
        gates=resolved.gates,
        guards=resolved.guards,
        evidence=evidence_of(resolved),
        findings=[
            *(_known(BASELINE, finding) for finding in matrix.baseline.findings),
            *(_known(row_id, finding) for row_id, finding in resolved.findings),
        ],
        notes=[
            *planner.notes,
            *_notes(matrix, cluster, facts, arms[0]),
            *undecidable_notes(resolved.gates, arms, planner.builds),
        ],
        builds=builds,
        blocks=order_blocks(arms, pairs, seed),
        rule=PlannedRule(delta=delta, looks=stats.looks(pairs, len(arms) - 1), seed=seed, fixed=candidate == CALIBRATE),
        parity=parity_request(cluster),
        bench=bench_request(resolved, model, arms, cells, repeats),
        calibrated_as=_calibrated_as(planner, arms[0]),
    )


def _calibrated_as(planner: ArmPlanner, baseline: PlannedArm) -> str:
    """The key of the cluster's own baseline; of this plan's, where that one cannot run here."""
    if planner.candidate.harness or planner.candidate.against:
        with suppress(PlanError):
            return processes_key(planner.plain_baseline())
    return processes_key(baseline)


def _notes(matrix: Matrix, cluster: Cluster, facts: ModelFacts | None, baseline: PlannedArm) -> list[str]:
    """What holds for every arm."""
    notes = []
    intended = matrix.baseline.settings.values()
    for key, value in cluster.scale.items():
        if key in intended and intended[key] != value:
            notes.append(f"this cluster pins {key} to {render(value)} in every arm (matrix: {render(intended[key])})")
    spec = cluster.builds[baseline.build]
    for variable, marker in matrix.baseline.markers.items():
        if variable in baseline.settings.get("environment", {}) and marker not in spec.markers:
            notes.append(
                f"{variable} is set, but build {baseline.build} does not promise the marker {marker}: "
                "the switch has no effect in such a build"
            )
    if facts is None:
        notes.append("no memory forecast: neither k3_model.facts nor the model's file is at hand")
    if cluster.model.sha256 is None and cluster.model.sidecar is None:
        notes.append("k3_model.sha256 is not known: the model's bytes are not verified")
    return notes


def _spec(spec: BuildSpec) -> dict[str, Any]:
    return spec.model_dump(mode="json", exclude_none=True)


def _known(row: str, finding: Finding) -> Known:
    return Known(row=row, text=finding.text, contradicts=finding.contradicts, seen=finding.seen)
