"""store.py: run directories, resume and the controller's lock."""

from __future__ import annotations

import json
import re
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from k3deploy.errors import ExitCode, LockedError
from k3deploy.store import ResumeError, Run, RunNotFound, Store, digest, layer_text, lock

PLAN = {"arms": [{"name": "baseline", "settings": {"ubatch_size": 1536}}, {"name": "U2@2048"}], "cells": ["pp2048"]}
LAYER = {"all": {"vars": {"k3_run_arms": []}, "hosts": {"rank0": {"k3_run_processes": {}}}}}
TOOL = {"version": "0.1.0", "harness_sha256": "aa"}


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3DEPLOY_STATE", str(tmp_path / "state"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "runs")


def make(store: Store, candidate: str = "candidate-U2", plan: dict[str, Any] | None = None) -> Run:
    return store.create(
        candidate,
        plan or PLAN,
        LAYER,
        cluster="lab",
        inventory=Path("inventory/lab"),
        tool=TOOL,
        options={"pairs": 3},
        reason="try it",
    )


def test_a_run_is_private_and_complete(store: Store) -> None:
    run = make(store)
    assert re.fullmatch(r"\d{8}T\d{6}-candidate-U2-[0-9a-f]{6}", run.id)
    assert run.id.endswith(digest(PLAN, TOOL)[:6])
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in run.path.rglob("*") if path.is_file()} == {0o600}
    assert run.plan() == PLAN
    assert store.load() == run
    assert not list(run.path.rglob(".*")), "no temporary file stays behind"


@pytest.mark.parametrize(
    "value", ["{{ 1 + 1 }}", "{% if %}", "{# gone #}", "it's {plain} 100% \N{SNOWMAN}", "true", " x "]
)
def test_ansible_reads_every_value_of_a_layer_as_it_was_written(value: str, tmp_path: Path) -> None:
    from ansible.inventory.manager import InventoryManager
    from ansible.parsing.dataloader import DataLoader
    from ansible.template import Templar
    from ansible.vars.manager import VariableManager

    layer = tmp_path / "run.yml"
    layer.write_text(layer_text({"all": {"hosts": {"rank0": {"k3_value": value}}}}))
    loader = DataLoader()
    inventory = InventoryManager(loader, [str(layer)])
    variables = VariableManager(loader, inventory).get_vars(host=inventory.get_host("rank0"))
    assert Templar(loader, variables).template(variables["k3_value"]) == value


def test_the_layer_carries_the_run_s_name_and_place(store: Store) -> None:
    run = make(store)
    layer = yaml.safe_load((run.layer / "run.yml").read_text())
    variables = layer["all"]["vars"]
    assert (variables["k3_run_arms"], variables["k3_run_id"], variables["k3_run_dir"]) == ([], run.id, str(run.path))
    assert variables["k3_run_reason"] == "try it" and "@" in variables["k3_run_owner"]
    assert layer["all"]["hosts"] == LAYER["all"]["hosts"]
    assert [path.name for path in run.layer.iterdir()] == ["run.yml"], "Ansible reads every file of the directory"


def test_a_candidate_s_name_makes_a_safe_directory_name(store: Store) -> None:
    run = make(store, "candidate-U2@3072+U6/../x")
    assert run.path.parent == store.root and "/" not in run.id and "candidate-U2-3072+U6-..-x" in run.id


def test_every_change_of_plan_or_tool_changes_the_digest() -> None:
    other = json.loads(json.dumps(PLAN))
    other["arms"][0]["settings"]["ubatch_size"] = 2048
    assert len({digest(PLAN, TOOL), digest(other, TOOL), digest(PLAN, {**TOOL, "harness_sha256": "bb"})}) == 3
    assert digest(dict(reversed(PLAN.items())), TOOL) == digest(PLAN, TOOL), "the order of keys means nothing"


def test_runs_are_listed_newest_first_and_found_by_part_path_or_latest(store: Store) -> None:
    old = make(store)
    old = replace(old, path=old.path.rename(store.root / f"20200101T000000{old.id[15:]}"))
    new = make(store, "candidate-U9")
    (store.root / "20990101T000000-unfinished-ab12cd").mkdir()
    assert [run.id for run in store.runs()] == [new.id, old.id]
    assert store.load("U9").id == new.id
    assert store.load(old.id).id == old.id
    assert store.load(str(new.path)).id == new.id
    assert store.load("latest").id == new.id
    with pytest.raises(RunNotFound, match="not one run") as caught:
        store.load("candidate")
    assert old.id in caught.value.remedy and new.id in caught.value.remedy
    with pytest.raises(RunNotFound, match="no run 'U7'"):
        store.load("U7")


def test_no_runs_at_all_is_said_with_a_remedy(store: Store) -> None:
    assert store.runs() == []
    with pytest.raises(RunNotFound, match="no run in") as caught:
        store.load()
    assert "apply" in caught.value.remedy


def test_summary_counts_blocks_and_knows_the_verdict(store: Store) -> None:
    run = make(store)
    (run.path / "blocks" / "000.json").write_text("{}")
    (run.path / "verdict.json").write_text('{"outcome": "REJECT"}')
    summary = run.summary()
    assert (summary["blocks"], summary["verdict"], summary["candidate"]) == (1, "REJECT", "candidate-U2")


def test_a_run_resumes_under_the_same_plan(store: Store) -> None:
    run = make(store)
    (run.layer / "run.yml").unlink()
    make(store, "candidate-U9")
    store.resume(run, json.loads(json.dumps(PLAN)), LAYER, TOOL)
    assert (run.layer / "run.yml").exists()
    assert store.load().id == run.id


def test_resume_refuses_another_plan_and_names_the_keys(store: Store) -> None:
    run = make(store)
    other = json.loads(json.dumps(PLAN))
    other["arms"][0]["settings"]["ubatch_size"] = 3072
    with pytest.raises(ResumeError) as caught:
        store.resume(run, other, LAYER, {**TOOL, "version": "0.2.0"})
    message = str(caught.value)
    assert "plan.arms[0].settings.ubatch_size: 1536 -> 3072" in message
    assert 'tool.version: "0.1.0" -> "0.2.0"' in message
    assert message.count("->") == 2


def test_a_broken_record_is_an_error_for_people(store: Store) -> None:
    run = make(store)
    (run.path / "plan.json").write_text("{")
    with pytest.raises(RunNotFound, match="is not JSON"):
        run.plan()
    (run.path / "run.json").write_text("{}")
    with pytest.raises(RunNotFound, match="has no candidate"):
        store.load(run.id)


def test_a_second_process_is_told_who_holds_the_lock() -> None:
    code = (
        "import sys; from k3deploy.store import lock\n"
        "with lock('lab', 'apply candidate-U2') as open_for: open_for(60); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(LockedError) as caught, lock("lab", "apply candidate-U9"):
            pass
        words = str(caught.value)
        expected = (f"pid {other.pid}", "apply candidate-U2", "since ", "its window ends at ")
        assert all(part in words for part in expected), words
        assert caught.value.exit_code is ExitCode.LOCKED
        with lock("gb10", "apply"):
            pass
        other.kill()
    with lock("lab", "apply candidate-U9"):
        pass
