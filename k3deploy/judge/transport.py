"""What carried the RPC connections: what of it makes a block void, and what a reader is told.

The proof itself is the collection's (both ends' log lines, queue pairs, counters, sockets); here its result is read.
"""

from __future__ import annotations

from collections.abc import Sequence

from k3deploy.facts import Block, TransportProof
from k3deploy.judge.planned import PlannedArm, PlanView
from k3deploy.judge.verdict import Seen

# An observation that only a build with timing lines has, and what it takes to have it.
_TIMED = (
    "it takes workers that time their commands: patch set u8-rpc-timing in the build of every arm, and "
    "GGML_RPC_TIMING: '1' in k3_settings.environment"
)
BREAKS = "rpc_errors"  # the observation: log lines of transfers that broke
TAKES = {"rpc_p99": _TIMED, "worker_link_idle": _TIMED}


def transport_problems(plan: PlanView, arm: PlannedArm, block: Block) -> list[str]:
    """Why a block is void for its transport. A candidate's broken transfers are a gate's where a row judges them."""
    lead = f"block {block.index} ({block.arm})"
    required = arm.transport.require if arm.transport else plan.transport.require
    proof = block.transport
    if proof is None:
        return [] if required == "tcp" else [f"{lead}: nothing proves RDMA on every connection"]
    problems = [f"{lead}: {text}" for text in proof.problems]
    if required == "rdma" and proof.transport != "RDMA" and not problems:
        problems.append(f"{lead}: RDMA is required, and what was found is {proof.transport}")
    if arm.transport and arm.transport.rdma == "off" and any(one.result == "RDMA" for one in proof.connections):
        problems.append(f"{lead}: a connection is on RDMA, planned was the fall-back to TCP")
    if not _judged_by_breaks(plan, arm):
        problems += [f"{lead}: {text}" for text in proof.events]
    return problems


def broken_transfers(plan: PlanView, arm: PlannedArm, block: Block) -> bool:
    """Whether transfers broke of an arm that is judged by that: harm, also where the block broke of it."""
    return _judged_by_breaks(plan, arm) and bool(block.observations.rpc_errors)


def _judged_by_breaks(plan: PlanView, arm: PlannedArm) -> bool:
    gates = plan.gates_of(arm).values()
    return arm.name != plan.arms[0].name and any(gate.observation == BREAKS for gate in gates)


def transport_findings(blocks: Sequence[Block]) -> list[Seen]:
    """What carried the connections, in plain words, each text once with the blocks that it stands for."""
    where: dict[str, list[str]] = {}
    for block in blocks:
        for text in _told(block.transport) if block.transport else []:
            where.setdefault(text, []).append(f"{block.index}")
    return [Seen(source="measured", text=f"{text} (block {', '.join(known)})") for text, known in where.items()]


def _told(proof: TransportProof) -> list[str]:
    found = []
    if proof.connections and proof.transport in ("TCP", "RDMA"):
        found.append(f"the transport of all {len(proof.connections)} RPC connections is {proof.transport}")
    elif proof.connections:
        found += [f"RPC connection to {one.worker}: {one.result}, {one.reason}" for one in proof.connections]
    if proof.transport == "TCP":
        reasons = dict.fromkeys(f"{one.worker}: {one.reason}" for one in proof.connections if one.reason)
        found.append(f"why it is TCP: {'; '.join(reasons)}")
    found += [f"a connection was made anew during the measurement: {text}" for text in proof.reconnected]
    return found
