"""The harness against real llama.cpp: two RPC workers and a head on this machine, a tiny kimi-k3 model."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from llamakit import Llama, cluster, head, measure, start_harness, workers

from k3deploy.facts import parse_head_log, parse_worker_log

CELLS = [
    {"cell": "pp256", "state": "cold", "n_prompt": 256, "n_predict": 1},
    {"cell": "tg16", "state": "cold", "n_prompt": 16, "n_predict": 16},
    {"cell": "pp256", "state": "warm", "n_prompt": 256, "n_predict": 1},
    {"cell": "pp256", "state": "cached", "n_prompt": 256, "n_predict": 1},
]

LONG = {"cell": "pp2048", "state": "cold", "n_prompt": 2048, "n_predict": 1}

pytestmark = pytest.mark.lab


def texts(result: dict[str, Any]) -> list[str]:
    return [sample["tokens_sha256"] for cell in result["cells"] for sample in cell["samples"]]


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_all_states_count_on_a_recurrent_model_and_texts_survive_a_restart(llama: Llama, tmp_path: Path) -> None:
    found = []
    for number, source in enumerate(("metrics", "slots")):
        folder = tmp_path / str(number)
        folder.mkdir()
        flags = ["--metrics"] if source == "metrics" else []
        with cluster(llama, folder, "--ctx-checkpoints", "0", *flags) as made:
            warmup = {"prefill": [64], "decode": [1, 2]}
            found.append(
                measure(folder, made, cells=CELLS, warmup=warmup, probes=["graphs"], head_log=str(made.head_log))
            )
    for result, source in zip(found, ("metrics", "slots"), strict=True):
        assert result["error"] is None and result["foreign_check"] == source
        bad = [s["why"] for cell in result["cells"] for s in cell["samples"] if not s["valid"]]
        assert bad == []
        cached = result["cells"][3]["samples"][0]
        assert (cached["cache_n"], cached["prompt_n"]) == (224, 32)
        decode = result["probes"]["graphs"]["requests"][-1]
        assert decode["kind"] == "decode" and decode["reused"] > 0
    assert texts(found[0]) == texts(found[1])
    observed = parse_head_log((tmp_path / "0/head.log").read_text(errors="replace"))
    assert observed.kv_types == {"k": "f16", "v": "f16"}
    assert all(name.startswith("127.0.0.1:") for name in [*observed.recurrent_mib, *observed.kv_cache_mib])
    assert observed.recurrent_mib and observed.kv_cache_mib


def test_cache_reuse_on_a_recurrent_model_takes_effect_and_changes_the_text(llama: Llama, tmp_path: Path) -> None:
    with cluster(llama, tmp_path, "--metrics", "--ctx-checkpoints", "0", "--cache-reuse", "256") as made:
        result = measure(tmp_path, made, cells=CELLS[:1], probes=["shifted_prefix"])
    probe = result["probes"]["shifted_prefix"]
    assert probe["effective"] is True and probe["cache_n"] == 512
    assert probe["identical"] is False


def test_without_cache_reuse_a_moved_prefix_is_evaluated_anew_with_the_same_text(llama: Llama, tmp_path: Path) -> None:
    with cluster(llama, tmp_path, "--metrics", "--ctx-checkpoints", "0") as made:
        result = measure(tmp_path, made, cells=CELLS[:1], probes=["shifted_prefix"])
    probe = result["probes"]["shifted_prefix"]
    assert probe["effective"] is False and probe["identical"] is True


def test_a_frozen_worker_ends_the_measurement_at_its_deadline(llama: Llama, tmp_path: Path) -> None:
    long = [{"cell": "tg2000", "state": "cold", "n_prompt": 16, "n_predict": 2000}]
    with cluster(llama, tmp_path, "--metrics") as made:
        begin = time.monotonic()
        process = start_harness(tmp_path, made, cells=long, deadline_s=5)
        time.sleep(1)
        made.workers[1].send_signal(signal.SIGSTOP)
        _, said = process.communicate(timeout=60)
        assert time.monotonic() - begin < 15
        made.workers[1].send_signal(signal.SIGCONT)  # so that the head can end
    assert process.returncode == 1 and "deadline of 5 s" in said


def test_a_killed_worker_is_a_failed_server(llama: Llama, tmp_path: Path) -> None:
    long = [{"cell": "tg2000", "state": "cold", "n_prompt": 16, "n_predict": 2000}]
    with cluster(llama, tmp_path, "--metrics") as made:
        process = start_harness(tmp_path, made, cells=long)
        time.sleep(1)
        made.workers[1].kill()
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1 and said.strip() and "Traceback" not in said
    assert parse_head_log(made.head_log.read_text(errors="replace")).fatal


def test_the_timing_proxy_changes_no_text_and_times_every_graph_of_each_worker(llama: Llama, tmp_path: Path) -> None:
    found = []
    spent: list[float] = []
    for proxied in (False, True):
        folder = tmp_path / str(proxied)
        folder.mkdir()
        with workers(folder, llama, llama, proxied=proxied) as at:
            with head(llama, folder, at, "--metrics", "--ctx-checkpoints", "0") as made:
                begin = time.monotonic()
                found.append(measure(folder, made, cells=[*CELLS[:2], LONG]))
                wall = time.monotonic() - begin
            spent = [cpu_seconds(process.pid) for process in at.processes]
    assert texts(found[0]) == texts(found[1])
    for number, cpu in enumerate(spent):
        text = (tmp_path / f"True/worker{number}.log").read_text()
        assert "without timing" not in text
        forward = parse_worker_log(text, "rank").rank_forward_ms["rank"] / 1000
        # One thread computes: its graphs take nearly all of its time at least, and no more than there was.
        assert 0.7 * cpu < forward < wall, (number, cpu, forward, wall)
