"""Several candidates in one window: their plans merged to one, with shared baseline blocks and each arm's own gates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from k3deploy import stats
from k3deploy.inventory import Cluster
from k3deploy.matrix import Matrix
from k3deploy.plan.blocks import order_blocks
from k3deploy.plan.make import make_plan
from k3deploy.plan.model import Plan, PlanError, PlannedArm

PREFIX = "campaign-"
Item = TypeVar("Item")


def campaign_name(candidates: Sequence[str]) -> str:
    """``campaign-next,U9``: what a run of these candidates is called."""
    return PREFIX + ",".join(candidates)


def campaign_candidates(name: str) -> list[str] | None:
    """The candidates in a campaign's name; ``None`` for the name of a candidate."""
    return name.removeprefix(PREFIX).split(",") if name.startswith(PREFIX) else None


def make_campaign(matrix: Matrix, cluster: Cluster, name: str, *, pairs: int = 1, **options: Any) -> Plan:
    """One plan for all candidates in ``name``; options: those of ``make_plan``.

    What one row asks of every arm that it is measured with (U7: context checkpoints) holds for all arms of the
    campaign. A candidate that is impossible on this cluster, contradicts another's such setting, or is measured against
    a baseline of its own, is left out, and ``notes`` says why; raises ``PlanError`` when none is left,
    ``CandidateError`` for a name that no row has.
    """
    resolved = {text: matrix.resolve(f"candidate-{text}") for text in campaign_candidates(name) or []}
    left_out: list[str] = []
    harness: dict[str, Any] = {}
    for text, candidate in list(resolved.items()):
        if clash := [key for key, value in candidate.harness.items() if harness.get(key, value) != value]:
            left_out.append(f"{text} is left out: it asks for another {clash[0]} in every arm than those before it")
            del resolved[text]
        else:
            harness |= candidate.harness
    plans: dict[str, Plan] = {}
    for text in resolved:
        try:
            plan = make_plan(matrix, cluster, f"candidate-{text}", pairs=pairs, harness=harness, **options)
        except PlanError as error:
            left_out.append(f"{text} is left out: {error}")
            continue
        first = next(iter(plans.values()), plan)
        if _identity(plan.baseline) != _identity(first.baseline):
            left_out.append(f"{text} is left out: it is measured against a baseline of its own; apply it by itself")
            continue
        plans[text] = plan
    if not plans:
        raise PlanError("no candidate of the campaign can be measured here\n  " + "\n  ".join(left_out))
    every = list(plans.values())
    arms = [every[0].baseline, *_own_arms(plans)]
    return every[0].model_copy(
        update={
            "candidate": name,
            "rows": _once(row for plan in every for row in plan.rows),
            "arms": arms,
            "gates": {},
            "evidence": _once(key for plan in every for key in plan.evidence),
            "findings": _once(finding for plan in every for finding in plan.findings),
            "notes": [*_once(note for plan in every for note in plan.notes), *left_out],
            "builds": {key: spec for plan in every for key, spec in plan.builds.items()},
            "blocks": order_blocks(arms, pairs, every[0].rule.seed),
            "rule": every[0].rule.model_copy(update={"looks": stats.looks(pairs, len(arms) - 1)}),
            "bench": every[0].bench.model_copy(
                update={
                    "cells": _once(cell for plan in every for cell in plan.bench.cells),
                    "probes": _once(probe for plan in every for probe in plan.bench.probes),
                }
            ),
        }
    )


def _own_arms(plans: dict[str, Plan]) -> list[PlannedArm]:
    """The arms of all candidates with what each is judged by; one that two candidates share is measured once."""
    arms: dict[str, PlannedArm] = {}
    for candidate, plan in plans.items():
        for arm in plan.arms[1:]:
            arms.setdefault(arm.name, arm.model_copy(update={"candidate": candidate, "gates": plan.gates}))
    return list(arms.values())


def _identity(arm: PlannedArm) -> tuple[object, ...]:
    return arm.build_key, arm.settings, arm.warmup, arm.processes


def _once(items: Iterable[Item]) -> list[Item]:
    """The items without repetitions, in their order; they need not be hashable."""
    found: list[Item] = []
    for item in items:
        if item not in found:
            found.append(item)
    return found
