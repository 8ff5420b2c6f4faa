"""The collection's filters: what reaches a unit file, and what counts as a problem of a rank."""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path

import pytest
from ansible.errors import AnsibleFilterError
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "collections"))

from ansible_collections.k3.deploy.plugins.action.record_block import memory_summary
from ansible_collections.k3.deploy.plugins.filter import checks, systemd

PRINTABLE = st.text(st.characters(blacklist_categories=("Cc", "Cs", "Zl", "Zp")))


def systemd_unquote(line: str) -> list[str]:
    """systemd's own reading of a double-quoted command line: escapes, then specifiers and variables."""
    words = []
    for word in re.findall(r'"((?:[^"\\]|\\.)*)"', line):
        text = re.sub(r"\\(.)", r"\1", word)
        assert not re.search(r"(?<!%)%(?:%%)*(?!%)", text), "a lone % would be a specifier"
        words.append(text.replace("%%", "%").replace("$$", "$"))
    return words


@given(st.lists(PRINTABLE, min_size=1, max_size=5))
def test_any_argument_vector_arrives_exactly_on_the_units_command_line(argv: list[str]) -> None:
    assert systemd_unquote(systemd.systemd_exec(argv)) == argv


@given(PRINTABLE)
def test_any_value_arrives_exactly_through_the_environment_file(value: str) -> None:
    line = systemd.environment_file({"NAME": value})
    match = re.fullmatch(r'NAME="(.*)"\n', line, re.DOTALL)
    assert match
    assert re.sub(r'\\([\\"$`])', r"\1", match[1]) == value


@pytest.mark.parametrize("value", ["two\nlines", "nul\0", "tab\t", "escape\x1b[2J"])
def test_control_characters_are_refused_not_carried_into_units(value: str) -> None:
    with pytest.raises(AnsibleFilterError, match="control characters"):
        systemd.systemd_exec(["program", value])
    with pytest.raises(AnsibleFilterError, match="control characters"):
        systemd.environment_file({"NAME": value})


def test_a_name_that_is_no_environment_variable_is_refused() -> None:
    with pytest.raises(AnsibleFilterError, match="not a name"):
        systemd.environment_file({"A B": "x"})


@pytest.fixture
def state() -> dict:
    """A worker rank that is fit."""
    return {
        "tools": {"ss": "/usr/bin/ss"},
        "window": None,
        "production": {"units": {"worker.service": {"load": "loaded", "active": "active", "pid": 7}}, "files": {}},
        "listeners": [{"address": "10.0.0.2", "port": 50052, "pid": 7, "unit": None}],
        "addresses": ["127.0.0.1", "10.0.0.2"],
        "paths": {"/opt/k3deploy": {"free_mib": 9000}},
        "hashes": {},
        "units": {},
    }


EXPECT = {
    "run_id": "r1",
    "is_head": False,
    "production": {"worker_unit": "worker.service"},
    "processes": {"baseline": {"worker": {"argv": ["bin/w", "-p", "50053"], "listen": "10.0.0.2:50053"}}},
    "disk_mib": 512,
    "root": "/opt/k3deploy",
    "tools": ["ss"],
}


def test_a_fit_rank_has_no_problems(state: dict) -> None:
    assert checks.preflight_problems(state, EXPECT) == []


def test_all_problems_of_a_rank_are_named_at_once(state: dict) -> None:
    state["tools"] = {"ss": None}
    state["addresses"] = ["127.0.0.1"]
    state["paths"]["/opt/k3deploy"]["free_mib"] = 3
    state["production"]["units"]["worker.service"]["active"] = "failed"
    state["listeners"].append({"address": "0.0.0.0", "port": 50053, "pid": 99, "unit": None})
    text = "\n".join(checks.preflight_problems(state, EXPECT))
    for part in ("ss is not installed", "not an address of this rank", "3 MiB free", "is failed", "taken by pid 99"):
        assert part in text


def test_our_own_candidate_on_the_port_is_no_problem(state: dict) -> None:
    unit = "k3-candidate-worker@baseline.service"
    state["listeners"].append({"address": "10.0.0.2", "port": 50053, "pid": 9, "unit": unit})
    assert checks.preflight_problems(state, EXPECT) == []


