"""The memory forecast: Kimi-K3's arithmetic on four ranks, and what a real server printed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k3deploy.errors import InputError, K3Error
from k3deploy.lab.model import SPECS, make_model
from k3deploy.memory import Rank, RankForecast, RdmaRing, forecast, split_layers
from k3deploy.model_facts import ModelFacts, model_facts_from_mapping, read_model_facts, row_bytes

RECORDED = Path(__file__).parents[1] / "fixtures" / "llama"
GIB, MIB = 1 << 30, 1 << 20
MLA_LAYERS = [*range(3, 93, 4), 92]
KIMI_K3 = {
    "arch": "kimi-k3",
    "n_layer": 93,
    "attention_layers": MLA_LAYERS,
    "bytes": 372_000_000_000,
    "n_embd": 7168,
    "n_head": 96,
    "n_vocab": 163840,
    "n_ctx_train": 1048576,
    "key_length": 576,
    "value_length": 512,
    "kda_head_dim": 128,
    "conv_kernel": 4,
    "n_ff_expert": 3072,
    "n_expert_used": 16,
    "n_latent": 3584,
    "residual_block": 12,
}
PRODUCTION = {
    "ctx_size": 600_000,
    "parallel": 1,
    "batch_size": 4096,
    "ubatch_size": 1536,
    "cache_type_k": "q8_0",
    "cache_type_v": "f16",
    "tensor_split": [1, 1, 1, 1],
    "n_gpu_layers": 999,
    "ctx_checkpoints": 0,
}
GB10 = [Rank("rank0"), Rank("rank1"), Rank("rank2"), Rank("rank3")]
LAB = [Rank("rank0", local_worker=True), *GB10[1:]]


@pytest.fixture(scope="module")
def kimi_k3() -> ModelFacts:
    return model_facts_from_mapping(KIMI_K3)


def of_k3(facts: ModelFacts, ranks: list[Rank] = GB10, **changes: Any) -> list[RankForecast]:
    return forecast(facts, {**PRODUCTION, **changes}, ranks, backend="cuda")


def gib(size: float) -> str:
    return f"{size / GIB:.2f}"


# --- Kimi-K3 on four GB10 --------------------------------------------------------------------------------------------


def test_kimi_k3_has_24_mla_and_69_kda_layers(kimi_k3: ModelFacts) -> None:
    assert (kimi_k3.layers.count("mla"), kimi_k3.layers.count("kda")) == (24, 69)
    assert kimi_k3.is_mla and kimi_k3.is_recurrent


def test_a_row_of_576_takes_1152_bytes_in_f16_and_612_in_q8_0() -> None:
    assert (row_bytes("f16", 576), row_bytes("q8_0", 576)) == (1152, 612)


@pytest.mark.parametrize(
    ("ctx_size", "cache_type", "total", "a_quarter"),
    [
        (600_000, "f16", "15.45", "3.86"),
        (600_000, "q8_0", "8.21", "2.05"),
        (614_400, "f16", "15.82", "3.96"),
        (614_400, "q8_0", "8.40", "2.10"),
    ],
)
def test_k_cache_of_kimi_k3(kimi_k3: ModelFacts, ctx_size: int, cache_type: str, total: str, a_quarter: str) -> None:
    whole = sum(rank.items["kv_cache"] for rank in of_k3(kimi_k3, ctx_size=ctx_size, cache_type_k=cache_type))
    assert gib(whole) == total
    assert gib(whole / 4) == a_quarter


def test_the_type_of_v_changes_nothing_for_mla(kimi_k3: ModelFacts) -> None:
    assert of_k3(kimi_k3, cache_type_v="f16") == of_k3(kimi_k3, cache_type_v="q8_0")


def test_a_layer_split_gives_5_to_7_mla_layers_a_rank(kimi_k3: ModelFacts) -> None:
    ranks = of_k3(kimi_k3)
    assert [len(rank.layers) for rank in ranks] == [24, 23, 24, 22]
    assert [rank.kinds["mla"] for rank in ranks] == [6, 5, 6, 7]
    assert [rank.output_layer for rank in ranks] == [False, False, False, True]


def test_q8_0_needs_an_f16_conversion_buffer_of_0_65_gib_on_cuda_only(kimi_k3: ModelFacts) -> None:
    assert all(0.64 < rank.items["kv_conversion"] / GIB < 0.65 for rank in of_k3(kimi_k3))
    assert all(rank.items["kv_conversion"] == 0 for rank in of_k3(kimi_k3, cache_type_k="f16"))
    assert all(rank.items["kv_conversion"] == 0 for rank in forecast(kimi_k3, PRODUCTION, LAB, backend="cpu"))


def test_f16_k_costs_1_5_to_2_1_gib_a_rank_less_the_conversion_buffer(kimi_k3: ModelFacts) -> None:
    small, large = of_k3(kimi_k3), of_k3(kimi_k3, cache_type_k="f16")
    delta = [b.items["kv_cache"] - a.items["kv_cache"] for a, b in zip(small, large, strict=True)]
    assert [gib(size) for size in delta] == ["1.81", "1.51", "1.81", "2.11"]
    assert gib(sum(delta) / 4) == "1.81"
    net = [b.total - a.total for a, b in zip(small, large, strict=True)]
    assert [gib(size) for size in net] == ["1.17", "0.87", "1.17", "1.47"]


def test_the_attention_mask_grows_with_microbatch_and_context(kimi_k3: ModelFacts) -> None:
    mask = of_k3(kimi_k3)[1].items["attention_mask"]
    assert mask == 4 * 1536 * 600_064 * 2
    assert of_k3(kimi_k3, ubatch_size=3072)[1].items["attention_mask"] == 2 * mask
    # the head fills it in host memory and has a copy on its device
    assert of_k3(kimi_k3)[0].items["attention_mask"] == 2 * mask


def test_recurrent_state_is_kept_per_kda_layer_and_slot(kimi_k3: ModelFacts) -> None:
    ranks = of_k3(kimi_k3)
    one_layer = 4 * (96 * 128 * 128 + 3 * 3 * 96 * 128)
    assert [rank.items["recurrent_state"] for rank in ranks] == [count * one_layer for count in (18, 18, 18, 15)]
    two_slots = of_k3(kimi_k3, parallel=2)
    assert [rank.items["recurrent_state"] for rank in two_slots] == [
        2 * rank.items["recurrent_state"] for rank in ranks
    ]


def test_checkpoints_stand_in_the_heads_memory_alone(kimi_k3: ModelFacts) -> None:
    ranks = of_k3(kimi_k3, ctx_checkpoints=32)
    assert ranks[0].items["checkpoints"] == 32 * kimi_k3.recurrent_bytes
    assert f"{kimi_k3.recurrent_bytes / MIB:.0f}" == "443"
    assert all(rank.items["checkpoints"] == 0 for rank in ranks[1:])


def test_weights_add_up_to_the_whole_model(kimi_k3: ModelFacts) -> None:
    assert sum(rank.items["weights"] for rank in of_k3(kimi_k3)) == 372_000_000_000


def test_context_of_several_slots_is_padded_per_slot(kimi_k3: ModelFacts) -> None:
    ranks = of_k3(kimi_k3, parallel=3)
    assert ranks[1].items["kv_cache"] == 3 * 200_192 * 5 * 612


def test_slots_that_share_one_cache_pad_it_once(kimi_k3: ModelFacts) -> None:
    ranks = of_k3(kimi_k3, parallel=3, kv_unified=True)
    assert ranks[1].items["kv_cache"] == 600_064 * 5 * 612


def test_a_microbatch_is_never_larger_than_the_batch(kimi_k3: ModelFacts) -> None:
    assert of_k3(kimi_k3, ubatch_size=8192) == of_k3(kimi_k3, ubatch_size=4096)


def test_rdma_pins_a_ring_per_connection(kimi_k3: ModelFacts) -> None:
    stock, wide = RdmaRing(), RdmaRing(chunk_bytes=MIB, depth=64)
    assert (stock.connection_bytes / MIB, wide.connection_bytes / MIB) == (6.25, 65)
    pinned = [rank.items["rdma_pinned"] / MIB for rank in forecast(kimi_k3, PRODUCTION, GB10, rdma=wide)]
    assert pinned == [195, 65, 65, 65]
    assert all(rank.items["rdma_pinned"] == 0 for rank in forecast(kimi_k3, PRODUCTION, GB10))


def test_a_heads_local_worker_has_both_ends_of_its_connection_there(kimi_k3: ModelFacts) -> None:
    ranks = forecast(kimi_k3, PRODUCTION, LAB, rdma=RdmaRing())
    assert ranks[0].items["rdma_pinned"] == 5 * RdmaRing().connection_bytes


def test_one_device_needs_no_pipeline_copies(kimi_k3: ModelFacts) -> None:
    (rank,) = of_k3(kimi_k3, ranks=GB10[:1])
    assert rank.items["attention_mask"] == 2 * 1536 * 600_064 * 2  # device and host, one copy each


def test_other_split_modes_and_unknown_cache_types_are_refused(kimi_k3: ModelFacts) -> None:
    with pytest.raises(K3Error, match="split_mode row"):
        of_k3(kimi_k3, split_mode="row")
    with pytest.raises(K3Error, match="unknown cache type"):
        of_k3(kimi_k3, cache_type_k="q9_9")
    with pytest.raises(K3Error, match="multiples of 32"):
        forecast(replace(kimi_k3, key_length=80), PRODUCTION, GB10)


def test_ordinary_attention_has_a_v_cache_of_its_own_type() -> None:
    facts = model_facts_from_mapping(
        {
            **{key: KIMI_K3[key] for key in ("bytes", "n_embd", "n_head", "n_vocab", "n_ctx_train")},
            "n_layer": 4,
            "attention_layers": [0, 1, 2, 3],
            "mla": False,
            "n_head_kv": 8,
            "key_length": 128,
            "value_length": 64,
        }
    )
    ranks = forecast(facts, {**PRODUCTION, "ctx_size": 1024}, GB10[:1], backend="cuda")
    assert ranks[0].items["kv_cache"] == 1024 * 4 * (8 * 128 // 32 * 34 + 8 * 64 * 2)
    assert ranks[0].items["kv_conversion"] == 1024 * 8 * 128 * 2
    assert ranks[0].items["recurrent_state"] == ranks[0].items["checkpoints"] == 0


# --- where layers go -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", json.loads((RECORDED / "layer-splits.json").read_text()))
def test_layers_go_where_llama_cpp_put_them(case: dict[str, Any]) -> None:
    shares = (case["tensor_split"] + [0.0] * 4)[:4]
    assert split_layers(case["n_layer"], shares, case["n_gpu_layers"]) == case["devices"]


def test_missing_shares_are_zero_and_surplus_ones_are_ignored(kimi_k3: ModelFacts) -> None:
    assert [len(rank.layers) for rank in of_k3(kimi_k3, tensor_split=[1, 1])] == [47, 46, 0, 0]
    assert of_k3(kimi_k3, tensor_split=[1, 1, 1, 1, 9]) == of_k3(kimi_k3)


def test_without_a_tensor_split_memory_decides(kimi_k3: ModelFacts) -> None:
    ranks = [Rank("rank0", 3 * GIB), Rank("rank1", GIB)]
    assert [len(rank.layers) for rank in of_k3(kimi_k3, ranks=ranks, tensor_split=None)] == [71, 22]


def test_layers_left_on_the_heads_cpu_count_there(kimi_k3: ModelFacts) -> None:
    ranks = of_k3(kimi_k3, n_gpu_layers=0)
    assert ranks[0].items["weights"] == 372_000_000_000
    assert all(rank.total == 0 for rank in ranks[1:])


# --- the real allocator ----------------------------------------------------------------------------------------------


def printed(log: str, what: str) -> dict[str, float]:
    """MiB by port (or CPU) of the buffers of one kind in a server's log."""
    found = re.findall(rf"(CPU|:\d+\])\S* +{what} buffer size = +([\d.]+) MiB", log)
    return {place.strip(":]"): float(size) for place, size in found}


