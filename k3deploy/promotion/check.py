"""What speaks against a promotion, in sentences: the verdict, the runbook's evidence, the build on the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from k3deploy.facts import Facts
from k3deploy.plan.model import PlannedArm
from k3deploy.promotion.evidence import GateRecord
from k3deploy.promotion.make import build_ids, programs
from k3deploy.promotion.model import RankNow


def refusals(
    verdict: Mapping[str, Any],
    gates: Sequence[GateRecord],
    facts: Facts,
    arm: PlannedArm,
    ranks: Mapping[str, RankNow] | None,
) -> list[str]:
    """Everything that forbids it; empty when it may be promoted. ``ranks`` is ``None`` where they were not asked."""
    problems = []
    outcome = verdict.get("outcome")
    if outcome != "ACCEPT":
        problems.append(f"the verdict is {outcome}, not ACCEPT: {verdict.get('reason') or 'no reason recorded'}")
    problems += [f"gate {gate.title}: {gate.detail}" for gate in gates if not gate.recorded]
    ids = build_ids(facts, arm)
    if len(ids) != 1 or "" in ids:
        shown = ", ".join(sorted(filter(None, ids))) or "none"
        problems.append(f"the run does not show one build of {arm.name}: {shown}")
    elif not (build_id := next(iter(ids))).startswith(arm.build_key + "-"):
        problems.append(f"the run measured build {build_id}, its plan was a build of {arm.build_key}")
    elif ranks is not None:
        problems += _build_problems(build_id, programs(facts, arm), sorted(arm.processes), ranks)
    return problems


def _build_problems(
    build_id: str, measured: Mapping[str, str], names: Sequence[str], ranks: Mapping[str, RankNow]
) -> list[str]:
    """Whether each rank still holds the very programs that were measured."""
    problems = []
    if not measured:
        problems.append("the run does not record the hashes of the programs that it measured")
    for rank in names:
        if rank not in ranks:
            problems.append(f"{rank}: was not read")
            continue
        for path, digest in sorted(measured.items()):
            there = ranks[rank].files.get(path)
            if there is None:
                problems.append(f"{rank}: release {build_id} has no {path}: install it again (k3deploy apply --resume)")
            elif there != digest:
                problems.append(f"{rank}: {path} of release {build_id} is not the file that was judged ({there[:12]})")
    return problems
