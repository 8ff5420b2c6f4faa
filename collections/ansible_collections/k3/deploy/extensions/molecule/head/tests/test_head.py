"""The head as it really runs, over two workers of its own build: it answers, from where, as whom, and with what."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from testinfra.host import Host

UNIT = "k3-candidate-head@baseline.service"
FOLDER = "/opt/k3deploy/candidates/baseline"


@pytest.fixture(scope="module")
def pid(rank0: Host, show: Callable[..., dict[str, str]]) -> str:
    shown = show(rank0, UNIT, "ActiveState", "MainPID")
    assert shown["ActiveState"] == "active"
    return shown["MainPID"]


def test_it_answers_a_prompt_with_the_planned_model(rank0: Host, addresses: dict[str, str], lab: dict[str, Any]) -> None:
    url = f"http://{addresses['rank0']}:8081"
    ask = "import json,sys,urllib.request as u; print(u.urlopen(u.Request(sys.argv[1], sys.argv[2].encode() or None)).read().decode())"
    body = json.dumps({"prompt": [1, 400, 401, 402], "n_predict": 4, "temperature": 0, "return_tokens": True})
    answer = json.loads(rank0.check_output("python3 -c %s %s %s", ask, f"{url}/completion", body))
    assert len(answer["tokens"]) == 4
    assert json.loads(rank0.check_output("python3 -c %s %s ''", ask, f"{url}/props"))["model_path"] == lab["model"]["path"]


def test_its_layers_are_on_both_workers(rank0: Host, rank1: Host, pid: str, addresses: dict[str, str]) -> None:
    peers = rank0.check_output(f"ss -Htnp state established | grep 'pid={pid},' | awk '{{print $4}}'").split()
    wanted = {f"{addresses[rank]}:50053" for rank in ("rank0", "rank1")}
    assert {peer for peer in peers if peer.endswith(":50053")} == wanted
    for rank in (rank0, rank1):
        assert "Accepted client connection" in rank.file(f"{FOLDER}/log/worker.log").content_string


def test_it_runs_the_candidates_own_program_and_libraries(rank0: Host, pid: str, build_id: str) -> None:
    release = f"/opt/k3deploy/releases/{build_id}"
    assert rank0.check_output(f"readlink /proc/{pid}/exe") == f"{release}/bin/llama-server"
    mapped = rank0.check_output(f"awk '$6 ~ /ggml|llama/ {{print $6}}' /proc/{pid}/maps | sort -u").splitlines()
    assert f"{release}/lib/libllama.so.0" in mapped
    # The binary and the libraries; the model is mapped too.
    assert all(path.startswith((f"{release}/", "/srv/models/")) for path in mapped)


def test_its_environment_is_the_planned_one(rank0: Host, pid: str, environ: Callable[..., dict[str, str]]) -> None:
    found = environ(rank0, pid)
    assert found["LD_LIBRARY_PATH"] == f"{FOLDER}/release/lib"
    assert found["GGML_CUDA_K3_FLASHKDA"] == "1"
    assert found["GGML_CUDA_K3_FLASHKDA_DIAG"] == "1"
    file = rank0.file(f"{FOLDER}/head.env")
    assert (file.user, file.mode) == ("root", 0o600)


def test_it_is_unprivileged_and_confined(rank0: Host, pid: str, status: Callable[..., dict[str, str]]) -> None:
    found = status(rank0, pid)
    assert found["Uid"].split() == [str(rank0.user("k3deploy").uid)] * 4
    assert {int(found[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert (found["NoNewPrivs"], found["Seccomp"]) == ("1", "2")
    inside = f"nsenter --target {pid} --mount --"
    for path in (f"{FOLDER}/release/bin/probe", "/opt/k3deploy/state/probe", "/etc/probe", "/root/probe"):
        assert "Read-only file system" in rank0.run(f"{inside} touch {path}").stderr, path


def test_its_unit_has_the_limits_of_the_plan(rank0: Host, show: Callable[..., dict[str, str]]) -> None:
    wanted = {
        "User": "k3deploy",
        "WorkingDirectory": FOLDER,
        "LimitMEMLOCK": "33554432",
        "CPUAffinity": "",
        "Restart": "no",
        "ProtectSystem": "strict",
        "ProtectHome": "read-only",
        "PartOf": "k3-candidate.target",
    }
    assert show(rank0, UNIT, *wanted) == wanted


def test_systemd_scores_its_sandbox_well(rank0: Host, exposure: Callable[[Host, str], float]) -> None:
    assert exposure(rank0, UNIT) <= 4.0


def test_it_listens_on_the_fabric_address_alone(rank0: Host, addresses: dict[str, str], listens: Callable[..., list[str]]) -> None:
    assert listens(rank0, 8081) == [f"{addresses['rank0']}:8081"]


def test_its_log_comes_at_once(rank0: Host) -> None:
    assert "listening on http://" in rank0.file(f"{FOLDER}/log/head.log").content_string


def test_its_exposure_is_held(rank0: Host) -> None:
    """Devices are closed by a list and not by PrivateDevices=, and still systemd finds it confined."""
    last = rank0.check_output(f"systemd-analyze security --no-pager {UNIT} | tail -1")
    assert float(last.split(": ")[1].split()[0]) <= 4.0, last
