"""What a verdict may and may not say, on plans and blocks that each test bends a little."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judgekit import ARM, BASELINE, PLAN, RECORDED, arm_of, block_of, facts_of, gate_of, plan_of, verdict_of

from k3deploy.errors import InputError
from k3deploy.facts import Facts
from k3deploy.judge import ArmVerdict, judge

# --- accepting ---


def test_five_pairs_with_a_steady_gain_are_accepted() -> None:
    verdict = verdict_of(facts_of(5, 1.05))
    assert verdict.outcome == "ACCEPT" and verdict.best_arm == ARM
    assert gate_of(verdict.arms[0], "cold_prefill").comparisons[0].ratio == pytest.approx(1.05, rel=0.005)


def test_one_pair_is_never_accepted_however_large_the_gain() -> None:
    verdict = verdict_of(facts_of(1, 3.0))
    assert verdict.outcome == "INCONCLUSIVE"
    assert "one server start per arm says nothing about restart spread" in verdict.reason
    assert "at least 5 pairs" in verdict.reason


def test_four_pairs_are_not_accepted_either() -> None:
    assert verdict_of(facts_of(4, 1.2)).outcome == "INCONCLUSIVE"


def test_a_gain_below_two_per_cent_is_not_accepted() -> None:
    assert verdict_of(facts_of(6, 1.015)).outcome == "REJECT"


def test_a_gain_that_the_spread_can_explain_stays_open_and_says_how_many_pairs_it_takes() -> None:
    arm = arm_of(facts_of(5, lambda pair: 1.05 + 0.06 * (-1) ** pair))
    assert arm.outcome == "INCONCLUSIVE"
    assert "pairs are too few: at the spread seen it takes about" in arm.reasons[0]


def test_no_difference_is_not_called_a_gain() -> None:
    assert verdict_of(facts_of(8)).outcome == "REJECT"  # futile: no gain of 2 % is left to hope for


def test_a_gain_in_cold_prompts_is_not_bought_with_slower_warm_ones() -> None:
    facts = facts_of(6, 1.05)
    for block in facts["blocks"]:
        for cell in block["bench"]["cells"]:
            if block["arm"] == ARM and cell["state"] == "warm":
                for sample in cell["samples"]:
                    sample["prompt_ms"] *= 1.2
    arm = arm_of(facts)
    assert gate_of(arm, "cold_prefill").outcome == "pass"
    assert gate_of(arm, "warm").outcome == "fail" and arm.outcome == "REJECT"


def test_warm_samples_never_count_for_a_cold_gate() -> None:
    facts = facts_of(5)
    for block in facts["blocks"]:
        for cell in block["bench"]["cells"]:
            if block["arm"] == ARM and cell["state"] == "warm":
                for sample in cell["samples"]:
                    sample["prompt_ms"] /= 2
    assert gate_of(arm_of(facts), "cold_prefill").comparisons[0].ratio == pytest.approx(1.0, rel=0.01)


def test_only_the_primary_cell_must_gain_and_the_others_must_not_lose() -> None:
    facts = facts_of(6, 1.05)
    for block in facts["blocks"]:
        for cell in block["bench"]["cells"]:
            if block["arm"] == ARM and cell["cell"] == "pp4096":
                for sample in cell["samples"]:
                    sample["prompt_ms"] *= 1.045  # +5 % becomes about +0.5 %
                    sample["ttft_ms"] *= 1.045
    assert arm_of(facts).outcome == "ACCEPT"


def test_a_cold_cell_that_no_gate_names_must_not_lose_either() -> None:
    facts, plan = facts_of(6, 1.05), plan_of()
    plan["gates"] = {"cold_prefill": {"cells": ["pp2048"], "require": "faster"}}
    assert arm_of(facts, plan).outcome == "ACCEPT"
    for block in facts["blocks"]:
        for cell in block["bench"]["cells"]:
            if block["arm"] == ARM and cell["cell"].startswith("tg"):
                for sample in cell["samples"]:
                    sample["predicted_ms"] *= 1.2
    arm = arm_of(facts, plan)
    assert arm.outcome == "REJECT" and gate_of(arm, "other_cold").implied


def test_an_accept_is_spoken_only_at_a_planned_look() -> None:
    plan = plan_of(rule={"delta": 0.02, "looks": [6, 8]})
    assert [arm_of(facts_of(pairs, 1.05), plan).outcome for pairs in (6, 7, 8)] == ["ACCEPT", "INCONCLUSIVE", "ACCEPT"]
    assert "only at a planned look (after 6, 8 pairs)" in "; ".join(arm_of(facts_of(7, 1.05), plan).reasons)


def test_harm_and_futility_may_stop_between_looks() -> None:
    plan = plan_of(rule={"delta": 0.02, "looks": [6, 8]})
    assert arm_of(facts_of(3, 0.9), plan).outcome == "REJECT"
    futile = arm_of(facts_of(4, 1.0), plan)
    assert futile.outcome == "REJECT" and "no gain of +2.0 % is left to hope for" in "; ".join(futile.reasons)


def test_the_smallest_worthwhile_gain_is_the_plans() -> None:
    plan = plan_of(rule={"delta": 0.10, "looks": [6]})
    assert arm_of(facts_of(6, 1.05), plan).outcome == "REJECT"
    assert arm_of(facts_of(6, 1.2), plan).outcome == "ACCEPT"


def test_a_run_that_may_not_be_accepted_says_why() -> None:
    plan = plan_of(rule={"delta": 0.02, "looks": [6], "no_accept": "the spread of this cluster is not known"})
    arm = arm_of(facts_of(6, 1.05), plan)
    assert arm.outcome == "INCONCLUSIVE"
    assert arm.reasons[0] == "every gate passes, but the spread of this cluster is not known"


def test_a_run_that_is_not_at_its_end_says_what_is_left_and_how_long_it_takes() -> None:
    arm = arm_of(facts_of(4, 1.05), plan_of(rule={"delta": 0.02, "looks": [6, 8]}))
    assert arm.reasons[0] == "4 of 8 planned pairs are measured; 4 are left, about 0.1 h"


# --- rejecting ---


def test_a_slower_arm_is_rejected_with_enough_pairs() -> None:
    arm = arm_of(facts_of(5, 0.95))
    assert arm.outcome == "REJECT" and "slower" in arm.reasons[0]


def test_one_pair_decides_no_speed_however_large_the_loss() -> None:
    assert arm_of(facts_of(1, 0.6)).outcome == "INCONCLUSIVE"
    assert arm_of(facts_of(3, 0.6)).outcome == "REJECT"


def test_the_recorded_run_of_a_busy_machine_stays_inconclusive() -> None:
    verdict = judge(PLAN, Facts.model_validate(RECORDED))
    assert verdict.outcome == "INCONCLUSIVE" and [arm.outcome for arm in verdict.arms] == ["INCONCLUSIVE"] * 2


def test_a_rank_below_its_floor_is_rejected_whatever_the_speed() -> None:
    facts = facts_of(5, 1.3)
    facts["blocks"][1]["ranks"]["rank3"]["memory"]["min_available_mib"] = 1535
    arm = arm_of(facts)
    assert arm.outcome == "REJECT" and "rank3 had 1535 MiB" in arm.reasons[0]


def test_a_block_that_the_guard_ended_is_rejected_for_memory_and_not_called_invalid() -> None:
    facts = facts_of(1)
    facts["blocks"][1]["bench"]["error"] = "the stream broke off"
    facts["blocks"][1]["ranks"]["rank2"]["memory"]["min_available_mib"] = 900
    assert arm_of(facts).outcome == "REJECT"


def test_what_the_guard_recorded_rejects_the_arm_in_its_own_words_even_where_no_minimum_shows_it() -> None:
    """A floor of free memory is crossed while MemAvailable still looks well."""
    facts = facts_of(1)
    words = "floor of free memory crossed on rank2: 512 MiB free without CMA at 12:03:11 UTC"
    facts["blocks"][1]["bench"] = {"cells": [], "error": words}
    facts["blocks"][1]["ranks"]["rank2"]["guard"] = {"what": "free", "words": words, "at": 1.0}
    arm = arm_of(facts)
    assert arm.outcome == "REJECT" and arm.reasons == [f"memory_floor: {words}"]


def test_an_orphaned_worker_says_nothing_about_memory() -> None:
    facts = facts_of(1)
    facts["blocks"][1]["ranks"]["rank2"]["guard"] = {"what": "orphan", "words": "the head is gone", "at": 1.0}
    assert gate_of(arm_of(facts), "memory_floor").outcome == "pass"


def test_a_floor_that_the_baseline_crossed_spoils_the_run_and_rejects_nobody() -> None:
    facts = facts_of(1)
    facts["blocks"][0]["bench"] = {"cells": [], "error": "memory floor crossed on rank1"}
    facts["blocks"][0]["ranks"]["rank1"]["guard"] = {"what": "memory", "words": "w", "at": 1.0}
    arm = arm_of(facts)
    assert arm.outcome == "INVALID" and "memory floor crossed on rank1" in arm.reasons[0]


def test_a_run_that_was_killed_in_a_block_says_so_and_how_it_goes_on() -> None:
    facts = facts_of(1)
    facts["blocks"][1] |= {"bench": None, "ended": None, "error": ""}
    assert "the run was stopped or killed in it" in arm_of(facts).reasons[0]
    del facts["blocks"][1]
    planned = plan_of(blocks=[{"index": n, "pair": n // 2, "arm": (BASELINE, ARM)[n % 2]} for n in range(4)])
    (reason,) = arm_of(facts, planned).reasons
    assert "1 of 4 planned blocks are measured" in reason and "apply --resume" in reason


def texts_of(arm: ArmVerdict) -> str:
    return "\n".join(seen.text for seen in arm.findings)


def test_a_forecast_that_is_off_by_more_than_a_tenth_is_a_finding() -> None:
    facts = facts_of(1)
    right = {"foreseen_mib": {"model": 95.0}, "allocated_mib": {"model": 100.0}, "error": -0.05, "wrong": False}
    off = {"foreseen_mib": {"model": 120.0}, "allocated_mib": {"model": 100.0}, "error": 0.2, "wrong": True}
    facts["blocks"][1]["allocation"] = {"rank1": right, "rank2": off}
    arm = arm_of(facts)
    assert f"the memory forecast of {ARM} is off on rank2: 120 MiB foreseen, 100 allocated (+20 %)" in texts_of(arm)
    assert "on rank1" not in texts_of(arm)
    assert [(m.foreseen_mib, m.allocated_mib, m.forecast_error) for m in arm.memory[1:3]] == [
        (95.0, 100.0, -0.05),
        (120.0, 100.0, 0.2),
    ]


def test_memory_that_falls_with_every_request_is_a_finding() -> None:
    facts = facts_of(1)
    for block, loss in zip(facts["blocks"], (0.0, 10.0), strict=True):
        rows = [[float(at), 9000 - loss * at, 1, 0, 1, 0.0, 0.0] for at in range(60)]
        block["ranks"]["rank3"]["memory"] |= {"series": rows, "ready_at": 9.0, "min_available_mib": 8000}
    arm = arm_of(facts)
    assert "available memory of rank3 changes by -" in texts_of(arm) and "the baseline's changes by +0.0" in texts_of(
        arm
    )
    assert (arm.memory[3].trend_mib_per_request or 0) < -1
    assert arm.memory[2].trend_mib_per_request is None


def test_a_rank_that_came_below_its_warning_is_told() -> None:
    facts = facts_of(1)
    rank = facts["blocks"][1]["ranks"]["rank1"]
    rank["memory"]["min_available_mib"] = 3000
    assert "below the warning" not in texts_of(arm_of(facts))
    rank["state"]["guard"] = {"armed": {"warn_mib": 4096}}
    assert "rank1 came down to 3000 MiB of available memory, below the warning at 4096 MiB" in texts_of(arm_of(facts))


def test_another_text_is_rejected_where_the_row_demands_the_same() -> None:
    plan = plan_of()
    plan["gates"]["quality"] = {"suite": "long-prefix", "require": "identical"}
    facts = facts_of(5, 1.05)
    assert arm_of(facts, plan).outcome == "INCONCLUSIVE"  # the suite itself was not run
    facts["blocks"][1]["bench"]["cells"][0]["samples"][0]["tokens_sha256"] = "0" * 64
    arm = arm_of(facts, plan)
    assert arm.outcome == "REJECT" and "greedy output differs in 1 of" in gate_of(arm, "quality").reason


def test_identity_is_not_judged_when_the_baseline_contradicts_itself() -> None:
    plan = plan_of()
    plan["gates"]["quality"] = {"suite": "long-prefix", "require": "identical"}
    facts = facts_of(5, 1.05)
    facts["blocks"][2]["bench"]["cells"][0]["samples"][0]["tokens_sha256"] = "0" * 64
    assert gate_of(arm_of(facts, plan), "quality").outcome == "open"


def test_reuse_of_a_moved_prefix_that_changes_the_text_is_rejected() -> None:
    facts = facts_of(5, 1.05)
    for block in facts["blocks"]:
        own = block["arm"] == ARM
        block["observations"] |= {"prefix_reuse_effective": own, "prefix_reuse_identical": not own}
        block["observations"] |= {"cache_reuse_disabled": False} if own else {}
        block["bench"]["probes"] = {"shifted_prefix": {"cache_n": 512 if own else 0}}
    arm = arm_of(facts)
    assert arm.outcome == "REJECT" and gate_of(arm, "prefix_reuse_text").outcome == "fail"
    assert "reused 512 tokens" in arm.reasons[0] and "(the baseline: 0)" in arm.reasons[0]
    assert any(seen.contradicts and "changes the output" in seen.text for seen in arm.findings)


def test_cache_reuse_without_effect_is_a_finding_against_the_hypothesis() -> None:
    facts = facts_of(1)
    facts["blocks"][1]["observations"] |= {
        "prefix_reuse_effective": False,
        "prefix_reuse_identical": True,
        "cache_reuse_disabled": True,
    }
    assert any(seen.contradicts and "no effect" in seen.text for seen in arm_of(facts).findings)


def test_other_microbatches_than_the_baseline_s_are_told() -> None:
    facts = facts_of(1)
    for block, batches in zip(facts["blocks"], ([2048], [1276, 768, 4]), strict=True):
        cell = next(cell for cell in block["bench"]["cells"] if (cell["cell"], cell["state"]) == ("pp2048", "cold"))
        for sample in cell["samples"]:
            sample["batches"] = batches
    texts = [seen.text for seen in arm_of(facts).findings]
    assert "microbatches as sent: pp2048 cold 1276+768+4 (baseline 1536+512)" in texts


def test_blocks_that_start_with_and_without_the_model_in_the_page_cache_are_told_apart() -> None:
    facts = facts_of(1)
    for block, resident in zip(facts["blocks"], (0, 1000), strict=True):
        block["ranks"]["rank0"]["health"] = {"before": {"page_cache": {"bytes": 1000, "resident_bytes": resident}}}
    texts = [seen.text for seen in verdict_of(facts).findings]
    assert any(text.startswith("block 0 started page-cache-cold") for text in texts)


# --- observations ---


@pytest.mark.parametrize(
    ("gate", "value", "outcome"),
    [
        ({"require": "equals", "limit": False}, False, "pass"),
        ({"require": "equals", "limit": False}, True, "fail"),
        ({"require": "at_most", "limit": 0.001}, 0.0009, "pass"),
        ({"require": "at_most", "limit": 0.001}, 0.0011, "fail"),
        ({"require": "at_least", "limit": 2}, 3, "pass"),
        ({"require": "at_least", "limit": 2}, 1, "fail"),
        ({"require": "not_higher"}, 9, "pass"),
        ({"require": "not_higher"}, 11, "fail"),
    ],
)
def test_an_observation_gate_says_what_was_seen(gate: dict[str, Any], value: Any, outcome: str) -> None:
    plan = plan_of(gates={"seen": {"observation": "thing", **gate}})
    facts = facts_of(1)
    facts["blocks"][0]["observations"]["thing"] = 10
    facts["blocks"][1]["observations"]["thing"] = value
    assert gate_of(arm_of(facts, plan), "seen").outcome == outcome


@pytest.mark.parametrize(
    ("key", "require", "seen", "outcome"),
    [
        ("flashkda_fallback", "at_most", 0, "open"),
        ("flashkda_fallback", "at_most", 3, "fail"),
        ("flashkda_active", "at_least", 3, "pass"),
        ("flashkda_active", "at_least", 0, "open"),
        ("rpc_p99", "at_most", 9.0, "open"),
    ],
    ids=["maybe more", "more already", "enough already", "maybe enough", "no count"],
)
def test_what_only_a_part_is_known_of_is_judged_where_the_rest_cannot_change_it(
    key: str, require: str, seen: float, outcome: str
) -> None:
    plan = plan_of(gates={"seen": {"observation": key, "require": require, "limit": 1}})
    facts = facts_of(1)
    facts["blocks"][1]["observations"] |= {key: seen, "truncated": [key]}
    arm = verdict_of(facts, plan).arms[0]
    gate = next(gate for gate in arm.gates if gate.name == "seen")
    assert gate.outcome == outcome
    assert any("longer than what is kept" in finding.text for finding in arm.findings)


def test_an_observation_that_nothing_speaks_of_leaves_the_gate_open() -> None:
    plan = plan_of(gates={"seen": {"observation": "rpc_p99", "require": "not_higher"}})
    arm = arm_of(facts_of(5), plan)
    assert arm.outcome == "INCONCLUSIVE" and "speaks of rpc_p99" in gate_of(arm, "seen").reason


# --- the candidate as a whole ---


def test_an_empty_run_is_invalid_and_not_an_error() -> None:
    verdict = judge(PLAN, Facts.model_validate({**RECORDED, "blocks": []}))
    assert verdict.outcome == "INVALID" and "no pair" in verdict.reason


def test_one_good_arm_of_a_sweep_is_enough() -> None:
    facts = facts_of(6, 1.05)
    slow = [{**block_of("U2@3072", pair, 0.8), "index": 100 + pair} for pair in range(6)]
    verdict = judge(PLAN, Facts.model_validate({**facts, "blocks": [*facts["blocks"], *slow]}))
    assert [arm.outcome for arm in verdict.arms] == ["ACCEPT", "REJECT"]
    assert verdict.outcome == "ACCEPT" and verdict.best_arm == ARM


def test_arms_of_a_sweep_share_the_chance_of_a_false_accept() -> None:
    facts = facts_of(5, 1.05)
    other = [{**block_of("U2@3072", pair, 0.8), "index": 100 + pair} for pair in range(5)]
    verdict = judge(PLAN, Facts.model_validate({**facts, "blocks": [*facts["blocks"], *other]}))
    # Alone, five pairs are accepted; of two arms the better one has 2.5 %, which five pairs cannot reach.
    assert [arm.outcome for arm in verdict.arms] == ["INCONCLUSIVE", "REJECT"]
    assert [arm.alpha for arm in verdict.arms] == [0.025, 0.0]  # Holm: the first does not pass
    assert "does not pass what may be spent here (0.025)" in "; ".join(verdict.arms[0].reasons)


def test_a_plan_that_lacks_its_gates_is_a_problem_with_a_name() -> None:
    plan = plan_of()
    del plan["gates"]
    with pytest.raises(InputError, match="gates"):
        judge(plan, Facts.model_validate(RECORDED))


def test_a_file_of_production_that_changes_while_a_run_goes_on_is_told_once() -> None:
    facts = facts_of(2)
    path = "/etc/systemd/system/llama-server.service"
    for block in facts["blocks"]:
        block["ranks"]["rank1"]["state"]["production"] = {"files": {path: "old" if block["index"] < 2 else "new"}}
    told = [seen.text for seen in verdict_of(facts).findings if "production's" in seen.text]
    assert told == [f"production's {path} on rank1 changed between block 0 and block 2"]


def test_judging_twice_gives_the_same_verdict() -> None:
    facts = Facts.model_validate(facts_of(6, 1.03))
    assert judge(plan_of(), facts) == judge(plan_of(), facts)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.floats(0.3, 3.0), st.floats(0.0, 0.2))
def test_every_run_gets_one_of_the_four_outcomes_and_few_pairs_never_accept(
    pairs: int, gain: float, spread: float
) -> None:
    verdict = verdict_of(facts_of(pairs, gain, spread))
    assert verdict.outcome in {"ACCEPT", "REJECT", "INCONCLUSIVE", "INVALID"}
    assert verdict.outcome != "ACCEPT" or (pairs >= 5 and gain > 1)
    assert verdict.reason
