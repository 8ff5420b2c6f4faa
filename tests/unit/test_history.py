"""Runs over weeks: shifts of a baseline are found where they are and nowhere else, and unlike runs are not mixed."""

from __future__ import annotations

import copy
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from k3deploy import history
from k3deploy.cli import run as command
from k3deploy.commands.history import _rows as rows_of
from k3deploy.facts import assemble

RUN = Path(__file__).parents[1] / "fixtures/run-small"
PLAN: dict[str, Any] = json.loads((RUN / "plan.json").read_text())
FACTS = assemble(RUN)


def starts(levels: list[tuple[int, float]], spread: float, seed: int) -> list[float]:
    """Logarithms of speeds: so many starts around each level."""
    source = random.Random(seed)
    return [math.log(level) + source.gauss(0, spread) for count, level in levels for _ in range(count)]


def test_a_lasting_loss_of_speed_is_found_where_it_began() -> None:
    (shift,) = history.shifts(starts([(12, 100.0), (8, 94.0)], 0.01, seed=3))
    assert shift.at == 12
    assert shift.ratio == pytest.approx(0.94, abs=0.02)


def test_noise_alone_is_seldom_called_a_shift() -> None:
    found = sum(bool(history.shifts(starts([(20, 100.0)], 0.01, seed))) for seed in range(200))
    assert found <= 20


def test_one_slow_start_is_no_shift() -> None:
    values = starts([(20, 100.0)], 0.005, seed=5)
    values[9] -= 0.1
    assert [shift.at for shift in history.shifts(values)] == []


@pytest.mark.parametrize("values", [[], [4.6], [4.6] * 30, starts([(5, 100.0)], 0.01, 1)])
def test_too_few_starts_or_no_difference_at_all_give_no_shift(values: list[float]) -> None:
    assert history.shifts(values) == []


def test_starts_of_one_identity_are_one_series_whatever_run_they_are_of() -> None:
    later = FACTS.model_copy(update={"run_id": "another"})
    lines = history.series([(PLAN, FACTS), (PLAN, later)])
    assert len({line.identity for line in lines}) == 1
    assert all({point.run for point in line.points} == {FACTS.run_id, "another"} for line in lines)


@pytest.mark.parametrize("change", ["environment", "build", "model", "harness"])
def test_a_baseline_that_was_changed_starts_a_series_of_its_own(change: str) -> None:
    plan, facts = copy.deepcopy(PLAN), FACTS
    if change == "environment":
        next(iter(plan["arms"][0]["processes"].values()))["worker"]["environment"]["X"] = "1"
    elif change == "build":
        plan["arms"][0]["build_key"] = "0" * 16
    elif change == "model":
        plan["model"]["sha256"] = "0" * 64
    else:
        blocks = [
            block.model_copy(update={"bench": block.bench.model_copy(update={"harness_sha256": "other"})})
            for block in FACTS.blocks
            if block.bench
        ]
        facts = FACTS.model_copy(update={"blocks": blocks})
    assert len({line.identity for line in history.series([(PLAN, FACTS), (plan, facts)])}) == 2


def test_what_two_plans_differ_in_is_named_to_the_leaf() -> None:
    plan = copy.deepcopy(PLAN)
    plan["arms"][1]["settings"]["threads"] = 99
    plan["blocks"] = []  # another order is no difference
    before = PLAN["arms"][1]["settings"].get("threads")
    found = history.differences(history.comparable(PLAN), history.comparable(plan))
    assert found == [(f"arms.{PLAN['arms'][1]['name']}.settings.threads", str(before or "(none)"), "99")]


@pytest.mark.parametrize("name", ["history", "compare"])
def test_without_runs_the_commands_say_what_to_do(name: str, tmp_path: Path, capsys: Any) -> None:
    arguments = [name, *(["latest", "latest"] if name == "compare" else []), "--runs", str(tmp_path)]
    assert command(arguments) != 0
    assert "k3deploy apply" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("candidate", "rows"),
    [
        ("candidate-U2@3072+U6", ["U2", "U6"]),
        ("campaign-next,U9,U2@2048,U2@3072", ["next", "U9", "U2"]),
        ("calibrate", ["calibrate"]),
    ],
)
def test_a_row_is_found_in_compositions_and_in_campaigns(candidate: str, rows: list[str]) -> None:
    assert rows_of(candidate) == rows
