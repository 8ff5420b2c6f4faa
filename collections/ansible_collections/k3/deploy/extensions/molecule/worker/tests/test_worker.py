"""The worker as it really runs: what it executes, as whom, what it may touch, where it listens, and when its log comes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from testinfra.host import Host

UNIT = "k3-candidate-worker@baseline.service"
FOLDER = "/opt/k3deploy/candidates/baseline"


@pytest.fixture(scope="module")
def pid(rank1: Host, show: Callable[..., dict[str, str]]) -> str:
    shown = show(rank1, UNIT, "ActiveState", "MainPID")
    assert shown["ActiveState"] == "active"
    return shown["MainPID"]


def test_it_runs_the_candidates_own_program_with_the_planned_arguments(rank1: Host, pid: str, build_id: str, addresses: dict[str, str]) -> None:
    argv = rank1.check_output(f"tr '\\0' ' ' < /proc/{pid}/cmdline").split()
    assert argv == [
        f"{FOLDER}/release/bin/ggml-rpc-server",
        *("--host", addresses["rank1"], "--port", "50053", "--threads", "2"),
    ]
    assert rank1.check_output(f"readlink /proc/{pid}/exe") == f"/opt/k3deploy/releases/{build_id}/bin/ggml-rpc-server"
    assert rank1.check_output(f"readlink /proc/{pid}/cwd") == FOLDER


def test_every_llama_library_that_it_loaded_is_the_candidates(rank1: Host, pid: str, build_id: str) -> None:
    mapped = rank1.check_output(f"awk '$6 ~ /ggml|llama/ {{print $6}}' /proc/{pid}/maps | sort -u").splitlines()
    assert f"/opt/k3deploy/releases/{build_id}/lib/libggml-rpc.so.0" in mapped
    assert all(path.startswith(f"/opt/k3deploy/releases/{build_id}/") for path in mapped)


def test_its_environment_is_the_planned_one(rank1: Host, pid: str, environ: Callable[..., dict[str, str]]) -> None:
    found = environ(rank1, pid)
    assert found["LD_LIBRARY_PATH"] == f"{FOLDER}/release/lib"
    assert found["GGML_CUDA_K3_FLASHKDA"] == "1"
    assert found["GGML_CUDA_K3_FLASHKDA_DIAG"] == "1"
    file = rank1.file(f"{FOLDER}/worker.env")
    assert (file.user, file.mode) == ("root", 0o600)


def test_it_is_unprivileged_and_confined(rank1: Host, pid: str, status: Callable[..., dict[str, str]]) -> None:
    found = status(rank1, pid)
    uid = rank1.user("k3deploy").uid
    assert found["Uid"].split() == [str(uid)] * 4
    assert {int(found[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert found["NoNewPrivs"] == "1"
    assert found["Seccomp"] == "2"
    assert found["Cpus_allowed_list"] == "0"


def test_its_unit_has_the_limits_of_the_plan(rank1: Host, show: Callable[..., dict[str, str]]) -> None:
    wanted = {
        "User": "k3deploy",
        "WorkingDirectory": FOLDER,
        "LimitMEMLOCK": "67108864",
        "CPUAffinity": "0",
        "Restart": "no",
        "NoNewPrivileges": "yes",
        "ProtectSystem": "strict",
        "ProtectHome": "yes",
        "PrivateTmp": "yes",
        "DevicePolicy": "closed",
        "RestrictNamespaces": "yes",
        "OOMScoreAdjust": "500",
        "PartOf": "k3-candidate.target",
    }
    assert show(rank1, UNIT, *wanted) == wanted


def test_it_can_write_nothing_but_its_log(rank1: Host, pid: str) -> None:
    inside = f"nsenter --target {pid} --mount --"
    assert rank1.run(f"{inside} touch {FOLDER}/log/probe && rm {FOLDER}/log/probe").rc == 0
    for path in (f"{FOLDER}/release/bin/probe", f"{FOLDER}/probe", "/opt/k3deploy/state/probe", "/etc/probe", "/var/probe"):
        assert "Read-only file system" in rank1.run(f"{inside} touch {path}").stderr, path
    assert rank1.check_output(f"{inside} ls -A /root /home").split() == ["/home:", "/root:"]


def test_systemd_scores_its_sandbox_well(rank1: Host, exposure: Callable[[Host, str], float]) -> None:
    assert exposure(rank1, UNIT) <= 4.0


def test_it_listens_on_the_fabric_address_alone(rank1: Host, addresses: dict[str, str], listens: Callable[..., list[str]]) -> None:
    assert listens(rank1, 50053) == [f"{addresses['rank1']}:50053"]


def test_its_log_comes_at_once(rank1: Host, addresses: dict[str, str]) -> None:
    """Without line buffering nothing is in it as long as the worker lives."""
    assert f"{addresses['rank1']}:50053" in rank1.file(f"{FOLDER}/log/worker.log").content_string


def test_its_memory_is_watched(rank1: Host) -> None:
    rows = [line.split() for line in rank1.check_output("sleep 1.2; cat /opt/k3deploy/state/memory/baseline.tsv").splitlines()]
    assert rows and all(len(row) == 7 for row in rows)
    total = int(rank1.check_output("awk '/MemTotal/ {print $2}' /proc/meminfo")) // 1024
    assert all(0 < int(row[1]) < total for row in rows)


def test_stopping_the_target_stops_everything_of_the_candidate_and_leaves_the_guard(rank1: Host, show: Callable[..., dict[str, str]]) -> None:
    rank1.check_output("systemctl stop k3-candidate.target")
    assert show(rank1, UNIT, "ActiveState") == {"ActiveState": "inactive"}
    assert show(rank1, "k3-candidate-guard.service", "ActiveState") == {"ActiveState": "active"}
    assert rank1.run("pgrep -u k3deploy").rc == 1


def test_its_exposure_is_held(rank1: Host) -> None:
    """Devices are closed by a list and not by PrivateDevices=, and still systemd finds it confined."""
    last = rank1.check_output(f"systemd-analyze security --no-pager {UNIT} | tail -1")
    assert float(last.split(": ")[1].split()[0]) <= 4.0, last
