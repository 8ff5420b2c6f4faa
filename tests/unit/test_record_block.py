"""What is written of a block that broke: every reason and every log, however often it breaks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible.plugins.action import ActionBase

sys.path.insert(0, str(Path(__file__).parents[2] / "collections"))

from ansible_collections.k3.deploy.plugins.action import record_block

from k3deploy.commands.advise import put_aside
from k3deploy.facts import VoidBlock, assemble, read_model

BLOCK = {"index": 1, "pair": 0, "arm": "U2@2048", "slug": "U2-2048"}


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ActionBase, "run", lambda *_: {})
    (tmp_path / "plan.json").write_text('{"candidate": "candidate-U2"}')
    return tmp_path


def record(run_dir: Path, log: str, **arguments: Any) -> Path:
    """Record a block of one rank with one line of log."""
    action = object.__new__(record_block.ActionModule)
    ranks = {"rank0": {"stop": {"k3_logs": {"head": log}}}}
    args = {"run_dir": str(run_dir), "block": BLOCK, "ranks": ranks, "started": 1.0, "ended": 2.0, **arguments}
    action._task = SimpleNamespace(args=args, check_mode=False)
    return Path(action.run()["path"])


def logs_of(run_dir: Path, path: Path) -> list[str]:
    ranks = json.loads(path.read_text())["ranks"]
    return [(run_dir / name).read_text() for name in ranks["rank0"]["logs"].values()]


def test_a_block_that_breaks_again_leaves_its_earlier_records_and_logs(run_dir: Path) -> None:
    paths = [record(run_dir, f"log {reason}\n", void=reason) for reason in ("first", "second", "third")]
    assert [path.name for path in paths] == ["001-1.json", "001-2.json", "001-3.json"]
    assert [logs_of(run_dir, path) for path in paths] == [["log first\n"], ["log second\n"], ["log third\n"]]
    facts = assemble(run_dir)
    assert [(void.index, void.void, void.broken) for void in facts.void] == [
        (1, "first", True),
        (1, "second", True),
        (1, "third", True),
    ]


def test_a_block_that_broke_and_one_that_was_put_aside_stand_beside_each_other(run_dir: Path) -> None:
    record(run_dir, "broke\n", void="it broke")
    counted = record(run_dir, "measured\n")
    assert counted == run_dir / "blocks/001.json" and logs_of(run_dir, counted) == ["measured\n"]
    aside = put_aside(run_dir, 1, "somebody else asked")
    again = record(run_dir, "broke again\n", void="it broke again")
    assert (aside.name, again.name) == ("001-2.json", "001-3.json")
    assert [logs_of(run_dir, path) for path in (aside, again)] == [["measured\n"], ["broke again\n"]]
    assert [void.broken for void in assemble(run_dir).void] == [True, False, True]


def test_a_void_record_keeps_the_proof_of_the_transport(run_dir: Path) -> None:
    proof = {"require": "rdma", "transport": "TCP", "connections": [], "problems": ["rank1 is on TCP"]}
    path = record(run_dir, "x\n", void="rank1 is on TCP", transport=proof)
    found = read_model(VoidBlock, path).transport
    assert found is not None and found.problems == ["rank1 is on TCP"]


def test_a_run_of_which_nothing_counts_has_a_verdict_and_its_reports(run_dir: Path) -> None:
    from k3deploy.commands import judging
    from k3deploy.errors import ExitCode
    from k3deploy.store import Run

    plan = json.loads((Path(__file__).parents[1] / "fixtures/run-small/plan.json").read_text())
    (run_dir / "plan.json").write_text(json.dumps(plan))
    proof = {"require": "rdma", "transport": "TCP", "connections": [], "problems": ["rank1 is on TCP"]}
    record(run_dir, "x\n", void="rank1 is on TCP, not RDMA", transport=proof)
    run = Run(run_dir, plan["candidate"], "", "", "lab", "", {}, {}, "", "")
    outcome = judging.conclude(run)
    assert outcome.exit_code is ExitCode.INVALID
    assert outcome.verdict["arms"][0]["reasons"][0].endswith("does not count: rank1 is on TCP, not RDMA")
    assert outcome.html.exists() and "rank1 is on TCP, not RDMA" in outcome.html.read_text()
