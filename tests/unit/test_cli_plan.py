"""What `k3deploy plan` prints, and what `k3deploy apply` asks before it drains production."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner
from rich.console import Console

from k3deploy.commands import apply, consent, options, planning
from k3deploy.commands.options import UsageProblem
from k3deploy.commands.plan import plan, show
from k3deploy.commands.planning import Planned
from k3deploy.store import Run, Store


def process(*argv: str) -> dict[str, Any]:
    return {"argv": list(argv), "environment": {"K": "a b"}, "cpu_affinity": "5-9", "memlock_bytes": 64 << 20}


def arm(name: str, ubatch: str, differences: list[dict[str, str]]) -> dict[str, Any]:
    return {
        "name": name,
        "build": "default",
        "build_key": "0123456789abcdef",
        "differences": differences,
        "processes": {
            "rank0": {"head": process("bin/llama-server", "--ubatch-size", ubatch), "worker": None},
            "rank1": {"head": None, "worker": process("bin/ggml-rpc-server", "--port", "50053")},
        },
        "forecast": [{"rank": "rank0", "weights_mib": 1000.4, "total_mib": 1500}],
        "notes": [f"note of {name}"],
    }


PLAN: dict[str, Any] = {
    "candidate": "candidate-U2",
    "cluster": "east",
    "ranks": ["rank0", "rank1"],
    "rows": [{"id": "U2", "title": "ubatch", "kind": "runtime", "hypothesis": "larger is faster"}],
    "arms": [
        arm("baseline", "1536", []),
        arm("U2@2048", "2048", [{"key": "ubatch_size", "baseline": "1536", "arm": "2048"}]),
    ],
    "gates": {
        "cold": {
            **{"cells": ["pp2048"], "state": "cold", "metric": "speed", "suite": None, "observation": None},
            **{"require": "faster", "limit": None},
        }
    },
    "guards": {"rank_available_mib": 1536, "memlock_mib_per_connection": None},
    "blocks": [{"index": 0, "arm": "baseline"}, {"index": 1, "arm": "U2@2048"}],
    "rule": {"delta": 0.02, "looks": [6, 8], "seed": 1, "no_accept": "", "fixed": False},
    "bench": {"cells": [{"cell": "pp2048", "state": "cold"}], "repeats": 2, "probes": []},
    "notes": ["everything is smaller here"],
    "findings": [{"row": "U2", "text": "pipelining is lost", "contradicts": True}],
}


def shown() -> str:
    out = Console(file=io.StringIO(), width=160)
    show(out, PLAN)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def test_a_plan_shows_differences_processes_memory_gates_blocks_and_findings() -> None:
    text = shown()
    for words in (
        "candidate-U2 on east",
        "larger is faster",
        "ubatch_size",
        "K='a b' bin/llama-server --ubatch-size 1536   [cpus 5-9, memlock 64 MiB]",
        "1000",
        "faster",
        "1 baseline  2 U2@2048",
        "everything is smaller here",
        "against the hypothesis: pipelining is lost",
    ):
        assert words in text, words


def test_a_plan_says_what_an_accept_takes_before_anything_is_measured() -> None:
    assert "the whole interval above +2 %: after 6 pairs (at most 2.36% spent), 8 pairs" in shown()


def test_an_arm_shows_only_the_processes_that_differ_from_the_baseline_s() -> None:
    text = shown()
    assert text.count("bin/llama-server") == 2
    assert text.count("bin/ggml-rpc-server") == 1


class Cluster(SimpleNamespace):
    """As much of a cluster as the question before draining needs."""


def planned(name: str) -> Planned:
    cluster: Any = Cluster(
        name=name,
        ranks=[1, 2, 3, 4],
        head=SimpleNamespace(name="rank0"),
        production=SimpleNamespace(head_unit="k3-head.service"),
    )
    plan: Any = None
    return Planned(Path("inventory"), cluster, plan, PLAN)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "runs")


def test_without_a_terminal_only_the_lab_is_drained_unasked(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consent, "interactive", lambda: False)
    consent.confirm(planned("lab"), store, None, yes=False, deadline=7200)
    consent.confirm(planned("east"), store, None, yes=True, deadline=7200)
    with pytest.raises(UsageProblem, match=r"drains k3-head\.service on rank0 of cluster east") as caught:
        consent.confirm(planned("east"), store, None, yes=False, deadline=7200)
    assert "--yes" in caught.value.remedy


def test_on_a_terminal_the_answer_no_changes_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def refuse(question: str, **_: object) -> bool:
        asked.append(question)
        raise click.Abort

    monkeypatch.setattr(consent, "interactive", lambda: True)
    monkeypatch.setattr(click, "confirm", refuse)
    with pytest.raises(click.Abort):
        consent.confirm(planned("lab"), store, None, yes=False, deadline=7200)
    assert asked == ["Go on?"]


def test_a_window_is_as_long_as_all_blocks_up_to_their_own_deadlines_and_shorter_for_a_resumed_run(
    store: Store, tmp_path: Path
) -> None:
    made = planned("east")
    made.cluster.load_timeout_s = 1000
    made.cluster.production.drain_timeout_s = 600
    plan: Any = SimpleNamespace(bench=SimpleNamespace(deadline_s=900))
    whole = Planned(made.inventory, made.cluster, plan, {"blocks": [0, 1, 2, 3]})
    assert consent.window_length(whole, None) == 600 + (4 + 2) * (1000 + 900 + 120) + 900
    run = store.create("candidate-U2", PLAN, {"all": {}}, cluster="east", inventory=tmp_path, tool={}, options={})
    (run.path / "blocks" / "000.json").write_text("{}")
    assert consent.window_length(whole, run) == 600 + (3 + 2) * (1000 + 900 + 120) + 900


def test_how_long_it_takes_is_told_from_earlier_blocks_of_the_cluster(store: Store, tmp_path: Path) -> None:
    assert "not known yet" in consent._expected(store, "east", 4)
    run = store.create("candidate-U2", PLAN, {"all": {}}, cluster="east", inventory=tmp_path, tool={}, options={})
    (run.path / "blocks" / "000.json").write_text(json.dumps({"started": 100.0, "ended": 160.0}))
    (run.path / "blocks" / "001.json").write_text("{")
    assert consent._expected(store, "east", 4) == "about 4 min 00 s by earlier runs"
    times = {"started": "2026-11-30T10:00:00Z", "ended": "2026-11-30T10:02:00Z"}
    (run.path / "blocks" / "002.json").write_text(json.dumps(times))
    assert consent._expected(store, "east", 4) == "about 6 min 00 s by earlier runs"
    assert "not known yet" in consent._expected(store, "west", 4)


def test_a_resumed_run_keeps_its_candidate_inventory_and_options(store: Store, tmp_path: Path) -> None:
    run: Run = store.create(
        "candidate-U2",
        PLAN,
        {"all": {}},
        cluster="east",
        inventory=tmp_path,
        tool={},
        options={"pairs": 3, "cells": "pp2048,tg100"},
    )
    with click.Context(apply.apply) as context:
        context.set_parameter_source("inventory", click.core.ParameterSource.DEFAULT)
        given = {"pairs": None, "cells": None}
        assert apply._as_before(context, run, None, Path("inventory/lab"), given) == (
            "candidate-U2",
            tmp_path,
            {"pairs": 3, "cells": "pp2048,tg100"},
        )
        with pytest.raises(UsageProblem, match="is of candidate-U2, not of candidate-U9"):
            apply._as_before(context, run, "candidate-U9", tmp_path, given)


def test_pairs_and_repeats_shape_what_is_measured() -> None:
    place = Path(__file__).parents[2] / "inventory/gb10"
    command = ["candidate-U9", "-i", str(place), "--pairs", "3", "--repeats", "1", "--json"]
    done = CliRunner().invoke(plan, command)
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    assert (len(made["blocks"]), made["bench"]["repeats"]) == (6, 1)


def test_cells_are_split_at_commas() -> None:
    assert planning.split_cells(" pp2048, tg100 ,") == ["pp2048", "tg100"]
    assert planning.split_cells(None) == []


def test_the_tool_s_identity_covers_the_harness() -> None:
    identity = planning.tool_identity()
    assert len(identity["harness_sha256"]) == 64


def test_tables_are_wide_where_no_terminal_cuts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert options.console().width == 160
