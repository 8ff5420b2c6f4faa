"""What a run measures next, and what becomes of a block that is void."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from judgekit import ARM, BASELINE, PLAN, RUN, block_of, facts_of, plan_of, spoil_samples

from k3deploy.commands.advise import advise, main, put_aside
from k3deploy.facts import Facts, assemble
from k3deploy.judge import judge
from k3deploy.judge.step import Step, next_step, spares


def plan_for(pairs: int, looks: list[int] | None = None) -> dict[str, Any]:
    blocks = [
        {"index": 2 * pair + place, "pair": pair, "arm": arm, "slug": arm.replace("@", "-")}
        for pair in range(pairs)
        for place, arm in enumerate((BASELINE, ARM))
    ]
    return plan_of(blocks=blocks, rule={"delta": 0.02, "looks": looks or [pairs]})


def step_of(facts: dict[str, Any], plan: dict[str, Any], **options: Any) -> Step:
    return next_step(plan, Facts.model_validate(facts), **options)


def test_planned_blocks_come_in_their_order_until_all_are_measured() -> None:
    plan, facts = plan_for(2), facts_of(2, lambda pair: 1.05 - 0.05 * pair)
    order = []
    for recorded in range(5):
        step = step_of({**facts, "blocks": facts["blocks"][:recorded]}, plan)
        order.append(step.block["index"] if step.block else None)
    assert order == [0, 1, 2, 3, None]


def test_a_void_block_is_measured_again_at_once() -> None:
    plan, facts = plan_for(3), facts_of(2)
    spoil_samples(facts["blocks"][3])
    step = step_of(facts, plan)
    assert step.block == plan["blocks"][3]
    assert list(step.void) == [3] and "cache_n is 60, not 0" in step.void[3] and step.why == step.void[3]


def test_a_void_block_is_not_measured_again_without_end() -> None:
    plan, facts = plan_for(2), facts_of(2)
    spoil_samples(facts["blocks"][1])
    facts["void"] = [{"index": 1, "pair": 0, "arm": ARM, "void": "a prefix hit"} for _ in range(2)]
    step = step_of(facts, plan)
    assert step.block is None and "often enough" in step.why and not step.void


def test_whether_a_block_is_void_does_not_depend_on_its_speed() -> None:
    plan = plan_for(3)
    for speed in (0.01, 0.5, 1.0, 2.0, 100.0):
        facts = facts_of(2)
        facts["blocks"][3] = block_of(ARM, 1, speed)
        assert step_of(facts, plan).void == {}


def test_the_half_of_a_pair_that_is_hours_old_is_measured_again() -> None:
    plan, facts = plan_for(2), facts_of(1)
    facts["blocks"][0] |= {"started": "2026-11-29T10:00:00+00:00", "ended": "2026-11-29T10:01:00+00:00"}
    step = step_of(facts, plan)
    assert list(step.void) == [0] and step.block == plan["blocks"][0]


@pytest.mark.parametrize(("gain", "pairs", "outcome"), [(0.9, 3, "REJECT"), (1.0, 4, "REJECT"), (1.06, 6, "ACCEPT")])
def test_a_run_ends_when_its_verdict_stands(gain: float, pairs: int, outcome: str) -> None:
    plan = plan_for(8, [6, 8])
    step = step_of(facts_of(pairs, gain), plan)
    assert step.block is None and step.why.startswith(f"{outcome} after {pairs} pairs")


def test_a_run_whose_only_blocks_left_are_of_a_decided_arm_is_at_its_end() -> None:
    plan, facts = plan_for(5, [5]), facts_of(1)
    other = next(arm["name"] for arm in PLAN["arms"] if arm["name"] not in (BASELINE, ARM))
    plan["arms"] = PLAN["arms"]
    plan["blocks"] = [
        {"index": 3 * pair + place, "pair": pair, "arm": arm, "slug": arm.replace("@", "-")}
        for pair in range(5)
        for place, arm in enumerate((BASELINE, other, ARM))
    ]
    blocks = []
    for pair in range(5):
        blocks += [block_of(BASELINE, pair, 1.0), block_of(other, pair, 1.0 + 0.08 * (-1) ** pair)]
        blocks += [block_of(ARM, pair, 0.8)] if pair < 4 else []
    for block in blocks:
        block["index"] = 3 * block["pair"] + (BASELINE, other, ARM).index(block["arm"])
    step = step_of({**facts, "blocks": blocks}, plan)
    assert step.block is None and step.why == "every block of an arm that is not decided yet is measured"


def test_a_gain_does_not_end_a_run_between_looks() -> None:
    assert step_of(facts_of(5, 1.06), plan_for(8, [6, 8])).block is not None


def test_an_arm_below_the_floor_ends_the_run_and_is_not_tried_again() -> None:
    plan, facts = plan_for(8), facts_of(1)
    facts["blocks"][1]["ranks"]["rank3"]["memory"]["min_available_mib"] = 900
    facts["blocks"][1]["bench"]["error"] = "the guard ended it"
    step = step_of(facts, plan)
    assert step.block is None and step.why.startswith("REJECT") and step.void == {}


BREAKS = {"rpc_errors": {"observation": "rpc_errors", "require": "at_most", "limit": 0}}


@pytest.mark.parametrize(
    ("gates", "outcome"), [(BREAKS, "REJECT"), ({}, None)], ids=["judged by it", "not judged by it"]
)
def test_transfers_that_break_a_block_are_harm_where_a_row_judges_them_and_else_another_try(
    gates: dict[str, Any], outcome: str | None
) -> None:
    plan, facts = plan_for(2), facts_of(1)
    plan["gates"] = {**plan["gates"], **gates}
    broken = facts["blocks"][1]
    broken["bench"] |= {"cells": [], "error": "the stream broke off: the server, or a worker behind it, died"}
    broken["observations"] = {**broken.get("observations", {}), "rpc_errors": 1}
    step = step_of(facts, plan)
    if outcome:
        assert step.block is None and step.void == {} and step.why.startswith(outcome)
    else:
        assert list(step.void) == [1] and step.block == plan["blocks"][1]


def test_no_round_begins_that_would_not_end_in_time() -> None:
    plan, facts = plan_for(8), facts_of(2, lambda pair: 1.05 - 0.05 * pair)  # blocks of 50 seconds
    assert step_of(facts, plan, now=1000, until=1101).block is not None
    step = step_of(facts, plan, now=1000, until=1099)
    assert step.block is None and "--max-hours" in step.why
    assert step_of({**facts, "blocks": []}, plan, now=1000, until=1099, block_s=50).block is None
    begun = {**facts, "blocks": facts["blocks"][:3]}
    assert step_of(begun, plan, now=1000, until=1001).block is not None, "a round that has begun is finished"


def test_spare_blocks_are_bounded() -> None:
    assert [spares(blocks) for blocks in (2, 8, 16, 24)] == [2, 2, 4, 6]


# --- blocks that broke ---

OTHER = next(arm["name"] for arm in PLAN["arms"] if arm["name"] not in (BASELINE, ARM))


def broken(index: int, arm: str, reason: str = "the head did not come up", hour: int = 10) -> dict[str, Any]:
    moment = f"2026-11-30T{hour}:00:00+00:00"
    return {"index": index, "pair": 0, "arm": arm, "void": reason, "broken": True, "ended": moment}


def campaign(pairs: int = 3) -> dict[str, Any]:
    plan = plan_for(pairs, [pairs])
    plan["arms"] = PLAN["arms"]
    plan["blocks"] = [
        {"index": 3 * pair + place, "pair": pair, "arm": arm, "slug": arm.replace("@", "-")}
        for pair in range(pairs)
        for place, arm in enumerate((BASELINE, OTHER, ARM))
    ]
    return plan


def measured(*blocks: tuple[int, str, int]) -> list[dict[str, Any]]:
    """Blocks as (index, arm, pair)."""
    return [{**block_of(arm, pair, 1.0), "index": index} for index, arm, pair in blocks]


def test_a_block_that_broke_once_is_tried_again() -> None:
    facts = {**facts_of(1), "blocks": measured((0, BASELINE, 0)), "void": [broken(1, OTHER)]}
    step = step_of(facts, campaign())
    assert step.block is not None and step.block["index"] == 1


def test_an_arm_that_cannot_start_is_given_up_and_the_others_go_on() -> None:
    plan, void = campaign(), [broken(1, OTHER), broken(1, OTHER)]
    facts = {**facts_of(1), "blocks": measured((0, BASELINE, 0)), "void": void}
    order = []
    while (step := step_of(facts, plan)).block is not None:
        order.append(step.block["index"])
        block = step.block
        facts["blocks"] = [*facts["blocks"], *measured((block["index"], block["arm"], block["pair"]))]
    assert order == [2, 3, 5, 6, 8]


def test_breaks_of_several_blocks_that_were_measured_then_do_not_give_an_arm_up() -> None:
    blocks = measured((0, BASELINE, 0), (1, OTHER, 0), (2, ARM, 0), (3, BASELINE, 1))
    facts = {**facts_of(1), "blocks": blocks, "void": [broken(1, OTHER), broken(1, OTHER), broken(4, OTHER)]}
    step = step_of(facts, campaign())
    assert step.block is not None and step.block["index"] == 4


def test_breaks_leave_the_spare_blocks_to_those_that_are_void() -> None:
    blocks = measured((0, BASELINE, 0), (2, ARM, 0))
    spoil_samples(blocks[1])
    step = step_of({**facts_of(1), "blocks": blocks, "void": [broken(1, OTHER), broken(1, OTHER)]}, campaign())
    assert step.block is not None and step.block["index"] == 2


def test_a_run_ends_when_its_only_arm_or_its_baseline_cannot_start() -> None:
    facts = {**facts_of(1), "blocks": measured((0, BASELINE, 0))}
    step = step_of({**facts, "void": [broken(1, ARM), broken(1, ARM, "port taken", 11)]}, plan_for(3))
    assert step.block is None and step.why == f"{ARM} broke 2 times and is given up: port taken"
    step = step_of({**facts, "blocks": [], "void": [broken(0, BASELINE), broken(0, BASELINE)]}, campaign())
    assert step.block is None and step.why.startswith("baseline broke 2 times")


def test_an_arm_that_was_given_up_is_invalid_with_the_reason_of_its_last_break() -> None:
    blocks = measured((0, BASELINE, 0), (1, OTHER, 0), (2, ARM, 0))
    void = [broken(4, OTHER, "port taken", 12), broken(4, OTHER, "no route", 11)]
    verdict = judge(campaign(), Facts.model_validate({**facts_of(1), "blocks": blocks, "void": void}))
    other, arm = (next(one for one in verdict.arms if one.arm == name) for name in (OTHER, ARM))
    assert other.outcome == "INVALID"
    assert other.reasons[0] == f"blocks: block 4 ({OTHER}) does not count: port taken"
    assert not any("does not count" in reason for reason in arm.reasons)


def test_a_run_of_which_nothing_counts_is_invalid_and_says_the_last_reason_first() -> None:
    void = [broken(1, OTHER, "rank1: RDMA fell back", 12), broken(1, OTHER, "an older reason", 11)]
    verdict = judge(campaign(), Facts.model_validate({**facts_of(1), "blocks": [], "void": void}))
    assert all(arm.reasons[0].endswith("rank1: RDMA fell back") for arm in verdict.arms)
    assert verdict.outcome == "INVALID" and verdict.reason.endswith("does not count: rank1: RDMA fell back")


# --- the program that the playbook asks ---


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    place = tmp_path / "run"
    shutil.copytree(RUN, place)
    return place


def test_a_void_block_is_put_aside_with_its_logs_and_its_reason(run_dir: Path) -> None:
    record = json.loads((run_dir / "blocks/001.json").read_text())
    log = run_dir / next(iter(record["ranks"]["rank0"]["logs"].values()))
    text = log.read_text()
    put_aside(run_dir, 1, "somebody else asked")
    assert not (run_dir / "blocks/001.json").exists() and not log.exists()
    facts = assemble(run_dir)
    assert [(void.index, void.void) for void in facts.void] == [(1, "somebody else asked")]
    kept = json.loads((run_dir / "void/001-1.json").read_text())
    assert text in [(run_dir / name).read_text() for name in kept["ranks"]["rank0"]["logs"].values()]


def test_the_advisor_prints_one_object_and_says_what_is_wrong(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run_dir)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer.keys() == {"block", "why"}
    (run_dir / "blocks/000.json").write_text("{")
    assert main([str(run_dir)]) == 1
    assert "000.json:1" in capsys.readouterr().err


def test_advice_about_a_finished_run_is_to_stop(run_dir: Path) -> None:
    assert advise(run_dir)["block"] is None
