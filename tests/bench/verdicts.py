#!/usr/bin/env python3
"""How often the verdict is wrong, and how often it finds what is there: ten thousand simulated runs a row.

    tests/bench/verdicts.py [--runs 10000] [--pairs 8] [--seed 1]

Every row makes runs of one kind (what is true, and what disturbs the measurement), sends each pair by pair through the
rule that judges real runs (``k3deploy.judge.rule``) in the order that the plan would have, and counts what came out. A
block's log speed in a cell is

    effect of its arm + luck of its server start (one for prefill, one for decode) + noise of the cell + disturbances

Disturbances hit every cell of a block: a drift over the run, luck that is correlated from start to start, outliers,
a host with a slow state that comes and goes. An ACCEPT is an error where prefill gains delta or less, or where decode
loses 1 % or more; the table has the limits themselves, which are the hardest cases.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from k3deploy import stats
from k3deploy.judge.evidence import MAX_REPEATS
from k3deploy.judge.rule import DELTA, NOT_INFERIOR, Decision, Require, Rule, Speed
from k3deploy.plan.blocks import rounds

PRIMARY = "pp2048 cold"
REQUIRES: dict[str, Require] = {
    PRIMARY: "faster",
    "pp4096 cold": "not_slower",
    "pp2048 warm": "not_slower",
    "tg100 cold": "not_slower",
}
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class World:
    """What is true and what disturbs, as shares. ``gain``: of prefill in every state; ``decode``: of decode.

    spread, decode_spread: standard deviation of one server start's luck. noise: of one cell of one start. drift: over
    the whole run. outliers, slow_state: share of the blocks that are hit (by 2 to 15 %, by 5 %). void: share of the
    blocks that a check voids; each is measured again, as often as a run would.
    """

    name: str
    gain: float = 0.0
    decode: float = 0.0
    spread: float = 0.01
    decode_spread: float = 0.005
    noise: float = 0.002
    drift: float = 0.0
    correlation: float = 0.0
    outliers: float = 0.0
    slow_state: float = 0.0
    void: float = 0.0

    @property
    def accept_is_an_error(self) -> bool:
        return self.gain <= DELTA or self.decode <= NOT_INFERIOR - 1


@dataclass(frozen=True)
class Counted:
    """Shares of the runs with each outcome, and the mean number of pairs that it took.

    found: share of the runs in which the primary cell alone passes at the planned end. coverage: how often Student's
    and the bootstrap's 95 % interval of the primary cell at the planned end hold the truth.
    """

    world: World
    outcomes: dict[str, float]
    pairs: float
    found: float
    coverage: tuple[float, float]


CALM = World("calm")  # a start's luck is 1 %, so two starts differ by 1.4 %
DISTURBED = (
    CALM,
    replace(CALM, name="drift 5 %", drift=0.05),
    replace(CALM, name="autocorrelation 0.8", correlation=0.8),
    replace(CALM, name="outliers", outliers=0.05),
    replace(CALM, name="two-state host", slow_state=0.3),
    replace(CALM, name="all four", drift=0.05, correlation=0.8, outliers=0.05, slow_state=0.3),
)


def errors() -> list[World]:
    """Worlds in which ACCEPT is wrong."""
    found = [replace(world, name=f"no gain, {world.name}") for world in DISTURBED]
    found += [replace(world, name=f"gain of delta, {world.name}", gain=DELTA) for world in DISTURBED]
    loss = {"gain": 0.10, "decode": NOT_INFERIOR - 1}
    found += [replace(world, name=f"+10 %, decode -1 %, {world.name}", **loss) for world in DISTURBED]
    return [*found, replace(CALM, name="gain of delta, one block in ten void", gain=DELTA, void=0.1)]


def gains() -> list[World]:
    """Worlds in which ACCEPT is right."""
    worst = DISTURBED[-1]
    # Two starts that differ by 0.7 % on their own give pairs that differ by 1 %.
    steady = replace(CALM, spread=0.007, decode_spread=0.005, noise=0.001)
    return [
        replace(steady, name="+4 %, spread of the pairs 1 %", gain=0.04),
        replace(CALM, name="+4 %", gain=0.04),
        replace(CALM, name="+4 %, one block in ten void", gain=0.04, void=0.1),
        replace(CALM, name="+4 %, drift 5 %", gain=0.04, drift=0.05),
        replace(CALM, name="+4 %, decode as unsteady as prefill", gain=0.04, decode_spread=0.01),
        replace(CALM, name="+4 %, spread 0.5 %", gain=0.04, spread=0.005),
        replace(CALM, name="+3 %", gain=0.03),
        replace(worst, name="+10 %, all four disturbances", gain=0.10),
    ]


def differences(world: World, runs: int, pairs: int, seed: int) -> dict[str, Floats]:
    """Log ratios (runs, pairs) of each cell; not a number where a void block could not be measured again."""
    rng = np.random.default_rng(seed)
    blocks = 2 * pairs
    shape = (runs, blocks)
    disturbance = world.drift * np.arange(blocks) / blocks
    disturbance = disturbance - (rng.random(shape) < world.outliers) * rng.uniform(0.02, 0.15, shape)
    disturbance = disturbance - 0.05 * _slow(rng, world.slow_state, shape)
    disturbance[_lost(rng, world.void, shape)] = np.nan
    luck = {
        "pp": _luck(rng, world.spread, world.correlation, shape),
        "tg": _luck(rng, world.decode_spread, world.correlation, shape),
    }
    # The order as plans make it; a few hundred different ones stand for all.
    orders = np.array([[order[0] for order in rounds(2, pairs, number)] for number in range(min(runs, 500))])
    sign = np.where(orders[np.arange(runs) % len(orders)] == 0, 1.0, -1.0)  # the baseline first: second minus first
    made: dict[str, Floats] = {}
    for cell in REQUIRES:
        value = luck[cell[:2]] + disturbance + rng.normal(0, world.noise, shape)
        effect = math.log1p(world.gain if cell.startswith("pp") else world.decode)
        made[cell] = effect + sign * (value[:, 1::2] - value[:, 0::2])
    return made


def _luck(rng: np.random.Generator, spread: float, correlation: float, shape: tuple[int, int]) -> Floats:
    """Luck of each start with this standard deviation, correlated with that of the start before."""
    luck = rng.normal(0, spread, shape)
    fresh = math.sqrt(1 - correlation**2)
    for block in range(1, shape[1] if correlation else 1):
        luck[:, block] = correlation * luck[:, block - 1] + fresh * luck[:, block]
    return luck


def _slow(rng: np.random.Generator, share: float, shape: tuple[int, int]) -> NDArray[np.bool_]:
    """Whether the host is in its slow state: it is for ``share`` of the blocks, five in a row on average."""
    leave = 0.2
    enter = leave * share / (1 - share)
    slow = rng.random(shape) < share
    for block in range(1, shape[1]):
        draw = rng.random(shape[0])
        slow[:, block] = np.where(slow[:, block - 1], draw >= leave, draw < enter)
    return slow


def _lost(rng: np.random.Generator, void: float, shape: tuple[int, int]) -> NDArray[np.bool_]:
    """Blocks that were void each time."""
    lost: NDArray[np.bool_] = (rng.random((*shape, 1 + MAX_REPEATS)) < void).all(axis=-1)
    return lost


def follow(rule: Rule, cells: dict[str, Floats]) -> tuple[NDArray[np.int_], Floats]:
    """(decision, pairs it took) of each run: judged after every pair, ended by the first ACCEPT or REJECT."""
    runs = len(cells[PRIMARY])
    decision = np.full(runs, int(Decision.INCONCLUSIVE))
    took = np.full(runs, float(rule.looks[-1]))
    for pairs in range(1, rule.looks[-1] + 1):
        going = np.flatnonzero(decision == Decision.INCONCLUSIVE)
        now = rule.decide({cell: values[going, :pairs] for cell, values in cells.items()}, REQUIRES)
        decision[going] = now
        took[going[now != Decision.INCONCLUSIVE]] = pairs
    return decision, took


def count(world: World, runs: int, pairs: int, seed: int) -> Counted:
    cells = differences(world, runs, pairs, seed)
    rule = Rule.of(pairs)
    decision, took = follow(rule, cells)
    outcomes = {outcome.name: float(np.mean(decision == outcome)) for outcome in Decision}
    primary = cells[PRIMARY][np.isfinite(cells[PRIMARY]).all(axis=1)]
    found = float(np.mean(rule.speed(primary, "faster") == Speed.PASS))
    return Counted(world, outcomes, float(took.mean()), found, _coverage(primary, math.log1p(world.gain), seed))


def _coverage(whole: Floats, truth: float, seed: int) -> tuple[float, float]:
    low, high = stats.interval(whole)
    some = whole[:1000]
    pairs = whole.shape[1]
    resampled = np.random.default_rng(seed).multinomial(pairs, [1 / pairs] * pairs, size=999) / pairs
    quantiles = np.quantile(some @ resampled.T, [0.025, 0.975], axis=1)
    student = np.mean((low <= truth) & (truth <= high))
    return float(student), float(np.mean((quantiles[0] <= truth) & (truth <= quantiles[1])))


def table(rows: Sequence[Counted]) -> list[str]:
    header = [
        "world",
        "ACCEPT",
        "REJECT",
        "INCONCLUSIVE",
        "INVALID",
        "pairs",
        "gain found",
        "Student holds",
        "bootstrap holds",
    ]
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    for row in rows:
        shares = [f"{row.outcomes[name] * 100:.2f} %" for name in header[1:5]]
        covered = [f"{share * 100:.1f} %" for share in (row.found, *row.coverage)]
        lines.append("| " + " | ".join([row.world.name, *shares, f"{row.pairs:.1f}", *covered]) + " |")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Simulate runs and count verdicts.")
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    rule = Rule.of(options.pairs)
    begin = time.perf_counter()
    print(f"{options.runs} runs a row, {options.pairs} pairs, delta {rule.delta:.0%}")
    for look in rule.looks:
        print(f"look after {look} pairs: {stats.spent(look / options.pairs):.2%} may be spent")
    parts = (("An ACCEPT is an error (at most 5 %):", errors()), ("An ACCEPT is right:", gains()))
    for title, worlds in parts:
        print("", title, "", sep="\n")
        print("\n".join(table([count(world, options.runs, options.pairs, options.seed) for world in worlds])))
    print(f"\n{time.perf_counter() - begin:.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
