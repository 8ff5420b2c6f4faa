"""Records and logs: what is read, and what is said when they are wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3deploy.errors import InputError
from k3deploy.facts import Block, assemble, load_facts, parse_head_log, parse_worker_log, read_model, write_facts

RUN = Path(__file__).parents[1] / "fixtures/run-small"
HEAD_LOG = (RUN / "logs/rank0/000-head.log").read_text()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RUN, tmp_path / "run-small"))


def change_block(run_dir: Path, number: int, **changes: Any) -> Path:
    path = run_dir / f"blocks/{number:03d}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}, indent=1))
    return path


def test_a_recorded_run_assembles_and_survives_its_own_file(run_dir: Path) -> None:
    facts = assemble(run_dir)
    assert [block.arm for block in facts.blocks] == ["baseline", "U2@2048", "U2@3072"]
    assert facts.candidate == "candidate-U2" and facts.run_id == "run-small"
    assert load_facts(write_facts(run_dir, facts)) == facts


def test_assembling_twice_gives_the_same_document(run_dir: Path) -> None:
    first = write_facts(run_dir, assemble(run_dir)).read_bytes()
    assert write_facts(run_dir, assemble(run_dir)).read_bytes() == first


def test_logs_fill_in_what_the_record_does_not_say(run_dir: Path) -> None:
    observed = assemble(run_dir).blocks[0].observations
    assert observed.graphs_reused and observed.graphs_reused > 0
    assert observed.kv_types == {"k": "q8_0", "v": "q8_0"}
    assert observed.rdma_activated is False


def test_what_the_record_says_wins_over_the_log(run_dir: Path) -> None:
    change_block(run_dir, 0, observations={"graphs_reused": 3, "n_copies": None})
    observed = assemble(run_dir).blocks[0].observations
    assert observed.graphs_reused == 3 and observed.kv_types


def test_a_missing_log_loses_no_numbers(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "logs")
    block = assemble(run_dir).blocks[0]
    assert block.bench and block.observations.graphs_reused is None


def test_every_wrong_value_is_named_with_its_file_and_line(run_dir: Path) -> None:
    path = run_dir / "blocks/001.json"
    text = path.read_text()
    lines = text.splitlines()
    prompt_n = next(number for number, line in enumerate(lines) if '"prompt_n"' in line)
    lines[prompt_n] = lines[prompt_n].split(":")[0] + ': "many",'
    state = next(number for number, line in enumerate(lines) if '"state": "cold"' in line)
    lines[state] = lines[state].replace("cold", "tepid")
    path.write_text("\n".join(lines))
    with pytest.raises(InputError) as caught:
        assemble(run_dir)
    found = {problem.line: str(problem) for problem in caught.value.problems}
    assert found.keys() == {prompt_n + 1, state + 1}
    assert "cold" in found[state + 1] and str(path) in found[state + 1]


def test_problems_of_all_records_come_at_once(run_dir: Path) -> None:
    (run_dir / "blocks/000.json").write_text("{")
    change_block(run_dir, 2, index="third")
    with pytest.raises(InputError) as caught:
        assemble(run_dir)
    assert {Path(str(problem.file)).name for problem in caught.value.problems} == {"000.json", "002.json"}


def test_two_records_of_one_block_are_refused(run_dir: Path) -> None:
    shutil.copy(run_dir / "blocks/001.json", run_dir / "blocks/0011.json")
    with pytest.raises(InputError, match="two records of block 1"):
        assemble(run_dir)


def test_a_run_without_blocks_is_empty_and_not_an_error(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "blocks")
    assert assemble(run_dir).blocks == []


def test_a_block_that_never_served_needs_no_bench(run_dir: Path) -> None:
    change_block(run_dir, 1, bench=None, error="the head exited with 1")
    assert assemble(run_dir).blocks[1].bench is None


@pytest.mark.parametrize("text", ["", "[]", "nul", '{"index": ', "\ufeff{}", '{"index": 1' + "}" * 9])
def test_a_broken_record_is_a_problem_and_no_traceback(tmp_path: Path, text: str) -> None:
    path = tmp_path / "000.json"
    path.write_text(text)
    with pytest.raises(InputError):
        read_model(Block, path)


@given(st.binary(max_size=300))
def test_no_bytes_make_reading_a_record_fail_otherwise(data: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "000.json"
        path.write_bytes(data)
        with pytest.raises(InputError):
            read_model(Block, path)


def test_a_real_head_log_gives_sizes_by_endpoint() -> None:
    observed = parse_head_log(HEAD_LOG)
    endpoints = {f"10.77.53.{10 + rank}:50053" for rank in range(4)}
    assert set(observed.recurrent_mib) | set(observed.kv_cache_mib) == endpoints
    assert endpoints <= set(observed.compute_mib)
    assert observed.pipeline_parallel is True and observed.n_copies is None
    assert observed.fatal == []


def test_the_forecast_stands_beside_what_a_real_head_allocated(tmp_path: Path) -> None:
    """By rank: the head's own buffers count to the head, whatever they are called."""
    run_dir = Path(shutil.copytree(RUN, tmp_path / "run"))
    plan = json.loads((run_dir / "plan.json").read_text())
    sizes = {"weights_mib": 8.2, "kv_cache_mib": 4.8, "recurrent_state_mib": 0.1, "compute_mib": 208.5}
    arm = next(arm for arm in plan["arms"] if arm["name"] == "U2@2048")
    arm["forecast"] = [{"rank": "rank0", "layers": "", "weights_mib": 1.0}, {"rank": "rank1", "layers": "", **sizes}]
    (run_dir / "plan.json").write_text(json.dumps(plan))
    blocks = {block.arm: block for block in assemble(run_dir).blocks}
    assert blocks["baseline"].allocation == {}
    head, worker = (blocks["U2@2048"].allocation[name] for name in ("rank0", "rank1"))
    assert worker.allocated_mib == {"model": 8.21, "context": pytest.approx(4.91), "compute": 204.59}
    assert worker.error == pytest.approx(221.6 / 217.71 - 1) and not worker.wrong
    observed = blocks["U2@2048"].observations
    own = [
        size for table in (observed.model_mib, observed.compute_mib) for name, size in table.items() if "CPU" in name
    ]
    assert own and head.allocated_mib["model"] + head.allocated_mib["compute"] == pytest.approx(8.72 + 54.06 + sum(own))
    assert head.wrong


