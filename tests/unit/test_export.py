"""What other programs read of a run: the fields that they know, every sample, and nothing that breaks them."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from k3deploy.cli import run as command
from k3deploy.facts import assemble
from k3deploy.judge import judge
from k3deploy.report import export

RUN = Path(__file__).parents[1] / "fixtures/run-small"
PLAN: dict[str, Any] = json.loads((RUN / "plan.json").read_text())
FACTS = assemble(RUN)
VERDICT = judge(PLAN, FACTS)
SAMPLES = [
    (block, cell, sample)
    for block in FACTS.blocks
    for cell in (block.bench.cells if block.bench else [])
    for sample in cell.samples
]


def test_an_entry_has_the_fields_of_llama_bench_and_says_which_arm_and_state_it_is() -> None:
    entries = json.loads(export.llama_bench(PLAN, FACTS, VERDICT))
    assert entries
    for entry in entries:
        assert (entry["n_prompt"] > 0) != (entry["n_gen"] > 0)
        assert entry["avg_ts"] == pytest.approx(sum(entry["samples_ts"]) / len(entry["samples_ts"]))
        assert len(entry["samples_ns"]) == len(entry["samples_ts"])
        assert entry["k3_state"] in {"cold", "warm", "cached"}
    assert {entry["k3_arm"] for entry in entries} == {block.arm for block in FACTS.blocks}


def test_a_cells_speed_is_its_tokens_by_its_time() -> None:
    for entry in json.loads(export.llama_bench(PLAN, FACTS, VERDICT)):
        if entry["n_prompt"] and entry["k3_state"] == "cold":
            for taken, speed in zip(entry["samples_ns"], entry["samples_ts"], strict=True):
                assert speed == pytest.approx(entry["n_prompt"] / taken * 1e9, rel=1e-6)


def test_a_textfile_has_one_line_a_value_and_every_label_closed() -> None:
    lines = export.prometheus(PLAN, FACTS, VERDICT).splitlines()
    value = re.compile(r'k3deploy_\w+\{(?:\w+="(?:[^"\\]|\\.)*",?)+\} [0-9.e+-]+')
    assert all(line.startswith("# ") or value.fullmatch(line) for line in lines)
    assert f'outcome="{VERDICT.outcome}"' in lines[2]
    assert sum("tokens_per_second{" in line for line in lines) > 0


def test_a_label_cannot_end_its_line_early() -> None:
    plan = {**PLAN, "cluster": 'a"b\\c\nd'}
    assert 'cluster="a\\"b\\\\c\\nd"' in export.prometheus(plan, FACTS, VERDICT)


def test_the_table_has_every_request_and_marks_those_that_do_not_count() -> None:
    rows = list(csv.DictReader(io.StringIO(export.table(PLAN, FACTS, VERDICT))))
    assert len(rows) == len(SAMPLES)
    assert [row["valid"] == "True" for row in rows] == [sample.valid for _, _, sample in SAMPLES]
    assert [row["cell"] for row in rows] == [cell.cell for _, cell, _ in SAMPLES]


def test_each_gate_and_check_is_a_case_and_only_a_failed_one_fails() -> None:
    root = ElementTree.fromstring(export.junit(PLAN, FACTS, VERDICT))
    for suite, arm in zip(root, VERDICT.arms, strict=True):
        assert len(suite) == len(arm.gates) + len(arm.checks) == int(suite.attrib["tests"])
        failed = [f"gate.{gate.name}" for gate in arm.gates if gate.outcome == "fail"]
        failed = [*(f"validity.{check.name}" for check in arm.checks if not check.passed), *failed]
        assert [case.attrib["name"] for case in suite if case.find("failure") is not None] == failed
        assert int(suite.attrib["failures"]) == len(failed)


def test_a_reason_with_control_codes_is_still_xml() -> None:
    arm = VERDICT.arms[0]
    gate = arm.gates[0].model_copy(update={"outcome": "fail", "reason": "a \x00 b \x1b[31m <&> \ud83d"})
    changed = VERDICT.model_copy(update={"arms": [arm.model_copy(update={"gates": [gate]})]})
    ElementTree.fromstring(export.junit(PLAN, FACTS, changed))


def test_a_form_that_is_not_known_is_refused_with_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["export", "--format", "yaml"]) == 2
    assert "llama-bench" in capsys.readouterr().err
