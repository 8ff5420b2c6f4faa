"""The collection's roles, each by its own Molecule scenario, on a lab of their own.

A scenario checks the role on a rank without it, converges, converges again without a change, checks what is then
installed, tries what the role must refuse, and looks at the ranks with testinfra.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from labkit import ROOT, lab_named

pytestmark = pytest.mark.lab

LAB = "k3mol"
COLLECTION = ROOT / "collections" / "ansible_collections" / "k3" / "deploy"
SCENARIOS = (
    "base",
    "build",
    "install",
    "guard",
    "worker",
    "head",
    "benchmark",
    "lab_production",
    "window",
    "preflight",
    "verify",
)
READS_ONLY = {"preflight"}
# The first one makes the lab, and llama.cpp where no compiler cache is there.
TIMEOUT_S = 1800
STEP = re.compile(r"^INFO +\[\w+ > (\w+)\] Executing$", re.MULTILINE)
SCORE = re.compile(r"^systemd-analyze security (\S+): (\S+)$", re.MULTILINE)
CHANGED = re.compile(r"^rank\d+ .*\bchanged=(\d+)", re.MULTILINE)


@pytest.fixture(scope="session")
def molecule(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Run molecule and return its words; its lab lives as long as the session."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("K3DEPLOY_", "ANSIBLE_"))}
    place = tmp_path_factory.mktemp("molecule")
    environment = {
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "K3DEPLOY_MOLECULE_LAB": LAB,
        "MOLECULE_EPHEMERAL_DIRECTORY": str(place),
        "NO_COLOR": "1",
    }

    def run(*arguments: str) -> str:
        try:
            done = subprocess.run(
                ["molecule", *arguments],
                cwd=COLLECTION,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except BaseException:
            kill_below(place)
            raise
        assert done.returncode == 0, done.stdout[-6000:]
        return done.stdout

    try:
        yield run
    finally:
        kill_below(place)
        lab_named(LAB).down()


def kill_below(place: Path) -> None:
    """Kill what molecule started and left: Ansible's workers are session leaders and outlive its process group."""
    mark = f"MOLECULE_EPHEMERAL_DIRECTORY={place}".encode()
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and mark in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


def steps(said: str) -> list[tuple[str, str]]:
    """[(step, its words)] in the order that they ran."""
    parts = STEP.split(said)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def changes(words: str) -> list[int]:
    """What a playbook changed (or in check mode would), host by host."""
    found = [int(count) for count in CHANGED.findall(words)]
    assert found, words
    return found


def test_every_role_has_a_scenario() -> None:
    roles = {path.name for path in (COLLECTION / "roles").iterdir()}
    assert roles == set(SCENARIOS)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_role(
    scenario: str, molecule: Callable[..., str], record_testsuite_property: Callable[[str, object], None]
) -> None:
    said = molecule("test", "--scenario-name", scenario, "--destroy=never")
    for unit, score in SCORE.findall(said):
        record_testsuite_property(f"exposure of {unit}", score)
    ran = steps(said)
    clean, installed = (changes(words) for step, words in ran if step == "check")
    (converged,) = (changes(words) for step, words in ran if step == "converge")
    assert any(clean) == any(converged) == (scenario not in READS_ONLY)
    assert not any(installed), "check mode would change what is installed"
