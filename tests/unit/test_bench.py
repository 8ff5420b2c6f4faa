"""The harness as it really runs (a process of its own) against a server whose behaviour the test decides."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3deploy.commands.planning import tool_identity

HARNESS = (
    Path(__file__).parents[2] / "collections/ansible_collections/k3/deploy/roles/benchmark/files/k3_bench.py"
).resolve()
VOCAB = {"first_id": 300, "last_id": 2000, "bos": 1}


def load_harness() -> ModuleType:
    spec = importlib.util.spec_from_file_location("k3_bench", HARNESS)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # no byte code inside the collection
    sys.path.insert(0, str(HARNESS.parent))  # as for a script, which finds its neighbours
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(HARNESS.parent))
        sys.dont_write_bytecode = before
    return module


bench = load_harness()


class FakeServer(ThreadingHTTPServer):
    """llama-server as far as the harness sees it: one slot with a prefix cache, counters, streamed answers."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.prompts: list[dict[str, Any]] = []
        self.slot: list[int] = []
        self.counted = [0, 0]
        self.tasks = 0
        self.offer = {"/metrics", "/slots"}
        self.reuse = False  # take any prefix from the cache, even when told not to
        self.foreign_after: int | None = None  # another client's request after so many of ours
        self.hang_at: int | None = None  # SSE pings for ever, as with a frozen worker
        self.break_at: int | None = None  # the stream ends without its last event
        self.refuse_above = 100_000
        self.batch = 24  # tokens of a prompt that are evaluated at once
        self.short = 0  # generate so many tokens fewer than asked

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeServer

    def log_message(self, *_arguments: Any) -> None:
        pass

    def answer(self, status: int, document: Any) -> None:
        body = document.encode() if isinstance(document, str) else json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        server = self.server
        if self.path == "/props":
            self.answer(
                200, {"build_info": "b11434-test", "total_slots": 1, "default_generation_settings": {"n_ctx": 8192}}
            )
        elif self.path not in server.offer:
            self.answer(501, {"error": {"message": "not supported"}})
        elif self.path == "/metrics":
            prompt, predicted = server.counted
            self.answer(
                200,
                f"llamacpp:prompt_tokens_total {prompt}\nllamacpp:tokens_predicted_total {predicted}\n"
                "llamacpp:requests_processing 0\nllamacpp:requests_deferred 0\n",
            )
        else:
            self.answer(
                200, [{"id": 0, "id_task": server.tasks, "is_processing": False, "n_prompt_tokens": len(server.slot)}]
            )

    def do_POST(self) -> None:
        server = self.server
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if len(request["prompt"]) > server.refuse_above:
            self.answer(400, {"error": {"message": "exceeds the available context size"}})
            return
        server.prompts.append(request)
        number = len(server.prompts)
        prompt, wanted = request["prompt"], request["n_predict"] - server.short
        hit = 0
        if request["cache_prompt"] or server.reuse:
            while hit < min(len(prompt) - 1, len(server.slot)) and prompt[hit] == server.slot[hit]:
                hit += 1
        server.tasks += 1
        server.counted[0] += len(prompt) - hit
        server.counted[1] += wanted
        server.slot = [*prompt, *range(max(0, wanted - 1))]
        if server.foreign_after == number:
            server.counted[0] += 20
            server.slot = [0] * 20
        timings = {
            "cache_n": hit,
            "prompt_n": len(prompt) - hit,
            "prompt_ms": 10.0,
            "predicted_n": wanted,
            "predicted_ms": 5.0,
        }
        if not request.get("stream"):
            self.answer(200, {"content": "", "stop": True, "timings": timings})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        while server.hang_at == number:
            self.wfile.write(b":\n\n")
            self.wfile.flush()
            time.sleep(0.05)
        for processed in range(hit, len(prompt), server.batch) if request.get("return_progress") else ():
            progress = {"total": len(prompt), "cache": hit, "processed": processed, "time_ms": 1}
            event = {"tokens": [0], "stop": False, "prompt_progress": progress}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        for token in range(wanted):
            self.wfile.write(f"data: {json.dumps({'tokens': [token], 'stop': False})}\n\n".encode())
        if server.break_at != number:
            self.wfile.write(f"data: {json.dumps({'tokens': [], 'stop': True, 'timings': timings})}\n\n".encode())
        self.close_connection = True


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    thread = threading.Thread(target=fake.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield fake
    fake.shutdown()
    fake.server_close()


def request_for(server: FakeServer, **changes: Any) -> dict[str, Any]:
    return {
        "url": server.url,
        "deadline_s": 20,
        "seed": 7,
        "vocab": VOCAB,
        "repeats": 2,
        "cells": [{"cell": "pp64", "state": "cold", "n_prompt": 64, "n_predict": 1}],
        **changes,
    }


class Run:
    """One run of the harness and what it left behind."""

    def __init__(self, folder: Path, request: Any) -> None:
        self.folder = folder
        (folder / "request.json").write_text(request if isinstance(request, str) else json.dumps(request))
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-B", str(HARNESS), "--request", str(folder / "request.json")),
                *("--result", str(folder / "result.json"), "--progress", str(folder / "progress.json")),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self) -> tuple[int, dict[str, Any]]:
        _, self.stderr = self.process.communicate(timeout=30)
        path = self.folder / "result.json"
        return self.process.returncode, json.loads(path.read_text()) if path.exists() else {}


