"""The measurement of the tool's own cost runs and adds up. Its numbers are for docs/performance.md, not for a test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from controllerkit import ROOT, Applied, Controller


@pytest.mark.lab
def test_a_no_op_apply_is_measured_beside_a_ping(controller: Controller, applied: Callable[[str], Applied]) -> None:
    run = applied("next").run
    before = {path.name: path.stat().st_mtime_ns for path in (run / "blocks").iterdir()}
    program = Path(__file__).with_name("overhead.py")
    done = subprocess.run(
        [sys.executable, str(program), "--run", run.name, "--times", "1"],
        env=controller.environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines() if "|" in line]
    numbers = {row[0]: [float(cell) for cell in row[1:] if cell] for row in rows[2:]}
    assert numbers["`ansible ranks -m ping`"][1:] == [1, 1, 4]
    seconds, ratio, tasks, trips = numbers["no-op apply"]
    assert seconds > 0 and ratio > 0 and trips > tasks > 0
    phases = {"preflight", "build", "install", "window", "close", "judge"}
    assert {f"its phase {name}" for name in phases} <= numbers.keys()
    assert not any("its phase block" in name for name in numbers), "nothing was measured again"
    assert {path.name: path.stat().st_mtime_ns for path in (run / "blocks").iterdir()} == before
