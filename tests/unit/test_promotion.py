"""What forbids a promotion, what production would run after one, and the texts that an operator applies."""

from __future__ import annotations

import copy
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from promotionkit import HASHES, RUN_ID, TOOLCHAIN, accepted_run, records

from k3deploy import inventory as inventories
from k3deploy.commands import planning, promote
from k3deploy.errors import K3Error
from k3deploy.facts import Facts
from k3deploy.plan.model import Plan
from k3deploy.promotion import RankNow, demotion, layer, promotion, refusals, render, runbook_gates
from k3deploy.promotion.model import UnitNow
from k3deploy.promotion.unit import dropin

sys.path.insert(0, str(Path(__file__).parents[2] / "collections"))

from ansible_collections.k3.deploy.plugins.filter import promotion as filters
from ansible_collections.k3.deploy.plugins.filter import systemd

GB10 = Path(__file__).parents[2] / "inventory" / "gb10"
ACCEPT = {"outcome": "ACCEPT", "reason": "faster", "best_arm": "U2@2048"}


@pytest.fixture(scope="module")
def cluster() -> inventories.Cluster:
    return inventories.load(GB10)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planning.make("candidate-U2@2048", GB10, None, 5).plan


def facts_of(blocks: list[dict[str, Any]]) -> Facts:
    return Facts.model_validate({"run_id": RUN_ID, "candidate": "candidate-U2@2048", "blocks": blocks})


def production(cluster: inventories.Cluster, plan: Plan) -> dict[str, RankNow]:
    """Every rank with the judged release, and production as it runs."""
    ranks = {}
    for rank, processes in plan.arms[1].processes.items():
        units = {}
        if processes.worker is not None:
            units[cluster.production.worker_unit] = UnitNow(
                text="[Service]\n", argv=["/opt/llm/ggml-rpc-server", "--host", "0.0.0.0", "--port", "50052"]
            )
        if processes.head is not None:
            argv = ["/opt/llm/llama-server", "--host", "0.0.0.0", "--port", "8080", "--api-key-file", "/etc/k"]
            units[cluster.production.head_unit] = UnitNow(text="[Service]\n", argv=argv, environment={"GGML_X": "1"})
        files = {"bin/" + name: digest for name, digest in HASHES.items()}
        ranks[rank] = RankNow(files=files, units=units)
    return ranks


def refused(plan: Plan, blocks: list[dict[str, Any]], verdict: dict[str, Any], ranks: Any = None) -> list[str]:
    facts, arm = facts_of(blocks), plan.arms[1]
    return refusals(verdict, runbook_gates(facts, plan.baseline.name, arm.name), facts, arm, ranks)


# --- what forbids it --------------------------------------------------------------------------------------------------


def test_an_accept_with_all_evidence_and_the_judged_build_is_not_refused(
    cluster: inventories.Cluster, plan: Plan
) -> None:
    assert refused(plan, records(plan), ACCEPT, production(cluster, plan)) == []


@pytest.mark.parametrize("outcome", ["REJECT", "INCONCLUSIVE", "INVALID", None])
def test_any_other_verdict_is_refused_with_its_reason(plan: Plan, outcome: str | None) -> None:
    (problem,) = refused(plan, records(plan), {"outcome": outcome, "reason": "why not"})
    assert str(outcome) in problem and "why not" in problem


def _no_window(blocks: list[dict[str, Any]]) -> None:
    for rank in blocks[1]["ranks"].values():
        rank["state"]["window"] = {"run_id": "another"}


def _no_cell(blocks: list[dict[str, Any]]) -> None:
    blocks[1]["bench"]["cells"] = [cell for cell in blocks[1]["bench"]["cells"] if cell["cell"] != "pp512"]


def _without(part: str) -> Any:
    def spoil(blocks: list[dict[str, Any]]) -> None:
        blocks[1]["bench"]["parity"][part] = None

    return spoil


def _failed(blocks: list[dict[str, Any]]) -> None:
    blocks[0]["bench"]["parity"]["state"] = {"error": "slot save is off"}


def _short_suite(blocks: list[dict[str, Any]]) -> None:
    del blocks[0]["bench"]["parity"]["suites"]["texts"]["long-prefix"]


