"""Planted faults on real llama.cpp, each caught by the gate meant for it; and a program that is the same passes all."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llamakit import Llama, head, measure, model_path, workers

from k3deploy.facts import Facts, assemble
from k3deploy.judge.evidence import Evidence
from k3deploy.judge.parity import parity_gates
from k3deploy.judge.planned import PlanView
from k3deploy.judge.verdict import GateResult

RUN = Path(__file__).parents[1] / "fixtures/run-small"
BASELINE, ARM = "baseline", "U2@2048"
CELLS = [{"cell": "pp64", "state": "cold", "n_prompt": 64, "n_predict": 1}]
TEXTS = [{"id": "count", "prompt": "One, two, three, four, five, six,"}, {"id": "capital", "prompt": "The capital is"}]
ASKED = {
    "positions": {"n_prompt": 256, "every": 64, "n_probs": 20},
    "suites": {"n_predict": 12, "texts": {"short": TEXTS}},
}
# The linear coefficient of the polynomial in ggml's vector exponential: every gate and every SiLU goes through it.
COEFFICIENT = struct.pack("<f", float.fromhex("0x1.ffffecp-1"))
PLANTED = struct.pack("<f", 0.99)

Ask = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def ask(llama: Llama, tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """``ask(slug, first worker, seed)``: the answers of one server start, its state held against the baseline's."""
    states = tmp_path_factory.mktemp("states")

    def asked(slug: str, first: Llama | None = None, seed: int = 7) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(slug)
        state = {"n_prompt": 256, "directory": str(states), "run": "run", "arm": slug, "with": [BASELINE]}
        flags = ("--metrics", "--ctx-checkpoints", "0", "--slot-save-path", str(states))
        with (
            workers(folder, first or llama, llama) as at,
            head(llama, folder, at, *flags, model=model_path(seed)) as made,
        ):
            result = measure(folder, made, cells=CELLS, parity={**ASKED, "state": state})
        assert result["error"] is None
        answers: dict[str, Any] = result["parity"]
        assert not [part["error"] for part in answers.values() if part.get("error")]
        return answers

    return asked


@pytest.fixture(scope="module")
def baseline(ask: Ask) -> dict[str, Any]:
    return ask(BASELINE)


def judged(before: dict[str, Any], after: dict[str, Any], *, other_build: bool) -> dict[str, GateResult]:
    """The parity gates of an arm with these answers, as a verdict has them."""
    plan = json.loads((RUN / "plan.json").read_text())
    plan["arms"] = [arm for arm in plan["arms"] if arm["name"] in (BASELINE, ARM)]
    plan["arms"][1]["build_key"] = "f" * 16 if other_build else plan["arms"][0]["build_key"]
    recorded = assemble(RUN).model_dump(mode="json")
    blocks = {block["arm"]: block for block in recorded["blocks"] if block["arm"] in (BASELINE, ARM)}
    for name, answers in ((BASELINE, before), (ARM, after)):
        blocks[name]["bench"]["parity"] = answers
    view = PlanView.model_validate(plan)
    facts = Facts.model_validate({**recorded, "blocks": list(blocks.values())})
    return {gate.name: gate for gate in parity_gates(Evidence.of(view, view.arms[1], facts))}


def test_another_start_of_the_same_program_passes_every_gate(ask: Ask, baseline: dict[str, Any]) -> None:
    found = judged(baseline, ask("U2-2048"), other_build=True)
    assert {name: found[name].outcome for name in ("exact_output", "exact_state", "suites")} == {
        "exact_output": "pass",
        "exact_state": "pass",
        "suites": "pass",
    }
    assert (found["exact_output"].observed, found["exact_state"].observed) == (0.0, 0.0)


def test_a_worker_with_a_changed_constant_fails_the_exact_gates(
    llama: Llama, ask: Ask, baseline: dict[str, Any], tmp_path: Path
) -> None:
    planted = replace(llama, release=tmp_path)
    shutil.copytree(llama.release / "bin", tmp_path / "bin")
    shutil.copytree(llama.release / "lib", tmp_path / "lib")
    for library in (tmp_path / "lib").glob("libggml-cpu.so*"):
        content = library.read_bytes()
        assert COEFFICIENT in content
        library.write_bytes(content.replace(COEFFICIENT, PLANTED))
    found = judged(baseline, ask("U2-2048", first=planted), other_build=True)
    assert {found[name].outcome for name in ("exact_output", "exact_state")} == {"fail"}, found


def test_an_arm_with_another_models_weights_fails_the_suites_though_its_program_is_the_same(
    ask: Ask, baseline: dict[str, Any]
) -> None:
    found = judged(baseline, ask("U2-2048", seed=8), other_build=False)
    assert found["suites"].outcome == "fail" and "not by a near tie" in found["suites"].reason
    assert "exact_output" not in found
