"""scripts/test.sh: whoever stops the tests stops them, and what they started goes with them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/test.sh"
# Stands where pytest would: starts something that would outlive it, and says how it was stopped.
PYTEST = f"""\
#!{sys.executable}
import subprocess, sys, time
left = subprocess.Popen(["sleep", "300"], start_new_session=True)
print("left", left.pid, flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(2)
"""


def runs(pid: int) -> bool:
    """Whether a process still runs; one that is dead and waits for its parent to notice does not."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_the_tests_at_once_and_leaves_nothing(tmp_path: Path, number: signal.Signals, code: int) -> None:
    for name, text in {"pytest": PYTEST, "k3deploy": "#!/bin/sh\n", "chromium": "#!/bin/sh\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    process = subprocess.Popen(
        ["bash", str(SCRIPT)],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # as a terminal's shell leaves it
    )
    assert process.stdout is not None
    left = int(process.stdout.readline().split()[1])
    began = time.monotonic()
    process.send_signal(number)
    said = process.communicate(timeout=30)[0]
    assert process.returncode == code, said
    assert ("interrupted" in said) is (number == signal.SIGINT)
    assert time.monotonic() - began < 25
    assert not runs(left)
