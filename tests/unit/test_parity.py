"""Parity: what is asked, how answers are held against each other, and the state file that the server saves."""

from __future__ import annotations

import importlib.util
import json
import struct
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3deploy import parity
from k3deploy.errors import InputError
from k3deploy.parity import Parity
from k3deploy.plan.parity import SUITES, read_suites

HARNESS = Path(__file__).parents[2] / "collections/ansible_collections/k3/deploy/roles/benchmark/files/k3_parity.py"


def load_harness() -> ModuleType:
    spec = importlib.util.spec_from_file_location("k3_parity", HARNESS)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # no byte code inside the collection
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module


harness = load_harness()


def row(kind: int, values: list[float]) -> bytes:
    data = struct.pack(f"<{len(values)}f", *values)
    return struct.pack("<iQ", kind, len(data)) + data


def saved(path: Path, states: list[list[float]], *, kind: int = 0, attention: bytes = b"", tail: bytes = b"") -> Path:
    """As llama_state_seq_save_file writes it: tokens, an attention cache of any form, one cell, rows R, rows S."""
    tokens = [1, 5, 9]
    head = struct.pack("<3I", 0x67677371, 2, len(tokens)) + struct.pack("<3i", *tokens)
    cells = struct.pack("<5I", 1, len(tokens) - 1, 0, 0, 8)
    convolutions = b"".join(row(0, [0.5, 0.25]) for _ in states)
    path.write_bytes(head + attention + cells + convolutions + b"".join(row(kind, s) for s in states) + tail)
    return path


STATES = st.lists(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=20), min_size=1, max_size=4)


@given(STATES, st.binary(max_size=200))
def test_the_states_are_found_behind_an_attention_cache_of_any_form(
    tmp_path_factory: pytest.TempPathFactory, states: list[list[float]], attention: bytes
) -> None:
    path = saved(tmp_path_factory.mktemp("state") / "s", states, attention=attention)
    with harness.SavedState(str(path)) as state:
        found = [[value for part in state.slices(where) for value in part] for where in state.states]
    assert found == states


def test_a_difference_is_relative_to_the_largest_element_of_its_own_layer(tmp_path: Path) -> None:
    one = saved(tmp_path / "one", [[1.0, -2.0], [100.0, 50.0]])
    other = saved(tmp_path / "other", [[1.5, -2.0], [101.0, 50.0]])
    with harness.SavedState(str(one)) as mine, harness.SavedState(str(other)) as theirs:
        found = harness.difference(mine, theirs)
    assert found == {"max_error": 1.0, "relative_error": 0.25, "worst_state": 0}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: saved(path, [[1.0]], tail=b"xyz"), "no recurrent state"),
        (lambda path: saved(path, [[1.0]], kind=1), "not FP32"),
        (lambda path: path.write_bytes(b"GGUF" * 10) and path, "no saved sequence"),
        (lambda path: path.write_bytes(b"qs") and path, "ends too early"),
    ],
    ids=["something behind the states", "half precision", "another file", "cut off"],
)
def test_a_state_file_of_another_form_is_refused(tmp_path: Path, make: Any, words: str) -> None:
    make(tmp_path / "s")
    with pytest.raises(harness.StateError, match=words):
        harness.SavedState(str(tmp_path / "s"))


def test_states_of_other_shapes_are_not_compared(tmp_path: Path) -> None:
    one, other = saved(tmp_path / "one", [[1.0, 2.0]]), saved(tmp_path / "other", [[1.0]])
    with (
        harness.SavedState(str(one)) as mine,
        harness.SavedState(str(other)) as theirs,
        pytest.raises(harness.StateError, match="other shapes"),
    ):
        harness.difference(mine, theirs)


