"""Running other programs: one place that captures output, sets deadlines and words the failure."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence

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
