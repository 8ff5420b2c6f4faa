"""The baseline against itself: how much two starts of one arm differ, kept by cluster, model, build and settings.

A calibration is what a plan's promise rests on: how small a gain its pairs can show, and whether the measuring path
itself prefers the arm that runs first or second.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from k3deploy import stats
from k3deploy.facts import Facts, State
from k3deploy.judge import NOT_INFERIOR, ArmVerdict, Comparison
from k3deploy.judge.rule import STOP_PAIRS
from k3deploy.paths import harness_sha256, write_json

FOLDER = "calibration"
_IDENTITY = ("cluster", "model", "build_key", "settings")


class _Data(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class CellSpread(_Data):
    """One cell of the baseline against itself: the spread of the pairs' log ratios, their mean ratio with its interval,
    and what being second in a pair does, as a ratio with its interval."""

    cell: str
    state: State
    metric: str
    pairs: int
    spread: float
    ratio: float
    low: float
    high: float
    order: float
    order_low: float
    order_high: float


class Calibration(_Data):
    """What is known of one identity: a cluster, a model, a build, and the settings that they ran with.

    settings: stands for the baseline's processes on all ranks and for the harness; empty where that was not recorded.
    """

    cluster: str
    model: str
    build_key: str
    settings: str = ""
    run_id: str
    measured: str
    pairs: int
    cells: list[CellSpread]

    def of(self, cell: str, state: str, metric: str) -> CellSpread | None:
        wanted = (cell, state, metric)
        return next((found for found in self.cells if (found.cell, found.state, found.metric) == wanted), None)


@dataclass(frozen=True, slots=True)
class Power:
    """What a plan's pairs can show of its primary cells. ``problem`` says why they cannot show enough.

    remedy: what mends the calibration itself, where more pairs of the plan would not help.
    hardest: the cell that takes most pairs to be shown not slower where it is not, and how many (``None``: too many).
    """

    pairs: int
    calibration: Calibration | None
    spread: float | None = None
    half_width: float | None = None
    detects: float | None = None
    needed: int | None = None
    problem: str = ""
    hardest: tuple[str, int | None] | None = None
    remedy: str = ""


def calibration_of(plan: Mapping[str, Any], facts: Facts, arm: ArmVerdict) -> Calibration | None:
    """What the blocks of a calibration say; ``None`` below three pairs."""
    cells = [found for comparison in arm.cells if (found := _spread(comparison, facts, arm.arm)) is not None]
    if not cells:
        return None
    return Calibration(
        **identity(plan, _harness(facts)),
        run_id=facts.run_id,
        measured=facts.blocks[-1].started,
        pairs=arm.pairs,
        cells=cells,
    )


def identity(plan: Mapping[str, Any], harness: str) -> dict[str, str]:
    """Cluster, model, build and settings of a plan: what a calibration holds for. harness: its hash.

    The settings are those of the cluster's own baseline: a row that compares with another one is weighed by it too.
    """
    model = plan["model"]
    return {
        "cluster": str(plan["cluster"]),
        "model": str(model.get("sha256") or model["path"]),
        "build_key": str(plan["arms"][0]["build_key"]),
        "settings": hashlib.sha256(f"{plan.get('calibrated_as', '')} {harness}".encode()).hexdigest()[:12],
    }


def _harness(facts: Facts) -> str:
    """The harness that measured, as it said itself."""
    return next((str(block.bench.harness_sha256) for block in facts.blocks if block.bench), "")


def write(runs: Path, calibration: Calibration) -> Path:
    """Keep it below the directory of runs; it replaces an older one of the same identity."""
    path = _path(runs, calibration.model_dump(include=set(_IDENTITY)))
    write_json(path, calibration.model_dump(mode="json"))
    return path


def find(runs: Path, plan: Mapping[str, Any], harness: str | None = None) -> Calibration | None:
    """The calibration for ``plan``'s cluster, model, build and settings; one that cannot be read is none.

    harness: the hash of what will measure; that of this checkout if not given.
    """
    wanted = identity(plan, harness_sha256() if harness is None else harness)
    found = _read(_path(runs, wanted))
    return found if found is not None and found.model_dump(include=set(_IDENTITY)) == wanted else None


def of_other_settings(runs: Path, plan: Mapping[str, Any]) -> Calibration | None:
    """The latest calibration of ``plan``'s cluster, model and build, whatever it was measured with."""
    wanted = {key: value for key, value in identity(plan, "").items() if key != "settings"}
    known = [found for path in (runs / FOLDER).glob("*.json") if (found := _read(path)) is not None]
    same = [found for found in known if found.model_dump(include=set(wanted)) == wanted]
    return max(same, key=lambda found: found.measured, default=None)


