"""The baseline and the candidate's arms, resolved on a cluster."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from k3deploy.build_key import build_key
from k3deploy.inventory import Cluster
from k3deploy.matrix import BASELINE, Candidate, Matrix
from k3deploy.plan.builds import build_of
from k3deploy.plan.checks import cpu_notes, match_kv_types, refuse_impossible
from k3deploy.plan.forecast import forecast, memory_difference
from k3deploy.plan.model import Difference, PlanError, PlannedArm
from k3deploy.plan.processes import memlock_bytes, rank_processes
from k3deploy.plan.transport import (
    arm_transport,
    offer,
    refuse_proxy,
    refuse_without_rdma,
    ring_of,
    too_large,
    with_ring,
)
from k3deploy.settings import merge, render

if TYPE_CHECKING:
    from k3deploy.model_facts import ModelFacts


class ArmPlanner:
    """Settings of the matrix and of the cluster, made into arms.

    harness: settings that hold for every arm. builds: name -> spec of the builds that the arms run.
    """

    def __init__(self, matrix: Matrix, cluster: Cluster, candidate: Candidate, facts: ModelFacts | None) -> None:
        self.matrix = matrix
        self.cluster = cluster
        self.candidate = candidate
        self.facts = facts
        self.harness = merge(matrix.baseline.harness.values(), candidate.harness)
        self.build, spec = build_of(cluster, candidate)
        self.builds = {cluster.build: cluster.builds[cluster.build], self.build: spec}
        self.notes: list[str] = []

    def arms(self) -> list[PlannedArm]:
        """The baseline, then the candidate's arms: without those whose connections cannot be, and ``notes`` says so."""
        baseline = self._arm(BASELINE, self.candidate.against, self.cluster.build)
        arms, left_out = [baseline], []
        for arm in self.candidate.arms:
            settings = self._settings(arm.settings)
            build, spec = with_ring(self.build, self.builds[self.build], settings)
            ring, allowed = ring_of(spec, settings), memlock_bytes(settings, self.candidate.guards)
            if why := too_large(settings, ring, allowed):
                left_out.append((arm.name, why, offer(ring, allowed)))
                continue
            self.builds[build] = spec
            arms.append(self._arm(arm.name, arm.settings, build))
        if len(arms) == 1:
            name, why, offered = left_out[0]
            raise PlanError(f"{name}: {why}", remedy=f"{offered}; or raise the row's guard memlock_mib_per_connection.")
        self.notes += [f"{name} is left out: {why}; {offered}" for name, why, offered in left_out]
        if self.candidate.against:
            changed = ", ".join(f"{key} {render(value)}" for key, value in self.candidate.against.items())
            self.notes.append(f"the baseline of this comparison runs with {changed}, not as production does")
        if len({arm.slug for arm in arms}) != len(arms):
            raise PlanError(f"two arms have one name on disk: {', '.join(arm.slug for arm in arms)}")
        return [baseline, *(_compared(arm, baseline) for arm in arms[1:])]

    def plain_baseline(self) -> PlannedArm:
        """The baseline as ``k3deploy calibrate`` measures it, without what this candidate asks of every arm or compares
        itself with: what is known of its starts holds for every candidate."""
        plain = replace(self.candidate, harness={}, against={})
        return ArmPlanner(self.matrix, self.cluster, plain, self.facts)._arm(BASELINE, {}, self.cluster.build)

    def _settings(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return merge(
            self.matrix.baseline.settings.values(), self.harness, self.cluster.settings, row, self.cluster.scale
        )

    def _arm(self, name: str, row: Mapping[str, Any], build: str) -> PlannedArm:
        spec = self.builds[build]
        settings = self._settings(row)
        notes = [
            f"this cluster pins {key} to {render(pinned)}: the row's {render(row[key])} has no effect here"
            for key, pinned in self.cluster.scale.items()
            if key in row and row[key] != pinned and row[key] != self.matrix.baseline.settings.values().get(key)
        ]
        notes += match_kv_types(settings, spec, self.facts)
        refuse_impossible(name, self.cluster, settings, spec)
        refuse_without_rdma(name, self.cluster, settings)
        refuse_proxy(name, self.cluster, settings)
        notes += cpu_notes(self.cluster.head, settings)
        ladder = settings.get("graph_ladder") or {}
        guards = self.candidate.guards
        memory, memory_notes = forecast(self.facts, self.cluster, settings, spec, guards)
        notes += memory_notes
        return PlannedArm(
            name=name,
            slug=slug(name),
            build=build,
            build_key=build_key(spec),
            settings=settings,
            warmup={"prefill": ladder.get("prefill", []), "decode": ladder.get("decode", [])},
            processes={
                rank.name: rank_processes(rank, self.cluster, settings, spec, guards) for rank in self.cluster.ranks
            },
            transport=arm_transport(self.cluster, spec, settings, self.facts),
            forecast=memory,
            notes=notes,
        )


def _compared(arm: PlannedArm, baseline: PlannedArm) -> PlannedArm:
    one, other = _flat(baseline.settings), _flat(arm.settings)
    differences = [
        Difference(key=key, baseline=render(one.get(key)), arm=render(other.get(key)))
        for key in [*one, *(key for key in other if key not in one)]
        if one.get(key) != other.get(key)
    ]
    if arm.build_key != baseline.build_key:
        differences.append(Difference(key="build", baseline=baseline.build, arm=arm.build))
    notes = [note for note in arm.notes if note not in baseline.notes]
    notes += memory_difference(arm.forecast, baseline.forecast)
    if not differences:
        notes.append("this arm is the baseline: what is measured is the spread of the measurement itself")
    return arm.model_copy(update={"differences": differences, "notes": notes})


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with the environment spread out, so that one variable is one difference."""
    flat = {key: value for key, value in settings.items() if key != "environment"}
    return flat | {f"environment.{name}": value for name, value in (settings.get("environment") or {}).items()}


def slug(name: str) -> str:
    """A name for directories and systemd instances."""
    return re.sub(r"[^A-Za-z0-9.]", "-", name)


def processes_key(arm: PlannedArm) -> str:
    """Twelve digits that stand for the command lines, environments and CPUs of an arm on all ranks."""
    shown = {"argv", "environment", "cpu_affinity"}
    parts = {
        name: {
            kind: process.model_dump(include=shown) for kind in ("worker", "head") if (process := getattr(one, kind))
        }
        for name, one in arm.processes.items()
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
