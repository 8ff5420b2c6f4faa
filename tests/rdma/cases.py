"""What is tried on the test machine: heads, their workers, and the transport that each connection must have.

``python tests/rdma/cases.py`` prints the table.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

# As the machine's own network script gives them.
HEAD_ADDRESS = "10.99.0.10"
PLAIN_ADDRESS = "10.0.2.15"
DEVICE, OTHER_DEVICE = "rxe1", "rxe0"
EMPTY_GID = "200"
MIB = 1 << 20
WORKER_PORT, HEAD_PORT = 50053, 8081
STOCK = "stock"
RINGS = {"1024x63": (MIB, 63), "1024x64": (MIB, 64)}
SWITCH = {"GGML_RPC_NO_RDMA": "1"}
_QUIET = {"GGML_NO_BACKTRACE": "1", "OMP_WAIT_POLICY": "passive"}


@dataclass(frozen=True, slots=True)
class Worker:
    """An RPC worker: its arm, its address, and how its end of the connection is made.

    ``transport`` is what its connection must be found to have: RDMA, TCP, or either where two of one kind compete.
    ``cause`` is the kind of reason that must be found for TCP.
    """

    slug: str
    address: str
    case: str
    transport: str
    cause: str | None = None
    build: str = STOCK
    pinned: bool = False
    memlock_bytes: int = 8 * MIB
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def endpoint(self) -> str:
        return f"{self.address}:{WORKER_PORT}"


@dataclass(frozen=True, slots=True)
class Head:
    """A head, its workers in the order of --rpc, and the requests that it gets. ``starts``: whether it is to serve."""

    slug: str
    workers: tuple[Worker, ...]
    build: str = STOCK
    memlock_bytes: int = 64 * MIB
    environment: dict[str, str] = field(default_factory=dict)
    starts: bool = True
    requests: int = 1
    pause_s: float = 0.0  # before one more request

    @property
    def ring(self) -> tuple[int, int]:
        """Bytes of a message and receive buffers of its build."""
        return RINGS.get(self.build, (MIB // 4, 24))


def _fabric(number: int) -> str:
    return f"10.99.0.{10 + number}"


# Each kind of end on one head, so that the proof has to tell them apart.
MANY = Head(
    "many",
    (
        Worker("auto", _fabric(1), "device and GID found by the address", "RDMA"),
        Worker("pinned", _fabric(2), "device and GID resolved at launch and pinned", "RDMA", pinned=True),
        Worker(
            *("wrong-device", _fabric(3), "pinned to a device that does not own the address", "TCP", "device"),
            environment={"GGML_RDMA_DEV": OTHER_DEVICE},
        ),
        Worker(
            *("wrong-gid", _fabric(4), "pinned to a GID index that is empty", "TCP", "gid"),
            environment={"GGML_RDMA_DEV": DEVICE, "GGML_RDMA_GID": EMPTY_GID},
        ),
        Worker(
            *("gid-alone", _fabric(5), "a GID index without a device", "TCP", "gid"),
            environment={"GGML_RDMA_GID": "1"},
        ),
        Worker(
            *("small-memlock", _fabric(6), "the worker may lock less than a connection pins", "TCP", "memlock"),
            memlock_bytes=6 * MIB,
        ),
        Worker(
            *("switched-off", _fabric(7), "RDMA switched off at the worker's end alone", "TCP", "environment"),
            environment=SWITCH,
        ),
        Worker("plain-nic", PLAIN_ADDRESS, "the address is on an interface without RDMA", "TCP", "device"),
    ),
)
# Room for one connection and a half: whichever comes second is refused its memory, without a word.
TIGHT = Head(
    "tight",
    (
        Worker("tight-1", _fabric(1), "a head that may lock memory for one of two", "either", "memlock"),
        Worker("tight-2", _fabric(2), "the other one", "either", "memlock"),
    ),
    memlock_bytes=9 * MIB,
)
OFF = Head(
    "off",
    (
        Worker("off-head", _fabric(1), "RDMA switched off at the head's end alone", "TCP", "environment"),
        Worker("off-both", _fabric(2), "RDMA switched off at both ends", "TCP", "environment", environment=SWITCH),
    ),
    environment=SWITCH,
)
# The row's budget is 64 MiB a connection: 1 MiB x 63 fills it exactly, x 64 is one chunk too many.
DEEP = Head(
    "deep",
    (Worker("deep-64", _fabric(1), "1 MiB x 63 within 64 MiB", "RDMA", build="1024x63", memlock_bytes=64 * MIB),),
    build="1024x63",
    memlock_bytes=64 * MIB,
)
DEEPER = Head(
    "deeper",
    (
        Worker("deeper-64", _fabric(1), "1 MiB x 64 within 64 MiB", "TCP", "memlock", "1024x64", False, 64 * MIB),
        Worker("deeper-65", _fabric(2), "1 MiB x 64 within 65 MiB", "RDMA", build="1024x64", memlock_bytes=65 * MIB),
    ),
    build="1024x64",
    memlock_bytes=130 * MIB,
)
MIXED = Head(
    "mixed",
    (Worker("mixed-stock", _fabric(1), "a head of 1 MiB x 63 on a stock worker: it dies", "none"),),
    build="1024x63",
    starts=False,
)
# For what happens to a connection that works: requests, a pause, a killed worker, a dead link.
ONE = Head(
    "one",
    (Worker("one-worker", _fabric(1), "kept over requests and a pause, then broken", "RDMA"),),
    requests=3,
    pause_s=1.0,  # ten times as long as an end spins before it sleeps
)

HEADS = (MANY, TIGHT, OFF, DEEP, DEEPER, MIXED, ONE)
# A head and a worker of one arm on two machines, for the project's own block from its start to its record.
PAIR = Head(
    "pair", (Worker("pair", "10.99.0.27", "on another machine, resolved at launch and pinned", "RDMA", pinned=True),)
)


def arms() -> dict[str, str]:
    """slug -> build of every arm: each process has one of its own, with its own unit and environment."""
    return {item.slug: item.build for head in (*HEADS, PAIR) for item in (head, *head.workers)}


def processes(model: str) -> dict[str, dict[str, Any]]:
    """What a run layer says of a rank's processes, for all of them on one."""
    found: dict[str, dict[str, Any]] = {}
    for head in (*HEADS, PAIR):
        for worker in head.workers:
            argv = ["bin/ggml-rpc-server", "--host", worker.address, "--port", str(WORKER_PORT), "--threads", "1"]
            found[worker.slug] = {
                "worker": {
                    "argv": argv,
                    "environment": {**_QUIET, **worker.environment},
                    "memlock_bytes": worker.memlock_bytes,
                    "listen": worker.endpoint,
                },
                "guard_mib": 32,
            }
        found.setdefault(head.slug, {"guard_mib": 32})["head"] = _head_process(head, model)
    return found


