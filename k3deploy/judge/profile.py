"""Which rank the others wait for, and the layer split that would balance them: from the workers' own timing lines."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from k3deploy.facts import Block
from k3deploy.judge.evidence import Evidence
from k3deploy.judge.planned import PlannedArm
from k3deploy.judge.verdict import Seen

WORTH_MOVING = 0.10  # a rank that is slower than the others' mean by more than this is worth another split


@dataclass(frozen=True, slots=True)
class RankTime:
    """One rank over the blocks of an arm: medians of what a block's graphs took (ms) and of its idle share."""

    rank: str
    forward_ms: float
    rpc_ms: float | None
    idle_share: float | None


def rank_times(blocks: Sequence[Block]) -> list[RankTime]:
    """The ranks that said how long they computed, slowest first; empty without timing lines."""
    ranks = sorted({rank for block in blocks for rank in block.observations.rank_forward_ms})
    found = []
    for rank in ranks:
        forward = _median(blocks, "rank_forward_ms", rank)
        if forward:
            found.append(
                RankTime(rank, forward, _median(blocks, "rank_rpc_ms", rank), _median(blocks, "rank_idle_share", rank))
            )
    return sorted(found, key=lambda time: -time.forward_ms)


def _median(blocks: Sequence[Block], name: str, rank: str) -> float | None:
    values = [getattr(block.observations, name).get(rank) for block in blocks]
    return statistics.median(known) if (known := [value for value in values if value is not None]) else None


def profile_findings(evidence: Evidence) -> list[Seen]:
    times = rank_times(evidence.blocks)
    if len(times) < 2:
        return []
    slowest, others = times[0], times[1:]
    mean = statistics.fmean(time.forward_ms for time in others)
    excess = slowest.forward_ms / mean - 1
    text = f"{slowest.rank} computes {excess * 100:.0f} % longer than the mean of the others"
    if excess <= WORTH_MOVING:
        return [Seen(source="measured", text=f"{text}: the split is balanced to within {WORTH_MOVING * 100:.0f} %")]
    split = tensor_split(evidence.arm)
    proposed = balanced_split(split, {time.rank: time.forward_ms for time in times}, list(evidence.arm.processes))
    if proposed is None:
        lost = sorted(set(evidence.arm.processes) - {time.rank for time in times})
        why = (
            f"{', '.join(lost)} did not say how long it computed" if lost else "the command line names no tensor-split"
        )
        return [Seen(source="measured", text=f"{text}; no better split can be named: {why}")]
    shown = ", ".join(f"{share:g}" for share in proposed)
    row = f"a row to try: kind: runtime, set: {{tensor_split: [{shown}]}}, gate output_identity on the suite short"
    return [Seen(source="measured", text=f"{text}; {row}")]


def balanced_split(
    split: Sequence[float] | None, forward_ms: Mapping[str, float], ranks: Sequence[str]
) -> list[float] | None:
    """Shares under which each rank would take as long as every other, if time goes with the share.

    split: today's shares in the order of ``ranks``. ``None`` where a rank's time or share is not known. The sum stays.
    """
    if not split or len(split) != len(ranks) or any(rank not in forward_ms for rank in ranks):
        return None
    speed = [share / forward_ms[rank] for share, rank in zip(split, ranks, strict=True)]
    scale = sum(split) / sum(speed)
    return [round(value * scale, 2) for value in speed]


def tensor_split(arm: PlannedArm) -> list[float] | None:
    """The shares on the head's command line."""
    for rank in arm.processes.values():
        argv = rank.head.argv if rank.head else []
        if "--tensor-split" in argv[:-1]:
            return [float(share) for share in argv[argv.index("--tensor-split") + 1].split(",")]
    return None
