"""Faults on the lab: a cheap row to apply, one phase of it at a time, and what must hold after every fault."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from controllerkit import ROOT, Controller, Ongoing
from faulttable import PROPERTY, Row

RANKS = ("rank0", "rank1")  # of the inventory for faults
# One cold prefill of 256 tokens: a block of it is a server start and little else.
ROW = """\
id: F1
title: A small microbatch, cheap to measure
hypothesis: None; the tests' own row.
guard: none
rejection: none
kind: runtime
set: {ubatch_size: 128}
gates:
  cold_prefill: {cells: [pp256], require: faster}
"""
APPLY = ("apply", "candidate-F1", "--cells", "pp256", "--repeats", "1", "--yes")
# A rank whose network is cut is given up soon; not over connections that others keep open more patiently.
SSH = {
    "ANSIBLE_TIMEOUT": "4",
    "ANSIBLE_SSH_ARGS": "-o ControlMaster=auto -o ControlPersist=2m -o ServerAliveInterval=1 -o ServerAliveCountMax=3",
    "ANSIBLE_SSH_CONTROL_PATH": "%(directory)s/f-%%h",
}
MEMINFO = "/run/k3-fault-meminfo"
HEAD_SINCE = "systemctl show --property=MainPID,ActiveEnterTimestampMonotonic llama-production.service"


class _Plain(yaml.SafeLoader):
    """Reads a run's layer, in which what looks like a template is marked as data."""


_Plain.add_constructor("!unsafe", lambda loader, node: loader.construct_scalar(node))  # type: ignore[arg-type]


