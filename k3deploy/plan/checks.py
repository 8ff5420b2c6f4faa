"""What a binary or a rank would refuse late, change silently or not have: refused, mended or said in the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from k3deploy.inventory import BuildSpec, Cluster, Rank
from k3deploy.plan.model import PlanError
from k3deploy.plan.processes import devices

if TYPE_CHECKING:
    from k3deploy.matrix import Gate
    from k3deploy.model_facts import ModelFacts
    from k3deploy.plan.model import PlannedArm

TIMING_PATCH, TIMING_SWITCH = "u8-rpc-timing", "GGML_RPC_TIMING"
# Observations that come from the timing lines of workers and from nowhere else.
_TIMED = ("rpc_p99", "worker_link_idle")


def refuse_impossible(name: str, cluster: Cluster, settings: Mapping[str, Any], spec: BuildSpec) -> None:
    """Refuse what would fail late or be changed silently."""
    if "rpc_port" not in settings:
        raise PlanError(f"{name}: no rpc_port is set", remedy="Set it in the matrix' baseline.yml.")
    batch, ubatch = settings.get("batch_size", 2048), settings.get("ubatch_size", 512)
    if ubatch > batch:
        raise PlanError(
            f"{name}: ubatch_size {ubatch} is larger than batch_size {batch}: llama-server would clamp it silently",
            remedy="Raise batch_size in the row, or lower ubatch_size.",
        )
    names = devices(cluster, spec)
    split = settings.get("tensor_split")
    if split is not None and len(split) != len(names):
        raise PlanError(
            f"{name}: tensor_split has {len(split)} shares, {cluster.name} has {len(names)} devices "
            f"({', '.join(names)})",
            remedy=(
                "On a CPU head set k3_local_worker: true, so that the head's own share is a local RPC server; "
                "else set tensor_split in k3_scale."
            ),
        )
    if settings["rpc_port"] == cluster.production.worker_port:
        raise PlanError(f"{name}: rpc_port {settings['rpc_port']} is the port of production's workers")


def match_kv_types(settings: dict[str, Any], spec: BuildSpec, facts: ModelFacts | None) -> list[str]:
    """Make V follow K where the binary refuses the pair, and say so."""
    key_type, value_type = settings.get("cache_type_k", "f16"), settings.get("cache_type_v", "f16")
    if facts is None or not facts.is_mla or spec.mla_kv_types == "free" or key_type == value_type:
        return []
    settings["cache_type_v"] = key_type
    return [
        f"K {key_type} with V {value_type} cannot start: this build refuses K and V of different types for an MLA "
        f"model; it runs as {key_type}/{key_type} (V is a view of K and takes no memory of its own)"
    ]


def cpu_notes(head: Rank, settings: Mapping[str, Any]) -> list[str]:
    cpus = head.cpus
    if cpus is None:
        return []
    notes = []
    wanted = settings.get("cpu_range_batch")
    if wanted is not None and int(wanted.partition("-")[2]) >= cpus:
        notes.append(f"cpu_range_batch {wanted} names CPUs that {head.name} ({cpus} CPUs) does not have")
    for key in ("threads", "threads_batch"):
        if settings.get(key, 0) > cpus:
            notes.append(f"{key} {settings[key]} is more than the {cpus} CPUs of {head.name}")
    return notes


def undecidable_notes(
    gates: Mapping[str, Gate], arms: Sequence[PlannedArm], builds: Mapping[str, BuildSpec]
) -> list[str]:
    """Gates that stay open whatever is measured, because the workers of an arm do not time their commands."""
    timed = [f"{name} ({gate.observation})" for name, gate in gates.items() if gate.observation in _TIMED]
    silent = [arm.name for arm in arms if not _times_commands(arm, builds[arm.build])]
    if not timed or not silent:
        return []
    return [
        f"no run with this inventory decides {' and '.join(timed)}: the workers of {', '.join(silent)} do not time "
        f"their commands, so that it ends INCONCLUSIVE at best. It takes patch set {TIMING_PATCH} in the build of "
        f'every arm (k3_builds.{arms[0].build}.patch_sets) and {TIMING_SWITCH}: "1" in k3_settings.environment'
    ]


def _times_commands(arm: PlannedArm, spec: BuildSpec) -> bool:
    """Whether an arm's workers write timing lines: by the patch and its switch, or by the proxy that needs neither."""
    if arm.settings.get("rpc_profile") == "proxy":
        return True
    environment = arm.settings.get("environment") or {}
    return TIMING_PATCH in spec.patch_sets and str(environment.get(TIMING_SWITCH, "0")) != "0"
