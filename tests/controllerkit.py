"""Somebody who works on a lab: commands as a person gives them, and what can then be seen on the ranks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from k3deploy.commands.judging import EXIT_CODES
from k3deploy.facts import load_facts
from k3deploy.lab.cluster import Lab

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent

# What every apply measures.
CELLS = {
    *((cell, "cold") for cell in ("pp256", "pp512", "pp1024", "pp2048", "pp4096", "tg100")),
    *((cell, state) for state in ("warm", "cached") for cell in ("pp2048", "pp4096")),
}


@dataclass(frozen=True, slots=True)
class Controller:
    """Somebody who works on a lab: with an inventory, and with a state directory and runs of their own."""

    lab: Lab
    inventory: Path
    place: Path
    owner: str = ""  # who they are in windows; user@host without it

    @property
    def runs(self) -> Path:
        return self.place / "runs"

    @property
    def environment(self) -> dict[str, str]:
        """Of every command that is started here: apart from the user's own locks, runs and defaults."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("K3DEPLOY_", "ANSIBLE_"))}
        return {
            **kept,
            "K3DEPLOY_LAB": self.lab.config.name,
            "K3DEPLOY_LAB_SUBNET": str(self.lab.config.subnet),
            "K3DEPLOY_STATE": str(self.place / "state"),
            "K3DEPLOY_RUNS": str(self.runs),
            "K3DEPLOY_INVENTORY": str(self.inventory),
            "NO_COLOR": "1",
            **({"K3DEPLOY_OWNER": self.owner} if self.owner else {}),
        }

    def k3deploy(self, *arguments: str, timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
        """Run the command line to its end."""
        return self._run([str(BIN / "k3deploy"), *arguments], ROOT, timeout_s)

    def ansible(self, program: str, *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        """Run one of Ansible's own programs: what an operator has without k3deploy."""
        return self._run([str(BIN / program), *arguments], cwd, 600)

    def _run(self, argv: list[str], cwd: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            argv,
            cwd=cwd,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    @contextmanager
    def ongoing(
        self,
        *arguments: str,
        program: Sequence[str] = (str(BIN / "k3deploy"),),
        settings: Mapping[str, str] | None = None,
    ) -> Iterator[Ongoing]:
        """A command line that the caller interrupts or waits for; it does not outlive the block.

        settings: variables of its environment beside the usual ones.
        """
        words = self.place / f"words-{time.monotonic_ns()}.txt"
        with words.open("w") as sink:
            process = subprocess.Popen(
                [*program, *arguments],
                cwd=ROOT,
                env={**self.environment, **(settings or {})},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
        try:
            yield Ongoing(process, words)
        finally:
            process.terminate()  # brings production back before it ends
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def elsewhere(self, name: str, owner: str = "") -> Controller:
        """The same inventory worked on from another machine: no lock and no run is shared."""
        place = self.place / name
        place.mkdir()
        return replace(self, place=place, owner=owner)

    def without(self, rank: str) -> Controller:
        """The same person with an inventory that has lost a rank."""
        place = self.place / f"without-{rank}"
        for folder in self.inventory.parent.iterdir():
            shutil.copytree(folder, place / folder.name)
        for file in (place / "lab").glob("*.yml"):
            inventory = yaml.safe_load(file.read_text())
            _drop(inventory, rank)
            file.write_text(yaml.safe_dump(inventory))
        return replace(self, inventory=place / "lab")

    def thrifty(self, name: str, *, halved: bool = True) -> Controller:
        """The same person elsewhere, with few parity questions, no probe of speed, and two ranks of the four.

        Half the ranks halve what a block costs; production spans all four all the same.
        """
        mine = self.elsewhere(name)
        if halved:
            mine = mine.without("rank2").without("rank3")
            mine.change(lambda values: values["k3_scale"].update(tensor_split=[1, 1]))
        else:
            mine = replace(mine, inventory=one_inventory(self.lab, mine.place / "inventory"))
        mine.change(k3_parity={"every": 256, "n_predict": 1}, k3_health={"probe_s": 0})
        for suite in (mine.inventory.parent / "suites").glob("*.jsonl"):
            suite.write_text(suite.read_text().splitlines()[0] + "\n")
        return mine

    def change(self, edit: Callable[[dict[str, Any]], object] = lambda _: None, **values: Any) -> None:
        """Set variables of the whole cluster in this person's own inventory."""
        variables = self.inventory / "group_vars" / "all" / "k3.yml"
        held = {**yaml.safe_load(variables.read_text()), **values}
        edit(held)
        variables.write_text(yaml.safe_dump(held))

    def cut_off(self, rank: str, seconds: int) -> None:
        """Take a rank's network away for a while: nothing answers, and nothing says so."""
        words = f"sh -c 'ip link set eth0 down; sleep {seconds}; ip link set eth0 up'"
        self.on(rank, f"systemd-run --collect --quiet --on-active=1s --timer-property=AccuracySec=100ms {words}")
        time.sleep(2)

    def reboot(self, rank: str) -> None:
        """End everything on a rank at once and let its systemd come up again."""
        (found,) = (item for item in self.lab.config.ranks if item.name == rank)
        self.lab.engine.call("restart", "--time", "0", found.container)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with contextlib.suppress(AssertionError):
                self.on(rank, "systemctl is-system-running --wait || true")
                return
            time.sleep(0.5)
        raise AssertionError(f"{rank} did not come up again")

    def on(self, rank: str, script: str) -> str:
        """What a shell script prints on a rank; it must end well."""
        control = self.lab.config.control_dir / "t-%n"  # taken down with the lab
        argv = ["ssh", "-F", str(self.lab.config.ssh_config), "-o", "ControlMaster=auto", "-o", "ControlPersist=60"]
        argv += ["-o", f"ControlPath={control}", rank, "bash -s"]
        done = subprocess.run(argv, input=script, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, f"{rank}: {script}\n{done.stdout}{done.stderr}"
        return done.stdout

    def everywhere(self, script: str) -> dict[str, str]:
        """``on`` for all ranks at once: {rank: output}."""
        names = [rank.name for rank in self.lab.config.ranks]
        with ThreadPoolExecutor(len(names)) as pool:
            return dict(zip(names, pool.map(lambda name: self.on(name, script), names), strict=True))

    def ask_production(self, prompt: str = "The lazy dog", count: int = 8) -> list[int]:
        """The tokens with which production goes on; fails unless it serves."""
        question = {"prompt": prompt, "n_predict": count, "temperature": 0, "return_tokens": True}
        request = urllib.request.Request(
            f"http://{self.lab.config.ranks[0].address}:8080/completion",
            json.dumps({**question, "cache_prompt": False}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            tokens: list[int] = json.load(answer)["tokens"]
        return tokens

    def production(self) -> dict[str, str]:
        """All of production that an apply must leave alone, by rank: files, units, and the workers that run."""
        return self.everywhere(_PRODUCTION)

    def candidate(self) -> dict[str, str]:
        """Units and processes of candidates that run, by rank; empty where there is none."""
        return self.everywhere(_CANDIDATE)


def _drop(inventory: Any, rank: str) -> None:
    """Take a host out of every group of an inventory."""
    if isinstance(inventory, dict):
        inventory.pop(rank, None)
        for value in inventory.values():
            _drop(value, rank)


# Every file with hash, owner, mode and times; units as systemd has them; who listens on the workers' port since when.
_PRODUCTION = """\
find /opt/llama-production /etc/systemd/system/llama-production* -printf '%p %y %m %u %s %T@ %l\\n' | sort
find /opt/llama-production /etc/systemd/system/llama-production* -type f -print0 | sort -z | xargs -0 sha256sum
systemctl show --property=MainPID,ActiveEnterTimestampMonotonic,NRestarts,FragmentPath,DropInPaths \
  llama-production-worker.service
systemctl show --property=FragmentPath,DropInPaths llama-production.service
ss -Hltnp 'sport = :50052'
"""
_CANDIDATE = """\
systemctl list-units --all --plain --no-legend --state=active,activating,deactivating,failed 'k3-candidate*'
pgrep --list-full --uid k3deploy 2>/dev/null || true
ls /opt/k3deploy/state/window.json 2>/dev/null || true
"""


@dataclass(frozen=True, slots=True)
class Ongoing:
    """A command line that runs."""

    process: subprocess.Popen[bytes]
    words: Path

    @property
    def said(self) -> str:
        return self.words.read_text()

    def until(self, words: str, timeout_s: float = 300) -> None:
        """Wait until it printed ``words``."""
        end = time.monotonic() + timeout_s
        while words not in self.said:
            assert self.process.poll() is None, f"ended before it said {words!r}\n{self.said}"
            assert time.monotonic() < end, f"did not say {words!r} in time\n{self.said}"
            time.sleep(0.1)


def one_inventory(lab: Lab, place: Path, model: str = "k3-tiny-seed7-f16") -> Path:
    """A copy of the lab's inventory, matrix and suites below ``place``, with this lab's addresses and a tiny model."""
    for name in ("lab", "matrix", "suites"):
        shutil.copytree(ROOT / "inventory" / name, place / name)
    # Sorted after hosts.yml, so that its addresses win.
    shutil.copy(lab.config.inventory_dir / "hosts.yml", place / "lab" / "lab-addresses.yml")
    variables = place / "lab" / "group_vars" / "all" / "k3.yml"
    text = variables.read_text()
    assert "k3-lab-seed7-f16" in text
    variables.write_text(text.replace("k3-lab-seed7-f16", model))
    return place / "lab"


def changes(recap: str) -> list[int]:
    """How many tasks changed something, for each rank of a play recap."""
    return [int(count) for count in re.findall(r"^rank\d .*changed=(\d+)", recap, re.MULTILINE)]


def roles_that_changed(log: str) -> set[str]:
    """The roles of ours whose tasks report a change in what ansible-playbook printed."""
    tasks = re.split(r"^TASK \[", log, flags=re.MULTILINE)[1:]
    names = [task.partition("]")[0] for task in tasks if re.search(r"^changed: ", task, re.MULTILINE)]
    return {name.partition(" : ")[0].removeprefix("k3.deploy.") for name in names}


@dataclass(frozen=True, slots=True)
class Applied:
    """A run that came to its end, and how production was before and after it."""

    run: Path
    exit_code: int
    said: str
    production_before: dict[str, str]
    production_after: dict[str, str]

    def record(self, name: str) -> dict[str, Any]:
        """plan, facts or verdict of the run."""
        value: dict[str, Any] = json.loads((self.run / f"{name}.json").read_text())
        return value

    @property
    def blocks(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.record("facts")["blocks"]
        return found

    def assert_complete(self) -> None:
        """A verdict by the rules, from all cells of all blocks, with a report, and production as it was."""
        verdict, plan = self.record("verdict"), self.record("plan")
        assert self.exit_code == EXIT_CODES[verdict["outcome"]], self.said
        assert verdict["outcome"] in self.said and verdict["outcome"] != "INVALID"
        load_facts(self.run / "facts.json")
        assert [block["arm"] for block in self.blocks] == [block["arm"] for block in plan["blocks"]]
        for block in self.blocks:
            cells = block["bench"]["cells"]
            assert {(cell["cell"], cell["state"]) for cell in cells} == CELLS
            samples = [sample for cell in cells for sample in cell["samples"]]
            assert [sample["why"] for sample in samples if not sample["valid"]] == []
            assert len(samples) == len(cells) * plan["bench"]["repeats"]
            lowest = {name: rank["memory"]["run_min_mib"] for name, rank in block["ranks"].items()}
            assert lowest.keys() == set(plan["ranks"]) and all(lowest.values())
        assert verdict["outcome"] in (self.run / "report.html").read_text()
        assert self.production_after == self.production_before
