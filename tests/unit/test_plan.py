"""The plan: what runs where, as data, and every fact that would otherwise fail late."""

from __future__ import annotations

import functools
import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3deploy.errors import InputError, K3Error
from k3deploy.inventory import BuildSpec, Cluster, Model, Parity, Production, Rank, Source, Transport
from k3deploy.matrix import CandidateError, Matrix
from k3deploy.model_facts import ModelFacts, model_facts_from_mapping
from k3deploy.plan import Plan, PlanError, PlannedArm, make_plan, render_run_layer
from k3deploy.plan.blocks import rounds

MATRIX_FILES = Path(__file__).parents[2] / "inventory" / "matrix"
MATRIX = Matrix.load(MATRIX_FILES)
CPU_BUILD = BuildSpec.model_validate(
    {"source": {"kind": "tree", "path": "/srv/src"}, "backend": "cpu", "cmake": {"GGML_RPC": "ON"}}
)
CUDA_BUILD = BuildSpec.model_validate(
    {
        "source": {"kind": "tree", "path": "/srv/src"},
        "backend": "cuda",
        "cuda": {"nvcc": "/usr/local/cuda/bin/nvcc", "architectures": "121a-real"},
        "markers": ["K3_FLASHKDA_ACTIVE"],
        "mla_kv_types": "free",
    }
)


def cluster(*, cpu: bool = True, **changes: Any) -> Cluster:
    """Four ranks: CPU ranks with the head's local worker, or GPU ranks."""
    ranks = [
        Rank(
            index=index,
            name=f"r{index}",
            fabric_address=f"10.0.0.{index + 1}",
            rdma_device=None if cpu else "rocep1s0f0",
            local_worker=cpu and index == 0,
            cpus=20,
        )
        for index in range(4)
    ]
    values: dict[str, Any] = {
        "inventory": "inventory/test",
        "name": "test",
        "ranks": ranks,
        "builder": "r0",
        "root": "/opt/k3deploy",
        "user": "k3deploy",
        "model": Model(name="m", path="/srv/m.gguf", arch="kimi-k3", sha256="a" * 64),
        "builds": {"default": CPU_BUILD if cpu else CUDA_BUILD},
        "build": "default",
        "candidate_head_port": 8081,
        "transport": Transport(),
        "parity": Parity(suites=str(MATRIX.directory.parent / "suites")),
        "production": Production(
            head_unit="llama.service", worker_unit="rpc.service", head_url="http://10.0.0.1:8080", worker_port=50052
        ),
        "scale": {},
        "settings": {},
        "matrix": str(MATRIX.directory),
        "load_timeout_s": 60,
    }
    return Cluster(**(values | changes))


@functools.cache
def facts(mla: bool) -> ModelFacts:
    """The seed's architecture, or the same with ordinary attention."""
    return model_facts_from_mapping(
        {
            "bytes": 372_000_000_000,
            "n_layer": 93,
            "attention_layers": [*range(3, 92, 4), 92],
            "mla": mla,
            "n_embd": 7168,
            "n_head": 96,
            "n_vocab": 163840,
            "n_ctx_train": 1 << 20,
            "key_length": 576,
            "value_length": 512,
            "kda_head_dim": 128,
            "conv_kernel": 4,
        }
    )


def plan(candidate: str, on: Cluster | None = None, *, mla: bool = True, **options: Any) -> Plan:
    return make_plan(MATRIX, on or cluster(), f"candidate-{candidate}", model_facts=facts(mla), **options)


def value_of(arm: PlannedArm, flag: str, rank: str = "r0") -> str:
    process = arm.processes[rank].head
    assert process is not None
    return process.argv[process.argv.index(flag) + 1]


def test_a_cpu_head_serves_its_own_share_by_a_local_worker() -> None:
    baseline = plan("U2").baseline
    assert value_of(baseline, "--rpc") == "10.0.0.1:50053,10.0.0.2:50053,10.0.0.3:50053,10.0.0.4:50053"
    assert value_of(baseline, "--device") == "RPC0,RPC1,RPC2,RPC3"
    assert all(processes.worker for processes in baseline.processes.values())
    assert [rank for rank, processes in baseline.processes.items() if processes.head] == ["r0"]


