"""System packages: which are missing, and getting them with apt-get."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from k3deploy.errors import K3Error, PreflightError
from k3deploy.lab.process import run

# Another apt (a fresh machine's first upgrade, a second lab that is brought up) may be at work.
PATIENCE_S = 600
_TAKEN = ("Could not get lock", "Unable to lock", "Unable to acquire the dpkg frontend lock")


def missing_packages(wanted: Sequence[str]) -> list[str]:
    """Those of ``wanted`` that dpkg does not have installed, in the order given."""
    answer = run(["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *wanted], check=False)
    installed = {line.split()[0] for line in answer.stdout.splitlines() if line.endswith(" installed")}
    return [package for package in wanted if package not in installed]


def ensure_packages(
    wanted: Sequence[str],
    *,
    root: Sequence[str],
    progress: Callable[[str], None],
    confirm: Callable[[str], bool],
) -> list[str]:
    """Install what is missing and return its names. ``root`` is the prefix that makes a command run as root.

    Waits for another apt that holds the package manager's locks. Raises PreflightError when the user declines.
    """
    missing = missing_packages(wanted)
    if not missing:
        return []
    names = " ".join(missing)
    if not confirm(f"System packages to install with apt-get: {names}. Go ahead?"):
        raise PreflightError(
            f"system packages are missing: {names}",
            remedy=f"sudo apt-get install --no-install-recommends {names}",
        )
    progress(f"installing system packages: {names}")
    apt = [*root, "env", "DEBIAN_FRONTEND=noninteractive", "LC_ALL=C", "apt-get", "-qq"]
    _in_turn([*apt, "update"], 300, progress)
    _in_turn([*apt, "install", "-y", "--no-install-recommends", *missing], 900, progress)
    return missing


def _in_turn(argv: Sequence[str], timeout_s: float, progress: Callable[[str], None]) -> None:
    """Run apt-get, again and again while another one holds its locks: ``update`` has no option that waits."""
    deadline, told = time.monotonic() + PATIENCE_S, False
    while True:
        try:
            run(argv, timeout_s=timeout_s)
            return
        except K3Error as failed:
            if time.monotonic() > deadline or not any(words in str(failed) for words in _TAKEN):
                raise
        if not told:
            progress("another apt is at work on this host: waiting for it")
            told = True
        time.sleep(1)
