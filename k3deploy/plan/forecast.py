"""What an arm takes of each rank's memory, and what of it a reader must not miss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from k3deploy.errors import K3Error
from k3deploy.inventory import BuildSpec, Cluster, Rank
from k3deploy.matrix import Guards
from k3deploy.plan.model import MIB
from k3deploy.plan.processes import memory_floor
from k3deploy.plan.transport import ring_of

if TYPE_CHECKING:
    from k3deploy.memory import RankForecast
    from k3deploy.model_facts import ModelFacts


def forecast(
    facts: ModelFacts | None,
    cluster: Cluster,
    settings: Mapping[str, Any],
    spec: BuildSpec,
    guards: Guards,
) -> tuple[list[dict[str, Any]], list[str]]:
    """(one entry a rank, none without facts; notes) of one arm."""
    if facts is None:
        return [], []
    try:
        entries = _entries(facts, cluster, settings, spec)
    except K3Error as error:
        return [], [str(error)]
    floor = memory_floor(settings, guards)
    notes = [
        f"the forecast leaves {entry['left_mib']:.0f} MiB on {entry['rank']}, the floor is {floor} MiB"
        for entry in entries
        if entry.get("left_mib", floor) < floor
    ]
    return entries, notes


def memory_difference(arm: Sequence[Mapping[str, Any]], baseline: Sequence[Mapping[str, Any]]) -> list[str]:
    """What an arm takes more or less than the baseline on each rank, with the parts that make the difference."""
    texts = []
    for entry, before in zip(arm, baseline, strict=False):
        parts = [key for key in {**before, **entry} if key.endswith("_mib") and key not in {"total_mib", "left_mib"}]
        changed = {key: entry.get(key, 0) - before.get(key, 0) for key in parts}
        inside = [
            f"{key.removesuffix('_mib').replace('_', ' ')} {size:+.0f}"
            for key, size in changed.items()
            if abs(size) >= 1
        ]
        if inside:
            texts.append(f"{entry['rank']} {entry['total_mib'] - before['total_mib']:+.0f} MiB ({', '.join(inside)})")
    return [f"memory against the baseline: {'; '.join(texts)}"] if texts else []


def _entries(
    facts: ModelFacts,
    cluster: Cluster,
    settings: Mapping[str, Any],
    spec: BuildSpec,
) -> list[dict[str, Any]]:
    """One entry a rank: what it holds, MiB by part (those that no rank has are left out), the sum, and what is left."""
    from k3deploy import memory

    ranks = [
        memory.Rank(
            name=rank.name,
            memory_bytes=(rank.memory_mib or 0) * MIB,
            device=rank.runs_worker or spec.backend == "cuda",
            local_worker=rank.local_worker,
        )
        for rank in cluster.ranks
    ]
    rdma = None
    if settings.get("rdma") != "off" and cluster.transport.require == "rdma":
        rdma = ring_of(spec, settings)
    found = memory.forecast(facts, settings, ranks, backend=spec.backend, rdma=rdma)
    parts = [part for part in found[0].items if any(one.items[part] for one in found)]
    return [_entry(rank, one, parts) for rank, one in zip(cluster.ranks, found, strict=True)]


def _entry(rank: Rank, found: RankForecast, parts: Sequence[str]) -> dict[str, Any]:
    held = ", ".join(f"{found.kinds[kind]} {kind}" for kind in sorted(found.kinds)) or "none"
    entry: dict[str, Any] = {"rank": rank.name, "layers": held + (", output" if found.output_layer else "")}
    entry |= {f"{part}_mib": _mib(found.items[part]) for part in parts}
    entry["total_mib"] = _mib(found.total)
    if rank.memory_mib is not None:
        entry["left_mib"] = round(rank.memory_mib - found.total / MIB, 1)
    return entry


def _mib(size: int) -> float:
    return round(size / MIB, 1)
