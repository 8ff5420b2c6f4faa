"""Statistics on pairs of blocks: one number a pair, because the server restart is the sampling unit.

Requests inside one server start share its luck (memory layout, clocks, which rank is slow today); pooling them would
call noise a result. So a block gives one value per cell, the median of its log values; a pair of adjacent blocks
gives the difference d = arm - baseline; and everything below is said about the d's. All values are natural
logarithms of quantities where more is better, so ``exp(d)`` is the ratio arm / baseline.

Functions that say ``(..., n)`` take many runs at once, the n pairs of each along the last axis: what judges one run is
what the simulation in ``tests/bench/verdicts.py`` tries on ten thousand.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]
    Ints = NDArray[np.int_]

MIN_PAIRS = 5  # the exact sign-flip test cannot fall below 5 % with fewer (1/2^4 = 6.25 %)
CONFIDENCE = 0.95
ALPHA = 0.05  # the chance that a false gain is accepted, over all looks and all arms together
POWER = 0.9
PAIRS_CAP = 200  # beyond this nobody measures: the difference is too small for the spread
_EXACT_PAIRS = 12  # 4096 patterns of signs; with more pairs as many are drawn
_PATTERNS = 4096
_RESAMPLES = 1999


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the pairs say about the ratio arm / baseline.

    ``low`` and ``high`` bound it with 95 % confidence (Student) and are ``None`` with one pair; ``bootstrap`` is the
    bootstrap's interval, from three pairs on. ``spread`` is the standard deviation of d. ``p_value`` is that of the
    one-sided exact sign-flip test that the ratio is above the margin that was asked for.
    """

    pairs: int
    ratio: float
    low: float | None = None
    high: float | None = None
    spread: float | None = None
    p_value: float | None = None
    bootstrap: tuple[float, float] | None = None

    @property
    def enough(self) -> bool:
        """Whether there are pairs enough to accept something on their strength."""
        return self.pairs >= MIN_PAIRS


def median_log(values: Sequence[float]) -> float | None:
    """The value of one block: the median of the logarithms; ``None`` without a positive value."""
    logs = [math.log(value) for value in values if value > 0 and math.isfinite(value)]
    return statistics.median(logs) if logs else None


def estimate(differences: Sequence[float], margin: float = 0.0) -> Estimate | None:
    """The ratio and its intervals from the paired differences; ``None`` without any.

    margin: the logarithm that the p-value tests against.

    Student's interval is the one that decides: the bootstrap of fewer than some ten values is too narrow (the
    simulation prints by how much), so it is shown beside it and decides nothing.
    """
    if not differences:
        return None
    mean = statistics.fmean(differences)
    if len(differences) == 1:
        return Estimate(1, math.exp(mean))
    low, high = interval(_array(differences))
    spread = statistics.stdev(differences)
    p_value = sign_flip([value - margin for value in differences]) if len(differences) >= MIN_PAIRS else None
    return Estimate(
        len(differences),
        math.exp(mean),
        math.exp(float(low)),
        math.exp(float(high)),
        spread,
        p_value,
        bootstrap(tuple(differences)),
    )


def interval(differences: Floats, confidence: float = CONFIDENCE) -> tuple[Floats, Floats]:
    """Student's interval of the mean of ``differences`` (..., n), n at least 2: lower and upper bounds (...)."""
    import numpy as np

    pairs = differences.shape[-1]
    mean = differences.mean(axis=-1)
    half = _t_quantile((1 + confidence) / 2, pairs - 1) * differences.std(axis=-1, ddof=1) / np.sqrt(pairs)
    return mean - half, mean + half


@cache
def bootstrap(differences: tuple[float, ...]) -> tuple[float, float] | None:
    """The bootstrap's 95 % interval (BCa) of the ratio; ``None`` below three pairs or without any spread."""
    if len(differences) < 3 or statistics.stdev(differences) < 1e-12:
        return None
    import warnings

    import numpy as np
    from scipy import stats

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a degenerate resample gives no number, which is what is looked at
        found = stats.bootstrap(
            (_array(differences),),
            np.mean,
            confidence_level=CONFIDENCE,
            n_resamples=_RESAMPLES,
            method="BCa",
            rng=np.random.default_rng(0),
        ).confidence_interval
    low, high = float(found.low), float(found.high)
    return (math.exp(low), math.exp(high)) if math.isfinite(low) and math.isfinite(high) else None


def sign_flip(differences: Sequence[float]) -> float:
    """The p-value of the one-sided sign-flip test of mean(d) > 0: exact up to 13 pairs, then sampled."""
    import numpy as np
    from scipy.stats import permutation_test

    result = permutation_test(
        (_array(differences),),
        np.mean,
        permutation_type="samples",
        alternative="greater",
        n_resamples=9999,
        vectorized=True,
        rng=np.random.default_rng(0),
    )
    return float(result.pvalue)


# --- looks -----------------------------------------------------------------------------------------------------------


def spent(share: float, alpha: float = ALPHA) -> float:
    """How much of ``alpha`` may be spent once ``share`` of the planned pairs is measured.

    O'Brien and Fleming's shape as a spending function (Lan and DeMets): little early, all of it at the end.
    """
    from scipy.stats import norm

    if share >= 1:
        return alpha
    return float(2 - 2 * norm.cdf(norm.ppf(1 - alpha / 2) / math.sqrt(share)))


