"""What makes a measurement count: blocks that are void, and what nothing proves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from judgekit import BASELINE, arm_of, facts_of, gate_of, head_unit, plan_of, spoil_samples

from k3deploy.judge import ArmVerdict


def spoil_argv(block: dict[str, Any]) -> None:
    argv = head_unit(block)["argv"]
    argv[argv.index("--ubatch-size") + 1] = "512"


def spoil_environment(block: dict[str, Any]) -> None:
    head_unit(block)["environment"]["GGML_CUDA_K3_FLASHKDA"] = "0"


def spoil_build(block: dict[str, Any]) -> None:
    head_unit(block)["build_id"] = "feedfacefeedface-00000000"


def spoil_binary(block: dict[str, Any]) -> None:
    units = block["ranks"]["rank2"]["state"]["units"]
    next(iter(units.values()))["exe_sha256"] = "0" * 64


def spoil_unit(block: dict[str, Any]) -> None:
    head_unit(block)["active"] = "failed"


def spoil_state(block: dict[str, Any]) -> None:
    block["ranks"]["rank1"]["state"] = None


def spoil_memory(block: dict[str, Any]) -> None:
    block["ranks"]["rank1"]["memory"] = None


def spoil_harness(block: dict[str, Any]) -> None:
    block["bench"]["harness_sha256"] = "0" * 64


def spoil_cell(block: dict[str, Any]) -> None:
    del block["bench"]["cells"][0]


def spoil_end(block: dict[str, Any]) -> None:
    block["bench"]["error"] = "the deadline of 900 s for the whole measurement has passed"


def spoil_start(block: dict[str, Any]) -> None:
    block["bench"] = None
    block["observations"]["fatal"] = [{"line": "different K (q8_0) and V (f16)", "meaning": "set both alike"}]


SPOILERS = [
    (spoil_argv, "lacks 2048 and has 512"),
    (spoil_environment, "GGML_CUDA_K3_FLASHKDA=0, planned was GGML_CUDA_K3_FLASHKDA=1"),
    (spoil_build, "ran feedfacefeedface-00000000 on rank0, planned was"),
    (spoil_binary, "is not the same file on every rank"),
    (spoil_unit, "the unit is failed"),
    (spoil_state, "rank1, worker: no state"),
    (spoil_memory, "the memory minimum of rank1 is not known"),
    (spoil_harness, "not measured by one known harness"),
    (spoil_samples, "cache_n is 60, not 0"),
    (spoil_cell, "was not measured"),
    (spoil_end, "not measured to its end: the deadline of 900 s"),
    (spoil_start, "set both alike"),
]


@pytest.mark.parametrize(("spoil", "words"), SPOILERS, ids=[spoil.__name__ for spoil, _ in SPOILERS])
def test_what_was_not_measured_as_planned_is_invalid_and_says_why(
    spoil: Callable[[dict[str, Any]], None], words: str
) -> None:
    facts = facts_of(5, 1.05)
    assert arm_of(facts).outcome == "ACCEPT"
    spoil(facts["blocks"][3])
    arm = arm_of(facts)
    assert arm.outcome == "INVALID"
    assert words in "; ".join(arm.reasons)


def test_a_broken_baseline_makes_every_arm_invalid() -> None:
    facts = facts_of(5, 1.05)
    spoil_samples(facts["blocks"][2])
    assert arm_of(facts).outcome == "INVALID"


def test_rdma_is_required_only_where_the_plan_says_so_and_must_then_be_proven() -> None:
    facts = facts_of(5, 1.05)
    plan = plan_of(transport={"require": "rdma"})
    assert arm_of(facts, plan).outcome == "INVALID"
    for block in facts["blocks"]:
        block["observations"]["rdma_activated"] = True  # a line proves nothing
    assert arm_of(facts, plan).outcome == "INVALID"
    for block in facts["blocks"]:
        block["transport"] = {"require": "rdma", "transport": "none", "connections": []}
    assert "what was found is none" in arm_of(facts, plan).reasons[0]
    for block in facts["blocks"]:
        block["transport"]["transport"] = "RDMA"
    assert arm_of(facts, plan).outcome == "ACCEPT"


def test_arms_with_one_setting_of_the_transport_must_have_had_one_transport() -> None:
    facts = facts_of(5, 1.05)
    for block in facts["blocks"]:
        kind = "TCP" if block["arm"] == BASELINE else "RDMA"
        one = {"worker": "rank1", "endpoint": "10.0.0.2:50053", "result": kind, "cause": None, "reason": ""}
        block["transport"] = {"require": "tcp", "transport": kind, "connections": [one]}
    arm = arm_of(facts)
    assert arm.outcome == "INVALID" and "the blocks had different transports" in arm.reasons[0]
    plan = plan_of()
    plan["arms"][0]["transport"] = {"rdma": "off", "require": "tcp"}  # as row U4 has it
    assert arm_of(facts, plan).outcome == "ACCEPT"


def test_a_sample_whose_own_counts_say_that_it_was_cached_is_never_a_cold_one() -> None:
    facts = facts_of(5, 1.05)
    facts["blocks"][4]["bench"]["cells"][0]["samples"][0]["cache_n"] = 500
    arm = arm_of(facts)
    assert arm.outcome == "INVALID" and "cache_n 500" in arm.reasons[0]


def test_a_block_in_which_nobody_could_see_foreign_requests_does_not_count() -> None:
    facts = facts_of(5, 1.05)
    facts["blocks"][1]["bench"]["foreign_check"] = "none"
    assert "nothing showed whether others sent requests" in arm_of(facts).reasons[0]


def test_a_program_of_unknown_hash_is_not_the_planned_one() -> None:
    facts = facts_of(5, 1.05)
    head_unit(facts["blocks"][1])["exe_sha256"] = None
    assert "the hash of its program was not recorded" in arm_of(facts).reasons[0]


def test_an_arm_whose_text_changes_with_every_start_is_rejected_unless_the_baselines_does_too() -> None:
    facts = facts_of(5, 1.05)
    for number, block in enumerate(facts["blocks"]):
        if block["arm"] != BASELINE:
            block["bench"]["cells"][0]["samples"][0]["tokens_sha256"] = f"{number:064x}"
    arm = arm_of(facts)
    assert arm.outcome == "REJECT" and "differs between its starts" in arm.reasons[0]
    for number, block in enumerate(facts["blocks"]):
        block["bench"]["cells"][0]["samples"][0]["tokens_sha256"] = f"{number:064x}"
    assert "same_after_restart" not in {gate.name for gate in arm_of(facts).gates}


CLAIM = {"kernel_ran": {"observation": "kda_chunked_active", "require": "at_least", "limit": 1}}


def claimed(markers: dict[str, dict[str, int]], **observed: Any) -> ArmVerdict:
    """The verdict on an arm that claims a kernel, of which its ranks said this."""
    facts, plan = facts_of(5, 1.05), plan_of()
    plan["gates"] |= CLAIM
    for block in facts["blocks"]:
        active = sum(said.get("kda_chunked_active", 0) for said in markers.values())
        block["observations"] |= {"rank_markers": markers, "kda_chunked_active": active, **observed}
        block["allocation"] = {
            rank: {"foreseen_mib": {}, "allocated_mib": {"model": size}} for rank, size in (("rank0", 90), ("rank1", 0))
        }
    return arm_of(facts, plan)


def test_a_claimed_kernel_ran_on_every_rank_that_holds_layers_or_the_block_does_not_count() -> None:
    ran, fell = {"kda_chunked_active": 1}, {"kda_chunked_fallback": 3}
    assert claimed({"rank0": ran}).outcome == "ACCEPT"  # rank1 holds none
    assert claimed({"rank0": ran, "rank1": {**ran, **fell}}).outcome == "ACCEPT"
    arm = claimed({"rank0": ran, "rank1": fell})
    assert arm.outcome == "INVALID" and "kda_chunked fell back 3 times and never ran on rank1" in arm.reasons[0]
    assert any("always fell back on rank1" in seen.text for seen in arm.findings)
    assert "never ran, and its log does not say why on rank0" in claimed({"rank1": ran}).reasons[0]
    assert claimed({}, truncated=["kda_chunked_active"]).outcome == "INCONCLUSIVE"


def test_chunks_that_the_server_evaluated_anew_prove_no_continuation() -> None:
    facts = facts_of(5, 1.05)
    for block in facts["blocks"]:
        block["bench"]["parity"]["continuation"]["chunks"]["256"]["cache_n"] = 0
    gate = gate_of(arm_of(facts), "continuation_and_reuse")
    assert gate.outcome == "open" and "evaluated the prompt anew in chunks of 256" in gate.reason


def test_a_suite_that_one_arm_answered_in_part_is_open() -> None:
    facts = facts_of(5, 1.05)
    more = {"id": "b", "prompt_sha256": "1", "tokens": [3]}
    for block in facts["blocks"]:
        if block["arm"] == BASELINE:
            block["bench"]["parity"]["suites"]["texts"]["short"].append(more)
    gate = gate_of(arm_of(facts), "suites")
    assert gate.outcome == "open" and "1 of 2 greedy texts could be compared" in gate.reason


def test_every_cold_and_warm_cell_must_count_in_every_block_but_an_unjudged_cached_one_need_not() -> None:
    facts = facts_of(5, 1.05)
    for block in facts["blocks"]:
        cached = copy.deepcopy(block["bench"]["cells"][0])
        block["bench"]["cells"].append({**cached, "state": "cached"})
    for sample in facts["blocks"][3]["bench"]["cells"][-1]["samples"]:
        sample.update(valid=False, why="no prefix hit: cache_n is 0")
    assert arm_of(facts).outcome == "ACCEPT"
    plan = plan_of()
    plan["gates"]["cached"] = {"cells": ["pp2048"], "state": "cached", "require": "not_slower"}
    assert arm_of(facts, plan).outcome == "INVALID"


def test_a_request_of_somebody_else_makes_a_block_void() -> None:
    facts = facts_of(5, 1.05)
    facts["blocks"][2]["bench"]["foreign"] = ["the server counted 900 tokens, ours were 512"]
    arm = arm_of(facts)
    assert arm.outcome == "INVALID" and "the server counted 900 tokens" in arm.reasons[0]


def test_a_baseline_below_the_floor_is_no_harm_of_the_candidate() -> None:
    facts = facts_of(5, 1.05)
    facts["blocks"][0]["ranks"]["rank3"]["memory"]["min_available_mib"] = 1535
    assert facts["blocks"][0]["arm"] == BASELINE
    assert arm_of(facts).outcome == "INVALID"


def test_a_pair_that_was_cut_for_hours_does_not_count() -> None:
    facts = facts_of(5, 1.05)
    facts["blocks"][0]["ended"] = "2026-11-29T12:00:00+00:00"
    facts["blocks"][0]["started"] = "2026-11-29T11:59:00+00:00"
    arm = arm_of(facts)
    assert arm.outcome == "INVALID" and "before pair 0 went on" in arm.reasons[0]


def test_a_part_of_the_parity_test_that_an_arm_refused_is_told_in_its_words() -> None:
    facts = facts_of(5, 1.05)
    for block in facts["blocks"][1::2]:
        block["bench"]["parity"]["suites"] = {"error": "the prompt (2115) exceeds the context (1024)"}
        block["bench"]["parity"]["continuation"] = {"error": "HTTP 500: no slot"}
    arm = arm_of(facts)
    assert arm.outcome == "INCONCLUSIVE"
    assert gate_of(arm, "suites").reason == "this arm: the prompt (2115) exceeds the context (1024)"
    assert gate_of(arm, "continuation_and_reuse").reason == "this arm: HTTP 500: no slot"
