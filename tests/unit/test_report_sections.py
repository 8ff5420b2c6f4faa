"""What a report says beyond the gates: parity, time per rank, memory over time, transport, and what was void."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from judgekit import ARM, BASELINE, facts_of, plan_of

from k3deploy.facts import Facts
from k3deploy.judge import judge
from k3deploy.judge.profile import balanced_split
from k3deploy.report import charts, sections, words
from k3deploy.report.html import render_html
from k3deploy.report.text import render_markdown
from k3deploy.report.view import make_view

PLAN = plan_of()


def facts_with(change: Any, pairs: int = 1) -> Facts:
    """Recorded facts whose blocks ``change`` bends, each by itself."""
    document = facts_of(pairs)
    for block in document["blocks"]:
        change(block)
    return Facts.model_validate(document)


def timed(block: dict[str, Any]) -> None:
    """Timing lines of three ranks, of which one takes half as long again."""
    block["observations"]["rank_forward_ms"] = {"rank0": 100.0, "rank1": 150.0, "rank2": 100.0}
    block["observations"]["rank_rpc_ms"] = {"rank0": 5.0, "rank1": 5.0, "rank2": 5.0}


def remembered(block: dict[str, Any]) -> None:
    """A memory record of one rank over two minutes."""
    memory = {
        "min_available_mib": 2048,
        "samples": 3,
        "series": [[1000 + 60 * at, 4096 - 1024 * at] for at in range(3)],
    }
    block["ranks"] = {"rank0": {**block["ranks"]["rank0"], "memory": memory}}


def page(facts: Facts) -> str:
    return render_html(Path("run"), PLAN, facts, judge(PLAN, facts))


def test_every_answer_of_the_parity_test_is_shown_with_how_far_it_is_off() -> None:
    def differ(block: dict[str, Any]) -> None:
        if block["arm"] == ARM:
            block["bench"]["parity"]["suites"]["texts"]["short"][0]["tokens"] = [1, 9]

    rows = sections.parity_rows(PLAN, facts_with(differ))
    assert [(row.arm, row.differs) for row in rows if row.what.startswith("suite")] == [(ARM, True)]
    assert "short/a at token 2" in next(row.result for row in rows if row.differs)
    assert "short/a at token 2" in page(facts_with(differ))


def test_a_run_without_the_parity_test_says_so() -> None:
    facts = facts_with(lambda block: block["bench"].pop("parity"))
    assert sections.parity_rows(PLAN, facts) == []
    assert "were not asked" in page(facts)


def test_the_rank_that_the_others_wait_for_is_named_with_a_split_that_would_balance_it() -> None:
    found = judge(PLAN, facts_with(timed)).arms[0].findings
    (text,) = [seen.text for seen in found if "computes" in seen.text]
    assert text.startswith("rank1 computes 50 % longer")
    assert "no better split can be named: rank3 did not say" in text


def test_shares_go_to_each_rank_by_its_speed_and_keep_their_sum() -> None:
    forward = {"a": 100.0, "b": 150.0, "c": 100.0, "d": 100.0}
    split = balanced_split([1, 1, 1, 1], forward, list(forward))
    assert split == [1.09, 0.73, 1.09, 1.09]
    assert balanced_split([1, 1, 1], forward, list(forward)) is None
    assert balanced_split(None, forward, list(forward)) is None


def test_memory_is_drawn_for_each_rank_with_its_floor_and_the_warning() -> None:
    series = sections.memory_series(facts_with(remembered))
    assert [(arm, minutes) for arm, minutes, _ in series["rank0"]] == [(BASELINE, [0, 1, 2]), (ARM, [0, 1, 2])]
    drawn = charts.memory_chart(series, [BASELINE, ARM], {"rank0": 1536}, 4096)
    assert "rank0, GiB available" in drawn and "var(--bad)" in drawn
    assert charts.memory_chart({}, [], {}, None) == ""
    assert "Memory over time" in page(facts_with(remembered))


def test_what_did_not_count_is_in_page_and_markdown_with_its_reason() -> None:
    document = facts_of(1)
    document["void"] = [{"index": 3, "pair": 1, "arm": ARM, "void": "rank2 was <slow>"}]
    facts = Facts.model_validate(document)
    assert "rank2 was &lt;slow&gt;" in page(facts)
    assert "rank2 was \\<slow\\>" in render_markdown(PLAN, facts, judge(PLAN, facts))


@pytest.mark.parametrize("result", ["RDMA", "TCP"])
def test_each_connection_is_listed_once_with_what_carried_it(result: str) -> None:
    def carried(block: dict[str, Any]) -> None:
        one = {"worker": "rank1", "result": result, "reason": "the counters say so"}
        block["transport"] = {"require": "tcp", "transport": result, "connections": [one]}

    (row,) = sections.transport_rows(facts_with(carried, pairs=2))
    assert (row.worker, row.result) == ("rank1", result)
    assert row.blocks == "0, 1, 2, 3"


@pytest.mark.parametrize(
    ("pairs", "looks", "said"),
    [
        (1, [], "No ACCEPT can be spoken: it takes 5 pairs, and 1 were planned"),
        (8, [6, 8], "ACCEPT may be spoken after 6 pairs (2.36 %), 8 pairs (5.00 %)"),
    ],
)
def test_looks_and_what_each_may_spend_are_told_for_the_arm(pairs: int, looks: list[int], said: str) -> None:
    facts = Facts.model_validate(facts_of(pairs))
    plan = plan_of(rule={"looks": looks})
    verdict = judge(plan, facts)
    assert said in render_html(Path("run"), plan, facts, verdict)
    assert said in render_markdown(plan, facts, verdict)


def test_an_arm_that_shares_the_chance_of_a_wrong_accept_is_told_its_own_share() -> None:
    assert "8 pairs (2.50 %)" in words.looks([6, 8], 0.025, 6)
    assert "1 of 2 looks reached" in words.looks([6, 8], 0.025, 6)


def test_the_bootstraps_interval_stands_beside_the_one_that_decides() -> None:
    facts = Facts.model_validate(facts_of(8))
    plan = plan_of()
    verdict = judge(plan, facts)
    found = next(c for gate in verdict.arms[0].gates for c in gate.comparisons if c.bootstrap_low is not None)
    assert words.bootstrap(found) != words.interval(found)
    row = f"{words.interval(found)} | {words.bootstrap(found)}"
    assert row in render_markdown(plan, facts, verdict)
    shown = re.sub(r"</td><td[^>]*>", " | ", render_html(Path("run"), plan, facts, verdict))
    assert row in shown


def test_the_line_that_must_be_cleared_is_the_runs_own() -> None:
    facts = Facts.model_validate(facts_of(8))
    verdict = judge(plan_of(), facts)
    drawn = [charts.ratio_chart(verdict.arms[0], delta) for delta in (0.02, 0.3)]
    assert drawn[0] != drawn[1]
    asked = verdict.model_copy(update={"delta": 0.3})
    assert "“faster” (+30.0 %)" in render_html(Path("run"), PLAN, facts, asked)


def test_each_block_says_how_much_of_the_model_was_in_the_page_cache() -> None:
    def read(block: dict[str, Any]) -> None:
        cache = {"bytes": 1000, "resident_bytes": 250 if block["arm"] == ARM else 1000}
        block["ranks"]["rank0"]["health"] = {"before": {"page_cache": cache}}

    facts = facts_with(read)
    assert {row.arm: row.page_cache for row in make_view(Path("run"), PLAN, facts, judge(PLAN, facts)).blocks} == {
        BASELINE: "100 %",
        ARM: "25 %",
    }
    assert "25 %" in page(facts) and "25 %" in render_markdown(PLAN, facts, judge(PLAN, facts))


def nccl_of(**found: bool) -> list[str]:
    """What the provenance says where the manifests of these slugs say this."""

    def tell(block: dict[str, Any]) -> None:
        for rank in block["ranks"].values():
            rank["state"]["nccl"] = found

    facts = facts_with(tell)
    return [text for name, text in make_view(Path("run"), PLAN, facts, judge(PLAN, facts)).provenance if name == "NCCL"]


def test_the_provenance_says_whether_the_builds_found_nccl_and_what_that_is_worth() -> None:
    slug = next(arm["slug"] for arm in PLAN["arms"] if arm["name"] == ARM)
    used = "found at build, llama.cpp's RPC path does not use it"
    assert nccl_of(**{BASELINE: True, slug: True}) == [used]
    assert nccl_of(**{BASELINE: False, slug: False}) == ["not found at build"]
    assert nccl_of(**{BASELINE: False, slug: True}) == [f"not found at build ({BASELINE}); {used} ({ARM})"]
    assert nccl_of() == [], "a prebuilt release, or one from before"
