"""Tiny models from a seed: the same bytes for one seed, a vocabulary that loses nothing, a cache that is not fooled."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGUFReader, quants

from k3deploy.commands.lab_model import model as command
from k3deploy.errors import K3Error
from k3deploy.lab.model import (
    ARCH,
    BOS,
    END_OF_TURN,
    FIRST_BYTE,
    FIRST_MERGE,
    SPECIAL_TOKENS,
    SPECS,
    byte_alphabet,
    make_model,
    merges,
    tensor_specs,
)
from k3deploy.lab.model_cache import default_directory, ensure_model, file_sha256, model_facts
from k3deploy.lab.quantize import calibration_text, iq1_s_commands, quantize_iq1_s
from k3deploy.model_facts import model_facts_from_mapping, read_model_facts

TINY = SPECS["tiny"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    make_model(path, TINY, 7, "f16")
    return path


# --- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "sha256"),
    [
        ("f16", "8ea60306275c7a4f51ce3e90928c61888234250f5a3a8eaf00ea323ef8edfac0"),
        ("q8_0", "5a3a2030a14d2b36b45487883b769485ef4823871c1816a43be601423a55d53f"),
    ],
)
def test_a_seed_always_gives_these_bytes(tmp_path: Path, model_type: Any, sha256: str) -> None:
    """On any machine and with any numpy; whoever changes the bytes raises FORMAT and these hashes."""
    make_model(tmp_path / "model.gguf", TINY, 7, model_type)
    assert file_sha256(tmp_path / "model.gguf") == sha256


def test_another_seed_gives_other_weights(tiny: Path, tmp_path: Path) -> None:
    make_model(tmp_path / "other.gguf", TINY, 8, "f16")
    mine, other = (
        {tensor.name: tensor.data for tensor in GGUFReader(path).tensors} for path in (tiny, tmp_path / "other.gguf")
    )
    assert all((mine[name] != other[name]).any() for name in mine)


def test_a_model_that_could_not_be_finished_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("k3deploy.lab.model._values", full_disk)
    with pytest.raises(OSError, match="No space left"):
        make_model(tmp_path / "model.gguf", TINY, 7)
    assert list(tmp_path.iterdir()) == []


# --- architecture ----------------------------------------------------------------------------------------------------


def test_experts_drawn_as_iq1_s_have_the_size_of_those_that_were_quantized(tmp_path: Path) -> None:
    path = tmp_path / "experts.gguf"
    make_model(path, TINY, 7, "iq1_s_experts")
    kinds = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    experts = [tensor for name, tensor in kinds.items() if name.endswith("_exps.weight")]
    assert experts and {tensor.tensor_type.name for tensor in experts} == {"IQ1_S"}
    assert {tensor.tensor_type.name for name, tensor in kinds.items() if "_exps" not in name} == {"Q8_0", "F32"}
    for tensor in experts:
        values = quants.dequantize(tensor.data, tensor.tensor_type)
        assert values.std() == pytest.approx(values.shape[-1] ** -0.5, rel=0.02), tensor.name


@pytest.mark.parametrize("spec", SPECS.values(), ids=str)
def test_three_kda_layers_to_one_mla_layer(spec: Any) -> None:
    kinds = ["mla" if spec.is_mla(layer) else "kda" for layer in range(spec.n_layer)]
    assert kinds == ["kda", "kda", "kda", "mla"] * (spec.n_layer // 4)


@pytest.mark.parametrize("spec", SPECS.values(), ids=str)
def test_every_matrix_row_fits_the_block_of_iq1_s_or_of_q8_0(spec: Any) -> None:
    rows = {tensor.name: tensor.shape[-1] for tensor in tensor_specs(spec) if tensor.matrix}
    assert all(length % 32 == 0 for length in rows.values())
    # what lives in a head's own dimension cannot be a multiple of 256; llama-quantize keeps those finer
    assert {name.split(".")[2] for name, length in rows.items() if length % 256} == {"ssm_f_b", "attn_k_b"}


def test_a_spec_with_a_size_that_iq1_s_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="n_embd = 320"):
        replace(TINY, n_embd=320)
    with pytest.raises(ValueError, match="n_vocab = 100"):
        replace(TINY, n_vocab=100)


def test_weights_keep_activations_in_range(tiny: Path) -> None:
    for tensor in GGUFReader(tiny).tensors:
        values = np.asarray(tensor.data, dtype=np.float32)
        assert np.isfinite(values).all()
        assert np.abs(values).max() < 40


def test_head_counts_say_which_layers_keep_a_k_cache(tiny: Path) -> None:
    fields = GGUFReader(tiny).fields
    assert fields["general.architecture"].contents() == ARCH
    assert fields[f"{ARCH}.attention.head_count_kv"].contents() == [0, 0, 0, 1]
    assert fields[f"{ARCH}.attention.key_length"].contents() == 576
    assert fields[f"{ARCH}.kda.head_dim"].contents() == 128


# --- tokenizer -------------------------------------------------------------------------------------------------------


def test_every_byte_has_a_token_of_its_own(tiny: Path) -> None:
    tokens = GGUFReader(tiny).fields["tokenizer.ggml.tokens"].contents()
    assert tokens[:FIRST_BYTE] == list(SPECIAL_TOKENS)
    assert tokens[FIRST_BYTE:FIRST_MERGE] == byte_alphabet()
    assert len(set(tokens)) == len(tokens) == TINY.n_vocab


def test_every_merge_joins_tokens_that_exist() -> None:
    known = set(byte_alphabet())
    for first, second in merges(TINY.n_vocab - FIRST_MERGE):
        assert first in known and second in known
        known.add(first + second)


def test_a_vocabulary_beyond_the_merges_is_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        merges(10_000)


def test_greedy_output_hardly_ends_early_or_breaks_utf_8(tiny: Path) -> None:
    (output,) = (tensor.data for tensor in GGUFReader(tiny).tensors if tensor.name == "output.weight")
    spread = np.abs(np.asarray(output, dtype=np.float32)).max(axis=1)
    unwanted = [*range(FIRST_BYTE), *(FIRST_BYTE + byte for byte in range(0x80, 0x100))]
    assert spread[unwanted].max() < spread[FIRST_MERGE:].min() / 10
    assert {BOS, END_OF_TURN} <= set(unwanted)


# --- cache -----------------------------------------------------------------------------------------------------------


def test_a_model_is_made_once(tmp_path: Path) -> None:
    first = ensure_model(tmp_path, TINY, 7, "q8_0")
    again = ensure_model(tmp_path, TINY, 7, "q8_0")
    assert (first.created, again.created) == (True, False)
    assert first.sha256 == again.sha256 == file_sha256(first.path)


@pytest.mark.parametrize("damage", ["model", "sidecar", "spec", "gone"])
def test_a_damaged_or_outdated_model_is_made_again(tmp_path: Path, damage: str) -> None:
    made = ensure_model(tmp_path, TINY, 7, "q8_0")
    if damage == "model":
        content = bytearray(made.path.read_bytes())
        content[-1] ^= 1
        made.path.write_bytes(content)
    elif damage == "sidecar":
        made.sidecar.write_text("[")
    elif damage == "spec":
        record = json.loads(made.sidecar.read_text())
        made.sidecar.write_text(json.dumps({**record, "format": 0}))
    else:
        made.path.unlink()
    again = ensure_model(tmp_path, TINY, 7, "q8_0")
    assert again.created
    assert file_sha256(again.path) == made.sha256


def test_the_sidecar_says_what_a_forecast_needs(tmp_path: Path) -> None:
    made = ensure_model(tmp_path, TINY, 7, "f16")
    record = json.loads(made.sidecar.read_text())
    assert record["vocab"] == {"first_id": FIRST_MERGE, "last_id": TINY.n_vocab - 1, "bos": BOS}
    assert record["facts"] == model_facts(TINY, made.path.stat().st_size)
    written, read = model_facts_from_mapping(record["facts"]), read_model_facts(made.path)
    uncounted = {"layer_bytes": (), "input_bytes": 0, "output_bytes": 0}
    assert replace(written, **uncounted) == replace(read, **uncounted)


def test_models_live_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_directory() == tmp_path / "k3deploy" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_directory() == Path("/home/someone/.cache/k3deploy/models")


# --- IQ1_S -----------------------------------------------------------------------------------------------------------


def test_iq1_s_measures_first_and_quantises_with_the_result() -> None:
    measure, quantize = iq1_s_commands(Path("bin"), Path("in"), Path("out"), Path("text"), Path("imatrix"))
    assert measure[0] == "bin/llama-imatrix"
    assert measure[measure.index("-o") + 1] == quantize[quantize.index("--imatrix") + 1] == "imatrix"
    assert quantize[0] == "bin/llama-quantize"
    assert quantize[-4:] == ["in", "out", "IQ1_S", "1"]


def test_calibration_text_comes_from_the_seed() -> None:
    assert calibration_text(7) == calibration_text(7) != calibration_text(8)
    assert calibration_text(7).isascii()


def test_iq1_s_without_the_tools_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(K3Error, match="llama-imatrix"):
        ensure_model(tmp_path, TINY, 7, "iq1_s")
    with pytest.raises(K3Error, match=r"cannot run .*llama-imatrix: No such file") as caught:
        quantize_iq1_s(tmp_path, tmp_path / "in.gguf", tmp_path / "out.gguf", 7)
    assert "--binaries" in caught.value.remedy


def test_a_tool_that_fails_is_quoted_and_leaves_nothing(tmp_path: Path) -> None:
    tool = tmp_path / "llama-imatrix"
    tool.write_text("#!/bin/sh\necho cannot read the model >&2\nexit 3\n")
    tool.chmod(0o755)
    target = tmp_path / "out"
    target.mkdir()
    with pytest.raises(K3Error, match=r"llama-imatrix ended with exit code 3:\ncannot read the model"):
        quantize_iq1_s(tmp_path, tmp_path / "in.gguf", target / "model.gguf", 7)
    assert list(target.iterdir()) == []


# --- command ---------------------------------------------------------------------------------------------------------


def test_the_command_makes_a_model_and_then_says_it_is_there(tmp_path: Path) -> None:
    arguments = ["--spec", "tiny", "--type", "q8_0", "--out", str(tmp_path)]
    made = CliRunner().invoke(command, arguments)
    assert made.exit_code == 0 and "(made)" in made.output
    again = CliRunner().invoke(command, [*arguments, "--json"])
    record = json.loads(again.output)
    assert record["created"] is False
    assert record["path"] == str(tmp_path / "k3-tiny-seed7-q8_0.gguf")
    assert record["sha256"] == file_sha256(Path(record["path"]))