def test_the_files_of_a_split_model_add_up_and_a_context_made_again_counts_once() -> None:
    lines = ["load_tensors: CPU_Mapped model buffer size = 10.00 MiB"] * 3
    lines += [f"sched_reserve: CUDA0 compute buffer size = {size} MiB" for size in (900.0, 700.0)]
    observed = parse_head_log("\n".join(lines))
    assert (observed.model_mib, observed.compute_mib) == ({"CPU_Mapped": 30.0}, {"CUDA0": 700.0})


def test_breakdowns_are_keyed_by_endpoint_and_the_last_one_counts() -> None:
    lead = "I common_memory_breakdown_print: |   - "
    table = (
        f"{lead}RPC0 (10.0.0.2:50053) | 24105 = 24000 + (  {{}} =     4 +       1 +      14) +         -18 |\n"
        f"{lead}Host                   |                    38 =     1 +       0 +      37                |\n"
    )
    observed = parse_head_log(table.format(18).replace("14)", "99)") + table.format(19))
    assert observed.memory_breakdown["10.0.0.2:50053"].compute == 14
    assert observed.memory_breakdown["10.0.0.2:50053"].free == 24000
    assert observed.memory_breakdown["Host"].compute == 37


def test_refused_cache_types_are_explained() -> None:
    line = "0.1 E llama_init_from_model: model does not support different K (q8_0) and V (f16) cache types"
    (fatal,) = parse_head_log(f"x\n{line}\ny").fatal
    assert fatal.line == line and "set both alike" in fatal.meaning


def test_workers_that_are_gone_after_the_stop_are_no_failure() -> None:
    crash = "ggml-rpc.cpp:566: Remote RPC server crashed or returned malformed response\n"
    told = "srv operator(): cleaning up before exit...\n"
    assert parse_head_log(told + crash).fatal == [] and parse_head_log(told + crash).rpc_errors == 0
    assert parse_head_log(crash + told).fatal != [] and parse_head_log(crash + told).rpc_errors == 1


def test_n_copies_is_read_where_the_build_prints_it() -> None:
    observed = parse_head_log("llama_context: pipeline parallelism enabled (n_copies=4)")
    assert observed.pipeline_parallel is True and observed.n_copies == 4
    assert parse_head_log("llama_context: constructing llama_context").pipeline_parallel is False
    assert parse_head_log("nothing about it").pipeline_parallel is None


def test_rdma_counts_only_when_it_was_activated_and_never_failed() -> None:
    line = "RDMA activated: qpn=17->18 mtu=1024 rx_depth=24\n"
    assert parse_worker_log(line * 3).rdma_connections == 3 and parse_worker_log(line).rdma_activated is True
    assert parse_worker_log("transport : TCP (RDMA auto-negotiate enabled)").rdma_activated is False
    assert parse_worker_log(line + "RDMA activate failed, staying on TCP").rdma_activated is False


def test_one_end_that_stays_on_tcp_is_no_rdma(run_dir: Path) -> None:
    for log in (run_dir / "logs").rglob("000-*.log"):
        if "rank3" not in str(log):
            log.write_text("RDMA activated: qpn=17->18 mtu=1024 rx_depth=24\n" + log.read_text())
    observed = assemble(run_dir).blocks[0].observations
    assert observed.rdma_activated is False and observed.rdma_connections == 4


def test_bridge_markers_are_counted_per_worker_log() -> None:
    observed = parse_worker_log("K3_FLASHKDA_ACTIVE T=2048\nK3_FLASHKDA_FALLBACK fused\nK3_FLASHKDA_ACTIVE\n")
    assert (observed.flashkda_active, observed.flashkda_fallback) == (2, 1)