def looks(pairs: int, arms: int = 1) -> list[int]:
    """After how many pairs an ACCEPT may be spoken, of ``pairs`` planned: the last pair, and at half and three quarters
    of the way where the exact test can reach what may be spent by then (with ``arms`` to share it)."""
    if pairs < MIN_PAIRS:
        return [pairs]
    early = [math.ceil(pairs * share) for share in (0.5, 0.75)]
    reached = [n for n in early if MIN_PAIRS <= n < pairs and 0.5**n <= spent(n / pairs, ALPHA / arms)]
    return [*dict.fromkeys(reached), pairs]


def least_pairs(arms: int = 1, alpha: float = ALPHA) -> int:
    """The fewest pairs with which the exact test can accept one of ``arms``."""
    return next(n for n in range(MIN_PAIRS, PAIRS_CAP) if 0.5**n <= alpha / arms)


def sign_flip_passes(differences: Floats, margin: float, planned: Sequence[int], alpha: float = ALPHA) -> Bools:
    """Whether the sign-flip test of mean(d) > ``margin`` has passed at one of the looks so far: (..., n) -> (...).

    planned: the looks, as numbers of pairs; the last one is the planned end. What was spent at an earlier look is known
    exactly, pattern by pattern, so nothing is given away to approximation. Between looks the answer is no.
    """
    import numpy as np

    pairs = differences.shape[-1]
    shape = differences.shape[:-1]
    shifted = (differences - margin).reshape(-1, pairs)
    passed = np.zeros(len(shifted), dtype=bool)
    if pairs not in planned:
        return passed.reshape(shape)
    signs = _sign_patterns(pairs)
    gone = np.zeros((len(shifted), len(signs)), dtype=bool)
    for look in (number for number in planned if number <= pairs):
        sums = shifted[:, :look] @ signs[:, :look].T
        sums[gone] = -np.inf
        used = gone.sum(axis=1)
        budget = np.maximum(math.floor(spent(look / planned[-1], alpha) * len(signs) + 1e-9) - used, 0)
        # The largest `budget` of the patterns are spent; one that ties with the first beyond them is not among them.
        ordered = -np.sort(-sums, axis=1)
        beyond = ordered[np.arange(len(ordered)), np.minimum(budget, len(signs) - 1)]
        spend = sums > beyond[:, None] + 1e-12
        passed |= spend[:, 0]  # pattern 0 flips nothing: it is what was measured
        gone |= spend
    return passed.reshape(shape)


def holm(p_values: Sequence[float], alpha: float = ALPHA) -> list[float]:
    """Holm's level for each of several tests: the smallest p-value is held against alpha / m, the next against
    alpha / (m - 1), and so on. Behind the first that does not pass the levels are 0: none after it may."""
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    levels = [0.0] * len(p_values)
    for rank, place in enumerate(order):
        levels[place] = alpha / (len(p_values) - rank)
        if p_values[place] > levels[place]:
            break
    return levels


# --- planning --------------------------------------------------------------------------------------------------------


def half_width(pairs: int, spread: float) -> float:
    """Half the width of the interval of ``pairs`` differences with this standard deviation, as a logarithm."""
    return _t_quantile((1 + CONFIDENCE) / 2, pairs - 1) * spread / math.sqrt(pairs)


def detects(pairs: int, spread: float, margin: float) -> float:
    """The true difference (a logarithm) whose lower bound clears ``margin`` in nine runs of ten."""
    return margin + half_width(pairs, spread) + _t_quantile(POWER, pairs - 1) * spread / math.sqrt(pairs)


def pairs_to_clear(margin: float, spread: float) -> int | None:
    """The fewest pairs with which nine of ten runs clear ``margin`` (below 0) where nothing differs; ``None``: more
    than anybody measures."""
    return next((n for n in range(MIN_PAIRS, PAIRS_CAP + 1) if detects(n, spread, margin) <= 0), None)


def pairs_for(half: float, spread: float) -> int | None:
    """The fewest pairs whose interval is at most ``half`` wide to either side; ``None``: more than anybody measures."""
    return next((n for n in range(MIN_PAIRS, PAIRS_CAP + 1) if half_width(n, spread) <= half), None)


def pairs_needed(found: Estimate, threshold: float) -> int | None:
    """How many pairs it takes to tell the ratio from ``threshold`` at the spread seen so far.

    ``None``: more than anybody measures, or the estimate is on the wrong side. With one pair the spread is unknown
    and the answer is the smallest number that can decide anything.
    """
    distance = math.log(found.ratio) - math.log(threshold)
    if found.spread is None:
        return MIN_PAIRS
    if distance <= 0:
        return None
    return next((n for n in range(MIN_PAIRS, PAIRS_CAP + 1) if half_width(n, found.spread) < distance), None)


def _array(values: Sequence[float]) -> Floats:
    import numpy as np

    return np.asarray(values, dtype=float)


@cache
def _t_quantile(probability: float, freedom: int) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(freedom, probability))


@cache
def _sign_patterns(pairs: int) -> Any:
    """Patterns of +1 and -1 (patterns, pairs); the first flips nothing. All of them, or as many as are drawn."""
    import numpy as np

    if pairs <= _EXACT_PAIRS:
        numbers = np.arange(2**pairs)
        return 1.0 - 2.0 * ((numbers[:, None] >> np.arange(pairs)) & 1)
    drawn = np.random.default_rng(0).choice([-1.0, 1.0], size=(_PATTERNS, pairs))
    drawn[0] = 1.0
    return drawn
