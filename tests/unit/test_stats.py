"""What pairs of blocks can and cannot say."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
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


@settings(max_examples=40)
@given(differences)
def test_the_interval_holds_the_ratio(values: list[float]) -> None:
    found = stats.estimate(values)
    assert found is not None
    if found.low is not None and found.high is not None:
        assert found.low <= found.ratio * (1 + 1e-9) and found.ratio <= found.high * (1 + 1e-9)


@settings(max_examples=40)
@given(differences)
def test_swapping_the_arms_mirrors_the_estimate(values: list[float]) -> None:
    one, other = stats.estimate(values), stats.estimate([-value for value in values])
    assert one is not None and other is not None
    assert one.ratio * other.ratio == pytest.approx(1.0)
    if one.low is not None and other.high is not None:
        assert one.low * other.high == pytest.approx(1.0, rel=1e-6)


# --- looks and the exact test ---


@pytest.mark.parametrize(("pairs", "looks"), [(1, [1]), (5, [5]), (8, [6, 8]), (12, [9, 12]), (16, [8, 12, 16])])
def test_looks_are_where_the_exact_test_can_reach_what_may_be_spent(pairs: int, looks: list[int]) -> None:
    assert stats.looks(pairs) == looks
    assert all(0.5**look <= stats.spent(look / pairs) for look in looks if pairs >= stats.MIN_PAIRS)


def test_several_arms_need_more_pairs() -> None:
    assert [stats.least_pairs(arms) for arms in (1, 2, 3, 4)] == [5, 6, 6, 7]


def test_all_of_alpha_is_spent_at_the_end_and_little_early() -> None:
    assert stats.spent(1.0) == stats.ALPHA
    assert stats.spent(0.5) < 0.01 < stats.spent(0.75) < 0.03


@pytest.mark.parametrize("pairs", [5, 6, 8, 10])
def test_a_single_look_is_the_sign_flip_test_of_scipy(pairs: int) -> None:
    values = np.random.default_rng(4).normal(0.6, 1.0, (60, pairs))
    passed = stats.sign_flip_passes(values, 0.0, [pairs])
    assert passed.any() and not passed.all()
    assert [bool(one) for one in passed] == [stats.sign_flip(list(row)) <= stats.ALPHA for row in values]


def test_equal_differences_pass_only_where_no_tie_hides_them() -> None:
    assert stats.sign_flip_passes(np.full((1, 8), 0.05), 0.0, [8]).all()
    assert not stats.sign_flip_passes(np.zeros((1, 8)), 0.0, [8]).any()


@pytest.mark.parametrize("pairs", [8, 10])
def test_all_looks_together_pass_no_more_than_alpha_where_there_is_nothing(pairs: int) -> None:
    values = np.random.default_rng(3).standard_t(3, (4000, pairs))  # heavy tails, no difference
    looks = stats.looks(pairs)
    passed = np.zeros(len(values), dtype=bool)
    for look in looks:
        passed |= stats.sign_flip_passes(values[:, :look], 0.0, looks)
    assert 0.03 < passed.mean() <= 0.055


def test_between_looks_nothing_passes_and_a_pass_is_not_taken_back() -> None:
    values = np.array([[0.05, 0.04, 0.06, 0.05, 0.05, 0.04, -0.5, -0.5]])
    assert [bool(stats.sign_flip_passes(values[:, :n], 0.0, [6, 8])[0]) for n in (5, 6, 7, 8)] == [
        False,
        True,
        False,
        True,
    ]


def test_holm_divides_by_rank() -> None:
    assert stats.holm([0.03, 0.001, 0.01]) == pytest.approx([0.05, 0.05 / 3, 0.025])


def test_the_bootstrap_is_shown_beside_and_is_the_narrower_one_with_few_pairs() -> None:
    found = stats.estimate([0.05, 0.03, 0.06, 0.04, 0.055])
    assert found and found.bootstrap and found.low and found.high
    assert found.low < found.bootstrap[0] < found.ratio < found.bootstrap[1] < found.high


@pytest.mark.parametrize("pairs", [5, 8, 12])
def test_what_a_plan_says_it_detects_it_detects(pairs: int) -> None:
    margin, spread = math.log(1.02), 0.01
    truth = stats.detects(pairs, spread, margin)
    values = np.random.default_rng(2).normal(truth, spread, (20_000, pairs))
    assert 0.87 < float((stats.interval(values)[0] > margin).mean()) < 0.93
