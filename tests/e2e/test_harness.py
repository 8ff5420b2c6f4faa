"""The harness against real llama.cpp: two RPC workers and a head on this machine, a tiny kimi-k3 model.

The lab's own build runs here with the loader and the libraries of the rank that compiled it, whatever this host has.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from labkit import built_release

from k3deploy.facts import parse_head_log
from k3deploy.lab.cluster import Lab
from k3deploy.lab.model import SPECS, default_directory, ensure_model

HARNESS = (
    Path(__file__).parents[2] / "collections/ansible_collections/k3/deploy/roles/benchmark/files/k3_bench.py"
).resolve()
VOCAB = {"first_id": 300, "last_id": 2000, "bos": 1}
CELLS = [
    {"cell": "pp256", "state": "cold", "n_prompt": 256, "n_predict": 1},
    {"cell": "tg16", "state": "cold", "n_prompt": 16, "n_predict": 16},
    {"cell": "pp256", "state": "warm", "n_prompt": 256, "n_predict": 1},
    {"cell": "pp256", "state": "cached", "n_prompt": 256, "n_predict": 1},
]

pytestmark = pytest.mark.lab


@dataclass(frozen=True, slots=True)
class Llama:
    """A llama.cpp release with everything that its programs load."""

    release: Path
    libraries: Path

    def argv(self, program: str) -> list[str]:
        (loader,) = self.libraries.glob("ld-linux*")
        path = f"{self.release / 'lib'}:{self.libraries}"
        return [str(loader), "--library-path", path, str(self.release / "bin" / program)]


@pytest.fixture(scope="module")
def llama(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Llama:
    release = built_release(lab)
    libraries = tmp_path_factory.mktemp("libraries")
    builder = next(rank.name for rank in lab.config.ranks if rank.is_builder)
    needed = "ldd bin/llama-server bin/ggml-rpc-server | grep -o '[[:space:]]/lib[^ ]*' | sort -u"
    command = f"cd {release.rank_path}; export LD_LIBRARY_PATH=lib; tar --create --dereference $({needed})"
    ssh = ["ssh", "-F", str(lab.config.ssh_config), builder, command]
    archive = subprocess.run(ssh, capture_output=True, check=True).stdout
    unpack = ["tar", "--extract", "--directory", str(libraries), "--transform", "s,.*/,,"]
    subprocess.run(unpack, input=archive, check=True)
    return Llama(release.directory, libraries)


@dataclass
class Cluster:
    url: str
    workers: list[subprocess.Popen[bytes]]
    head_log: Path


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


@contextlib.contextmanager
def cluster(llama: Llama, folder: Path, *flags: str) -> Iterator[Cluster]:
    """Two workers and a head that answers; all of them are gone afterwards."""
    model = ensure_model(default_directory(), SPECS["tiny"], 7, "f16").path
    first, second, port = free_ports(3)
    environment = {
        **os.environ,
        "OMP_WAIT_POLICY": "passive",
        "GGML_NO_BACKTRACE": "1",
    }
    processes: list[subprocess.Popen[bytes]] = []

    def start(name: str, argv: list[str]) -> subprocess.Popen[bytes]:
        with (folder / f"{name}.log").open("wb") as log:
            processes.append(subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, env=environment))
        return processes[-1]

    try:
        workers = [
            start(f"worker{number}", [*llama.argv("ggml-rpc-server"), "-H", "127.0.0.1", "-p", str(at), "-t", "1"])
            for number, at in enumerate((first, second))
        ]
        time.sleep(0.5)  # a worker is never asked over its port: it serves one client at a time
        argv = [*llama.argv("llama-server"), "-m", str(model), "--host", "127.0.0.1", "--port", str(port)]
        argv += ["--rpc", f"127.0.0.1:{first},127.0.0.1:{second}", "--device", "RPC0,RPC1", "--tensor-split", "1,1"]
        argv += ["-ngl", "99", "-c", "4096", "-b", "2048", "-ub", "512", "-np", "1", "-t", "1", "-tb", "1"]
        argv += ["-fa", "on", "-ctk", "f16", "-ctv", "f16", "-lv", "4", "--cache-ram", "0"]
        head = start("head", [*argv, *flags])
        url = f"http://127.0.0.1:{port}"
        _await_health(url, head, folder / "head.log")
        yield Cluster(url, workers, folder / "head.log")
    finally:
        for process in reversed(processes):
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _await_health(url: str, head: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        assert head.poll() is None, log.read_text(errors="replace")[-2000:]
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            if answer.status == 200:
                return
        time.sleep(0.1)
    raise AssertionError(f"no answer: {log.read_text(errors='replace')[-2000:]}")


def start_harness(folder: Path, made: Cluster, **changes: Any) -> subprocess.Popen[str]:
    request = {"url": made.url, "deadline_s": 120, "seed": 7, "vocab": VOCAB, "repeats": 1, "cells": CELLS, **changes}
    (folder / "request.json").write_text(json.dumps(request))
    (folder / "result.json").unlink(missing_ok=True)
    argv = [sys.executable, "-B", str(HARNESS), "--request", str(folder / "request.json")]
    argv += ["--result", str(folder / "result.json"), "--progress", str(folder / "progress.json")]
    return subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)


def measure(folder: Path, made: Cluster, **changes: Any) -> dict[str, Any]:
    process = start_harness(folder, made, **changes)
    _, said = process.communicate(timeout=180)
    assert process.returncode in (0, 1), said
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    assert (process.returncode == 0) == (result["error"] is None)
    return result


def texts(result: dict[str, Any]) -> list[str]:
    return [sample["tokens_sha256"] for cell in result["cells"] for sample in cell["samples"]]


def test_all_states_count_on_a_recurrent_model_and_texts_survive_a_restart(llama: Llama, tmp_path: Path) -> None:
    found = []
    for number, source in enumerate(("metrics", "slots")):
        folder = tmp_path / str(number)
        folder.mkdir()
        flags = ["--metrics"] if source == "metrics" else []
        with cluster(llama, folder, "--ctx-checkpoints", "0", *flags) as made:
            warmup = {"prefill": [64], "decode": [1, 2]}
            found.append(measure(folder, made, warmup=warmup, probes=["graphs"], head_log=str(made.head_log)))
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
