"""Isolation: a role writes below its root and its own units, and nowhere else on the rank's disk."""

from __future__ import annotations

import os
from collections.abc import Callable

from testinfra.host import Host

OURS = (
    "/opt/k3deploy",
    "/etc/systemd/system/k3-candidate",
    "/etc/systemd/system/multi-user.target.wants/k3-candidate-guard.service",
)
ACCOUNTS = ("/etc/passwd", "/etc/group", "/etc/shadow", "/etc/gshadow", "/etc/subuid", "/etc/subgid", "/etc/.pwd.lock")
PRODUCTION = (
    "/opt/llama-production",
    "/etc/systemd/system/llama-production",
    "/etc/systemd/system/multi-user.target.wants/llama-production",
)
COMPILER_CACHE = ("/var/cache/k3deploy/ccache",)  # the inventory's k3_ccache_dir: its owner is the account's
# What a scenario's role is for, beside that.
ALLOWED = {
    "base": ACCOUNTS,
    "build": (*ACCOUNTS, *COMPILER_CACHE),
    "guard": ("/root/.ssh/authorized_keys", "/etc/resolv.conf"),  # the lab writes them when it starts the rank that was rebooted
    "install": (*ACCOUNTS, *COMPILER_CACHE),
    "lab_production": (*ACCOUNTS, *PRODUCTION),
    "verify": (*ACCOUNTS, *COMPILER_CACHE),
}


def test_nothing_outside_was_written(rank0: Host, rank1: Host, written: Callable[[Host], set[str]]) -> None:
    scenario = os.environ["MOLECULE_SCENARIO_NAME"]
    allowed = (*OURS, *ALLOWED.get(scenario, ()))
    for rank in (rank0, rank1):
        assert sorted(path for path in written(rank) if not path.startswith(allowed)) == []
