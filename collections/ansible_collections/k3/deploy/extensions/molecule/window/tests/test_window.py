"""After the window: production serves as before, untouched, and the record of the window stays."""

from __future__ import annotations

import json
from collections.abc import Callable

from testinfra.host import Host


def test_production_serves_again(rank0: Host, addresses: dict[str, str], listens: Callable[..., list[str]]) -> None:
    assert listens(rank0, 8080) == [f"{addresses['rank0']}:8080"]
    ask = "import urllib.request as u; print(u.urlopen('http://rank0:8080/health').status)"
    assert rank0.check_output("python3 -c %s", ask) == "200"


def test_the_closed_window_is_kept_with_its_proof(rank0: Host) -> None:
    assert not rank0.file("/opt/k3deploy/state/window.json").exists
    last = json.loads(rank0.file("/opt/k3deploy/state/window-last.json").content_string)
    assert last["run_id"] == "molecule"
    assert last["closed"] > last["opened"]
    assert last["proof"] == {"answers": True, "as_recorded": True, "tokens": last["tokens"]}
    assert not rank0.file("/opt/k3deploy/state/guard.json").exists


def test_productions_programs_are_the_release_to_the_byte(rank0: Host, rank1: Host, build_id: str) -> None:
    for rank in (rank0, rank1):
        folder = f"/opt/llama-production/{build_id}"
        files = json.loads(rank.check_output(f"cat {folder}/manifest.json"))["files"]
        lines = "".join(f"{item['sha256']}  {folder}/{path}\n" for path, item in files.items())
        rank.check_output(f"sha256sum --check --strict --quiet <<'EOF'\n{lines}EOF")
