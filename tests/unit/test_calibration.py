"""What the baseline against itself says, and what it lets a later run promise."""

from __future__ import annotations

import functools
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from judgekit import ARM, BASELINE, block_of, facts_of, plan_of
from test_plan import MATRIX, cluster, facts, plan

from k3deploy import calibration, stats
from k3deploy.cli import run as command
from k3deploy.commands import apply
from k3deploy.errors import ExitCode
from k3deploy.facts import Facts
from k3deploy.judge import judge
from k3deploy.plan import make_plan
from k3deploy.store import Store


@functools.cache
def measured(pairs: int = 6, spread: float = 0.003, second: float = 1.0) -> calibration.Calibration | None:
    """A calibration with blocks whose order alternates; ``second``: what being second in a pair does."""
    luck = random.Random(2)
    facts = facts_of(pairs)
    blocks = []
    for pair in range(pairs):
        order = (BASELINE, ARM) if pair % 2 == 0 else (ARM, BASELINE)
        for place, arm in enumerate(order):
            speed = (1 + luck.gauss(0, spread)) * (second if place else 1)
            block = block_of(arm, pair, speed)
            when = f"2026-11-30T{pair:02d}:{place}"
            block |= {"index": 2 * pair + place, "started": f"{when}0:00+00:00", "ended": f"{when}5:00+00:00"}
            blocks.append(block)
    plan = plan_for(pairs)
    found = Facts.model_validate({**facts, "blocks": blocks})
    return calibration.calibration_of(plan, found, judge(plan, found).arms[0])