@dataclass
class Rig:
    """Somebody who applies the cheap row, and production as it is meant to be."""

    controller: Controller
    answer: list[int]
    production: dict[str, str]
    layer: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, controller: Controller) -> Rig:
        """Give the lab's own controller a cheap inventory, with a matrix for faults and small limits."""
        mine = controller.thrifty("faults")
        (mine.inventory.parent / "matrix" / "F1.yml").write_text(ROW)
        mine.change(lambda values: values["k3_scale"].update(ctx_size=1024), k3_load_timeout_s=12)
        return cls(mine, controller.ask_production(), controller.production())

    # -- commands ---------------------------------------------------------------------------------------------------

    @contextmanager
    def applying(
        self,
        playbook: str = "apply",
        *arguments: str,
        extra: Mapping[str, Any] | None = None,
        controller: Controller | None = None,
    ) -> Iterator[Applying]:
        """``k3deploy apply candidate-F1`` under way; of its playbooks only this one runs, with ``extra`` variables."""
        who = controller or self.controller
        tasks = who.place / f"tasks-{time.monotonic_ns()}.log"
        tasks.touch()
        settings = {"ANSIBLE_LOG_PATH": str(tasks), **SSH}
        program = [sys.executable, str(ROOT / "tests" / "applyfrom.py"), playbook, json.dumps(dict(extra or {}))]
        with who.ongoing(*(arguments or APPLY), program=program, settings=settings) as going:
            yield Applying(going, tasks, who)

    def apply(self, playbook: str, **more: Any) -> Applying:
        """The same, to its end."""
        with self.applying(playbook, **more) as going:
            going.wait()
        return going

    def install(self) -> str:
        """The row's builds, arms and units on every rank, by the playbooks; what they said. Keeps the run's layer."""
        prepared = self.apply("preflight")
        layers = ["-i", str(self.controller.inventory), "-i", str(prepared.run / "inventory")]
        done = self.controller.ansible("ansible-playbook", *layers, "playbooks/build.yml", "playbooks/install.yml")
        assert done.returncode == 0, prepared.said + done.stdout + done.stderr
        layer = yaml.load((prepared.run / "inventory" / "run.yml").read_text(), _Plain)
        self.layer.update(layer["all"]["vars"], k3_model=layer["all"]["hosts"]["rank0"]["k3_model"])
        return done.stdout

    def one_block(
        self, cell: str = "pp256", n_prompt: int = 256, n_predict: int = 1, repeats: int = 1
    ) -> dict[str, Any]:
        """Extra variables for one block of F1 with one cell, without the parity that a first pair is asked for.

        Whoever does not answer for eight seconds is given up.
        """
        bench = self.layer["k3_run_bench"]
        asked = {"cell": cell, "state": "cold", "n_prompt": n_prompt, "n_predict": n_predict}
        return {
            "k3_run_blocks": [{"index": 0, "pair": 1, "arm": "F1", "slug": "F1"}],
            "k3_run_spares": 0,
            "k3_run_advisor": [],
            "k3_run_bench": {**bench, "cells": [asked], "repeats": repeats, "request_timeout_s": 8},
        }

    def until(self, rank: str, condition: str) -> None:
        """Wait on a rank until a shell command succeeds."""
        waiting = f"timeout 90 bash -c {shlex.quote(f'until {condition}; do sleep 0.05; done')}"
        there = (
            "systemctl status --no-pager -n 5 'k3-candidate*' >&2; ss -tnp >&2; cat /opt/k3deploy/state/guard.json >&2"
        )
        self.controller.on(rank, f"{waiting} || {{ {there}; exit 1; }}")

    def arm(self, rank: str, when: str, then: str) -> None:
        """On a rank, as soon as the shell command ``when`` succeeds, do ``then``; for four minutes at most."""
        script = f"end=$((SECONDS + 240)); until {when}; do [ $SECONDS -lt $end ] || exit 1; sleep 0.01; done; {then}"
        self.controller.on(rank, f"systemd-run --collect --quiet bash -c {shlex.quote(script)}")

    def manifests(self) -> dict[str, Any]:
        """The manifest of the row's build, by its key, as the builder has it."""
        key = self.layer["k3_run_arms"][0]["build_key"]
        return {key: json.loads(self.controller.on("rank0", f"cat /opt/k3deploy/builds/{key}-*/manifest.json"))}

    @contextmanager
    def cut_off(self, rank: str) -> Iterator[None]:
        """A rank without network."""
        (name,) = (item.container for item in self.controller.lab.config.ranks if item.name == rank)
        link = ("exec", name, "ip", "link", "set", "eth0")
        self.controller.lab.engine.call(*link, "down")
        try:
            yield
        finally:
            self.controller.lab.engine.call(*link, "up")
            self.controller.on(rank, "true")

    @contextmanager
    def mounted(self, rank: str, what: str, place: str) -> Iterator[None]:
        """Something mounted over a place of a rank."""
        self.controller.on(rank, f"mount {what}")
        try:
            yield
        finally:
            self.controller.on(rank, f"umount {place}")

    @contextmanager
    def squatter(self, rank: str, port: int) -> Iterator[None]:
        """Somebody else who listens on a port of a rank."""
        self.controller.on(rank, f"systemd-run --collect --quiet --unit=squatter python3 -m http.server {port}")
        try:
            self.until(rank, f"ss -Hltn 'sport = :{port}' | grep -q .")
            yield
        finally:
            self.controller.on(rank, "systemctl stop squatter")

    @contextmanager
    def deaf(self, rank: str, unit: str) -> Iterator[None]:
        """A unit whose process does not hear SIGTERM: that is inherited through exec. It is given two seconds."""
        folder = f"/run/systemd/system/{unit}.d"
        script = (
            f"mkdir -p {folder}\n{{ printf '[Service]\\nTimeoutStopSec=2\\nExecStart=\\n'\n"
            "sed -n 's|^ExecStart=/|ExecStart=/usr/bin/env --ignore-signal=TERM /|p' "
            f"/etc/systemd/system/{unit}.d/*.conf\n"
            f"}} > {folder}/zz-deaf.conf\nsystemctl daemon-reload"
        )
        self.controller.on(rank, script)
        try:
            yield
        finally:
            self.controller.on(rank, f"rm -r {folder}; systemctl daemon-reload")

    # -- what must hold ----------------------------------------------------------------------------------------------

    def head_since(self) -> str:
        return self.controller.on("rank0", HEAD_SINCE)

    def differences(self, rebooted: str = "") -> list[str]:
        """What is not as it must be, in sentences; of a rank that was rebooted its workers may be others."""
        wrong = [f"{rank} still has: {text}" for rank, text in self.controller.candidate().items() if text]
        for rank, text in self.controller.production().items():
            before, now = self.production[rank].splitlines(), text.splitlines()
            if rank == rebooted:
                before, now = ([line for line in lines if not _PROCESS.match(line)] for lines in (before, now))
            wrong += [f"{rank}: production had {line!r}" for line in before if line not in now]
            wrong += [f"{rank}: production has {line!r}" for line in now if line not in before]
        if (answer := self.controller.ask_production()) != self.answer:
            wrong.append(f"production answers {answer}, before {self.answer}")
        return wrong

    def rollback(self, *arguments: str) -> tuple[int, str]:
        """Bring production back as an operator does: exit code and words."""
        done = self.controller.k3deploy("rollback", *arguments)
        return done.returncode, done.stdout + done.stderr

    def state(self, name: str) -> dict[str, Any]:
        """A file of the head's own records; empty when it is not there."""
        found: dict[str, Any] = json.loads(
            self.controller.on("rank0", f"cat /opt/k3deploy/state/{name}.json 2>/dev/null || echo '{{}}'")
        )
        return found