@pytest.mark.parametrize(
    ("recording", "spec", "model_type", "settings"),
    [
        ("memory-lab-f16.log", "lab", "f16", {"ctx_size": 8192, "ubatch_size": 1536, "cache_type_k": "q8_0"}),
        ("memory-tiny-q8_0.log", "tiny", "q8_0", {"ctx_size": 4000, "ubatch_size": 512, "cache_type_k": "f16"}),
    ],
)
def test_forecast_equals_the_servers_own_figures(
    tmp_path: Path, recording: str, spec: str, model_type: Any, settings: dict[str, Any]
) -> None:
    log = (RECORDED / recording).read_text()
    make_model(tmp_path / "model.gguf", SPECS[spec], 7, model_type)
    facts = read_model_facts(tmp_path / "model.gguf")
    # a head without a share of its own keeps apart what its host holds
    ranks = [Rank("host", device=False), *(Rank(str(port)) for port in range(51100, 51104))]
    settings = {**PRODUCTION, **settings, "ctx_checkpoints": 1}
    host, *devices = forecast(facts, settings, ranks)
    for item, what in (("weights", "model"), ("kv_cache", "KV"), ("recurrent_state", "RS")):
        sizes = printed(log, what)
        assert {rank.rank: round(rank.items[item] / MIB, 2) for rank in devices if rank.items[item]} == {
            port: size for port, size in sizes.items() if port != "CPU"
        }
    assert round(host.items["weights"] / MIB, 2) == printed(log, "model")["CPU"]
    checkpoint = re.search(r"created context checkpoint .* size = ([\d.]+) MiB", log)
    assert checkpoint is not None
    assert host.items["checkpoints"] / MIB == pytest.approx(float(checkpoint[1]), abs=0.001)
    placed = [int(device) for device in re.findall(r"assigned to device RPC(\d)", log)]
    assert [index for index, rank in enumerate(devices) for _ in range(len(rank.layers) + rank.output_layer)] == placed