@pytest.mark.parametrize(
    ("spoil", "gate", "words"),
    [
        (_no_window, "1 ", "inside this run's window"),
        (_without("positions"), "2 ", "256-token test of U2@2048"),
        (_failed, "2 ", "slot save is off"),
        (_without("suites"), "3 ", "suite short"),
        (_short_suite, "3 ", "suite long-prefix of the baseline"),
        (_no_cell, "4 ", "pp512 cold of U2@2048"),
        (_without("continuation"), "5 ", "continuation in chunks of U2@2048"),
        (_without("reuse"), "5 ", "reset and reuse"),
    ],
)
def test_a_gate_without_evidence_in_both_arms_is_refused_by_name(plan: Plan, spoil: Any, gate: str, words: str) -> None:
    blocks = copy.deepcopy(records(plan))
    spoil(blocks)
    (problem,) = refused(plan, blocks, ACCEPT)
    assert problem.startswith(f"gate {gate}") and words in problem


def test_a_run_inside_the_operator_s_own_window_is_evidence_of_the_window(plan: Plan) -> None:
    blocks = records(plan)
    for one in blocks:
        for rank in one["ranks"].values():
            if rank["state"]["window"]:
                rank["state"]["window"] = {"run_id": "by-hand", "guest": RUN_ID}
    assert refused(plan, blocks, ACCEPT) == []


def test_a_rank_whose_release_is_another_or_gone_is_refused(cluster: inventories.Cluster, plan: Plan) -> None:
    ranks = production(cluster, plan)
    names = sorted(ranks)
    ranks[names[0]] = RankNow(files={**ranks[names[0]].files, "bin/llama-server": "c" * 64})
    ranks[names[1]] = RankNow(files={})
    del ranks[names[2]]
    problems = " | ".join(refused(plan, records(plan), ACCEPT, ranks))
    assert "is not the file that was judged" in problems
    assert f"{names[1]}: release" in problems and f"{names[2]}: was not read" in problems


def test_a_run_of_two_builds_or_of_another_than_planned_is_refused(plan: Plan) -> None:
    blocks = records(plan)
    unit = next(iter(next(iter(blocks[1]["ranks"].values()))["state"]["units"].values()))
    unit["build_id"] = "ffff-00112233"
    assert "does not show one build" in refused(plan, blocks, ACCEPT)[0]
    for rank in blocks[1]["ranks"].values():
        for one in rank["state"]["units"].values():
            one["build_id"] = "ffff-00112233"
    assert "its plan was a build of" in refused(plan, blocks, ACCEPT)[0]


def test_everything_that_is_wrong_is_said_at_once(plan: Plan) -> None:
    assert len(refused(plan, [], {"outcome": "INVALID"})) >= 6


# --- what production would run ----------------------------------------------------------------------------------------


def made(cluster: inventories.Cluster, plan: Plan, ranks: dict[str, RankNow] | None = None) -> Any:
    facts, arm = facts_of(records(plan)), plan.arms[1]
    gates = runbook_gates(facts, plan.baseline.name, arm.name)
    ranks = ranks or production(cluster, plan)
    return promotion(cluster, plan, facts, arm, gates, ranks, run_id=RUN_ID, owner="alice@desk", reason="faster")


def test_production_gets_the_judged_settings_at_its_own_address_and_ports(
    cluster: inventories.Cluster, plan: Plan
) -> None:
    found = made(cluster, plan)
    head = found.ranks["gb10-0"][0]
    line = " ".join(head.argv)
    assert head.argv[0] == f"/opt/llm/k3deploy/{found.build_id}/bin/llama-server"
    assert "--ubatch-size 2048" in line and "--host 0.0.0.0 --port 8080" in line
    assert "--rpc 192.168.100.11:50052,192.168.100.12:50052,192.168.100.13:50052" in line
    assert "50053" not in line and "8081" not in line and "--slot-save-path" not in line
    assert head.environment["LD_LIBRARY_PATH"] == f"/opt/llm/k3deploy/{found.build_id}/lib"
    worker = found.ranks["gb10-1"][0]
    assert worker.argv[1:5] == ["--host", "0.0.0.0", "--port", "50052"]
    assert worker.unit == cluster.production.worker_unit