def test_a_window_of_another_run_locks_and_the_own_one_does_not(state: dict) -> None:
    state.update(
        time=2000, window={"run_id": "other", "owner": "x@y", "opened": 1000, "deadline": 3000, "reason": "why"}
    )
    words = (
        "LOCKED: the maintenance window is held by x@y for run other since 1970-01-01 00:16:40 UTC until "
        "1970-01-01 00:50:00 UTC (why); wait until then, ask its owner, or roll back if nobody works in it any more"
    )
    assert checks.preflight_problems(state, EXPECT) == [words]
    state["window"] = {"run_id": "r1"}
    assert checks.preflight_problems(state, EXPECT) == []


def test_a_stale_window_is_called_stale_and_rollback_is_offered(state: dict) -> None:
    state.update(time=4000, window={"run_id": "other", "owner": "x@y", "opened": 1000, "deadline": 3000})
    (words,) = checks.preflight_problems(state, EXPECT)
    assert "it is stale, its end has passed: rollback" in words


@pytest.mark.parametrize(("owner", "locked"), [("x@y", False), ("z@y", True), ("", True)])
def test_hand_work_locks_out_everybody_but_its_owner(state: dict, owner: str, locked: bool) -> None:
    state.update(time=2000, window={"run_id": "by-hand", "kind": "hand", "owner": "x@y", "opened": 1, "deadline": 3000})
    assert bool(checks.preflight_problems(state, {**EXPECT, "owner": owner})) is locked


def test_a_window_whose_file_is_torn_locks_until_it_is_rolled_back(state: dict) -> None:
    state.update(time=2000, window={"damaged": True})
    (words,) = checks.preflight_problems(state, EXPECT)
    assert words.startswith("LOCKED: the maintenance window's file cannot be read: rollback")


# --- what a rollback leaves ------------------------------------------------------------------------------------------

STOPPED = {"stopped": {"changed": True}, "restored": None}


def proven(**window: object) -> dict:
    return {"stopped": {"changed": False}, "restored": {"production": {"answers": True, "window": window}}}


def test_a_rollback_that_reached_every_rank_of_the_window_leaves_nothing() -> None:
    seen = {"rank0": proven(ranks={"rank0": "10.0.0.1", "rank1": "10.0.0.2"}), "rank1": STOPPED}
    assert checks.rollback_left(seen, "rank0") == []


def test_a_rank_that_was_not_reached_is_named_with_what_finishes_it() -> None:
    seen = {"rank0": proven(), "rank1": {"stopped": {"unreachable": True, "msg": "no route"}}, "rank2": {}}
    first, second = checks.rollback_left(seen, "rank0")
    assert first.startswith("rank1 was not reached") and "systemctl stop 'k3-candidate*'" in first
    assert second.startswith("rank2 was not reached")


def test_a_process_that_cannot_be_killed_is_named() -> None:
    stuck = {"stopped": {"failed": True, "msg": "still running after SIGKILL: w (pid 7)"}}
    assert checks.rollback_left({"rank0": proven(), "rank1": stuck}, "rank0") == [
        "rank1: still running after SIGKILL: w (pid 7)"
    ]


def test_a_rank_that_the_inventory_lost_since_the_window_opened_is_named_with_its_address() -> None:
    seen = {"rank0": proven(ranks={"rank0": "", "rank3": "10.0.0.4"}, deadline=3600)}
    (words,) = checks.rollback_left(seen, "rank0")
    assert words.startswith("rank3 (10.0.0.4) took part in the window and is not in this inventory")
    assert words.endswith("its own guard does so at 1970-01-01 01:00:00 UTC")


@pytest.fixture
def running(state: dict) -> dict:
    """The same rank while the arm `baseline` runs as planned."""
    state["units"] = {
        "k3-candidate-worker@baseline.service": {
            "active": "active",
            "pid": 9,
            "argv": ["/opt/k3deploy/candidates/baseline/release/bin/w", "-p", "50053"],
            "build_id": "b-1",
            "environment": {"GGML_CUDA_K3_FLASHKDA": "1"},
        }
    }
    state["listeners"] = [{"address": "10.0.0.2", "port": 50053, "pid": 9, "unit": None}]
    return state


ARM = {"slug": "baseline", "build_key": "b"}
PROCESSES = {
    "worker": {
        "argv": ["bin/w", "-p", "50053"],
        "listen": "10.0.0.2:50053",
        "environment": {"GGML_CUDA_K3_FLASHKDA": "1"},
    }
}


