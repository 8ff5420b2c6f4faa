"""Logs that are too long to travel: what of them still counts on the controller, and what is said to be missing."""

from __future__ import annotations

import re
import shutil
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "collections"))

from ansible_collections.k3.deploy.plugins.action import record_block
from ansible_collections.k3.deploy.plugins.module_utils import log_excerpt, log_lines

from k3deploy.facts import assemble, parse_head_log, parse_worker_log

RUN = Path(__file__).parents[1] / "fixtures/run-small"
HEAD_LOG = (RUN / "logs/rank0/000-head.log").read_text()
NOISE = "slot update_slots: id 0 | task 7 | new prompt, n_ctx_slot = 8192 and nothing that is counted\n"
START = "K3_FLASHKDA_ACTIVE variant=7\n"
MIDDLE = 'K3_FLASHKDA_FALLBACK reason="shape" tokens=3\n'
TIMING = (
    "K3_RPC_TIMING graph={n} kind=recompute device=0 nodes=1257 end_us={end} prepare_us=1 compute_us=1000 "
    "set=9 set_bytes=7377 set_us=30 get=1 get_bytes=8192 get_us=611\n"
)


def noise(size: int) -> str:
    return NOISE * (size // len(NOISE) + 1)


def excerpt_of(tmp_path: Path, text: str) -> str:
    path = tmp_path / "worker.log"
    path.write_text(text)
    return log_excerpt.unpack(log_excerpt.pack(log_excerpt.excerpt(str(path))))


def test_a_short_log_travels_as_it_is(tmp_path: Path) -> None:
    text = START + noise(200_000) + "no newline at its end"
    assert excerpt_of(tmp_path, text) == text
    assert log_excerpt.excerpt(str(tmp_path / "none.log")) == ""


def test_markers_at_the_start_in_the_middle_and_at_the_end_of_a_long_log_are_all_counted(tmp_path: Path) -> None:
    text = START + noise(3 << 20) + MIDDLE + noise(3 << 20) + MIDDLE + START
    kept = excerpt_of(tmp_path, text)
    observed = parse_worker_log(kept)
    assert len(kept) < 300_000
    assert (observed.flashkda_active, observed.flashkda_fallback, observed.truncated) == (2, 2, [])


def test_what_a_head_says_while_it_loads_and_when_it_ends_is_the_same_of_a_long_log(tmp_path: Path) -> None:
    head, end = HEAD_LOG.split("\n", 150)[:150], HEAD_LOG.split("\n", 150)[150]
    long = "\n".join(head) + "\n" + noise(2 << 20) + end
    assert parse_head_log(excerpt_of(tmp_path, long)) == parse_head_log(long) == parse_head_log(HEAD_LOG)


def test_every_graphs_time_is_counted_however_many_there_are(tmp_path: Path) -> None:
    lines = [TIMING.format(n=n, end=7_000_000 + 2000 * n) + NOISE for n in range(20_000)]
    text = "".join(lines)
    kept = excerpt_of(tmp_path, text)
    assert kept.count("K3_RPC_TIMING") == 20_000
    assert parse_worker_log(kept, "rank1") == parse_worker_log(text, "rank1")


def test_a_gap_is_marked_with_the_bytes_that_are_missing(tmp_path: Path) -> None:
    text = START + noise(1 << 20) + MIDDLE + noise(1 << 20)
    kept = excerpt_of(tmp_path, text)
    gap = re.search(r"^\[k3deploy: (\d+) bytes left out here, but for the lines below that are counted\]$", kept, re.M)
    assert gap is not None
    marks = sum(len(line) + 1 for line in kept.splitlines() if line.startswith("[k3deploy: "))
    assert int(gap[1]) == len(text) - (len(kept) - marks)
    assert "\n" + MIDDLE + log_lines.END in kept and kept.startswith(START)


def test_the_lines_of_a_gap_s_edges_are_whole(tmp_path: Path) -> None:
    lines = dict.fromkeys(f"line {number} of many\n" for number in range(20_000))
    kept = excerpt_of(tmp_path, "".join(lines)).splitlines(keepends=True)
    assert len(kept) < len(lines) and all(line in lines for line in kept if not line.startswith("[k3deploy: "))


def test_counted_lines_without_end_are_bounded_and_said_to_be_missing(tmp_path: Path) -> None:
    kept = excerpt_of(tmp_path, START + MIDDLE * 40_000 + noise(1 << 20) + "RDMA activated: qpn=1->2\n")
    observed = parse_worker_log(kept)
    assert len(kept) < 700_000 and re.search(r"^\[k3deploy: \d+ lines of flashkda left out here\]$", kept, re.M)
    assert observed.truncated == ["flashkda_active", "flashkda_fallback"]
    assert observed.rdma_connections == 1, "a flood of one kind takes no room from another"


def test_memory_on_the_rank_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = log_lines.KINDS["rpc_timing"]._replace(keep=1 << 20)
    monkeypatch.setitem(log_lines.KINDS, "rpc_timing", bound)
    path = tmp_path / "worker.log"
    with path.open("w") as log:
        for _ in range(40):
            log.write(noise(1 << 20))
        log.write("x" * (8 << 20))  # a line without end
        log.write("\n" + TIMING.format(n=1, end=1) * 10_000)
    tracemalloc.start()
    kept = log_excerpt.excerpt(str(path))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 16 << 20 and len(kept) < 2 << 20
    assert "rank_forward_ms" in parse_worker_log(kept).truncated


def test_a_long_log_is_read_in_seconds(tmp_path: Path) -> None:
    path = tmp_path / "worker.log"
    path.write_text(noise(64 << 20))
    began = time.process_time()
    log_excerpt.excerpt(str(path))
    assert time.process_time() - began < 10


def test_a_line_longer_than_what_is_read_at_a_time_still_tells(tmp_path: Path) -> None:
    text = noise(1 << 18) + "x" * (5 << 20) + " RDMA CQ wc error: status=12 " + "y" * (1 << 20) + "\n" + noise(1 << 18)
    kept = excerpt_of(tmp_path, text)
    assert parse_worker_log(kept).rpc_errors == 1 and len(kept) < 300_000


def test_a_log_that_is_long_is_carried_compressed_and_comes_back_as_it_was() -> None:
    text = TIMING.format(n=1, end=1) * 30_000 + "é"
    packed = log_excerpt.pack(text)
    assert len(packed) < len(text) / 5 and log_excerpt.unpack(packed) == text
    assert "did not arrive whole" in log_excerpt.unpack(packed[:30] + "!")
    assert log_excerpt.unpack("Accepted client connection\n") == "Accepted client connection\n"


SAMPLES = {
    "told_to_stop": ["srv cleaning up before exit...", "Received second interrupt, terminating", "Received interrupt"],
    "graphs_reused": ["llama_perf: graphs reused = 12"],
    "pipeline": ["pipeline parallelism enabled (n_copies=4)", "pipeline parallelism enabled"],
    "pipeline_given_up": ["retrying without pipeline parallelism"],
    "context_made": ["constructing llama_context"],
    "cache_reuse_off": [
        "cache_reuse is not supported by this context",
        "cache_reuse is not supported by multimodal",
        "cache reuse is not supported - ignoring",
    ],
    "buffer": ["RPC0[10.0.0.2:50053] KV buffer size = 4.78 MiB"],
    "kv_types": ["K (q8_0):    9.56 MiB, V (q8_0):    0.00 MiB"],
    "breakdown_device": [
        "common_memory_breakdown_print: |   - R (a:1) | 9 = 9 + (  49 =     8 +       0 +      40) + -4 |"
    ],
    "breakdown_other": ["common_memory_breakdown_print: |   - Host |   111 =     0 +       0 +     111   |"],
    "rdma_activated": ["RDMA activated: qpn=1->2 mtu=4096"],
    "rdma_failed": ["RDMA activate failed", "RDMA CQ wc error: status=12"],
    "rpc_error": [
        "send failed (bytes_sent=-1)",
        "recv failed (bytes_recv=0)",
        "RDMA CQ wc error",
        "Remote RPC server crashed or returned malformed response",
    ],
    "rpc_timing": [TIMING.format(n=1, end=2).strip()],
    "broken": [
        *("RDMA CQ wc error", "send failed (x", "recv failed (x", "Remote RPC server crashed", "Unknown command: 9"),
        *("RPC server version mismatch", "RPC handshake failed", "tensor size mismatch", "timed out", "Time out"),
        *("Timedout", "a timeout"),
    ],
    "fatal": [
        "model does not support different K (q8_0) and V (f16) cache types",
        "quantized V cache was requested, but this requires Flash Attention",
        "quantized V cache requires flash",
        "K cache type q4_0 with block size 32 does not divide",
        "Remote RPC server crashed or returned malformed response",
        *("Failed to connect to 10.0.0.2:50053", "RPC handshake failed", "RPC server version mismatch"),
        *("Failed to parse endpoint", "Failed to create server socket", "failed to allocate CUDA0 buffer"),
        *("unable to allocate CUDA0 buffer", "Failed to allocate", "failed to allocate buffer"),
        *("error: invalid argument: --x", "unknown argument", "couldn't bind HTTP server socket", "failed to bind"),
        *("failed to load model", "error loading model", "failed to open GGUF", "CUDA error", "out of memory"),
        *("GGML_ASSERT(x)", "ggml_abort"),
    ],
    **{name: [f"K3_{name.upper()}_ACTIVE", f"K3_{name.upper()}_FALLBACK"] for name in log_lines.MARKERS},
}


@pytest.mark.parametrize("name", log_lines.KINDS)
def test_every_line_that_a_pattern_finds_has_one_of_its_words(name: str) -> None:
    kind = log_lines.KINDS[name]
    for line in SAMPLES[name]:
        assert re.search(kind.pattern, line), line
        assert any(word in line for word in kind.words), line
    unused = [word for word in kind.words if not any(word in line for line in SAMPLES[name])]
    assert not unused


def test_every_alternative_of_what_ends_a_server_is_sampled() -> None:
    silent = [pattern for pattern, _, _ in log_lines.FATAL if not any(re.search(pattern, x) for x in SAMPLES["fatal"])]
    assert not silent


def test_observations_that_a_kind_feeds_exist() -> None:
    from k3deploy.facts.schema import Observations

    fed = {name for kind in log_lines.KINDS.values() for name in kind.feeds}
    assert fed <= Observations.model_fields.keys()


# --- on the controller ---


def test_a_packed_log_is_written_as_text_and_without_secrets(tmp_path: Path) -> None:
    secret = "api_key=verysecretvalue\n"
    text = TIMING.format(n=1, end=1) * 5000 + secret + TIMING.format(n=2, end=2) * 5000
    arguments: dict[str, Any] = {"ready_at": None}
    action = object.__new__(record_block.ActionModule)
    kept = action._rank(tmp_path, 3, "rank0", {"stop": {"k3_logs": {"worker": log_excerpt.pack(text)}}}, arguments)
    written = (tmp_path / kept["logs"]["worker"]).read_text()
    assert written == text.replace("verysecretvalue", "********")


def test_looking_for_secrets_in_a_long_log_takes_no_minute() -> None:
    text = (TIMING.format(n=1, end=1) * 5 + "a line between\n") * 5000
    began = time.process_time()
    assert record_block.masked_log(text) == text
    assert time.process_time() - began < 10


def test_a_private_key_is_masked_also_with_lines_of_numbers_in_it() -> None:
    key = "-----BEGIN PRIVATE KEY-----\nabc\n" + TIMING.format(n=1, end=1) + "secretpart\n-----END PRIVATE KEY-----\n"
    assert "secretpart" not in record_block.masked_log(key)


def test_a_truncated_log_is_an_observation_of_its_block(tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(RUN, tmp_path / "run"))
    log = run_dir / "logs/rank1/000-worker.log"
    log.write_text(log.read_text() + log_lines.LOST.format(7, "rpc_timing") + "\n")
    observed = assemble(run_dir).blocks[0].observations
    assert {"rpc_p99", "worker_link_idle", "slowest_rank_excess"} <= set(observed.truncated)