def answers(**changes: Any) -> Parity:
    """A server that is consistent with itself, with parts replaced."""
    whole = {"tokens": [7, 8, 9], "cache_n": 4}
    parts: dict[str, Any] = {
        "positions": {"prompt_sha256": "p", "positions": [{"position": 8, "top": {"1": -0.1, "2": -2.5}}]},
        "suites": {
            "texts": {
                "short": [{"id": "a", "prompt_sha256": "s", "tokens": [1, 2, 3], "margins": [2.0, 0.01, 1.0]}],
            }
        },
        "continuation": {"whole": [7, 8, 9], "chunks": {"256": whole, "512": whole}},
        "reuse": {name: [4, 5] for name in ("first", "other", "again", "after_erase", "after_cancel")},
    }
    return Parity.model_validate({**parts, **changes})


def test_an_output_error_is_the_largest_difference_of_a_log_probability() -> None:
    other = answers(positions={"prompt_sha256": "p", "positions": [{"position": 8, "top": {"1": -0.1, "2": -2.25}}]})
    assert parity.output_difference(answers(), other) == parity.OutputDifference(0.25, 8, 1)
    assert parity.output_difference(answers(), answers()) == parity.OutputDifference(0.0, 8, 1)


def test_a_token_that_fell_out_of_the_likeliest_counts_as_far_as_it_must_have_fallen() -> None:
    other = answers(positions={"prompt_sha256": "p", "positions": [{"position": 8, "top": {"2": -0.1, "3": -4.0}}]})
    found = parity.output_difference(answers(), other)
    assert found and found.max_error == pytest.approx(3.9)  # token 1: from -0.1 to -4.0 or below


def test_answers_to_other_questions_are_not_compared() -> None:
    other = answers(positions={"prompt_sha256": "q", "positions": [{"position": 8, "top": {"1": -0.1}}]})
    assert parity.output_difference(answers(), other) is None
    theirs = {"texts": {"short": [{"id": "a", "prompt_sha256": "other tokenizer", "tokens": [9]}]}}
    assert parity.divergences(answers(), answers(suites=theirs), "short") == ([], 0)


def test_a_divergence_names_its_token_and_how_clearly_the_baseline_had_chosen() -> None:
    theirs = {"texts": {"short": [{"id": "a", "prompt_sha256": "s", "tokens": [1, 7, 3]}]}}
    found, compared = parity.divergences(answers(), answers(suites=theirs), "short")
    assert compared == 1
    assert [str(divergence) for divergence in found] == ["short/a at token 2 (margin 0.01)"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"continuation": {"whole": [7], "chunks": {"256": {"tokens": [6]}}}}, ["chunks of 256"]),
        ({"reuse": {"first": [1], "again": [1], "after_erase": [2], "after_cancel": [1]}}, ["erased"]),
        (
            {"reuse": {"first": [1], "again": [3], "after_erase": [1], "after_cancel": [3]}},
            ["another prompt", "broken"],
        ),
        ({}, []),
    ],
    ids=["chunks", "erase", "state left over", "consistent"],
)
def test_a_server_that_contradicts_itself_is_found_out(changes: dict[str, Any], words: list[str]) -> None:
    found = parity.inconsistencies(answers(**changes))
    assert len(found) == len(words)
    assert all(word in text for word, text in zip(words, found, strict=True))


def test_the_suites_that_come_with_it_are_well_formed() -> None:
    suites = read_suites(Path(__file__).parents[2] / "inventory" / "suites")
    assert tuple(suites) == SUITES
    assert all(suites.values())


def test_all_that_is_wrong_with_suites_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "short.jsonl").write_text(
        '{"id": "a", "prompt": "x"}\n{"id": "a", "prompt": "y"}\nnonsense\n{"id": "b"}\n'
    )
    (tmp_path / "natural.jsonl").write_text("\n")
    with pytest.raises(InputError) as caught:
        read_suites(tmp_path)
    said = str(caught.value)
    for words in ("short.jsonl:2", "short.jsonl:3", "short.jsonl:4", "has no text", "long-prefix.jsonl"):
        assert words in said


@given(st.text(max_size=200))
def test_no_text_in_a_suite_is_a_traceback(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.mktemp("suites")
    for suite in SUITES:
        (folder / f"{suite}.jsonl").write_text(text + "\n" + json.dumps({"id": text}), encoding="utf-8")
    with pytest.raises(InputError):
        read_suites(folder)