def plan_for(pairs: int, delta: float = 0.02) -> dict[str, Any]:
    blocks = [{"index": i, "pair": i // 2, "arm": (BASELINE, ARM)[i % 2], "slug": "x"} for i in range(2 * pairs)]
    return plan_of(blocks=blocks, rule={"delta": delta, "looks": stats.looks(pairs)})


def campaign_for(pairs: int) -> dict[str, Any]:
    """The plan of a campaign: gates of its arms, none of its own."""
    plan = plan_for(pairs)
    own = {**plan["arms"][1], "gates": plan["gates"]}
    other = {**own, "name": "other", "gates": {"decode": {**plan["gates"]["cold_prefill"], "cells": ["tg100"]}}}
    return {**plan, "gates": {}, "arms": [plan["arms"][0], own, other]}


def test_spread_and_order_effect_are_told_apart() -> None:
    found = measured(second=1.05)
    assert found is not None and found.pairs == 6
    cell = found.of("pp2048", "cold", "speed")
    assert cell is not None
    assert cell.order == pytest.approx(1.05, abs=0.01) and cell.order_low > 1.02
    assert cell.ratio == pytest.approx(1.0, abs=0.01), "in half of the pairs the other one was second"


def test_two_pairs_are_no_calibration() -> None:
    assert measured(pairs=2) is None


HARNESS = Facts.model_validate(facts_of(1)).blocks[0].bench.harness_sha256  # type: ignore[union-attr]


def test_it_is_kept_by_cluster_model_build_and_settings(tmp_path: Path) -> None:
    found, plan = measured(), plan_for(8)
    assert found is not None and calibration.find(tmp_path, plan, HARNESS) is None
    calibration.write(tmp_path, found)
    assert calibration.find(tmp_path, plan, HARNESS) == found
    other = plan_for(8)
    other["arms"][0] = {**other["arms"][0], "build_key": "0" * 16}
    assert calibration.find(tmp_path, other, HARNESS) is None
    assert calibration.find(tmp_path, {**plan, "cluster": "elsewhere"}, HARNESS) is None
    assert calibration.find(tmp_path, {**plan, "calibrated_as": "changed"}, HARNESS) is None
    assert calibration.find(tmp_path, plan, "another harness") is None


def test_a_calibration_of_other_settings_is_not_used_and_named(tmp_path: Path) -> None:
    found, changed = measured(), {**plan_for(8), "calibrated_as": "changed"}
    assert found is not None and calibration.of_other_settings(tmp_path, changed) is None
    calibration.write(tmp_path, found)
    other = calibration.of_other_settings(tmp_path, changed)
    power = calibration.power(changed, None, other)
    assert power.problem == (
        f"no calibration for these settings (the last one, {found.run_id}, was for others: measure again)"
    )
    assert calibration.of_other_settings(tmp_path, {**changed, "cluster": "elsewhere"}) is None


def test_the_clusters_own_settings_change_what_a_calibration_is_for_and_a_rows_do_not() -> None:
    key = plan("U9").calibrated_as
    assert key and make_plan(MATRIX, cluster(), "calibrate", model_facts=facts(True)).calibrated_as == key
    assert plan("U7").calibrated_as == key, "it changes every arm, the baseline too"
    gpus = cluster(cpu=False)
    assert plan("U4", gpus).calibrated_as == plan("U9", gpus).calibrated_as, "it has a baseline of its own"
    changed = cluster(settings={**cluster().settings, "threads_batch": 3})
    assert plan("U9", changed).calibrated_as != key


def test_a_calibration_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    found = measured()
    assert found is not None
    calibration.write(tmp_path, found).write_text("{")
    assert calibration.find(tmp_path, plan_for(8), HARNESS) is None
    assert calibration.of_other_settings(tmp_path, plan_for(8)) is None


def test_a_run_without_enough_pairs_does_not_pass_for_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found, mapping = measured(), plan_for(3)
    assert found is not None and HARNESS is not None
    monkeypatch.setattr(calibration, "harness_sha256", lambda: HARNESS)
    calibration.write(tmp_path, found)
    run = Store(tmp_path).create(
        "calibrate", mapping, {}, cluster="c", inventory=tmp_path, tool={}, options={}, reason=""
    )
    monkeypatch.setattr(apply, "launch", lambda *_given, **_options: 0)
    assert command(["calibrate", "--runs", str(tmp_path), "--yes"]) == ExitCode.INCONCLUSIVE
    said = " ".join(capsys.readouterr().err.split())
    assert f"INCONCLUSIVE: {run.id} has too few pairs" in said and f"what {found.run_id} found" in said
    calibration.write(tmp_path, found.model_copy(update={"run_id": run.id}))
    assert command(["calibrate", "--runs", str(tmp_path), "--yes"]) == ExitCode.OK


def test_steady_starts_promise_a_small_gain() -> None:
    power = calibration.power(plan_for(8), measured(spread=0.003))
    assert power.problem == "" and power.detects is not None and 0.02 < power.detects < 0.04


def test_too_few_pairs_for_the_spread_are_a_problem_with_a_number() -> None:
    power = calibration.power(plan_for(6), measured(spread=0.02))
    assert "more than half of the 2 %" in power.problem
    assert power.needed is not None and power.spread is not None
    assert stats.half_width(power.needed, power.spread) <= math.log1p(0.02) / 2
    assert calibration.power(plan_for(6, delta=0.2), measured(spread=0.02)).problem == ""


def test_without_calibration_nothing_is_promised() -> None:
    power = calibration.power(plan_for(8), None)
    assert power.detects is None and "is not known" in power.problem


@pytest.mark.parametrize("pairs", [1, 3])
def test_a_few_pairs_cannot_be_accepted_however_steady_the_starts(pairs: int) -> None:
    assert "fewer than 5 pairs" in calibration.power(plan_for(pairs), measured()).problem


def power_of(pairs: int = 8, delta: float = 0.02, **cell: float) -> calibration.Power:
    """What ``pairs`` pairs promise where every cell of the calibration is as ``cell`` says."""
    found = measured()
    assert found is not None
    cells = [known.model_copy(update=cell) for known in found.cells]
    return calibration.power(plan_for(pairs, delta), found.model_copy(update={"cells": cells}))


def test_a_path_that_prefers_one_arm_is_a_problem() -> None:
    power = power_of(ratio=1.05, low=1.04, high=1.06)
    assert "differs from itself by +5.0 % on pp2048 cold" in power.problem and "k3deploy calibrate" in power.remedy


def test_a_sure_preference_is_a_problem_long_before_it_is_a_gain() -> None:
    assert "differs from itself by -0.7 %" in power_of(ratio=0.993, low=0.990, high=0.996).problem


def test_a_preference_that_is_sure_and_too_small_to_matter_is_none() -> None:
    assert power_of(ratio=1.002, low=1.001, high=1.003).problem == ""


def test_a_preference_that_may_be_luck_is_none() -> None:
    assert power_of(ratio=1.007, low=0.998, high=1.016).problem == ""


def test_a_sure_effect_of_the_order_is_a_problem() -> None:
    power = power_of(order=0.98, order_low=0.97, order_high=0.99)
    assert "being second in a pair makes pp2048 cold -2.0 %" in power.problem
    assert "what a block leaves behind" in power.remedy
    assert power_of(order=0.995, order_low=0.993, order_high=0.997).problem == "", "it cancels over the pairs"


def test_a_calibration_that_did_not_show_equality_is_a_problem_with_the_pairs_that_could() -> None:
    power = power_of(ratio=1.006, low=0.985, high=1.028, spread=0.02, pairs=20)
    assert "not shown that the baseline is equal to itself on pp2048 cold: -1.5 % to +2.8 %" in power.problem
    assert power.remedy == "k3deploy calibrate --pairs 11"
    assert power_of(ratio=1.006, low=0.985, high=1.028, spread=0.02, pairs=20, delta=0.04).problem == ""


def test_pairs_that_are_too_few_are_named_before_a_calibration_that_is_too_wide() -> None:
    assert "more than half" in power_of(ratio=1.0, low=0.97, high=1.03, spread=0.03).problem


@pytest.mark.parametrize(("spread", "at_most"), [(0.004, 0.01), (0.008, 0.08)])
def test_equal_starts_are_rarely_called_unequal(spread: float, at_most: float) -> None:
    """Calibrations of six pairs of equal starts; eight pairs may spread by 1.2 % and still be worth beginning."""
    luck, runs = np.random.default_rng(3), 300
    differences = luck.normal(0, spread, (runs, 6))
    signed = differences * np.array([1, -1, 1, -1, 1, -1])
    found = {name: _intervals(values) for name, values in (("ratio", differences), ("order", signed))}
    refused = 0
    for run in range(runs):
        (ratio, low, high), (order, order_low, order_high) = (found[name][run] for name in ("ratio", "order"))
        cell = {"ratio": ratio, "low": low, "high": high, "order": order, "order_low": order_low}
        refused += power_of(**cell, order_high=order_high, spread=spread).problem != ""
    assert refused / runs <= at_most


def _intervals(differences: Any) -> list[tuple[float, float, float]]:
    low, high = stats.interval(differences)
    return [tuple(map(float, row)) for row in np.exp(np.stack([differences.mean(axis=1), low, high], axis=1))]


def test_the_cell_that_takes_most_pairs_to_be_shown_not_slower_is_named() -> None:
    found = measured(spread=0.003)
    assert found is not None
    cells = [c.model_copy(update={"spread": 0.01 if c.cell == "tg100" else 0.002}) for c in found.cells]
    power = calibration.power(plan_for(8), found.model_copy(update={"cells": cells}))
    assert power.hardest is not None and power.hardest[0] == "tg100 cold"
    assert power.hardest[1] == stats.pairs_to_clear(math.log(0.99), 0.01) == 13


def test_a_campaign_is_held_to_the_gates_of_its_arms() -> None:
    assert calibration.primary_cells(campaign_for(8)) == [("pp2048", "cold", "speed"), ("tg100", "cold", "speed")]
    power = calibration.power(campaign_for(6), measured(spread=0.02))
    assert "more than half of the 2 %" in power.problem and power.detects is not None


def test_what_one_candidate_of_a_campaign_speeds_up_another_must_not_slow_down() -> None:
    found = measured(spread=0.003)
    assert found is not None
    cells = [c.model_copy(update={"spread": 0.01 if c.cell == "tg100" else 0.002}) for c in found.cells]
    power = calibration.power(campaign_for(8), found.model_copy(update={"cells": cells}))
    assert power.hardest is not None and power.hardest[0] == "tg100 cold"
