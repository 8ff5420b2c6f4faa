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
# Token ids of the model's plain vocabulary. A token takes this processor up to a second.
PROMPT = list(range(300, 308))

Links = dict[str, Any]
Proof = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Seen:
    """A head that was started, and served some requests if it could: readings, its words, and the proofs of both spans.

    ``start`` is the proof from before the head's start until it serves, ``block`` the one over its requests.
    """

    head: Head
    serves: bool
    tokens: list[list[int]]
    links: dict[str, Links]  # before, ready, after
    said: str  # the end of the head's log
    start: Proof
    block: Proof

    def connection(self, slug: str) -> dict[str, Any]:
        """What the proof of the start says of a worker's connection."""
        return next(item for item in self.start["connections"] if item["worker"] == slug)


class Fabric:
    """Runs heads one after the other on one machine, and each once."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._seen: dict[str, Seen] = {}
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

    def run(self, head: Head) -> Seen:
        """The head with its workers, started unless that was done; it serves until another one is run."""
        if head.slug not in self._seen:
            arm = self.describe(head)
            pinned = [worker for worker in head.workers if worker.pinned]
            links = self.call("read", **arm) if pinned else {}
            files = {worker.slug: environment("pinned", links[worker.slug]["resolved"]) for worker in pinned}
            asked = {"prompt": PROMPT, "predict": 3, "count": head.requests, "pause_s": head.pause_s}
            said = self.call("start", **arm, **asked, rdma_env=files)
            assert "error" not in said, said["error"]
            links = said["links"]
            start = self.prove(head, links["before"], links["ready"])
            block = self.prove(head, links["ready"], links["after"])
            self._seen[head.slug] = Seen(head, said["serves"], said["tokens"], links, said["head"], start, block)
            self._running = head.slug
        return self._seen[head.slug]

    def interrupt(self, head: Head, command: str, *, packets: int = 200, patience_s: float = 60) -> dict[str, Any]:
        """Run ``command`` while a request is on its way; ends the head's life."""
        if self._running != head.slug:
            self._seen.pop(head.slug, None)
            self.run(head)
        arm = {**self.describe(head), "prompt": PROMPT * 64, "predict": 64, "act": command, "packets": packets}
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
