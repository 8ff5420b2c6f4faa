"""A candidate that cannot keep its floor on a rank is refused before production is drained, with what takes what."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "collections"))

from ansible_collections.k3.deploy.plugins.filter.memory_fit import freed_by_drain, memory_problems

WORKER = "llama-rpc-worker.service"
FORECASTS: list[dict[str, Any]] = [
    {"arm": "baseline", "floor_mib": 1536, "total_mib": 97000, "parts": {"weights": 91000, "kv cache": 6000}},
    {"arm": "U9", "floor_mib": 1536, "total_mib": 99000, "parts": {"weights": 91000, "kv cache": 8000}},
]


@pytest.fixture
def rank() -> dict[str, Any]:
    """124 GB, of which production's worker holds 3 GiB by its processes and 87 by the GPU."""
    return {
        "mem": {"MemTotal": 124000, "MemAvailable": 12000},
        "production": {"units": {WORKER: {"active": "active"}}},
        "holdings": {WORKER: {"anon_mib": 3000, "gpu_mib": 87000, "gpu_from": "nvidia-smi"}},
    }


def test_what_fits_beside_the_floor_is_no_problem(rank: dict[str, Any]) -> None:
    assert memory_problems(rank, FORECASTS) == []
    rank["mem"]["MemAvailable"] = 99000 + 1536 - 90000
    assert memory_problems(rank, FORECASTS) == []


def test_one_mib_too_little_refuses_that_arm_alone_and_shows_what_takes_what(rank: dict[str, Any]) -> None:
    rank["mem"]["MemAvailable"] = 99000 + 1535 - 90000
    (text,) = memory_problems(rank, FORECASTS)
    assert "U9 would leave 1535 MiB" in text and "baseline would" not in text
    assert "100535 MiB are available once production's head is stopped: 10535 now, 90000 freed" in text
    assert "3000 MiB resident in production's processes and 87000 MiB of its GPU by nvidia-smi" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["weights", "91000", "91000"] in rows and ["kv", "cache", "6000", "8000"] in rows
    assert ["all", "together", "97000", "99000"] in rows and ["floor", "1536", "1536"] in rows


def test_a_window_that_is_open_already_frees_nothing_more(rank: dict[str, Any]) -> None:
    rank["production"]["units"][WORKER]["active"] = "inactive"
    rank["mem"]["MemAvailable"] = 110000
    assert freed_by_drain(rank, None)[0] == 0 and memory_problems(rank, FORECASTS) == []


def test_what_an_interrupted_run_left_is_freed_too(rank: dict[str, Any]) -> None:
    rank["holdings"]["k3-candidate-worker@U9.service"] = {"anon_mib": 500, "gpu_mib": 0, "gpu_from": ""}
    freed, how = freed_by_drain(rank, None)
    assert freed == 90500 and "500 MiB of an interrupted run" in how


def test_the_inventorys_word_goes_before_what_was_seen(rank: dict[str, Any]) -> None:
    assert freed_by_drain(rank, 95000) == (95000, "95000 MiB of production by the inventory")


def test_what_is_not_known_is_bounded_by_what_is_in_use_and_said_to_be(rank: dict[str, Any]) -> None:
    rank["holdings"] = {}
    freed, how = freed_by_drain(rank, None)
    assert freed == 112000 and "not known" in how and "best case" in how
    impossible = copy.deepcopy(FORECASTS)
    impossible[1]["total_mib"] = 123000
    (text,) = memory_problems(rank, impossible)
    assert "U9 would leave 1000 MiB" in text


def test_more_than_the_machine_has_is_never_counted_on(rank: dict[str, Any]) -> None:
    impossible = copy.deepcopy(FORECASTS)
    impossible[0]["total_mib"] = 123000
    assert "baseline would leave 1000 MiB" in memory_problems(rank, impossible, 200000)[0]


def test_without_a_forecast_nothing_is_claimed(rank: dict[str, Any]) -> None:
    assert memory_problems(rank, []) == []