def test_a_gpu_head_holds_its_share_before_the_workers() -> None:
    baseline = plan("U2", cluster(cpu=False)).baseline
    assert value_of(baseline, "--rpc") == "10.0.0.2:50053,10.0.0.3:50053,10.0.0.4:50053"
    assert value_of(baseline, "--device") == "CUDA0,RPC0,RPC1,RPC2"
    assert baseline.processes["r0"].worker is None


def test_nothing_listens_on_every_network_and_no_worker_caches_tensors() -> None:
    for arm in plan("next").arms:
        for index, processes in enumerate(arm.processes.values()):
            for process in filter(None, (processes.worker, processes.head)):
                assert process.argv[process.argv.index("--host") + 1] == f"10.0.0.{index + 1}"
            assert processes.worker is not None
            assert processes.worker.listen == f"10.0.0.{index + 1}:50053"
            assert not {"-c", "--cache"} & set(processes.worker.argv)


def test_the_switches_of_the_bridge_are_on_the_head_and_on_every_worker() -> None:
    for arm in plan("U9", cluster(cpu=False)).arms:
        for processes in arm.processes.values():
            for process in filter(None, (processes.worker, processes.head)):
                assert process.environment["GGML_CUDA_K3_FLASHKDA"] == "1"
                assert process.environment["GGML_CUDA_K3_FLASHKDA_DIAG"] == "1"


def test_a_switch_that_the_build_cannot_obey_is_noted() -> None:
    words = "does not promise the marker K3_FLASHKDA_ACTIVE"
    assert any(words in note for note in plan("U2").notes)
    assert not any(words in note for note in plan("U2", cluster(cpu=False)).notes)


def test_every_arm_is_measured_under_the_same_harness_settings() -> None:
    for arm in plan("U2").arms:
        assert [value_of(arm, flag) for flag in ("--parallel", "--cache-ram", "--ctx-checkpoints")] == ["1", "0", "0"]
    assert {value_of(arm, "--ctx-checkpoints") for arm in plan("U7").arms} == {"4"}


def test_only_the_difference_differs() -> None:
    baseline, first, second = plan("U2").arms
    assert [(d.key, d.baseline, d.arm) for d in first.differences] == [("ubatch_size", "1536", "2048")]
    assert [(d.key, d.baseline, d.arm) for d in second.differences] == [("ubatch_size", "1536", "3072")]
    assert baseline.differences == []
    assert [processes.worker for processes in first.processes.values()] == [
        processes.worker for processes in baseline.processes.values()
    ]


def test_v_follows_k_where_the_build_refuses_the_pair() -> None:
    baseline, u9 = plan("U9").arms
    assert (value_of(baseline, "--cache-type-k"), value_of(baseline, "--cache-type-v")) == ("q8_0", "q8_0")
    assert (value_of(u9, "--cache-type-k"), value_of(u9, "--cache-type-v")) == ("f16", "f16")
    assert any("K q8_0 with V f16 cannot start" in note for note in baseline.notes)


@pytest.mark.parametrize(("on", "mla"), [(cluster(cpu=False), True), (cluster(), False)])
def test_v_is_left_alone_where_the_pair_works(on: Cluster, mla: bool) -> None:
    baseline = plan("U9", on, mla=mla).baseline
    assert (value_of(baseline, "--cache-type-k"), value_of(baseline, "--cache-type-v")) == ("q8_0", "f16")
    assert not any("cannot start" in note for note in baseline.notes)


def test_what_the_cluster_pins_holds_for_every_arm_and_is_said() -> None:
    pinned = plan("next", cluster(scale={"ctx_size": 8192, "ubatch_size": 512}))
    assert {value_of(arm, "--ctx-size") for arm in pinned.arms} == {"8192"}
    assert {value_of(arm, "--ubatch-size") for arm in pinned.arms} == {"512"}
    assert "this cluster pins ctx_size to 8192 in every arm (matrix: 600000)" in pinned.notes
    assert any("pins ubatch_size to 512: the row's 2048 has no effect here" in note for note in pinned.arms[1].notes)


def test_an_arm_without_a_difference_says_that_it_is_the_baseline() -> None:
    arm = plan("U2@2048", cluster(scale={"ubatch_size": 512})).arms[1]
    assert arm.differences == []
    assert any("this arm is the baseline" in note for note in arm.notes)


def test_a_cluster_adds_settings_where_the_row_does_not_speak() -> None:
    baseline, arm, *_ = plan(
        "U3", cluster(settings={"threads": 2, "worker_threads": 3, "worker_cpu_affinity": "5-9"})
    ).arms
    assert value_of(baseline, "--threads") == "2"
    assert value_of(arm, "--threads") == "16"
    worker = arm.processes["r2"].worker
    assert worker is not None
    assert worker.argv[-2:] == ["--threads", "3"]
    assert worker.cpu_affinity == "5-9"