@pytest.mark.parametrize("row", json.loads((RECORDED / "compute-buffers.json").read_text()))
def test_compute_buffers_are_estimated_within_ten_percent(row: dict[str, Any]) -> None:
    model = row["model"]
    layers = tuple("mla" if layer % 4 == 3 else "kda" for layer in range(model.pop("n_layer")))
    facts = ModelFacts(
        **model,
        arch="kimi-k3",
        layers=layers,
        layer_bytes=(0,) * len(layers),
        input_bytes=0,
        output_bytes=0,
        n_vocab=2048,
        n_ctx_train=65536,
        n_head_kv=tuple(int(kind == "mla") for kind in layers),
        key_length=576,
        value_length=512,
        kda_head_dim=128,
        conv_kernel=4,
    )
    count = len(row["device_mib"])
    ranks = [Rank("host", device=False), *(Rank(str(index)) for index in range(count))]
    host, *devices = forecast(facts, {**PRODUCTION, **row["settings"], "tensor_split": [1] * count}, ranks)
    estimated = [(rank.items["compute"] + rank.items["attention_mask"]) / MIB for rank in devices]
    assert estimated == pytest.approx(row["device_mib"], rel=0.10 if row["fitted"] else 0.05)
    assert (host.items["compute"] + host.items["attention_mask"]) / MIB == pytest.approx(row["host_mib"], rel=0.01)


