"""Many candidates in one window: one baseline, each arm judged by its own row's gates, nothing dropped in silence."""

from __future__ import annotations

import pytest
from judgekit import ARM, BASELINE, facts_of, plan_of
from test_plan import MATRIX, cluster, plan

from k3deploy.cli import run as command
from k3deploy.commands import apply
from k3deploy.facts import Facts
from k3deploy.judge import judge
from k3deploy.matrix import CandidateError
from k3deploy.plan import Plan, PlanError, make_campaign
from k3deploy.report.matrix import matrix_rows
from k3deploy.report.text import render_matrix


def campaign(*candidates: str, pairs: int = 2) -> Plan:
    return make_campaign(MATRIX, cluster(), "campaign-" + ",".join(candidates), pairs=pairs)


def test_every_arm_of_every_candidate_runs_in_each_round_beside_one_baseline() -> None:
    found = campaign("U2", "U9")
    names = {"baseline", "U2@2048", "U2@3072", "U9"}
    assert {arm.name for arm in found.arms} == names
    for pair in range(2):
        assert sorted(block.arm for block in found.blocks if block.pair == pair) == sorted(names)


def test_what_one_candidate_needs_measured_is_measured_in_all_blocks() -> None:
    found, alone = campaign("U9", "U7"), plan("U7")
    assert {(cell.cell, cell.state) for cell in alone.bench.cells} <= {(c.cell, c.state) for c in found.bench.cells}
    assert set(alone.bench.probes) <= set(found.bench.probes)


def test_what_a_row_asks_of_every_arm_holds_for_all_arms_of_the_campaign() -> None:
    found = campaign("U9", "U7")
    assert {arm.settings["ctx_checkpoints"] for arm in found.arms} == {4}
    assert {arm.settings["ctx_checkpoints"] for arm in campaign("U9").arms} == {0}


def test_each_arm_carries_the_gates_of_its_own_row() -> None:
    found = campaign("U9", "U6")
    gates = {arm.name: set(arm.gates or {}) for arm in found.arms[1:]}
    assert gates == {name: set(plan(name).gates) for name in ("U9", "U6")}
    assert found.gates == {} and found.baseline.gates is None


def test_an_arm_that_two_candidates_share_is_measured_once() -> None:
    assert [arm.name for arm in campaign("U2", "U2@2048").arms] == ["baseline", "U2@2048", "U2@3072"]


def test_a_candidate_that_is_impossible_here_is_left_out_and_named() -> None:
    found = campaign("U9", "U10")
    assert [arm.name for arm in found.arms] == ["baseline", "U9"]
    assert any(note.startswith("U10 is left out") for note in found.notes)


def test_a_campaign_of_impossible_candidates_is_refused_with_each_reason() -> None:
    with pytest.raises(PlanError, match="U10 is left out"):
        campaign("U10")


def test_a_misspelt_candidate_is_an_error_and_not_left_out() -> None:
    with pytest.raises(CandidateError, match="U99"):
        campaign("U9", "U99")


def test_an_arm_is_judged_by_its_own_gates_alone() -> None:
    merged = plan_of()
    own = merged["gates"]
    alone = judge(plan_of(), Facts.model_validate(facts_of(8, 1.04)))
    merged["arms"][1] |= {"candidate": "U2", "gates": own}
    merged["gates"] = {}
    together = judge(merged, Facts.model_validate(facts_of(8, 1.04)))
    assert [gate.name for gate in together.arms[0].gates] == [gate.name for gate in alone.arms[0].gates]
    merged["arms"][1]["gates"] = {}
    assert not {gate.name for gate in judge(merged, Facts.model_validate(facts_of(8, 1.04))).arms[0].gates} & set(own)


def test_the_matrix_names_hypothesis_verdict_effect_and_cost_of_each_arm() -> None:
    facts = Facts.model_validate(facts_of(8, 1.04))
    verdict = judge(plan_of(), facts)
    (row,) = matrix_rows(plan_of(), facts, verdict)
    assert row.arm == ARM != BASELINE
    assert row.hypothesis and row.verdict == verdict.arms[0].outcome
    assert row.effect.startswith("pp2048 cold +3.8 % (+3.6 % to") and "8 starts" in row.cost
    assert all(word in render_matrix([row], width=200) for word in (row.arm, row.verdict, row.cost))


def test_a_campaign_without_candidates_says_where_they_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["campaign"]) == 2
    assert "k3deploy matrix" in capsys.readouterr().err


def test_a_campaign_takes_the_options_of_an_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[apply.Request, bool]] = []

    def launch(request: apply.Request, *, anyway: bool, **_others: object) -> int:
        asked.append((request, anyway))
        return 0

    monkeypatch.setattr(apply, "launch", launch)
    options = ["--delta", "3", "--seed", "7", "--max-hours", "2.5", "--anyway"]
    assert command(["campaign", "U2", "U9", *options]) == 0
    ((request, anyway),) = asked
    assert request.candidate == "campaign-U2,U9" and request.max_hours == 2.5 and anyway
    assert (request.options["delta"], request.options["seed"]) == (3.0, 7)
