"""System packages: which are missing, and getting them with apt-get."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from k3deploy.errors import PreflightError
from k3deploy.lab.process import run


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

    Raises PreflightError when the user declines.
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
    apt = [*root, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq"]
    run([*apt, "update"], timeout_s=300)
    run([*apt, "install", "-y", "--no-install-recommends", *missing], timeout_s=900)
    return missing