# --- facts -----------------------------------------------------------------------------------------------------------


def test_facts_of_a_model_file_are_those_it_was_made_from(tmp_path: Path) -> None:
    spec = SPECS["tiny"]
    make_model(tmp_path / "model.gguf", spec, 7, "q8_0")
    facts = read_model_facts(tmp_path / "model.gguf")
    assert facts.layers == ("kda", "kda", "kda", "mla")
    assert facts.n_head_kv == (0, 0, 0, 1)
    assert (facts.n_embd, facts.n_head, facts.n_vocab) == (spec.n_embd, spec.n_head, spec.n_vocab)
    assert (facts.key_length, facts.value_length, facts.kda_head_dim, facts.conv_kernel) == (576, 512, 128, 4)
    assert (facts.n_latent, facts.n_expert_used, facts.residual_block) == (256, 2, 2)
    assert facts.input_bytes == 2048 * 256 // 32 * 34


def test_a_file_that_is_no_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"not a model at all, but long enough to be read")
    with pytest.raises(InputError, match=r"model\.gguf: cannot read the model"):
        read_model_facts(tmp_path / "model.gguf")
    with pytest.raises(InputError, match="No such file"):
        read_model_facts(tmp_path / "absent.gguf")


def test_all_wrong_facts_are_told_at_once() -> None:
    wrong = {**KIMI_K3, "n_head": "96", "n_embed": 7168}
    with pytest.raises(InputError) as caught:
        model_facts_from_mapping(wrong)
    assert {str(problem).split(": ")[1] for problem in caught.value.problems} == {"n_head", "n_embed"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_layers": [3, 93]}, "numbered 0 to 92"),
        ({"kda_head_dim": 0}, "kda_head_dim: needed"),
        ({"layer_bytes": [1, 2]}, r"one entry a layer \(93\), not 2"),
    ],
)
def test_facts_that_contradict_each_other_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        model_facts_from_mapping({**KIMI_K3, **change})


def test_unequal_layers_are_taken_as_written() -> None:
    sizes = [10**9 + layer for layer in range(93)]
    facts = model_facts_from_mapping({**KIMI_K3, "layer_bytes": sizes})
    assert of_k3(facts)[1].items["weights"] == sum(sizes[24:47])