def samples(result: dict[str, Any], cell: str, state: str) -> list[dict[str, Any]]:
    return next(c["samples"] for c in result["cells"] if c["cell"] == cell and c["state"] == state)


def test_cold_and_warm_prompts_are_never_seen_before_and_count(server: FakeServer, tmp_path: Path) -> None:
    cells = [{"cell": "pp64", "state": state, "n_prompt": 64, "n_predict": 1} for state in ("cold", "warm")]
    rc, result = Run(tmp_path, request_for(server, cells=cells)).finish()
    assert rc == 0 and result["error"] is None
    for state in ("cold", "warm"):
        for sample in samples(result, "pp64", state):
            assert sample["valid"] and sample["cache_n"] == 0 and sample["prompt_n"] == 64
            assert sample["ttft_ms"] <= sample["wall_ms"]
    prompts = [tuple(request["prompt"]) for request in server.prompts]
    assert len(set(prompts)) == len(prompts) == 4
    assert all(request["cache_prompt"] is False and request["id_slot"] == 0 for request in server.prompts)


def test_all_cold_samples_come_before_the_first_warm_one(server: FakeServer, tmp_path: Path) -> None:
    cells = [{"cell": "pp64", "state": state, "n_prompt": 64, "n_predict": 1} for state in ("warm", "cold")]
    _, result = Run(tmp_path, request_for(server, cells=cells)).finish()
    cold = [sample["order"] for sample in samples(result, "pp64", "cold")]
    warm = [sample["order"] for sample in samples(result, "pp64", "warm")]
    assert max(cold) < min(warm)


def test_two_servers_get_the_same_prompts_whatever_the_salt_says(server: FakeServer, tmp_path: Path) -> None:
    for number, salt in enumerate(("run:0", "run:1")):
        (tmp_path / salt).mkdir()
        Run(tmp_path / salt, request_for(server, salt=salt, warmup={"prefill": [32], "decode": [1]})).finish()
        assert len(server.prompts) == 4 * (number + 1)
    half = len(server.prompts) // 2
    assert [r["prompt"] for r in server.prompts[:half]] == [r["prompt"] for r in server.prompts[half:]]


def test_a_prefix_hit_makes_a_cold_sample_invalid_but_keeps_it(server: FakeServer, tmp_path: Path) -> None:
    server.reuse = True
    server.slot = bench.prompt_ids(7, "pp64/cold/0", 64, VOCAB)
    rc, result = Run(tmp_path, request_for(server)).finish()
    first = samples(result, "pp64", "cold")[0]
    assert rc == 0 and len(samples(result, "pp64", "cold")) == 2
    assert not first["valid"] and "cache_n is 63, not 0" in first["why"] and "prompt_n is 1, not 64" in first["why"]


def test_cached_samples_count_only_with_a_prefix_hit(server: FakeServer, tmp_path: Path) -> None:
    cells = [{"cell": "pp64", "state": "cached", "n_prompt": 64, "n_predict": 1, "n_cached": 40}]
    _, result = Run(tmp_path, request_for(server, cells=cells)).finish()
    for sample in samples(result, "pp64", "cached"):
        assert sample["valid"] and (sample["cache_n"], sample["prompt_n"]) == (40, 24)
    primed = [request for request in server.prompts if len(request["prompt"]) == 40]
    assert len(primed) == 2 and all(r["n_predict"] == 0 and not r["cache_prompt"] for r in primed)