_PROCESS = re.compile(r"(MainPID|ActiveEnterTimestampMonotonic|NRestarts)=|LISTEN ")


@dataclass
class Applying:
    """An apply under way, or ended."""

    going: Ongoing
    tasks: Path
    controller: Controller
    killed: bool = False

    def until_task(self, words: str, timeout_s: float = 240) -> None:
        """Wait until Ansible begins a play or task whose headline has ``words``."""
        end = time.monotonic() + timeout_s
        while not re.search(rf"(PLAY|TASK) \[[^\n]*{re.escape(words)}", self.tasks.read_text(errors="replace")):
            assert self.going.process.poll() is None, f"ended before {words!r}\n{self.said}"
            assert time.monotonic() < end, f"{words!r} did not begin\n{self.said}"
            time.sleep(0.05)

    def until_phase(self, name: str, timeout_s: float = 240) -> None:
        """Wait until its record says that a phase began."""
        end = time.monotonic() + timeout_s
        while not any(phase["phase"].startswith(name) for phase in self.phases()):
            assert self.going.process.poll() is None, f"ended before phase {name}\n{self.said}"
            assert time.monotonic() < end, f"phase {name} did not begin\n{self.said}"
            time.sleep(0.05)

    def until_measuring(self, cell: str) -> None:
        """Wait until the harness asks the first prompt of a cell."""
        progress = "/opt/k3deploy/work/bench-progress.json"
        self.controller.on("rank0", f"rm -f {progress}")  # of the run before
        self.until_task("Measure | run the harness")
        begun = f"grep -qs '{cell} cold' {progress}"
        self.controller.on("rank0", f"timeout 90 bash -c {shlex.quote(f'until {begun}; do sleep 0.05; done')}")

    def phases(self) -> list[dict[str, Any]]:
        """The beginnings of phases in its record."""
        return [event for event in self.events() if event["event"] == "phase_start"]

    def kill(self) -> None:
        """SIGKILL, and away with what a module of it does on the ranks: its ssh connection ended."""
        self.killed = True
        self.going.process.send_signal(signal.SIGKILL)
        self.going.process.wait()

    def wait(self, timeout_s: float = 300) -> int:
        return self.going.process.wait(timeout_s)

    @property
    def code(self) -> int:
        return int(self.going.process.returncode)

    @property
    def said(self) -> str:
        return self.going.said

    @property
    def run(self) -> Path:
        return (self.controller.runs / "latest").resolve()

    def events(self) -> list[dict[str, Any]]:
        found = re.search(r"^run (\S+)$", self.said, re.MULTILINE)
        path = self.controller.runs / found[1] / "events.ndjson" if found else Path("/nowhere")
        # A line that is just being written has no end yet.
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def records(self) -> dict[str, Any]:
        """What is recorded of blocks: {blocks/000.json: record}."""
        found = [path for folder in ("blocks", "void") for path in sorted((self.run / folder).glob("*.json"))]
        return {f"{path.parent.name}/{path.name}": json.loads(path.read_text()) for path in found}


@dataclass
class Fault:
    """One case under way. ``holds`` ends it: asserts what must hold after every fault, and keeps its row."""

    rig: Rig
    name: str
    where: str
    properties: list[tuple[str, object]]
    head_before: str = ""
    began: float = field(default_factory=time.monotonic)
    row: Row | None = None

    def holds(self, code: int | str, said: str, *words: str, rebooted: str = "") -> None:
        """Production is as before, nothing of a candidate is left, and ``said``, the record, has all of ``words``."""
        missing = [word for word in words if word not in said]
        assert not missing, f"the record lacks {missing}:\n{said}"
        wrong = self.rig.differences(rebooted)
        assert not wrong, "\n".join([*wrong, said])
        if rebooted:
            self.rig.production = self.rig.controller.production()
        stopped = self.rig.head_since() != self.head_before
        became = "stopped, and back as recorded" if stopped else "served all the time"
        shown = next((line for line in said.splitlines() if words and words[0] in line), words[0] if words else said)
        seconds = time.monotonic() - self.began
        self.row = Row(self.name, self.where, became, str(code), shown.strip()[:300], seconds)
        self.properties.append((PROPERTY, asdict(self.row)))


@contextmanager
def fault_of(rig: Rig, name: str, where: str, properties: list[tuple[str, object]]) -> Iterator[Fault]:
    """A case, and when it did not come to its end: production back for the next one."""
    fault = Fault(rig, name, where, properties, rig.head_since())
    try:
        yield fault
    finally:
        if fault.row is None:
            with contextlib.suppress(Exception):
                rig.rollback()
