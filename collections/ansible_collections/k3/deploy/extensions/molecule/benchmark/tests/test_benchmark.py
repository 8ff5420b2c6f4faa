"""The harness on the head: the file of this collection, run as the candidate's account, with measured and valid cells."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from testinfra.host import Host

FILES = Path(__file__).parents[4] / "roles" / "benchmark" / "files"
HARNESS = ("k3_bench.py", "k3_client.py", "k3_parity.py")
ROOT = "/opt/k3deploy"


def test_the_harness_is_the_collections(rank0: Host) -> None:
    for name in HARNESS:
        file = rank0.file(f"{ROOT}/libexec/{name}")
        assert file.sha256sum == hashlib.sha256((FILES / name).read_bytes()).hexdigest()
        assert file.user == "root"
    assert rank0.file(f"{ROOT}/libexec/{HARNESS[0]}").mode == 0o755


def test_every_cell_was_measured_and_is_valid(rank0: Host) -> None:
    file = rank0.file(f"{ROOT}/work/bench-result.json")
    result = json.loads(file.content_string)
    assert file.user == "k3deploy"
    assert result["error"] is None
    whole = b"".join((FILES / name).read_bytes() for name in HARNESS)
    assert result["harness_sha256"] == hashlib.sha256(whole).hexdigest()
    samples = [sample for cell in result["cells"] for sample in cell["samples"]]
    assert [sample["why"] for sample in samples if not sample["valid"]] == []
    prefill, decode = samples
    assert (prefill["prompt_n"], prefill["cache_n"]) == (128, 0)
    assert decode["predicted_n"] == 8


def test_the_job_left_no_unit_behind(rank0: Host, show: Callable[..., dict[str, str]]) -> None:
    assert show(rank0, "k3-candidate-bench.service", "LoadState", "ActiveState") == {"LoadState": "not-found", "ActiveState": "inactive"}