def _read(path: Path) -> Calibration | None:
    try:
        return Calibration.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError):
        return None


def power(plan: Mapping[str, Any], calibration: Calibration | None, other: Calibration | None = None) -> Power:
    """What the plan's pairs can show where a gain is asked for (the first cell of each such gate).

    other: where there is no calibration, the one that was for other settings.
    """
    blocks = plan["blocks"]
    pairs = 1 + max(block["pair"] for block in blocks)
    least = stats.least_pairs(len(plan["arms"]) - 1)
    if calibration is None:
        return Power(pairs, None, problem=_UNKNOWN if other is None else _FOR_OTHERS.format(other.run_id))
    margin = math.log1p(plan["rule"]["delta"])
    spreads = [calibration.of(cell, state, metric) for cell, state, metric in primary_cells(plan)]
    known = [found for found in spreads if found is not None]
    if len(known) < len(spreads):
        return Power(pairs, calibration, problem=f"{calibration.run_id} did not calibrate a cell that this run judges")
    if not known:
        return Power(pairs, calibration)
    spread = max(found.spread for found in known)
    needed = stats.pairs_for(margin / 2, spread)
    if pairs < 2:
        return Power(pairs, calibration, spread, needed=needed, problem=f"fewer than {least} pairs cannot be accepted")
    half = stats.half_width(pairs, spread)
    hardest = _hardest(plan, calibration)
    detects = math.expm1(stats.detects(pairs, spread, margin))
    # One problem, the one that has to go first: what is wrong with the path stays wrong with any number of pairs, and
    # whether it is equal to itself is asked of a plan that could use the answer.
    problem, remedy = _unsound(known, margin)
    if not problem and pairs < least:
        problem = f"fewer than {least} pairs cannot be accepted"
    elif not problem and half > margin / 2:
        problem = (
            f"{pairs} pairs know a gain to ±{math.expm1(half) * 100:.1f} % only (spread {spread * 100:.1f} %), "
            f"more than half of the {math.expm1(margin) * 100:.3g} % that are worth a change"
        )
    elif not problem:
        problem, remedy = _not_equal(known, margin)
    return Power(pairs, calibration, spread, half, detects, needed, problem, hardest, remedy)


def _unsound(known: Sequence[CellSpread], margin: float) -> tuple[str, str]:
    """(problem, remedy) of a path that surely prefers one arm, or surely the first or second of a pair; or two empty.

    Sure: the interval leaves no effect out. A calibration of steady starts finds effects that are too small to matter,
    so that a preference counts from a quarter of what is worth a change on: what it adds to an arm is half of what
    the verdict may be unsure of. The order is balanced over the pairs and cancels in the mean, so that it may be twice
    as large; beyond that each pair says more of its place than of its arm, and one that is void tips the balance.
    """
    for found in known:
        if _surely_beyond(found.ratio, found.low, found.high, margin / 4):
            return (
                f"the baseline differs from itself by {_percent(found.ratio)} on {found.cell} {found.state}: "
                "the measuring path is biased",
                "find what the calibration's second arm has otherwise than its first, then k3deploy calibrate",
            )
    for found in known:
        if _surely_beyond(found.order, found.order_low, found.order_high, margin / 2):
            return (
                f"being second in a pair makes {found.cell} {found.state} {_percent(found.order)}: "
                "one block changes what the next one finds",
                "find what a block leaves behind (heat, page cache, memory that is kept), then k3deploy calibrate",
            )
    return "", ""


