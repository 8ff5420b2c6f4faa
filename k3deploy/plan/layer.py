"""The run's inventory layer, from which the roles work."""

from __future__ import annotations

from typing import Any

from k3deploy.judge.step import spares
from k3deploy.plan.model import Plan, PlannedArm


def render_run_layer(plan: Plan) -> dict[str, Any]:
    """The run's inventory layer: what the roles read (``k3_run_id`` and ``k3_run_dir`` are the store's to add)."""
    return {
        "all": {
            "vars": {
                "k3_run_builds": plan.builds,
                "k3_run_arms": [_layer_arm(arm, plan) for arm in plan.arms],
                "k3_run_blocks": [block.model_dump() for block in plan.blocks],
                "k3_run_spares": spares(len(plan.blocks)),
                "k3_run_parity": plan.parity,
                "k3_run_bench": plan.bench.model_dump(mode="json", exclude_none=True),
            },
            "hosts": {
                rank: {
                    # On the host, where it wins over group_vars: the hash that the inventory left to the sidecar.
                    "k3_model": plan.model.model_dump(mode="json", exclude={"sidecar", "facts"}, exclude_none=True),
                    "k3_run_memory": [entry for arm in plan.arms for entry in _layer_memory(arm, rank)],
                    "k3_run_processes": {
                        arm.slug: arm.processes[rank].model_dump(mode="json", exclude_none=True) for arm in plan.arms
                    },
                }
                for rank in plan.ranks
            },
        }
    }


def _layer_memory(arm: PlannedArm, rank: str) -> list[dict[str, Any]]:
    """The forecast of one arm on one rank, for the preflight; nothing without facts about the model."""
    return [
        {
            "arm": arm.name,
            "floor_mib": arm.processes[rank].guard_mib,
            "total_mib": entry["total_mib"],
            "parts": {
                key.removesuffix("_mib").replace("_", " "): size
                for key, size in entry.items()
                if key.endswith("_mib") and key not in ("total_mib", "left_mib")
            },
        }
        for entry in arm.forecast
        if entry["rank"] == rank
    ]


def _layer_arm(arm: PlannedArm, plan: Plan) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": arm.name, "slug": arm.slug, "build_key": arm.build_key}
    entry["transport"] = arm.transport.model_dump()
    gates = plan.gates if arm.gates is None else arm.gates
    if arm is not plan.arms[0] and any(gate.observation == "rpc_errors" for gate in gates.values()):
        entry["breaks_count"] = True  # a transfer that breaks is then this arm's result, not bad luck
    if arm.warmup != plan.bench.warmup:
        entry["bench"] = {"warmup": arm.warmup}
    return entry