def test_oversubscription_and_missing_cpus_are_noted() -> None:
    small = [rank.model_copy(update={"cpus": 8}) for rank in cluster().ranks]
    baseline, arm, *_ = plan("U3", cluster(ranks=small)).arms
    assert "threads_batch 32 is more than the 8 CPUs of r0" in baseline.notes
    assert "cpu_range_batch 4-19 names CPUs that r0 (8 CPUs) does not have" in arm.notes


def test_the_ladder_is_the_warmup_of_its_own_arm() -> None:
    baseline, u6 = plan("U6").arms
    assert baseline.warmup == {"prefill": [256], "decode": [1]}
    assert u6.warmup == {"prefill": [256, 512, 1024, 1536, 2048], "decode": [1, 2, 4, 8]}
    layer = render_run_layer(plan("U6"))["all"]["vars"]
    assert "bench" not in layer["k3_run_arms"][0]
    assert layer["k3_run_arms"][1]["bench"] == {"warmup": u6.warmup}


def test_cached_cells_and_probes_are_measured_only_where_a_row_asks() -> None:
    assert {cell.state for cell in plan("U2").bench.cells} == {"cold", "warm", "cached"}
    u7 = plan("U7").bench
    assert [cell.cell for cell in u7.cells if cell.state == "cached"] == ["pp2048", "pp4096"]
    assert u7.probes == ["shifted_prefix"]
    assert plan("U6").bench.probes == ["graphs"]


def test_cold_and_warm_cells_are_those_of_the_matrix() -> None:
    cells = [(cell.cell, cell.state, cell.n_prompt, cell.n_predict) for cell in plan("U2").bench.cells]
    assert cells == [
        ("pp256", "cold", 256, 1),
        ("pp512", "cold", 512, 1),
        ("pp1024", "cold", 1024, 1),
        ("pp2048", "cold", 2048, 1),
        ("pp4096", "cold", 4096, 1),
        ("tg100", "cold", 16, 100),
        ("pp2048", "warm", 2048, 1),
        ("pp4096", "warm", 4096, 1),
        ("pp2048", "cached", 2048, 1),
        ("pp4096", "cached", 4096, 1),
    ]


def test_a_cell_at_a_depth_is_measured_where_it_is_asked_for() -> None:
    wanted = ["pp2048", "pp4096", "tg100", "tg100@d32768", "pp512@d4096"]
    cells = [cell for cell in plan("U2", cells=wanted).bench.cells if "@" in cell.cell]
    assert [(cell.cell, cell.state, cell.n_prompt, cell.n_predict, cell.n_cached) for cell in cells] == [
        ("tg100@d32768", "cached", 32768 + 16, 100, 32768),
        ("pp512@d4096", "cached", 4096 + 512, 1, 4096),
    ]
    with pytest.raises(PlanError, match="no cell 'tg100@32768'"):
        plan("U2", cells=[*wanted, "tg100@32768"])


def test_cells_can_be_chosen_but_not_those_that_gates_need_left_out() -> None:
    chosen = plan("U2", cells=["pp2048", "pp4096", "tg100"]).bench.cells
    assert {cell.cell for cell in chosen} == {"pp2048", "pp4096", "tg100"}
    with pytest.raises(PlanError, match="judges pp4096"):
        plan("U2", cells=["pp2048", "tg100"])
    with pytest.raises(PlanError, match="no cell 'pp99'"):
        plan("U2", cells=["pp99"])


def test_rounds_run_baseline_and_arms_beside_each_other() -> None:
    blocks = plan("U2", pairs=3).blocks
    assert [block.pair for block in blocks] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [block.index for block in blocks] == list(range(9))
    for pair in range(3):
        assert {block.arm for block in blocks if block.pair == pair} == {"baseline", "U2@2048", "U2@3072"}


@given(st.integers(2, 5), st.integers(1, 12), st.integers(0, 1 << 31))
def test_the_order_is_balanced_and_the_seed_alone_decides_it(arms: int, pairs: int, seed: int) -> None:
    order = rounds(arms, pairs, seed)
    assert order == rounds(arms, pairs, seed)
    firsts = [sum(entry[0] == arm for entry in order) for arm in range(arms)]
    assert max(firsts) - min(firsts) <= 1
    for one, other in itertools.combinations(range(arms), 2):
        before = sum(entry.index(one) < entry.index(other) for entry in order)
        assert abs(2 * before - pairs) <= 1


