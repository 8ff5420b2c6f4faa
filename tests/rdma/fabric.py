"""The cases on the machine: starts an arm, and has the project's own proof say what carries each connection."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cases
from ansible_collections.k3.deploy.plugins.module_utils import rdma_proof
from ansible_collections.k3.deploy.plugins.modules.rdma_link import environment
from cases import Head
from machine import Machine

from k3deploy.lab.process import run

_COLLECTIONS = Path(__file__).parents[2] / "collections"
_MODULE_UTILS = "ansible_collections/k3/deploy/plugins/module_utils"
_PLACE = "/run/k3rdma"
# Token ids of the model's plain vocabulary; long enough for messages of more than a chunk between ranks.
PROMPT = list(range(300, 396))

Links = dict[str, Any]
Proof = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Started:
    """A head that was started: readings before and after, and whether it serves."""

    head: Head
    serves: bool
    before: Links
    after: Links
    said: str  # the end of the head's log
    proof: Proof

    def connection(self, slug: str) -> dict[str, Any]:
        return next(item for item in self.proof["connections"] if item["worker"] == slug)


class Fabric:
    """Runs heads one after the other on one machine. A head that was started is not started again."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._started: dict[str, Started] = {}
        self._running = ""
        self._send_programs()

    def _send_programs(self) -> None:
        """The project's own code for ranks as it is now, and the program that calls it."""
        raw = io.BytesIO()
        with tarfile.open(fileobj=raw, mode="w:gz") as archive:
            for path in (_COLLECTIONS / _MODULE_UTILS).glob("*.py"):
                archive.add(path, f"{_MODULE_UTILS}/{path.name}")
            archive.add(Path(__file__).with_name("guest.py"), "guest.py")
        self.machine.put(_PLACE, raw.getvalue())

    def call(self, command: str, **given: Any) -> Any:
        """One command of guest.py."""
        script = f"cd {_PLACE} && exec python3 guest.py {command}"
        said = run([*self.machine.ssh, script], stdin=json.dumps(given), timeout_s=600)
        return json.loads(said.stdout)

    def describe(self, head: Head) -> dict[str, Any]:
        """An arm as guest.py needs it."""
        workers = {worker.slug: {"address": worker.address, "endpoint": worker.endpoint} for worker in head.workers}
        url = f"http://{cases.HEAD_ADDRESS}:{cases.HEAD_PORT}"
        return {"head": head.slug, "address": cases.HEAD_ADDRESS, "url": url, "workers": workers}

    def start(self, head: Head) -> Started:
        """The head with its workers, running from here on, and the proof of its start."""
        if head.slug != self._running:
            arm = self.describe(head)
            pinned = [worker for worker in head.workers if worker.pinned]
            links = self.call("read", **arm) if pinned else {}
            files = {worker.slug: environment("pinned", links[worker.slug]["resolved"]) for worker in pinned}
            said = self.call("start", **arm, rdma_env=files)
            assert "error" not in said, said["error"]
            proof = self.prove(head, said["before"], said["after"])
            self._started[head.slug] = Started(head, said["serves"], said["before"], said["after"], said["head"], proof)
            self._running = head.slug
        return self._started[head.slug]

    def request(self, head: Head, *, count: int = 1, predict: int = 4, pause_s: float = 0) -> tuple[list[Any], Links]:
        """(tokens of each request, the readings after them)."""
        arm = {**self.describe(head), "prompt": PROMPT, "predict": predict, "count": count, "pause_s": pause_s}
        said = self.call("requests", **arm)
        return said["tokens"], said["after"]

    def interrupt(self, head: Head, command: str, *, packets: int = 200, patience_s: float = 60) -> dict[str, Any]:
        """Run ``command`` while a request is on its way."""
        arm = {**self.describe(head), "prompt": PROMPT * 8, "predict": 64, "command": command, "packets": packets}
        self._running = ""
        return self.call("breaks", **arm, patience_s=patience_s)

    def prove(self, head: Head, before: Links, after: Links) -> Proof:
        """What rdma_proof says of all connections of a head between two readings."""
        chunk, depth = head.ring
        plan = {"require": "rdma", "chunk_bytes": chunk, "rx_depth": depth, "workload_bytes": 0}
        listen = {worker.slug: worker.endpoint for worker in head.workers}
        ranks = {
            name: {"is_head": name == "head", "listen": listen.get(name), "before": before[name], "after": after[name]}
            for name in after
        }
        return rdma_proof.prove(plan, ranks)
