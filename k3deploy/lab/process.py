"""Running other programs: one place that captures output, sets deadlines and words the failure; and taking turns."""

from __future__ import annotations

import contextlib
import fcntl
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from k3deploy.errors import K3Error

_TAIL_LINES = 12


def run(
    argv: Sequence[str],
    *,
    stdin: str = "",
    check: bool = True,
    timeout_s: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """Run ``argv`` without a shell and capture both outputs as text.

    Raises K3Error when the program is missing, passes its deadline, or (with ``check``) exits non-zero; the
    message carries the command and the end of what the program said.
    """
    try:
        done = subprocess.run(list(argv), input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False)
    except FileNotFoundError as missing:
        raise K3Error(f"{argv[0]}: no such program") from missing
    except subprocess.TimeoutExpired as late:
        raise K3Error(f"no end after {timeout_s:.0f} s: {shlex.join(argv)}") from late
    if check and done.returncode != 0:
        said = "\n".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-_TAIL_LINES:])
        raise K3Error(f"exit {done.returncode}: {shlex.join(argv)}\n{said}")
    return done


def matching(wanted: Callable[[list[str]], bool]) -> list[int]:
    """Process ids whose command line, as a list of arguments, is ``wanted``."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:  # it ended while we looked
            continue
        if command and wanted([part.decode(errors="replace") for part in command.rstrip(b"\0").split(b"\0")]):
            found.append(int(folder.name))
    return found


def kill_matching(wanted: Callable[[list[str]], bool], *, root: Sequence[str], timeout_s: float = 10.0) -> None:
    """Kill (SIGKILL) what ``matching`` finds and wait until it is gone; ``root`` makes a command run as root."""
    deadline = time.monotonic() + timeout_s
    while (found := matching(wanted)) and time.monotonic() < deadline:
        run([*root, "kill", "-9", *map(str, found)], check=False)
        time.sleep(0.05)


@contextlib.contextmanager
def one_at_a_time(lock: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the file ``lock`` (made where it is missing) after whoever holds it now; ``waiting`` is called if somebody
    does. The lock dies with its process, so a kill leaves none."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
