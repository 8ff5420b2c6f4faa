"""The guard as it really runs: what it costs, what it may do, and what it keeps."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from testinfra.host import Host

UNIT = "k3-candidate-guard.service"
STATE = "/opt/k3deploy/state"


@pytest.fixture(scope="module")
def pid(rank0: Host, show: Callable[..., dict[str, str]]) -> str:
    """Of the rank where it is armed since the scenario's beginning."""
    shown = show(rank0, UNIT, "ActiveState", "UnitFileState", "MainPID")
    assert (shown["ActiveState"], shown["UnitFileState"]) == ("active", "enabled")
    return shown["MainPID"]


def test_what_it_watches_is_what_was_asked(rank0: Host) -> None:
    config = json.loads(rank0.file(f"{STATE}/guard.json").content_string)
    assert (config["run_id"], config["floors"], config["warn_mib"]) == ("molecule", {"dummy": 1536}, 4096)
    assert config["is_head"] and config["production"]["head_unit"] == "llama-production.service"
    assert 3000 < config["deadline"] - float(rank0.check_output("date +%s.%N")) < 3600
    file = rank0.file(f"{STATE}/guard.json")
    assert (file.user, file.mode) == ("root", 0o600)


def test_it_is_small_and_nearly_idle(rank0: Host, pid: str, status: Callable[..., dict[str, str]]) -> None:
    assert int(status(rank0, pid)["VmHWM"].split()[0]) < 20 * 1024
    used = "systemctl show --property=CPUUsageNSec --value k3-candidate-guard.service"
    before, after = rank0.check_output(f"{used}; sleep 6; {used}").split()
    assert (int(after) - int(before)) / 6e9 < 0.005, "of a core"


def test_it_looks_at_least_four_times_a_second(rank0: Host, pid: str) -> None:
    looked = rank0.run(f"cd /tmp; for i in 1 2 3; do sed -n 's/^voluntary_ctxt_switches:\\t//p' /proc/{pid}/status; sleep 2; done")
    first, _, last = map(int, looked.stdout.split())
    assert last - first >= 16


def test_of_root_only_what_it_needs_is_left_to_it(rank0: Host, pid: str, status: Callable[..., dict[str, str]]) -> None:
    found = status(rank0, pid)
    kill, ptrace, read = 1 << 5, 1 << 19, 1 << 2  # the last: whose descriptors another user's sockets are
    assert {int(found[name], 16) for name in ("CapPrm", "CapEff", "CapBnd")} == {kill | ptrace | read}
    assert (found["NoNewPrivs"], found["Seccomp"]) == ("1", "2")
    inside = f"nsenter --target {pid} --mount --"
    for path in ("/etc/probe", "/opt/k3deploy/probe", "/opt/k3deploy/libexec/probe", "/var/probe"):
        assert "Read-only file system" in rank0.run(f"{inside} touch {path}").stderr, path


def test_systemd_scores_its_sandbox_well(rank0: Host, exposure: Callable[[Host, str], float]) -> None:
    assert exposure(rank0, UNIT) <= 4.0


def test_the_kernel_and_a_hang_are_provided_for(rank0: Host, show: Callable[..., dict[str, str]]) -> None:
    """What a container does not grant (the score itself) is at least asked for."""
    wanted = {"OOMScoreAdjust": "-1000", "Restart": "on-failure", "WatchdogUSec": "15s", "Type": "notify"}
    assert show(rank0, UNIT, *wanted) == wanted
