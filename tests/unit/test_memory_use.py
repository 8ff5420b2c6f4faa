"""The allocator against the forecast, and the trend of available memory."""

from __future__ import annotations

import random

import pytest

from k3deploy.memory_use import allocations, trend

ENDPOINTS = {"10.0.0.1:50053": "rank0", "10.0.0.2:50053": "rank1"}
FORECAST = [
    {
        "rank": "rank0",
        "layers": "2 kda",
        "weights_mib": 16.0,
        "kv_cache_mib": 0.0,
        "compute_mib": 190.0,
        "attention_mask_mib": 9.0,
    },
    {
        "rank": "rank1",
        "layers": "1 mla",
        "weights_mib": 8.2,
        "kv_cache_mib": 4.8,
        "compute_mib": 200.0,
        "checkpoints_mib": 900.0,
    },
]
BREAKDOWN = {
    "10.0.0.1:50053": {"model": 8, "context": 0, "compute": 54},
    "10.0.0.2:50053": {"model": 8, "context": 4, "compute": 204},
    "Host": {"model": 7, "context": 0, "compute": 148},
}


def test_a_ranks_devices_are_summed_and_what_is_no_device_buffer_stays_out() -> None:
    head, worker = allocations(FORECAST, ENDPOINTS, BREAKDOWN, 1.0)
    assert (head.rank, head.allocated, head.cut) == ("rank0", {"model": 15, "context": 0, "compute": 202}, 6.0)
    assert head.foreseen == {"model": 16.0, "context": 0.0, "compute": 199.0}
    assert sum(worker.foreseen.values()) == pytest.approx(213.0), "checkpoints lie in the head's own memory"
    assert worker.error == pytest.approx(213 / 216 - 1) and not worker.wrong


@pytest.mark.parametrize(
    ("foreseen", "wrong"), [(190, True), (195, False), (216, False), (240, False), (243, True)], ids=str
)
def test_more_than_a_tenth_off_is_wrong_either_way_and_cut_figures_are_not(foreseen: float, wrong: bool) -> None:
    forecast = [FORECAST[0], {"rank": "rank1", "compute_mib": foreseen}]
    assert allocations(forecast, ENDPOINTS, BREAKDOWN, 1.0)[1].wrong is wrong


def test_without_a_forecast_or_a_breakdown_nothing_is_claimed() -> None:
    assert allocations([], ENDPOINTS, BREAKDOWN, 1.0) == [] == allocations(FORECAST, ENDPOINTS, {}, 1.0)
    only = {"10.0.0.2:50053": BREAKDOWN["10.0.0.2:50053"]}
    assert [one.rank for one in allocations(FORECAST, ENDPOINTS, only, 1.0)] == ["rank1"]


def rows(loss: float, noise: float = 0.0, dips: int = 0, count: int = 200) -> list[list[float]]:
    """A row a second: memory falls by ``loss`` a second, and dips by 2000 for a moment now and then."""
    luck = random.Random(3)
    return [
        [float(at), 50000 - loss * at + luck.gauss(0, noise) - (2000 if dips and at % dips == 0 else 0)]
        for at in range(count)
    ]


def test_a_leak_is_told_by_the_request() -> None:
    found = trend(rows(2.0), 99.5, 20)
    assert found is not None
    assert found.per_request == pytest.approx(-2.0 * 99 / 20) and found.high < -9


def test_short_peaks_and_noise_are_no_leak() -> None:
    found = trend(rows(0.0, noise=5.0, dips=7), 0.0, 20)
    assert found is not None and abs(found.per_request) < 1 and found.low <= 0 <= found.high


def test_what_was_lost_while_loading_does_not_count() -> None:
    loading = [[float(at), 90000.0 - 900 * at] for at in range(50)]
    serving = [[float(at), 45000.0] for at in range(50, 100)]
    found = trend([*loading, *serving], 49.5, 10)
    assert found is not None and found.per_request == 0


@pytest.mark.parametrize(("ready_at", "requests"), [(None, 9), (190.0, 9), (0.0, 0)], ids=str)
def test_too_little_says_nothing(ready_at: float | None, requests: int) -> None:
    assert trend(rows(2.0), ready_at, requests) is None
