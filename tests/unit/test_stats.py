"""What pairs of blocks can and cannot say."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3deploy import stats

differences = st.lists(st.floats(-0.5, 0.5), min_size=1, max_size=12)


def test_one_pair_gives_a_ratio_and_no_interval() -> None:
    found = stats.estimate([math.log(1.05)])
    assert found is not None
    assert found.ratio == pytest.approx(1.05)
    assert found.low is None and found.high is None and not found.enough


def test_no_pair_gives_nothing() -> None:
    assert stats.estimate([]) is None


@pytest.mark.parametrize(("pairs", "factor"), [(3, 2.48), (5, 1.24), (6, 1.05), (8, 0.84), (12, 0.64)])
def test_the_interval_is_as_wide_as_the_number_of_pairs_allows(pairs: int, factor: float) -> None:
    assert stats.half_width(pairs, 1.0) == pytest.approx(factor, abs=0.005)


def test_five_equal_gains_are_enough_and_their_sign_flip_test_is_one_in_thirty_two() -> None:
    found = stats.estimate([0.05, 0.04, 0.06, 0.055, 0.045])
    assert found is not None and found.enough
    assert found.low is not None and found.low > 1.02
    assert found.p_value == pytest.approx(1 / 32)


def test_four_pairs_are_never_enough() -> None:
    found = stats.estimate([0.05, 0.05, 0.05, 0.05])
    assert found is not None and not found.enough and found.p_value is None


def test_pairs_needed_grows_with_the_spread_and_is_nothing_on_the_wrong_side() -> None:
    calm, wild = stats.estimate([0.05, 0.04, 0.06]), stats.estimate([0.10, -0.02, 0.07])
    assert calm and wild
    assert stats.pairs_needed(calm, 1.02) == stats.MIN_PAIRS
    assert (stats.pairs_needed(wild, 1.02) or 0) > 10
    below = stats.estimate([0.01, 0.0])
    assert below and stats.pairs_needed(below, 1.02) is None


def test_a_block_is_its_median_and_not_its_luckiest_request() -> None:
    assert stats.median_log([100.0, 101.0, 5000.0]) == pytest.approx(math.log(101))
    assert stats.median_log([0.0, -3.0, math.inf]) is None


@given(differences)
def test_the_interval_holds_the_ratio(values: list[float]) -> None:
    found = stats.estimate(values)
    assert found is not None
    if found.low is not None and found.high is not None:
        assert found.low <= found.ratio * (1 + 1e-9) and found.ratio <= found.high * (1 + 1e-9)


@given(differences)
def test_swapping_the_arms_mirrors_the_estimate(values: list[float]) -> None:
    one, other = stats.estimate(values), stats.estimate([-value for value in values])
    assert one is not None and other is not None
    assert one.ratio * other.ratio == pytest.approx(1.0)
    if one.low is not None and other.high is not None:
        assert one.low * other.high == pytest.approx(1.0, rel=1e-6)