@pytest.mark.parametrize("offer", [{"/metrics"}, {"/slots"}])
def test_a_request_of_somebody_else_makes_the_sample_invalid(
    server: FakeServer, tmp_path: Path, offer: set[str]
) -> None:
    server.offer, server.foreign_after = offer, 2
    _, result = Run(tmp_path, request_for(server, repeats=3)).finish()
    assert [sample["valid"] for sample in samples(result, "pp64", "cold")] == [True, False, True]
    assert "another request ran" in samples(result, "pp64", "cold")[1]["why"]
    assert "another request ran" in result["foreign"][0], "the whole block is void, not only the sample"
    assert result["foreign_check"] == next(iter(offer)).strip("/")


def test_a_request_of_somebody_else_between_two_samples_is_seen_in_the_sum(server: FakeServer, tmp_path: Path) -> None:
    server.foreign_after = 1  # during the warm-up, which no sample watches
    _, result = Run(tmp_path, request_for(server, warmup={"prefill": [16]})).finish()
    assert all(sample["valid"] for cell in result["cells"] for sample in cell["samples"])
    assert len(result["foreign"]) == 1 and "others asked" in result["foreign"][0]


def test_a_block_of_our_own_requests_alone_has_nothing_foreign(server: FakeServer, tmp_path: Path) -> None:
    _, result = Run(tmp_path, request_for(server, warmup={"prefill": [16], "decode": [1]})).finish()
    assert result["foreign"] == [] and result["foreign_check"] == "metrics"


def test_the_batches_in_which_a_prompt_was_evaluated_are_recorded(server: FakeServer, tmp_path: Path) -> None:
    cells = [
        {"cell": "pp64", "state": "cold", "n_prompt": 64, "n_predict": 1},
        {"cell": "pp64", "state": "cached", "n_prompt": 64, "n_predict": 1, "n_cached": 40},
    ]
    _, result = Run(tmp_path, request_for(server, cells=cells)).finish()
    assert samples(result, "pp64", "cold")[0]["batches"] == [24, 24, 16]
    assert samples(result, "pp64", "cached")[0]["batches"] == [24]
    assert bench.k3_client.batch_sizes([], {"cache_n": 0, "prompt_n": 64}) is None


def test_a_server_that_shows_nothing_is_said_to_be_unwatched(server: FakeServer, tmp_path: Path) -> None:
    server.offer = set()
    rc, result = Run(tmp_path, request_for(server)).finish()
    assert rc == 0 and result["foreign_check"] == "none"


def test_a_frozen_worker_ends_at_the_deadline_although_pings_go_on(server: FakeServer, tmp_path: Path) -> None:
    server.hang_at = 2
    begin = time.monotonic()
    rc, result = Run(tmp_path, request_for(server, deadline_s=1)).finish()
    assert rc == 1 and time.monotonic() - begin < 5
    assert "deadline of 1 s" in result["error"]
    first, second = samples(result, "pp64", "cold")
    assert first["valid"] and not second["valid"] and "deadline" in second["why"]


def test_one_request_has_its_own_timeout(server: FakeServer, tmp_path: Path) -> None:
    server.hang_at = 1
    rc, result = Run(tmp_path, request_for(server, request_timeout_s=1)).finish()
    assert rc == 1 and "no complete answer within 1 s" in result["error"]


def test_a_stream_that_breaks_off_is_a_failed_server(server: FakeServer, tmp_path: Path) -> None:
    server.break_at = 2
    rc, result = Run(tmp_path, request_for(server)).finish()
    assert rc == 1 and "broke off" in result["error"]
    assert [sample["valid"] for sample in samples(result, "pp64", "cold")] == [True, False]


def test_nobody_listening_is_said_and_leaves_a_result(tmp_path: Path, server: FakeServer) -> None:
    rc, result = Run(tmp_path, request_for(server, url="http://127.0.0.1:9")).finish()
    assert rc == 1 and "refused" in result["error"]


def test_a_refused_request_is_an_invalid_sample_and_the_rest_is_measured(server: FakeServer, tmp_path: Path) -> None:
    server.refuse_above = 100
    cells = [{"cell": f"pp{n}", "state": "cold", "n_prompt": n, "n_predict": 1} for n in (200, 64)]
    rc, result = Run(tmp_path, request_for(server, cells=cells)).finish()
    assert rc == 0
    assert all("exceeds the available context" in sample["why"] for sample in samples(result, "pp200", "cold"))
    assert all(sample["valid"] for sample in samples(result, "pp64", "cold"))


def test_too_few_generated_tokens_make_a_sample_invalid(server: FakeServer, tmp_path: Path) -> None:
    server.short = 2
    cells = [{"cell": "tg8", "state": "cold", "n_prompt": 16, "n_predict": 8}]
    _, result = Run(tmp_path, request_for(server, cells=cells)).finish()
    assert all("6 tokens generated (6 received), not 8" in s["why"] for s in samples(result, "tg8", "cold"))


