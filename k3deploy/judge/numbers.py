"""Numbers from samples: a cell of the arm against the baseline's, and each rank's memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

from k3deploy import stats
from k3deploy.facts import Block, Cell, Sample, State
from k3deploy.judge.evidence import Evidence, cell_names
from k3deploy.judge.verdict import Comparison, Metric, RankMemory
from k3deploy.memory_use import Trend, trend


def compare(evidence: Evidence, name: str, state: State, metric: Metric, threshold: float | None = None) -> Comparison:
    """One cell; threshold: the ratio that the lower bound must be above, if something judges the cell."""
    before: list[float] = []
    after: list[float] = []
    for one, other in evidence.pairs:
        low = stats.median_log(_samples(one.cell(name, state), metric))
        high = stats.median_log(_samples(other.cell(name, state), metric))
        if low is not None and high is not None:
            before.append(low)
            after.append(high)
    differences = [high - low for low, high in zip(before, after, strict=True)]
    found = stats.estimate(differences, math.log(threshold or 1.0))
    bounds = found.bootstrap if found else None
    cells = {
        side: [cell for block in blocks if (cell := block.cell(name, state)) is not None]
        for side, blocks in (("baseline", evidence.baseline_blocks), ("arm", evidence.blocks))
    }
    return Comparison(
        cell=name,
        state=state,
        metric=metric,
        unit="ms" if metric == "ttft" else "t/s",
        baseline=_typical(before, metric),
        arm=_typical(after, metric),
        ratio=found.ratio if found else None,
        low=found.low if found else None,
        high=found.high if found else None,
        pairs=found.pairs if found else 0,
        spread=found.spread if found else None,
        p_value=found.p_value if found else None,
        bootstrap_low=bounds[0] if bounds else None,
        bootstrap_high=bounds[1] if bounds else None,
        threshold=threshold,
        differences=differences,
        pairs_needed=stats.pairs_needed(found, threshold) if found and threshold else None,
        baseline_samples=sum(len(cell.valid()) for cell in cells["baseline"]),
        arm_samples=sum(len(cell.valid()) for cell in cells["arm"]),
        invalid_samples=sum(len(cell.samples) - len(cell.valid()) for side in cells.values() for cell in side),
    )


def all_cells(evidence: Evidence) -> list[Comparison]:
    """Every cell that was measured: its speed, and for prompts the time to the first token as well."""
    rows = []
    for name, state in cell_names(evidence.both):
        rows.append(compare(evidence, name, state, "speed"))
        if not name.startswith("tg"):
            rows.append(compare(evidence, name, state, "ttft"))
    return rows


def rank_memory(evidence: Evidence) -> list[RankMemory]:
    ranks = dict.fromkeys([*evidence.arm.processes, *(rank for block in evidence.blocks for rank in block.ranks)])
    return [
        RankMemory(
            rank=rank,
            min_available_mib=_lowest(evidence.blocks, rank, "min_available_mib"),
            load_min_mib=_lowest(evidence.blocks, rank, "load_min_mib"),
            run_min_mib=_lowest(evidence.blocks, rank, "run_min_mib"),
            baseline_min_mib=_lowest(evidence.baseline_blocks, rank, "min_available_mib"),
            guard_mib=evidence.arm.processes[rank].guard_mib if rank in evidence.arm.processes else None,
            min_driver_free_mib=_lowest(evidence.blocks, rank, "min_driver_free_mib"),
            **_allocated(evidence.blocks, rank),
            trend_mib_per_request=found.per_request if (found := steepest(evidence.blocks, rank)) else None,
        )
        for rank in ranks
    ]


def steepest(blocks: Sequence[Block], rank: str) -> Trend | None:
    """The trend of available memory in the block in which it fell most from one request to the next."""
    found = []
    for block in blocks:
        memory = block.ranks[rank].memory if rank in block.ranks else None
        if memory is not None and block.bench is not None:
            requests = len(block.bench.warmup) + sum(len(cell.samples) for cell in block.bench.cells)
            found.append(trend(memory.series, memory.ready_at, requests))
    return min((one for one in found if one is not None), key=lambda one: one.high, default=None)


def _allocated(blocks: Sequence[Block], rank: str) -> dict[str, float | None]:
    """The forecast beside the allocation, of the block in which it is furthest off."""
    known = [block.allocation[rank] for block in blocks if rank in block.allocation]
    if not known:
        return {}
    worst = max(known, key=lambda one: abs(one.error or 0.0))
    return {
        "foreseen_mib": round(sum(worst.foreseen_mib.values()), 1),
        "allocated_mib": round(sum(worst.allocated_mib.values()), 1),
        "forecast_error": worst.error,
    }


def _value(cell: Cell, sample: Sample, metric: Metric) -> float | None:
    if metric == "ttft":
        return sample.ttft_ms
    return sample.decode_per_second if cell.decodes else sample.prefill_per_second


def _samples(cell: Cell | None, metric: Metric) -> list[float]:
    """The cell's valid values such that more is better: tokens per second, or one over the time to first token."""
    values = [_value(cell, sample, metric) for sample in cell.valid()] if cell else []
    known = [value for value in values if value is not None and value > 0]
    return [1.0 / value for value in known] if metric == "ttft" else known


def _typical(block_values: Sequence[float], metric: Metric) -> float | None:
    """What the blocks' values stand for, in the metric's own unit; two of them have exactly the estimate's ratio."""
    if not block_values:
        return None
    mean = math.exp(math.fsum(block_values) / len(block_values))
    return 1.0 / mean if metric == "ttft" else mean


def _lowest(blocks: Sequence[Block], rank: str, field: str) -> int | None:
    memories = [block.ranks[rank].memory for block in blocks if rank in block.ranks]
    values = [getattr(memory, field) for memory in memories if memory is not None]
    return min((value for value in values if value is not None), default=None)