def test_what_only_production_s_unit_has_is_not_lost_in_silence(cluster: inventories.Cluster, plan: Plan) -> None:
    assert any("--api-key-file /etc/k" in note for note in made(cluster, plan).notes)


def test_the_plan_shows_argv_environment_difference_and_the_text_to_apply(
    cluster: inventories.Cluster, plan: Plan
) -> None:
    found = made(cluster, plan)
    text = render(found, "promotions/x")
    assert "k3deploy window open" in text and "k3deploy demote" in text
    assert "these steps are done by hand" in text and "playbooks/promote.yml" not in text
    for unit in (unit for units in found.ranks.values() for unit in units):
        assert unit.dropin.strip() in text
    assert "+ --ubatch-size 2048" in text and "- GGML_X=1" in text
    for number in range(1, 6):
        assert re.search(rf"^\| {number} ", text, re.MULTILINE)


def test_managed_production_is_changed_by_the_playbook_with_the_plan_s_layer(
    cluster: inventories.Cluster, plan: Plan
) -> None:
    managed = cluster.model_copy(update={"production": cluster.production.model_copy(update={"managed": True})})
    found = made(managed, plan)
    assert "-i promotions/x/inventory playbooks/promote.yml" in render(found, "promotions/x")
    data = layer(found)
    assert data["all"]["vars"]["k3_run_promotion"]["action"] == "promote"
    assert data["all"]["vars"]["k3_run_owner"] == "alice@desk"
    assert set(data["all"]["hosts"]) == set(plan.ranks)
    units = data["all"]["hosts"]["gb10-1"]["k3_run_promotion_units"]
    assert list(units) == [cluster.production.worker_unit]


def test_a_demotion_puts_back_what_each_rank_recorded(cluster: inventories.Cluster, plan: Plan) -> None:
    ranks = production(cluster, plan)
    unit = cluster.production.worker_unit
    before = UnitNow(text="x", dropin="now", argv=["a"])
    current = {"candidate": "candidate-U2", "build_id": "b-1", "previous": {unit: "[Service]\nearlier\n"}}
    ranks["gb10-1"] = RankNow(units={unit: before}, record={"current": current})
    found = demotion(cluster, ranks, owner="alice@desk", reason="")
    assert found.action == "demote" and found.candidate == "candidate-U2"
    assert found.ranks["gb10-1"][0].dropin == "[Service]\nearlier\n"
    assert found.ranks["gb10-2"][0].dropin == ""
    text = render(found, "promotions/y")
    assert "earlier" in text and "is removed" in text


# --- unit texts -------------------------------------------------------------------------------------------------------

PRINTABLE = st.text(st.characters(blacklist_categories=("Cc", "Cs", "Zl", "Zp")))


@given(st.lists(PRINTABLE, min_size=1, max_size=4))
def test_a_command_line_is_quoted_as_candidates_units_are(argv: list[str]) -> None:
    (line,) = re.findall(r"^ExecStart=(.+)$", dropin("p", argv, {}), re.MULTILINE)
    assert line == systemd.systemd_exec(argv)


@given(PRINTABLE)
def test_any_value_arrives_exactly_in_the_environment(value: str) -> None:
    (line,) = re.findall(r'^Environment="(.*)"$', dropin("p", ["/x"], {"NAME": value}), re.MULTILINE)
    assert re.sub(r"\\(.)", r"\1", line).replace("%%", "%") == f"NAME={value}"


@given(st.sampled_from(["\n", "\0", "\x1b", "\u2028", "\x85"]))
def test_a_line_break_in_a_value_is_refused(char: str) -> None:
    with pytest.raises(K3Error):
        dropin("p", ["/x", f"a{char}ExecStartPre=/bin/sh"], {})
    with pytest.raises(K3Error):
        dropin("p", ["/x"], {"NAME": f"a{char}b"})


