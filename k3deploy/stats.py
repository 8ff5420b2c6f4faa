"""Statistics on pairs of blocks: one number a pair, because the server restart is the sampling unit.

Requests inside one server start share its luck (memory layout, clocks, which rank is slow today); pooling them would
call noise a result. So a block gives one value per cell, the median of its log values; a pair of adjacent blocks
gives the difference d = arm - baseline; and everything below is said about the d's. All values are natural
logarithms of quantities where more is better, so ``exp(d)`` is the ratio arm / baseline.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MIN_PAIRS = 5  # the exact sign-flip test cannot fall below 5 % with fewer (1/2^4 = 6.25 %)
CONFIDENCE = 0.95
PAIRS_CAP = 200  # beyond this nobody measures: the difference is too small for the spread


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the pairs say about the ratio arm / baseline.

    ``low`` and ``high`` bound it with 95 % confidence and are ``None`` with one pair. ``spread`` is the standard
    deviation of d. ``p_value`` is that of the one-sided exact sign-flip test that the ratio is above 1.
    """

    pairs: int
    ratio: float
    low: float | None = None
    high: float | None = None
    spread: float | None = None
    p_value: float | None = None

    @property
    def enough(self) -> bool:
        """Whether there are pairs enough to accept something on their strength."""
        return self.pairs >= MIN_PAIRS


def median_log(values: Sequence[float]) -> float | None:
    """The value of one block: the median of the logarithms; ``None`` without a positive value."""
    logs = [math.log(value) for value in values if value > 0 and math.isfinite(value)]
    return statistics.median(logs) if logs else None


def estimate(differences: Sequence[float]) -> Estimate | None:
    """The ratio and its interval from the paired differences; ``None`` without any.

    The interval is Student's on the mean of d: a bootstrap of fewer than some ten values is too narrow.
    """
    if not differences:
        return None
    mean = statistics.fmean(differences)
    if len(differences) == 1:
        return Estimate(1, math.exp(mean))
    spread = statistics.stdev(differences)
    if spread < 1e-12:
        low = high = mean
    else:
        from scipy.stats import ttest_1samp

        interval = ttest_1samp(differences, 0.0).confidence_interval(CONFIDENCE)
        low, high = float(interval.low), float(interval.high)
    p_value = _sign_flip(differences) if len(differences) >= MIN_PAIRS else None
    return Estimate(len(differences), math.exp(mean), math.exp(low), math.exp(high), spread, p_value)


def _sign_flip(differences: Sequence[float]) -> float:
    """The one-sided exact (up to 2^13 flips, then sampled) sign-flip test of mean(d) > 0."""
    import numpy as np
    from scipy.stats import permutation_test

    result = permutation_test(
        (np.asarray(differences),),
        np.mean,
        permutation_type="samples",
        alternative="greater",
        n_resamples=9999,
        vectorized=True,
        rng=np.random.default_rng(0),
    )
    return float(result.pvalue)


def half_width(pairs: int, spread: float) -> float:
    """Half the width of the interval of ``pairs`` differences with this standard deviation, as a logarithm."""
    from scipy.stats import t

    return float(t.ppf((1 + CONFIDENCE) / 2, pairs - 1)) * spread / math.sqrt(pairs)


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
