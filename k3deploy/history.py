"""Runs over weeks: where the baseline of one identity moved, and what two runs differ in.

A point is one server start of the baseline; points are comparable only where everything that could change them is the
same (command lines, environment, build, model, harness, cluster), so each such identity is a series of its own.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from k3deploy import stats
from k3deploy.facts import Block, Facts, State

MIN_SEGMENT = 3  # server starts; fewer are not a level
MIN_POINTS = 2 * MIN_SEGMENT
# What a shift must save of the sum of absolute deviations, in standard deviations x ln(n): by simulation of 20 starts,
# noise alone passes in 3 % and a shift of three standard deviations that lasts eight starts is found in 9 of 10.
PENALTY = 2.0


@dataclass(frozen=True, slots=True)
class Point:
    """One server start; ``value`` is the logarithm of tokens per second."""

    when: str
    run: str
    value: float


@dataclass(slots=True)
class Series:
    """A cell of one identity's baseline, in the order of time."""

    identity: str
    cluster: str
    cell: str
    state: State
    points: list[Point] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Shift:
    """The baseline moved between two points: the ratio of the level after to that before."""

    at: int
    ratio: float


def identity(plan: Mapping[str, Any], harness_sha256: str | None) -> str:
    """Twelve digits that stand for everything which could change the baseline's numbers."""
    baseline = plan["arms"][0]
    model = plan.get("model") or {}
    parts = {
        "cluster": plan.get("cluster"),
        "model": model.get("sha256") or model.get("path"),
        "build": baseline.get("build_key"),
        "processes": baseline.get("processes"),
        "warmup": baseline.get("warmup"),
        "harness": harness_sha256,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def series(runs: Sequence[tuple[Mapping[str, Any], Facts]]) -> list[Series]:
    """Every cell of every identity, from (plan, facts) of runs in any order."""
    found: dict[tuple[str, str, State], Series] = {}
    for plan, facts in runs:
        name = str(plan["arms"][0]["name"])
        for block in facts.of(name):
            if not block.bench or block.bench.error:
                continue
            key = identity(plan, block.bench.harness_sha256)
            for cell, state, value in _values(block):
                entry = found.setdefault((key, cell, state), Series(key, str(plan.get("cluster") or ""), cell, state))
                entry.points.append(Point(block.started, facts.run_id, value))
    for entry in found.values():
        entry.points.sort(key=lambda point: point.when)
    return list(found.values())


def _values(block: Block) -> Iterator[tuple[str, State, float]]:
    for cell in block.bench.cells if block.bench else []:
        speeds = [sample.decode_per_second if cell.decodes else sample.prefill_per_second for sample in cell.valid()]
        value = stats.median_log([speed for speed in speeds if speed is not None])
        if value is not None:
            yield cell.cell, cell.state, value


def noise(values: Sequence[float]) -> float:
    """The standard deviation of neighbours, by the median of their differences: a shift of level hardly changes it."""
    steps = [abs(after - before) for before, after in pairwise(values)]
    return statistics.median(steps) / (0.6745 * math.sqrt(2)) if steps else 0.0


def shifts(values: Sequence[float]) -> list[Shift]:
    """Where the level changed and stayed so for ``MIN_SEGMENT`` starts at least.

    PELT on absolute deviations: one odd start moves no median.
    """
    sigma = noise(values)
    if len(values) < MIN_POINTS or max(values) - min(values) < 1e-12:
        return []
    import numpy as np
    import ruptures

    signal = np.asarray(values, dtype=float).reshape(-1, 1)
    penalty = PENALTY * max(sigma, 1e-6) * math.log(len(values))
    ends = ruptures.Pelt(model="l1", min_size=MIN_SEGMENT, jump=1).fit_predict(signal, pen=penalty)
    starts = [0, *ends[:-1]]
    levels = [statistics.median(values[start:end]) for start, end in zip(starts, ends, strict=True)]
    steps = zip(starts[1:], pairwise(levels), strict=True)
    return [Shift(start, math.exp(after - before)) for start, (before, after) in steps]


def differences(one: Any, other: Any, place: str = "") -> list[tuple[str, str, str]]:
    """(place, one's value, other's value) of every leaf in which two documents differ."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        keys = sorted(one.keys() | other.keys(), key=str)
        inside = [(one.get(key), other.get(key), f"{place}.{key}" if place else str(key)) for key in keys]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        inside = [(before, after, f"{place}[{at}]") for at, (before, after) in enumerate(zip(one, other, strict=True))]
    else:
        return [] if one == other else [(place, _shown(one), _shown(other))]
    return [found for before, after, where in inside for found in differences(before, after, where)]


def _shown(value: Any) -> str:
    text = "(none)" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def comparable(plan: Mapping[str, Any]) -> dict[str, Any]:
    """What two runs are compared by: all that could change the numbers, by arm, without the order of the blocks."""
    return {
        "cluster": plan.get("cluster"),
        "model": {key: (plan.get("model") or {}).get(key) for key in ("name", "path", "sha256")},
        "arms": {
            arm["name"]: {key: arm.get(key) for key in ("build_key", "settings", "processes", "warmup")}
            for arm in plan["arms"]
        },
    }


def levels(facts: Facts) -> dict[tuple[str, str, State], tuple[float, int]]:
    """{(arm, cell, state): (tokens per second, server starts)}: the mean of the blocks' logarithms, as a speed."""
    found: dict[tuple[str, str, State], list[float]] = {}
    for block in facts.blocks:
        if block.bench and not block.bench.error:
            for cell, state, value in _values(block):
                found.setdefault((block.arm, cell, state), []).append(value)
    return {key: (math.exp(statistics.fmean(values)), len(values)) for key, values in found.items()}
