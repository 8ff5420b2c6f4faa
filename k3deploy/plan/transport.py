"""The RPC transport of an arm: what must carry it, the sizes that its build has, and the memory that these pin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from k3deploy.inventory import BuildSpec, Cluster
from k3deploy.plan.model import MIB, ArmTransport, PlanError

if TYPE_CHECKING:
    from k3deploy.memory import RdmaRing
    from k3deploy.model_facts import ModelFacts

# CMake settings that the patch set u5-rdma-chunk adds.
CHUNK, DEPTH = "GGML_RPC_RDMA_CHUNK", "GGML_RPC_RDMA_RX_DEPTH"
FLOAT_BYTES = 4


def ring_of(spec: BuildSpec, settings: Mapping[str, Any]) -> RdmaRing:
    """Chunk and receive depth of an arm: what its setting says, else what its build sets, else upstream's."""
    from k3deploy.memory import RdmaRing

    if text := settings.get("rdma_ring"):
        chunk_kib, depth = map(int, text.split("x"))
        return RdmaRing(chunk_kib * 1024, depth)
    stock = RdmaRing()
    return RdmaRing(int(spec.cmake.get(CHUNK, stock.chunk_bytes)), int(spec.cmake.get(DEPTH, stock.depth)))


def with_ring(name: str, spec: BuildSpec, settings: Mapping[str, Any]) -> tuple[str, BuildSpec]:
    """The build of an arm that sets ``rdma_ring``: one of its own, since the sizes are compiled in."""
    text = settings.get("rdma_ring")
    if text is None or spec.source.kind == "prebuilt":
        return name, spec
    ring = ring_of(spec, settings)
    cmake = {**spec.cmake, CHUNK: str(ring.chunk_bytes), DEPTH: str(ring.depth)}
    return f"{name}_{text}", spec.model_copy(update={"cmake": cmake})


def too_large(settings: Mapping[str, Any], ring: RdmaRing, allowed_bytes: int) -> str | None:
    """Why the ring of an arm does not fit into the pinned memory that a connection may have; ``None`` when it does."""
    if settings.get("rdma") == "off" or not allowed_bytes or ring.connection_bytes <= allowed_bytes:
        return None
    return (
        f"a connection with {ring.chunk_bytes >> 10} KiB x {ring.depth} pins {ring.connection_bytes / MIB:g} MiB, "
        f"{allowed_bytes / MIB:g} MiB are allowed: the registration would fail and the connection fall back to TCP "
        "without a log line"
    )


def offer(ring: RdmaRing, allowed_bytes: int) -> str:
    """The deepest ring of these chunks that fits."""
    depth = allowed_bytes // ring.chunk_bytes - 1
    if depth < 1:
        return f"chunks of {ring.chunk_bytes >> 10} KiB do not fit at any depth"
    return f"{ring.chunk_bytes >> 10}x{depth} fits"


def arm_transport(
    cluster: Cluster, spec: BuildSpec, settings: Mapping[str, Any], facts: ModelFacts | None
) -> ArmTransport:
    """What a proof expects. An arm that switches RDMA off is the fall-back on purpose, whatever is required else."""
    ring = ring_of(spec, settings)
    mode = settings.get("rdma") or "auto"
    return ArmTransport(
        rdma=mode,
        require="tcp" if mode == "off" else cluster.transport.require,
        chunk_bytes=ring.chunk_bytes,
        rx_depth=ring.depth,
        token_bytes=facts.n_embd * FLOAT_BYTES if facts else 0,
    )


def refuse_proxy(name: str, cluster: Cluster, settings: Mapping[str, Any]) -> None:
    """Refuse the timing proxy where bytes could go past it."""
    if settings.get("rpc_profile") != "proxy":
        return
    if cluster.transport.require == "rdma":
        raise PlanError(
            f"{name}: rpc_profile proxy sees TCP alone, and {cluster.name} requires RDMA: what it timed would not be "
            "what this cluster runs",
            remedy="Measure candidate-U8: its patch set times the server from inside, whatever carries the bytes.",
        )
    if settings.get("rdma") != "off":
        raise PlanError(
            f"{name}: rpc_profile proxy needs rdma off: a connection that goes over to RDMA goes past the proxy",
            remedy='Set rdma: "off" beside it.',
        )


def refuse_without_rdma(name: str, cluster: Cluster, settings: Mapping[str, Any]) -> None:
    """Refuse an arm that needs RDMA on a cluster that says it has none."""
    if settings.get("rdma") != "pinned":
        return
    if cluster.transport.require == "tcp" and all(rank.rdma_device is None for rank in cluster.ranks):
        raise PlanError(
            f"{name} needs RDMA on every rank: {cluster.name} says k3_transport.require: tcp and names no RDMA device",
            remedy="Where the ranks have RDMA, set k3_transport: {require: rdma}; GIDs are found at launch.",
        )
