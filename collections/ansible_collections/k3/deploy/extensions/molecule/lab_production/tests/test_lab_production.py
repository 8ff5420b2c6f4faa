"""The lab's production: a service of its own, apart from everything of ours, that answers on its ports."""

from __future__ import annotations

import json
from collections.abc import Callable

from testinfra.host import Host

PRODUCTION = "/opt/llama-production"
WORKER, HEAD = "llama-production-worker.service", "llama-production.service"


def test_its_worker_runs_its_own_copy_as_its_own_account(rank0: Host, rank1: Host, build_id: str, show: Callable[..., dict[str, str]]) -> None:
    for rank in (rank0, rank1):
        shown = show(rank, WORKER, "ActiveState", "UnitFileState", "User", "MainPID")
        pid = shown.pop("MainPID")
        assert shown == {"ActiveState": "active", "UnitFileState": "enabled", "User": "llm"}
        assert rank.check_output(f"readlink /proc/{pid}/exe") == f"{PRODUCTION}/{build_id}/bin/ggml-rpc-server"
        assert "/opt/k3deploy" not in rank.check_output(f"cat /proc/{pid}/maps /etc/systemd/system/{WORKER}")


def test_what_it_runs_is_the_release_to_the_byte(rank0: Host, rank1: Host, build_id: str) -> None:
    for rank in (rank0, rank1):
        folder = f"{PRODUCTION}/{build_id}"
        files = json.loads(rank.check_output(f"cat {folder}/manifest.json"))["files"]
        lines = "".join(f"{item['sha256']}  {folder}/{path}\n" for path, item in files.items())
        rank.check_output(f"sha256sum --check --strict --quiet <<'EOF'\n{lines}EOF")


def test_it_listens_where_the_inventory_says(
    rank0: Host, rank1: Host, addresses: dict[str, str], listens: Callable[..., list[str]], show: Callable[..., dict[str, str]]
) -> None:
    assert listens(rank0, 50052) == [f"{addresses['rank0']}:50052"]
    assert listens(rank1, 50052) == [f"{addresses['rank1']}:50052"]
    assert listens(rank0, 8080) == [f"{addresses['rank0']}:8080"]
    assert show(rank0, HEAD, "ActiveState", "UnitFileState") == {"ActiveState": "active", "UnitFileState": "enabled"}
    assert show(rank1, HEAD, "LoadState") == {"LoadState": "not-found"}


def test_it_says_whether_it_is_busy(rank0: Host) -> None:
    """A window waits for running requests: production must tell."""
    ask = "import urllib.request as u; print(u.urlopen('http://rank0:8080/slots').read().decode())"
    assert [slot["is_processing"] for slot in json.loads(rank0.check_output("python3 -c %s", ask))] == [False]