def test_a_drop_in_replaces_what_the_unit_says_of_program_environment_and_limits() -> None:
    lines = dropin("p", ["/x", "$HOME"], {"A": "1"}, 1024, "5-9").splitlines()
    assert lines.index("ExecStart=") < lines.index('ExecStart="/x" "$$HOME"')
    assert lines.index("EnvironmentFile=") < lines.index('Environment="A=1"')
    assert "LimitMEMLOCK=1024" in lines and "CPUAffinity=5-9" in lines
    assert "LimitMEMLOCK=infinity" in dropin("p", ["/x"], {})


# --- the window -------------------------------------------------------------------------------------------------------

HEAD_UNIT = "llama-server.service"


@pytest.mark.parametrize(
    ("window", "active", "problem"),
    [
        ({"owner": "alice@desk"}, "inactive", ""),
        (None, "inactive", "no maintenance window is open"),
        ({"owner": "bob@desk", "run_id": "r"}, "inactive", "LOCKED: the maintenance window is held by bob@desk"),
        ({"owner": "alice@desk", "closing": 1.0}, "inactive", "LOCKED"),
        ({"damaged": True}, "inactive", "LOCKED"),
        ({"owner": "alice@desk"}, "active", "runs inside the window"),
    ],
)
def test_production_is_changed_only_in_one_s_own_window_with_production_drained(
    window: dict[str, Any] | None, active: str, problem: str
) -> None:
    head = {"window": window, "units": {HEAD_UNIT: {"active": active}}}
    found = filters.promotion_problems(head, "alice@desk", "", HEAD_UNIT)
    assert (found == []) if not problem else problem in found[0]


def test_another_s_window_is_used_only_by_its_holder_s_name() -> None:
    head = {"window": {"owner": "bob@desk"}, "units": {}}
    assert filters.promotion_problems(head, "alice@desk", "bob@desk", HEAD_UNIT) == []
    assert filters.promotion_problems(head, "alice@desk", "carol@desk", HEAD_UNIT)


# --- the commands -----------------------------------------------------------------------------------------------------


@pytest.fixture
def run_of(tmp_path: Path, plan: Plan) -> Any:
    """Makes a run directory with a verdict."""

    def make(verdict: dict[str, Any]) -> Path:
        run = accepted_run(tmp_path / "runs", plan, GB10, HASHES, TOOLCHAIN)
        (run.path / "verdict.json").write_text(json.dumps(verdict))
        return run.path

    return make


def call(tmp_path: Path, *arguments: str) -> Any:
    options = ["-i", str(GB10), "--runs", str(tmp_path / "runs"), "--promotions", str(tmp_path / "promotions")]
    return CliRunner().invoke(promote.promote, ["candidate-U2@2048", *options, *arguments], standalone_mode=False)


def test_a_refused_promotion_contacts_no_rank_and_writes_nothing(
    tmp_path: Path, run_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("a rank was contacted")

    monkeypatch.setattr(promote, "read_ranks", never)
    run_of({"outcome": "REJECT", "reason": "slower"})
    result = call(tmp_path)
    assert isinstance(result.exception, promote.Refused) and result.exception.exit_code == 4
    assert "REJECT" in str(result.exception)
    assert not (tmp_path / "promotions").exists()


def test_an_accepted_candidate_gets_a_plan_and_a_check_writes_none(
    tmp_path: Path, run_of: Any, monkeypatch: pytest.MonkeyPatch, cluster: inventories.Cluster, plan: Plan
) -> None:
    run_of(ACCEPT)
    monkeypatch.setattr(promote, "read_ranks", lambda *_: production(cluster, plan))
    checked = call(tmp_path, "--check")
    assert checked.exception is None and "# Promote candidate-U2@2048" in checked.output
    assert not (tmp_path / "promotions").exists()
    written = call(tmp_path, "--json")
    assert written.exception is None, written.exception
    place = Path(json.loads(written.output)["path"])
    assert {path.name for path in place.rglob("*") if path.is_file()} == {"plan.json", "PLAN.md", "promotion.yml"}
    assert inventories.load(GB10, place / "inventory").name == "gb10"  # the layer lies over the inventory


def test_a_candidate_without_a_verdict_is_refused(tmp_path: Path) -> None:
    assert isinstance(call(tmp_path).exception, promote.Refused)