def test_the_order_is_random_and_not_the_same_for_every_seed() -> None:
    assert {tuple(rounds(2, 2, seed)[0]) for seed in range(20)} == {(0, 1), (1, 0)}


def test_the_plan_records_its_rule_before_anything_is_measured() -> None:
    rule = plan("U9", pairs=8, delta=0.05, seed=3).rule
    assert (rule.delta, rule.looks, rule.seed, rule.no_accept) == (0.05, [6, 8], 3, "")
    assert plan("U2", pairs=8).rule.looks == [8]  # two arms share what may be spent: six pairs cannot reach it


@pytest.mark.parametrize(
    ("row", "name", "cmake"),
    [
        ("U5@1024x63", "u5-rdma-chunk", {"GGML_RPC_RDMA_CHUNK": "1048576", "GGML_RPC_RDMA_RX_DEPTH": "63"}),
        ("U8", "u8-rpc-timing", {}),
    ],
)
def test_a_row_whose_patch_sets_are_here_is_built_from_the_baselines_source(
    row: str, name: str, cmake: dict[str, str]
) -> None:
    found = plan(row)
    baseline, arm = found.arms
    assert arm.build == row.lower().replace("@", "_")
    spec = found.builds[arm.build_key]
    before = found.builds[baseline.build_key]
    assert spec["patch_sets"] == [name] and before["patch_sets"] == []
    assert spec["source"] == before["source"]
    assert spec["cmake"] == before["cmake"] | cmake
    assert ("build", "default", arm.build) in [(d.key, d.baseline, d.arm) for d in arm.differences]


def test_a_row_with_its_own_build_in_the_inventory_uses_that_one() -> None:
    own = CPU_BUILD.model_copy(update={"cmake": {"X": "1"}})
    found = plan("U8", cluster(builds={"default": CPU_BUILD, "u8": own}))
    assert found.builds[found.arms[1].build_key]["cmake"] == {"X": "1"}
    assert found.builds[found.arms[1].build_key]["patch_sets"] == []


@pytest.mark.parametrize(
    ("row", "patch_set", "switch"),
    [
        ("U1", "u1-chunked-kda", "GGML_CUDA_K3_KDA_CHUNKED"),
        ("U10", "u10-iq1s-rows256", "GGML_CUDA_K3_IQ1S_ROWS256"),
        ("U10b", "u10b-iq1s-ncols", "GGML_CUDA_K3_IQ1S_NCOLS"),
        ("U11", "u11-kda-blocked", "GGML_CUDA_K3_KDA_BLOCKED"),
    ],
)
def test_a_row_that_changes_cuda_kernels_needs_a_build_for_cuda(row: str, patch_set: str, switch: str) -> None:
    with pytest.raises(PlanError, match=rf"candidate-{row} needs CUDA: patch set {patch_set}") as caught:
        plan(row)
    assert "backend: cuda" in caught.value.remedy
    baseline, arm = plan(row, cluster(cpu=False)).arms
    assert arm.build == row.lower() and arm.build_key != baseline.build_key
    for processes in arm.processes.values():
        for process in filter(None, (processes.worker, processes.head)):
            assert process.environment[switch] == "1"


def test_a_prebuilt_baseline_cannot_be_patched() -> None:
    prebuilt = CPU_BUILD.model_copy(update={"source": Source(kind="prebuilt", path="/srv/build")})
    with pytest.raises(PlanError, match="prebuilt") as caught:
        plan("U8", cluster(builds={"default": prebuilt}))
    assert "k3_builds.u8" in caught.value.remedy