def test_sigterm_stops_at_once_and_keeps_what_was_measured(server: FakeServer, tmp_path: Path) -> None:
    server.hang_at = 2
    run = Run(tmp_path, request_for(server))
    end = time.monotonic() + 10
    while len(server.prompts) < 2 and time.monotonic() < end:
        time.sleep(0.02)
    run.process.send_signal(signal.SIGTERM)
    rc, result = run.finish()
    assert rc == 1 and result["error"] == "stopped by SIGTERM"
    assert samples(result, "pp64", "cold")[0]["valid"]
    assert "Traceback" not in run.stderr


def test_progress_counts_every_request_to_the_end(server: FakeServer, tmp_path: Path) -> None:
    rc, result = Run(
        tmp_path, request_for(server, warmup={"prefill": [16, 32], "decode": [1]}, probes=["shifted_prefix"])
    ).finish()
    progress = json.loads((tmp_path / "progress.json").read_text())
    assert rc == 0 and progress["done"] == progress["total"] == 3 + 2 + 1
    assert [(entry["kind"], entry["size"]) for entry in result["warmup"]] == [
        ("prefill", 16),
        ("prefill", 32),
        ("decode", 1),
    ]
    assert not list(tmp_path.glob("*.tmp"))


def test_the_shifted_prefix_probe_reports_a_server_without_reuse(server: FakeServer, tmp_path: Path) -> None:
    _, result = Run(tmp_path, request_for(server, probes=["shifted_prefix"])).finish()
    probe = result["probes"]["shifted_prefix"]
    assert probe["cache_n"] == 0 and probe["effective"] is False and probe["identical"] is True


def test_the_idle_probe_asks_the_same_before_and_after_a_pause(server: FakeServer, tmp_path: Path) -> None:
    _, result = Run(tmp_path, request_for(server, probes=["idle"])).finish()
    assert result["probes"]["idle"] == {"idle_s": 3, "identical": True}
    assert [prompt["prompt"] for prompt in server.prompts[-2:]] == [server.prompts[-1]["prompt"]] * 2


def test_a_wrong_request_says_everything_that_is_wrong_at_once(server: FakeServer, tmp_path: Path) -> None:
    wrong = request_for(server, url="ftp://x", repeats=0, probes=["warp"], cells=[{"cell": "a", "state": "hot"}])
    run = Run(tmp_path, wrong)
    rc, result = run.finish()
    assert rc == 2 and result == {}
    for part in ("url must be", "repeats must be", "'warp' is unknown", "state must be one of cold, warm, cached"):
        assert part in run.stderr


def test_a_request_that_is_not_json_is_refused_without_a_traceback(tmp_path: Path) -> None:
    run = Run(tmp_path, "{")
    assert run.finish()[0] == 2
    assert "Traceback" not in run.stderr


def test_prompts_do_not_depend_on_the_python_that_runs_the_harness() -> None:
    assert bench.prompt_ids(7, "pp2048/cold/0", 6, VOCAB) == [1, 976, 331, 953, 1309, 1556]


@given(st.integers(), st.text(max_size=20), st.integers(1, 300), st.integers(0, 5000), st.integers(16, 5000))
def test_prompt_ids_stay_inside_the_vocabulary(seed: int, label: str, count: int, first: int, span: int) -> None:
    ids = bench.prompt_ids(seed, label, count, {"first_id": first, "last_id": first + span}, bos=False)
    assert len(ids) == count and all(first <= token <= first + span for token in ids)


def test_the_harness_uses_nothing_newer_than_python_3_9_and_only_the_standard_library() -> None:
    files = {path.stem: path.read_text() for path in HARNESS.parent.glob("*.py")}
    for source in files.values():
        imported = re.findall(r"^(?:import|from) ([\w.]+)", source, re.MULTILINE)
        assert {name.split(".")[0] for name in imported} <= set(sys.stdlib_module_names) | files.keys()
        ast.parse(source, feature_version=(3, 9))


def test_graph_counts_are_read_from_the_last_timings_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "head.log"
    log.write_text("x |    graphs reused =          6\ny |    graphs reused =         36\n")
    assert bench.last_graphs_reused(str(log)) == (36, 2)


def test_the_harness_names_itself_by_all_its_files_and_the_controller_by_the_same() -> None:
    assert {path.name for path in HARNESS.parent.glob("*.py")} == {"k3_bench.py", "k3_client.py", "k3_parity.py"}
    assert bench.own_sha256() == tool_identity()["harness_sha256"]