def prove(seen: dict) -> list[str]:
    return checks.prove_problems(seen, PROCESSES, ARM, "b-1", "/opt/k3deploy")


def test_what_runs_as_planned_is_proven(running: dict) -> None:
    assert prove(running) == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"argv": ["other"]}, "runs as"),
        ({"build_id": "b-2"}, "runs build b-2"),
        ({"environment": {}}, "GGML_CUDA_K3_FLASHKDA=None"),
        ({"active": "failed"}, "does not run"),
        ({"pid": 10}, "held by pid 9"),
    ],
)
def test_every_difference_from_the_plan_is_a_problem(running: dict, change: dict, word: str) -> None:
    running["units"]["k3-candidate-worker@baseline.service"].update(change)
    assert word in "\n".join(prove(running))


@pytest.fixture
def proxied(running: dict) -> dict:
    """The same worker behind the timing proxy of its unit."""
    running["listeners"] = [
        {"address": "10.0.0.2", "port": 50053, "pid": 10, "unit": "k3-candidate-worker@baseline.service"},
        {"address": "127.0.0.1", "port": 50053, "pid": 9, "unit": "k3-candidate-worker@baseline.service"},
    ]
    return running


def prove_proxied(seen: dict) -> list[str]:
    worker = {**PROCESSES["worker"], "server": "127.0.0.1:50053"}
    return checks.prove_problems(seen, {"worker": worker}, ARM, "b-1", "/opt/k3deploy")


def test_a_proxy_may_hold_the_endpoint_where_it_is_planned_and_of_the_unit(proxied: dict) -> None:
    assert prove_proxied(proxied) == []
    assert "held by pid 10" in "\n".join(prove(proxied))  # no proxy was planned
    proxied["listeners"][0]["unit"] = "other.service"
    assert "held by pid 10" in "\n".join(prove_proxied(proxied))


def test_behind_a_proxy_it_must_be_the_planned_server_that_listens(proxied: dict) -> None:
    proxied["listeners"][1]["pid"] = 11
    assert "does not listen at 127.0.0.1:50053" in "\n".join(prove_proxied(proxied))
    del proxied["listeners"][1]
    assert "does not listen at 127.0.0.1:50053" in "\n".join(prove_proxied(proxied))


def test_a_head_whose_release_is_of_another_build_key_is_a_problem(running: dict) -> None:
    problems = checks.prove_problems(running, PROCESSES, {**ARM, "build_key": "c"}, "b-1", "/opt/k3deploy")
    assert "planned was a build of c" in "\n".join(problems)


def test_another_arm_that_still_runs_is_a_problem(running: dict) -> None:
    other = copy.deepcopy(running["units"]["k3-candidate-worker@baseline.service"])
    running["units"]["k3-candidate-worker@U2-2048.service"] = other
    assert "of another arm runs too" in "\n".join(prove(running))


def test_the_least_memory_is_told_apart_for_load_and_run() -> None:
    rows = [[1.0, 900, 50, 0, 9, 0.0, 0.0], [2.0, 700, 40, 30, 8, 7.5, 1.0], [3.0, 800, 30, 0, 7, -1.0, -1.0]]
    summary = memory_summary(rows, ready_at=1.5)
    assert summary["min_available_mib"] == 700
    assert (summary["load_min_mib"], summary["run_min_mib"], summary["min_at"]) == (
        900,
        700,
        "1970-01-01T00:00:02.000+00:00",
    )
    assert (summary["min_free_mib"], summary["min_driver_free_mib"], summary["cached_at_min_mib"]) == (30, 10, 8)
    assert summary["pressure_max"] == 7.5


def test_a_long_series_is_thinned_in_the_record_and_keeps_its_least_value() -> None:
    rows = [[float(at), 5000 - at % 997, 9, 0, 9, 0.0, 0.0] for at in range(1800)]
    series = memory_summary(rows, ready_at=0.0)["series"]
    assert len(series) <= 400 and min(row[1] for row in series) == min(row[1] for row in rows)


def test_a_block_without_samples_says_that_nothing_is_known() -> None:
    assert memory_summary([], None)["min_available_mib"] is None
