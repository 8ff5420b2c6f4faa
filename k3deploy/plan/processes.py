"""From settings to processes: the command line and the environment of each rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3deploy.inventory import BuildSpec, Cluster, Rank
from k3deploy.matrix import Guards
from k3deploy.plan.model import MIB, Process, RankProcesses
from k3deploy.settings import flags

PARITY_DIRECTORY = "work/parity"  # below the cluster's root, on the head; where the parity test saves states

LOOPBACK = "127.0.0.1"  # where a worker listens behind the timing proxy of its unit

# Queues of a connection are pinned beside its ring on adapters that keep them in the process' memory: two completion
# queues, a queue pair and doorbells, in pages of up to 64 KiB.
QUEUE_BYTES = 512 * 1024


def rank_processes(
    rank: Rank, cluster: Cluster, settings: Mapping[str, Any], spec: BuildSpec, guards: Guards
) -> RankProcesses:
    return RankProcesses(
        worker=_worker(rank, settings, spec, guards) if rank.runs_worker else None,
        head=_head(rank, cluster, settings, spec, guards) if rank.is_head else None,
        guard_mib=memory_floor(settings, guards),
    )


def _worker(rank: Rank, settings: Mapping[str, Any], spec: BuildSpec, guards: Guards) -> Process:
    port = str(settings["rpc_port"])
    address = LOOPBACK if settings.get("rpc_profile") == "proxy" else rank.fabric_address
    # Never -c: a worker's tensor cache would hash and keep activations in the middle of a measurement.
    argv = [f"bin/{spec.worker_program}", "--host", address, "--port", port]
    if "worker_threads" in settings:
        argv += ["--threads", str(settings["worker_threads"])]
    return Process(
        argv=argv,
        environment=_environment(settings),
        cpu_affinity=settings.get("worker_cpu_affinity", ""),
        memlock_bytes=memlock_limit(settings, guards, 1),
        listen=f"{rank.fabric_address}:{port}",
        server=f"{address}:{port}" if address == LOOPBACK else None,
    )


def _head(rank: Rank, cluster: Cluster, settings: Mapping[str, Any], spec: BuildSpec, guards: Guards) -> Process:
    workers = cluster.workers
    port = str(cluster.candidate_head_port)
    endpoints = [f"{worker.fabric_address}:{settings['rpc_port']}" for worker in workers]
    argv = [
        "bin/llama-server",
        *("--host", rank.fabric_address, "--port", port, "--model", cluster.model.path),
        *("--rpc", ",".join(endpoints), "--device", ",".join(devices(cluster, spec))),
        *("--slot-save-path", f"{cluster.root}/{PARITY_DIRECTORY}"),
        *flags(settings),
    ]
    return Process(
        argv=argv,
        environment=_environment(settings),
        memlock_bytes=memlock_limit(settings, guards, len(workers)),  # one connection a worker
        url=f"http://{rank.fabric_address}:{port}",
    )


def devices(cluster: Cluster, spec: BuildSpec) -> list[str]:
    """The head's devices in split order. RPC devices would come before a local GPU by default."""
    local = [] if spec.backend == "cpu" or cluster.head.local_worker else ["CUDA0"]
    return local + [f"RPC{number}" for number in range(len(cluster.workers))]


def memlock_bytes(settings: Mapping[str, Any], guards: Guards) -> int:
    """Pinned bytes that one connection may have; 0 where nothing sets them."""
    limits = [settings.get("memlock_mib"), guards.memlock_mib_per_connection]
    return min(limit for limit in limits if limit is not None) * MIB if any(limits) else 0


def memlock_limit(settings: Mapping[str, Any], guards: Guards, connections: int) -> int:
    """A unit's limit of locked memory: the budget of its connections, and room for their queues."""
    budget = memlock_bytes(settings, guards)
    return (budget + QUEUE_BYTES) * connections if budget else 0


def memory_floor(settings: Mapping[str, Any], guards: Guards) -> int:
    """MiB that must stay available on every rank."""
    floor: int = settings.get("guard_mib", 0)
    return max(floor, guards.rank_available_mib or 0)


def _environment(settings: Mapping[str, Any]) -> dict[str, str]:
    environment = dict(settings.get("environment") or {})
    # The device and the GID of a pinned arm are found on the rank at launch: indices move.
    if settings.get("rdma") == "off":
        environment["GGML_RPC_NO_RDMA"] = "1"
    return environment