def test_a_row_whose_build_is_missing_says_how_to_name_one(tmp_path: Path) -> None:
    shutil.copytree(MATRIX_FILES, tmp_path / "matrix")
    row = tmp_path / "matrix" / "U8.yml"
    row.write_text(re.sub(r"\n +patch_sets: .*", "", row.read_text()))
    matrix = Matrix.load(tmp_path / "matrix")
    with pytest.raises(PlanError, match="candidate-U8 needs") as caught:
        make_plan(matrix, cluster(), "candidate-U8", model_facts=facts(True))
    assert "k3_builds.u8" in caught.value.remedy
    other = CPU_BUILD.model_copy(update={"cmake": {"X": "1"}})
    named = cluster(builds={"default": CPU_BUILD, "u8": other})
    baseline, arm = make_plan(matrix, named, "candidate-U8", model_facts=facts(True)).arms
    assert arm.build == "u8"
    assert arm.build_key != baseline.build_key
    assert ("build", "default", "u8") in [(d.key, d.baseline, d.arm) for d in arm.differences]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scale": {"batch_size": 1024, "ubatch_size": 1536}}, "ubatch_size 1536 is larger than batch_size 1024"),
        ({"scale": {"tensor_split": [1, 1, 1]}}, "tensor_split has 3 shares, test has 4 devices"),
        ({"scale": {"rpc_port": 50052}}, "is the port of production's workers"),
        ({"scale": {"ctx_size": 4096}}, "pp4096 does not fit into a context of 4096"),
        (
            {"ranks": [rank.model_copy(update={"local_worker": False}) for rank in cluster().ranks]},
            "tensor_split has 4 shares, test has 3 devices",
        ),
    ],
)
def test_what_would_fail_late_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=re.escape(words)):
        plan("U9", cluster(**changes))


def test_the_guard_is_the_strictest_of_row_and_baseline() -> None:
    assert plan("U2").baseline.processes["r3"].guard_mib == 1536
    assert plan("U2", cluster(scale={"guard_mib": 4096})).baseline.processes["r3"].guard_mib == 4096
    assert plan("U2", cluster(scale={"guard_mib": 64})).baseline.processes["r3"].guard_mib == 1536


def test_hash_and_vocabulary_come_from_the_sidecar(tmp_path: Path) -> None:
    sidecar = tmp_path / "m.json"
    sidecar.write_text(json.dumps({"name": "m", "sha256": "b" * 64, "vocab": {"first_id": 5, "last_id": 99, "bos": 1}}))
    on = cluster(model=Model(name="m", path="/srv/m.gguf", arch="kimi-k3", sidecar=str(sidecar)))
    made = plan("U2", on)
    assert made.model.sha256 == "b" * 64
    layer = render_run_layer(made)["all"]
    assert layer["hosts"]["r2"]["k3_model"]["sha256"] == "b" * 64
    assert layer["vars"]["k3_run_bench"]["vocab"] == {"first_id": 5, "last_id": 99, "bos": 1}
    assert not any("not verified" in note for note in made.notes)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"name": "other"}', '{"sha256": "short"}', '{"vocab": 3}'])
def test_a_wrong_sidecar_is_a_problem(tmp_path: Path, content: str | None) -> None:
    sidecar = tmp_path / "m.json"
    if content is not None:
        sidecar.write_text(content)
    with pytest.raises(InputError, match=re.escape(str(sidecar))):
        plan("U2", cluster(model=Model(name="m", path="/srv/m.gguf", arch="kimi-k3", sidecar=str(sidecar))))


def test_an_unverified_model_is_noted() -> None:
    assert any("not verified" in n for n in plan("U2", cluster(model=Model(name="m", path="/m", arch="x"))).notes)


def test_findings_of_the_rows_are_in_the_plan() -> None:
    known = {finding.row for finding in plan("next").findings}
    assert known == {"baseline", "next", "U2", "U3", "U6", "U7"}
    assert any(finding.contradicts and "2.1 GiB" in finding.text for finding in plan("U9").findings)


def test_a_refused_composition_stays_refused() -> None:
    with pytest.raises(CandidateError, match="U4 is not mixed with U2"):
        plan("U4+U2")


@given(
    st.sampled_from(["U2", "U2@3072", "U3", "U6", "U7", "U9", "next", "U2+U6", "U3@16+U9", "U9+U7+U6+U3+U2"]),
    st.integers(1, 4),
    st.booleans(),
)
@settings(deadline=None, max_examples=40)
def test_a_plan_is_whole_and_survives_json(candidate: str, pairs: int, cpu: bool) -> None:
    made = plan(candidate, cluster(cpu=cpu), pairs=pairs)
    assert Plan.model_validate_json(made.model_dump_json()) == made
    slugs = [arm.slug for arm in made.arms]
    assert slugs[0] == "baseline"
    assert len(set(slugs)) == len(slugs)
    assert all(re.fullmatch(r"[A-Za-z0-9.-]+", slug) for slug in slugs)
    assert len(made.blocks) == pairs * len(made.arms)
    for pair in range(pairs):
        assert sorted(block.slug for block in made.blocks if block.pair == pair) == sorted(slugs)
    layer = render_run_layer(made)["all"]
    assert json.loads(json.dumps(layer)) == layer
    assert set(layer["vars"]["k3_run_builds"]) == {arm["build_key"] for arm in layer["vars"]["k3_run_arms"]}
    for processes in layer["hosts"].values():
        assert set(processes["k3_run_processes"]) == set(slugs)
    for arm in made.arms:
        for ranks in arm.processes.values():
            for process in filter(None, (ranks.worker, ranks.head)):
                assert "None" not in process.argv
                assert all(isinstance(part, str) and part for part in process.argv)