def _head_process(head: Head, model: str) -> dict[str, Any]:
    devices = [f"RPC{number}" for number in range(len(head.workers))]
    argv = [
        *("bin/llama-server", "--host", HEAD_ADDRESS, "--port", str(HEAD_PORT), "--model", model),
        *("--rpc", ",".join(worker.endpoint for worker in head.workers), "--device", ",".join(devices)),
        *("--tensor-split", ",".join("1" for _ in devices), "--n-gpu-layers", "999", "--fit", "off", "--no-warmup"),
        *("--ctx-size", "1024", "--ubatch-size", "256", "--parallel", "1", "--threads", "1"),
        *("--cache-ram", "0", "--ctx-checkpoints", "0", "--verbosity", "4"),
    ]
    return {
        "argv": argv,
        "environment": {**_QUIET, **head.environment},
        "memlock_bytes": head.memlock_bytes,
        "url": f"http://{HEAD_ADDRESS}:{HEAD_PORT}",
    }


def main() -> int:
    lines = [f"{'head':8} {'worker':14} {'must be':16} case"]
    for head in (*HEADS, PAIR):
        for worker in head.workers:
            must = worker.transport + (f", {worker.cause}" if worker.cause else "")
            lines.append(f"{head.slug:8} {worker.slug:14} {must:16} {worker.case}")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