@pytest.mark.parametrize("kernel", ["blocked", "chunked"])
def test_the_kda_kernels_markers_are_counted_and_their_absence_is_zero(kernel: str) -> None:
    marker = f"K3_KDA_{kernel.upper()}"
    text = f'{marker}_FALLBACK reason="state history" size=128\n{marker}_ACTIVE heads=96 tokens=2048 seqs=1\n'
    observed = parse_worker_log(text)
    assert (getattr(observed, f"kda_{kernel}_active"), getattr(observed, f"kda_{kernel}_fallback")) == (1, 1)
    assert getattr(parse_worker_log("transport : TCP"), f"kda_{kernel}_active") == 0


def test_the_grouped_products_markers_are_counted() -> None:
    text = 'K3_IQ1S_GROUPED_ACTIVE variant=exact-wide k=3584\nK3_IQ1S_GROUPED_FALLBACK reason="shape" k=768\n'
    observed = parse_worker_log(text + "K3_IQ1S_GROUPED_ACTIVE variant=exact-narrow k=3072\n")
    assert (observed.iq1s_grouped_active, observed.iq1s_grouped_fallback) == (2, 1)


@pytest.mark.parametrize("change", ["rows256", "ncols"])
def test_the_tiles_markers_are_counted(change: str) -> None:
    marker = f"K3_IQ1S_{change.upper()}"
    observed = parse_worker_log(f'{marker}_ACTIVE tokens=2048\n{marker}_FALLBACK reason="device" tokens=512\n')
    assert (getattr(observed, f"iq1s_{change}_active"), getattr(observed, f"iq1s_{change}_fallback")) == (1, 1)
    assert getattr(parse_worker_log("transport : TCP"), f"iq1s_{change}_active") == 0


def test_timed_workers_tell_how_much_slower_the_slowest_rank_is(run_dir: Path) -> None:
    line = (
        "K3_RPC_TIMING graph={n} kind=recompute device=0 nodes=1257 end_us=7350388243 prepare_us=1 compute_us={us} "
        "set=9 set_bytes=7377 set_us=30 get=1 get_bytes=8192 get_us=611\n"
    )
    compute = {"rank0": 1000, "rank1": 1000, "rank2": 1000, "rank3": 1250}
    for rank, us in compute.items():
        log = run_dir / "logs" / rank / "000-worker.log"
        log.write_text(line.format(n=0, us=us) + "a line between\n" + line.format(n=1, us=us))
    observed = assemble(run_dir).blocks[0].observations
    assert observed.rank_forward_ms == {rank: 2 * us / 1000 for rank, us in compute.items()}
    assert observed.rank_rpc_ms["rank1"] == pytest.approx(1.282)
    assert observed.slowest_rank_excess == pytest.approx(0.25)


def test_workers_without_times_say_nothing_of_the_slowest_rank(run_dir: Path) -> None:
    observed = assemble(run_dir).blocks[0].observations
    assert observed.slowest_rank_excess is None and observed.rank_forward_ms == {}


def test_behaviour_settles_cache_reuse_where_the_log_is_silent(run_dir: Path) -> None:
    path = run_dir / "blocks/001.json"
    record = json.loads(path.read_text())
    record["bench"]["probes"] = {"shifted_prefix": {"effective": True, "identical": False, "cache_n": 512}}
    unit = record["ranks"]["rank0"]["state"]["units"]["k3-candidate-head@U2-2048.service"]
    unit["argv"] += ["--cache-reuse", "256"]
    path.write_text(json.dumps(record))
    observed = assemble(run_dir).blocks[1].observations
    assert observed.cache_reuse_disabled is False
    assert observed.prefix_reuse_effective is True and observed.prefix_reuse_identical is False


log_words = st.sampled_from(
    [
        *("graphs reused = ", "pipeline parallelism enabled (n_copies=", "KV buffer size = ", " MiB", "RPC0[", "]"),
        *("|   - RPC0 (", ") | 1 = 2 + (  3 =     4 +       0 +      14) + -18 |", "K (q8_0): 1 MiB, V (f16)"),
        *("RDMA activated: qpn=", "Failed to connect to ", "CUDA error", "1.2.3.4:5", "9" * 20, "\n", " ", "\x00", "é"),
    ]
)


@given(st.one_of(st.text(), st.lists(log_words, max_size=30).map("".join)))
def test_no_log_text_makes_the_parsers_fail(text: str) -> None:
    parse_head_log(text)
    parse_worker_log(text, "rank1")


@pytest.mark.parametrize("text", ["a" * 300_000, " " * 300_000, "|   - " + "x " * 150_000, "\n" * 300_000])
def test_long_and_odd_logs_are_read_in_time(text: str) -> None:
    import time

    begin = time.process_time()
    parse_head_log(text)
    assert time.process_time() - begin < 5
