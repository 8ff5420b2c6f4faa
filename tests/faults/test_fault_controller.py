"""kill -9 of k3deploy: at each boundary between two phases of an apply, and once inside each phase."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from faultkit import Applying, Fault, Rig

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("installed")]

NAME = "kill -9 of k3deploy"


def boundary(phase: str, before: str) -> object:
    mark = pytest.mark.fault(NAME, f"boundary {before} / {phase}")
    return pytest.param(phase, "", marks=mark, id=f"{before}-{phase}")


def inside(phase: str, task: str) -> object:
    return pytest.param(phase, task, marks=pytest.mark.fault(NAME, f"in {phase}"), id=phase)


def killed(going: Applying, phase: str, task: str) -> str:
    """Kill it when a phase begins, or at a task inside it; what its record ends with."""
    going.until_phase(phase)
    if task:
        going.until_task(task)
    going.kill()
    last = going.phases()[-1]
    assert last["phase"].startswith(phase), going.events()
    return f"{going.run.name}: its record ends in phase {last['phase']}, which began and has no end"


@pytest.mark.parametrize(
    ("phase", "task"),
    [
        boundary("preflight", "plan"),
        inside("preflight", "Judge the rank"),
        boundary("build", "preflight"),
        inside("build", "Put the build program in place"),
        boundary("install", "build"),
        inside("install", "Assemble and verify the release"),
    ],
)
def test_before_the_window(fault: Fault, phase: str, task: str) -> None:
    rig = fault.rig
    half_written = phase == "install" and task
    if half_written:
        rig.controller.on("rank1", "rm -r $(readlink -f /opt/k3deploy/candidates/F1/release)")
    with rig.applying() as going:
        said = killed(going, phase, task)
    if half_written:
        rig.install()  # what the killed one left is finished by the next
    fault.holds("killed", said, "its record ends in phase " + phase)


@pytest.mark.parametrize(
    ("phase", "task"),
    [
        boundary("window", "install"),
        inside("window", "Window | drain production"),
        boundary("block", "window"),
        inside("block", "Start the head and wait"),
        boundary("close", "block"),
        inside("close", "bring production back and prove it"),
    ],
)
def test_from_the_window_on(fault: Fault, phase: str, task: str) -> None:
    rig = fault.rig
    with rig.applying("measure", extra=rig.one_block()) as going:
        said = killed(going, phase, task)
    code, words = rig.rollback()
    assert code == 0, words
    fault.holds("killed; rollback 0", f"{said}\n{words}", "its record ends in phase " + phase, "production")


def until_there(path: Path) -> None:
    end = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < end, f"{path} was not written"
        time.sleep(0.02)


@pytest.mark.parametrize(
    "file", [pytest.param("", marks=pytest.mark.fault(NAME, "boundary close / judge"), id="close-judge"),
             pytest.param("verdict.json", marks=pytest.mark.fault(NAME, "in judge"), id="judge")]
)  # fmt: skip
def test_at_the_judge(fault: Fault, file: str) -> None:
    rig: Rig = fault.rig
    with rig.applying("measure", extra=rig.one_block()) as going:
        going.until_phase("judge")
        if file:
            until_there(going.run / file)
        going.kill()
    judged = rig.controller.k3deploy("report", going.run.name)
    fault.holds(
        f"killed; report {judged.returncode}",
        f"{judged.stdout}{judged.stderr}\nblocks: {sorted(going.records())}",
        "blocks: ['blocks/000.json']",
    )
