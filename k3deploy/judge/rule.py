"""The one rule that turns paired differences into a decision; nothing else decides about speed.

ACCEPT        the primary cell is superior and every other judged cell is not inferior.
REJECT        harm (a judged cell is surely slower) or futility (no worthwhile gain is left to hope for).
INCONCLUSIVE  neither, so far.
INVALID       a difference that must be there is not a number: nothing is decided on the rest.

*Superior* means: the lower bound of the 95 % interval of the ratio is above 1 + delta, and the exact sign-flip test
against 1 + delta passes at a planned look. *Not inferior* means the same of 0.99. Both are asked because they fail
differently: the interval needs differences that are about normal, the test only that they are symmetric, which the
random order within each pair gives. The test alone bounds false accepts by 5 %, whatever the interval does.
Harm and futility may stop a run after any pair from the third on: they can only cost a gain, never invent one.

Everything takes arrays (..., n) of log ratios, n pairs along the last axis, so that the simulation in
``tests/bench/verdicts.py`` tries this code and no copy of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Literal

from k3deploy import stats

if TYPE_CHECKING:
    from k3deploy.stats import Floats, Ints

DELTA = 0.02  # a gain below 2 % is not worth a change
NOT_INFERIOR = 0.99
STOP_PAIRS = 3  # with two pairs Student's interval says nothing that a person would act on

Require = Literal["faster", "not_slower"]


class Speed(IntEnum):
    """What the pairs say about one cell, in the order in which a worse one decides."""

    PASS = 0
    OPEN = 1
    FUTILE = 2
    HARM = 3


class Decision(IntEnum):
    """What all judged cells say together."""

    ACCEPT = 0
    INCONCLUSIVE = 1
    REJECT = 2
    INVALID = 3


@dataclass(frozen=True, slots=True)
class Rule:
    """delta: the smallest worthwhile gain, as a share. looks: pairs after which an ACCEPT may be spoken; the last one
    is the planned end. alpha: the chance of a false ACCEPT that this candidate may use (less where several share it).
    """

    looks: tuple[int, ...]
    delta: float = DELTA
    alpha: float = stats.ALPHA

    @classmethod
    def of(cls, pairs: int, **settings: float) -> Rule:
        return cls(tuple(stats.looks(pairs)), **settings)

    def threshold(self, require: Require) -> float:
        """The ratio that the lower bound must be above."""
        return 1 + self.delta if require == "faster" else NOT_INFERIOR

    def speed(self, differences: Floats, require: Require) -> Ints:
        """``Speed`` of one cell of each run: (..., n) -> (...)."""
        import numpy as np

        pairs = differences.shape[-1]
        found = np.full(differences.shape[:-1], Speed.OPEN, dtype=int)
        if pairs < 2:
            return found
        margin = math.log(self.threshold(require))
        low, high = stats.interval(differences)
        sure = np.asarray(low > margin)
        if pairs >= stats.MIN_PAIRS and sure.any():
            sure[sure] = stats.sign_flip_passes(differences[sure], margin, self.looks, self.alpha)
            found[sure] = Speed.PASS
        if pairs >= STOP_PAIRS:
            found[high < margin] = Speed.FUTILE if require == "faster" else Speed.HARM
            found[high < math.log(NOT_INFERIOR)] = Speed.HARM
        return found

    def decide(self, cells: Mapping[str, Floats], requires: Mapping[str, Require]) -> Ints:
        """``Decision`` of each run by its judged cells, each (..., n); ``requires`` says what each cell must be."""
        import numpy as np

        worst = np.maximum.reduce([self.speed(cells[name], require) for name, require in requires.items()])
        decision = np.asarray(DECISIONS)[worst]
        missing = np.logical_or.reduce([~np.isfinite(cells[name]).all(axis=-1) for name in requires])
        return np.where(missing, int(Decision.INVALID), decision)


# In the order of Speed.
DECISIONS: Sequence[Decision] = (Decision.ACCEPT, Decision.INCONCLUSIVE, Decision.REJECT, Decision.REJECT)
