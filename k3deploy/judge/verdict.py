"""What a verdict says: the data of ``verdict.json``.

A ratio is always "how much better": above 1 the arm is faster (or answers sooner) than the baseline of its own pair.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from k3deploy.facts import State

Outcome = Literal["ACCEPT", "REJECT", "INCONCLUSIVE", "INVALID"]
Metric = Literal["speed", "ttft"]


class _Said(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Check(_Said):
    """One validity check of one arm: passed or not, and everything that speaks against it."""

    name: str
    passed: bool
    problems: list[str] = Field(default_factory=list)


class Comparison(_Said):
    """One cell of the arm against the baseline's: means over the blocks of complete pairs, and their ratio.

    unit: ``t/s`` (more is better) or ``ms`` (less is better). low, high: the 95 % interval of the ratio (Student's,
    which decides); bootstrap_low, bootstrap_high: the bootstrap's, for comparison. threshold: what the lower bound must
    be above, where a gate judges the cell; p_value: of the exact sign-flip test against it.
    """

    cell: str
    state: State
    metric: Metric
    unit: Literal["t/s", "ms"]
    baseline: float | None
    arm: float | None
    ratio: float | None
    low: float | None = None
    high: float | None = None
    pairs: int = 0
    spread: float | None = None
    p_value: float | None = None
    bootstrap_low: float | None = None
    bootstrap_high: float | None = None
    threshold: float | None = None
    differences: list[float] = Field(default_factory=list, description="ln(arm / baseline) of each pair, in order")
    pairs_needed: int | None = None
    baseline_samples: int = 0
    arm_samples: int = 0
    invalid_samples: int = 0


class GateResult(_Said):
    """A gate with its numbers. ``implied`` gates hold for every row: the memory floor, the speed of every other cold or
    warm cell, unchanged text."""

    name: str
    require: str
    outcome: Literal["pass", "fail", "open"]
    reason: str
    implied: bool = False
    comparisons: list[Comparison] = Field(default_factory=list)
    limit: float | bool | None = None
    observed: float | bool | None = None


class RankMemory(_Said):
    """One rank over all blocks of the arm, in MiB.

    The lowest MemAvailable against its floor, and the lowest MemFree less CmaFree; what the plan foresaw that llama.cpp
    allocates, what it did allocate, and the error of that; how available memory changes from one request to the next
    in the block in which it fell most.
    """

    rank: str
    min_available_mib: int | None
    load_min_mib: int | None
    run_min_mib: int | None
    baseline_min_mib: int | None
    guard_mib: int | None
    min_driver_free_mib: int | None = None
    foreseen_mib: float | None = None
    allocated_mib: float | None = None
    forecast_error: float | None = None
    trend_mib_per_request: float | None = None


class Seen(_Said):
    """Something a reader must know beside the numbers. ``contradicts``: it speaks against the row's hypothesis."""

    source: str
    text: str
    contradicts: bool = False


class ArmVerdict(_Said):
    """One arm of the candidate."""

    arm: str
    slug: str
    outcome: Outcome
    reasons: list[str]
    pairs: int
    alpha: float = 0.05
    checks: list[Check]
    gates: list[GateResult]
    cells: list[Comparison]
    memory: list[RankMemory]
    findings: list[Seen]


class Verdict(_Said):
    """The candidate's verdict: that of its best arm."""

    candidate: str
    run_id: str
    outcome: Outcome
    reason: str
    best_arm: str | None
    pairs: int
    looks: list[int] = Field(default_factory=list)
    delta: float = 0.02
    arms: list[ArmVerdict]
    findings: list[Seen]
