"""The maintenance window by hand: strangers are refused, a rebooted head is a state to go on from, and rollback says
what it could not reach."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from controllerkit import Controller

pytestmark = pytest.mark.lab


@dataclass(frozen=True, slots=True)
class Opened:
    """A window that ann@east holds, and production as it was before."""

    ann: Controller
    answer: list[int]
    production: dict[str, str]


@pytest.fixture(scope="module")
def opened(controller: Controller) -> Iterator[Opened]:
    before = Opened(replace(controller, owner="ann@east"), controller.ask_production(), controller.production())
    done = before.ann.k3deploy("window", "open", "--deadline", "40m", "--reason", "new cable", "--yes")
    assert done.returncode == 0, done.stdout + done.stderr
    yield before
    controller.k3deploy("rollback")


def window(who: Controller) -> dict[str, Any] | None:
    done = who.k3deploy("window", "status", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] | None = json.loads(done.stdout)
    return found


def test_an_open_window_holds_production_down_and_every_rank_guards_itself(
    controller: Controller, opened: Opened
) -> None:
    found = window(opened.ann)
    assert found is not None and (found["owner"], found["kind"], found["reason"]) == ("ann@east", "hand", "new cable")
    assert 2000 < found["left_s"] <= 2400
    said = controller.everywhere("systemctl is-active llama-production k3-candidate-guard || true")
    assert {rank: text.split() for rank, text in said.items()} == {
        name: ["inactive", "active"] for name in ("rank0", "rank1", "rank2", "rank3")
    }


def test_a_stranger_can_neither_take_nor_close_it(controller: Controller, opened: Opened) -> None:
    bob = controller.elsewhere("bob", owner="bob@west")
    taken = bob.k3deploy("window", "open", "--yes")
    assert taken.returncode == 5, taken.stderr
    assert "held by ann@east for work by hand since" in taken.stderr and "(new cable)" in taken.stderr
    closed = bob.k3deploy("window", "close", "--force", "ann")
    assert closed.returncode == 2 and "--force ann is not the holder" in closed.stderr
    assert window(opened.ann) is not None


def test_a_head_that_was_rebooted_keeps_window_and_guard_and_starts_nothing_of_a_candidate(
    controller: Controller, opened: Opened
) -> None:
    controller.reboot("rank0")
    found = window(opened.ann)
    assert found is not None and found["owner"] == "ann@east"
    running = controller.on("rank0", "systemctl list-units --plain --no-legend --state=active 'k3-candidate*'")
    assert [line.split()[0] for line in running.splitlines()] == ["k3-candidate-guard.service"]


def test_rollback_with_a_rank_cut_off_and_one_lost_from_the_inventory_brings_production_back_and_names_both(
    controller: Controller, opened: Opened
) -> None:
    opened.ann.cut_off("rank2", 25)
    since = time.monotonic()
    done = controller.without("rank3").k3deploy("rollback")
    assert done.returncode == 21, done.stderr
    address = controller.lab.config.ranks[3].address
    assert "production is back: it answers as recorded before the window of ann@east; but this is left" in done.stderr
    assert "rank2 was not reached" in done.stderr
    assert f"rank3 ({address}) took part in the window and is not in this inventory" in done.stderr
    assert controller.ask_production() == opened.answer
    time.sleep(max(0.0, 28 - (time.monotonic() - since)))  # rank2 has its network again

    again = controller.k3deploy("rollback", "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["tasks"] <= 12
    assert controller.candidate() == dict.fromkeys(("rank0", "rank1", "rank2", "rank3"), "")
    after = controller.production()
    assert {rank: after[rank] for rank in ("rank1", "rank2", "rank3")} == {
        rank: opened.production[rank] for rank in ("rank1", "rank2", "rank3")
    }


def test_productions_workers_are_restarted_only_when_an_operator_asks(controller: Controller, opened: Opened) -> None:
    ask = "systemctl show --property=MainPID --value llama-production-worker"
    before = controller.everywhere(ask)
    assert controller.k3deploy("rollback").returncode == 0
    assert controller.everywhere(ask) == before
    assert controller.k3deploy("rollback", "--restart-workers").returncode == 0
    after = controller.everywhere(ask)
    assert all(after[rank] not in ("0\n", before[rank]) for rank in before)
    assert controller.ask_production() == opened.answer