def _not_equal(known: Sequence[CellSpread], margin: float) -> tuple[str, str]:
    """(problem, remedy) where the calibration has not shown that the baseline is equal to itself, or two empty.

    Equal: the whole interval within the smallest gain that is worth a change. Half of it would ask a calibration for
    more pairs than the comparisons that it is for.
    """
    for found in known:
        if math.log(found.low) < -margin or math.log(found.high) > margin:
            needed = stats.pairs_for(margin - abs(math.log(found.ratio)), found.spread)
            pairs = f" --pairs {max(needed, found.pairs + 1)}" if needed else " with more pairs"
            return (
                f"the calibration has not shown that the baseline is equal to itself on {found.cell} {found.state}: "
                f"{_percent(found.low)} to {_percent(found.high)}, and ±{math.expm1(margin) * 100:.3g} % are asked for",
                f"k3deploy calibrate{pairs}",
            )
    return "", ""


def _surely_beyond(ratio: float, low: float, high: float, margin: float) -> bool:
    return (low > 1 or high < 1) and abs(math.log(ratio)) > margin


def _percent(ratio: float) -> str:
    return f"{(ratio - 1) * 100:+.1f} %"


def _hardest(plan: Mapping[str, Any], calibration: Calibration) -> tuple[str, int | None] | None:
    """Of the cells that must not be slower, the one with the widest spread, and the pairs that it takes."""
    cells = [(cell["cell"], cell["state"], "speed") for cell in plan["bench"]["cells"] if cell["state"] != "cached"]
    # What one candidate of a campaign must speed up, another must not slow down.
    judged = [cell for cell in cells if any(cell not in _faster(gates) for gates in _gates(plan))]
    known = [found for cell in judged if (found := calibration.of(*cell))]
    if not known:
        return None
    widest = max(known, key=lambda found: found.spread)
    return f"{widest.cell} {widest.state}", stats.pairs_to_clear(math.log(NOT_INFERIOR), widest.spread)


def primary_cells(plan: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(cell, state, metric) of the cells that must be faster, for any arm of the plan; each once."""
    return list(dict.fromkeys(cell for gates in _gates(plan) for cell in _faster(gates)))


def _gates(plan: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The sets of gates that arms are judged by: the plan's, or in a campaign those of its arms."""
    own = [arm["gates"] for arm in plan["arms"] if arm.get("gates") is not None]
    return own or [plan["gates"]]


def _faster(gates: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    return [
        (gate["cells"][0], gate["state"], gate["metric"])
        for gate in gates.values()
        if gate["cells"] and gate["require"] == "faster"
    ]


_FOR_OTHERS = "no calibration for these settings (the last one, {}, was for others: measure again)"
_UNKNOWN = "how much two starts of one arm differ is not known for this cluster, model and build"


def _spread(found: Comparison, facts: Facts, arm: str) -> CellSpread | None:
    if found.pairs < STOP_PAIRS or found.spread is None or found.ratio is None:
        return None
    # Without every pair in this cell, which difference belongs to which order is not known.
    signs = _order_signs(facts, arm)
    if found.low is None or found.high is None or len(signs) != found.pairs:
        return None
    order = stats.estimate([sign * value for sign, value in zip(signs, found.differences, strict=True)])
    assert order is not None and order.low is not None and order.high is not None
    return CellSpread(
        cell=found.cell,
        state=found.state,
        metric=found.metric,
        pairs=found.pairs,
        spread=found.spread,
        ratio=found.ratio,
        low=found.low,
        high=found.high,
        order=order.ratio,
        order_low=order.low,
        order_high=order.high,
    )


def _order_signs(facts: Facts, arm: str) -> Sequence[int]:
    """+1 for each pair of which ``arm`` ran second, -1 where it ran first."""
    own = {block.pair: block.started for block in facts.of(arm)}
    other = {block.pair: block.started for block in facts.blocks if block.arm != arm}
    return [1 if started > other[pair] else -1 for pair, started in own.items() if pair in other]


def _path(runs: Path, wanted: Mapping[str, str]) -> Path:
    name = re.sub(r"[^A-Za-z0-9.-]", "-", wanted["cluster"])
    digest = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:12]
    return runs / FOLDER / f"{name}-{digest}.json"