SOME = st.fixed_dictionaries(
    {},
    optional={
        "ctx_size": st.none() | st.integers(1, 1 << 20),
        "batch_size": st.none() | st.integers(1, 8192),
        "ubatch_size": st.none() | st.integers(1, 8192),
        "parallel": st.none() | st.integers(1, 8),
        "tensor_split": st.none() | st.lists(st.integers(0, 3), min_size=1, max_size=5),
        "cache_type_v": st.none() | st.sampled_from(["f16", "q8_0"]),
        "rpc_port": st.none() | st.integers(50050, 50055),
        "guard_mib": st.none() | st.integers(1, 9999),
        "rdma": st.none() | st.sampled_from(["auto", "pinned", "off"]),
        "graph_ladder": st.none() | st.just({"prefill": [], "decode": []}),
        "environment": st.none() | st.just({"A": "1"}),
        "memlock_mib": st.none() | st.integers(1, 99),
    },
)


@given(SOME, SOME, st.sampled_from(["U2", "U3", "U4", "U7", "U9", "next"]), st.booleans())
@settings(deadline=None, max_examples=150)
def test_whatever_a_cluster_pins_ends_in_a_plan_or_in_words(
    scale: dict[str, Any], more: dict[str, Any], candidate: str, cpu: bool
) -> None:
    try:
        made = plan(candidate, cluster(cpu=cpu, scale=scale, settings=more))
    except K3Error as error:
        assert str(error)
        return
    for arm in made.arms:
        assert arm.settings.get("ubatch_size", 512) <= arm.settings.get("batch_size", 2048)
        for key, value in scale.items():
            if value is not None and key not in {"cache_type_v", "environment"}:
                assert arm.settings[key] == value


def test_u9_costs_what_the_arithmetic_says_and_the_plan_says_so() -> None:
    """K rows of 1152 and 612 bytes, 600,000 tokens padded, five to seven MLA layers a rank, one conversion buffer."""
    baseline, u9 = plan("U9", cluster(cpu=False)).arms
    layers = [entry["layers"] for entry in baseline.forecast]
    assert layers == ["18 kda, 6 mla", "18 kda, 5 mla", "18 kda, 6 mla", "15 kda, 7 mla, output"]
    cells = 600_064
    for before, after, count in zip(baseline.forecast, u9.forecast, (6, 5, 6, 7), strict=True):
        assert before["kv_cache_mib"] == round(cells * count * 612 / 2**20, 1)
        assert after["kv_cache_mib"] == round(cells * count * 1152 / 2**20, 1)
    average = sum(entry["kv_cache_mib"] for entry in u9.forecast) / 4 / 1024
    assert average == pytest.approx(3.86, abs=0.01)
    (note,) = [note for note in u9.notes if note.startswith("memory against the baseline")]
    assert "r0 +1195 MiB (kv cache +1854, kv conversion -659)" in note


def test_a_forecast_below_the_floor_is_noted() -> None:
    small = [rank.model_copy(update={"memory_mib": 96_000}) for rank in cluster(cpu=False).ranks]
    notes = plan("U2", cluster(cpu=False, ranks=small)).baseline.notes
    assert any(re.fullmatch(r"the forecast leaves -?\d+ MiB on r1, the floor is 1536 MiB", note) for note in notes)


def test_what_cannot_be_foreseen_is_said() -> None:
    row = plan("U2", cluster(scale={"split_mode": "row"}))
    assert row.baseline.forecast == []
    assert any("no memory forecast for split_mode row" in note for note in row.baseline.notes)
    without = make_plan(MATRIX, cluster(), "candidate-U2")
    assert any("no memory forecast" in note for note in without.notes)
