"""Each rank's memory: the floor that its guard enforces, and what a reader must know beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from k3deploy.facts import Block
from k3deploy.judge.evidence import Evidence
from k3deploy.judge.numbers import rank_memory, steepest
from k3deploy.judge.verdict import GateResult, Seen

MEMORY_GATE = "memory_floor"
LEAK_MIB = 1.0  # a smaller loss a request is within what a server's own buffers come to


def memory_gate(evidence: Evidence) -> list[GateResult]:
    """The floor: crossed where a rank's guard stopped a block for it, or where a rank was seen below it."""
    trips = [trip for block in evidence.blocks for trip in block.trips() if trip.is_floor]
    known = [rank for rank in rank_memory(evidence) if rank.min_available_mib is not None and rank.guard_mib]
    if not known:
        return [_result(False, "; ".join(trip.words for trip in trips), None, None)] if trips else []
    tightest = min(known, key=lambda rank: (rank.min_available_mib or 0) - (rank.guard_mib or 0))
    available, floor = tightest.min_available_mib or 0, tightest.guard_mib or 0
    text = f"{tightest.rank} had {available} MiB available at its lowest, the floor is {floor} MiB"
    if trips:
        text = "; ".join(dict.fromkeys(trip.words for trip in trips))
    return [_result(not trips and available >= floor, text, floor, available)]


def _result(passed: bool, reason: str, limit: int | None, observed: int | None) -> GateResult:
    return GateResult(
        name=MEMORY_GATE,
        require="at_least",
        outcome="pass" if passed else "fail",
        reason=reason,
        implied=True,
        limit=limit,
        observed=observed,
    )


def memory_findings(evidence: Evidence) -> list[Seen]:
    """A forecast that was off, memory that falls with every request, a rank below its warning."""
    texts = [*_forecast_errors(evidence), *_leaks(evidence), *_warnings(evidence.blocks)]
    return [Seen(source="measured", text=text) for text in texts]


def _forecast_errors(evidence: Evidence) -> Iterable[str]:
    said: set[str] = set()
    for block in evidence.both:
        for rank, found in sorted(block.allocation.items()):
            key = f"{block.arm} {rank}"
            if not found.wrong or key in said:
                continue
            said.add(key)
            parts = ", ".join(
                f"{part} {found.foreseen_mib[part]:.0f} for {found.allocated_mib[part]:.0f}"
                for part in found.allocated_mib
            )
            foreseen, allocated = sum(found.foreseen_mib.values()), sum(found.allocated_mib.values())
            error = "" if found.error is None else f" ({found.error * 100:+.0f} %)"
            yield (
                f"the memory forecast of {block.arm} is off on {rank}: {foreseen:.0f} MiB foreseen, "
                f"{allocated:.0f} allocated{error}: {parts}"
            )


def _leaks(evidence: Evidence) -> Iterable[str]:
    for rank in sorted({rank for block in evidence.blocks for rank in block.ranks}):
        found = steepest(evidence.blocks, rank)
        if found is None or found.high > -LEAK_MIB:
            continue
        before = steepest(evidence.baseline_blocks, rank)
        beside = "" if before is None else f"; the baseline's changes by {before.per_request:+.1f}"
        yield (
            f"available memory of {rank} changes by {found.per_request:+.1f} MiB a request (95 % interval "
            f"{found.low:+.1f} to {found.high:+.1f}, {found.requests} requests): a leak, "
            f"or a cache that still grows{beside}"
        )


def _warnings(blocks: Sequence[Block]) -> Iterable[str]:
    lowest: dict[str, tuple[int, int]] = {}
    for block in blocks:
        for rank, record in block.ranks.items():
            armed = (record.state.guard.get("armed") if record.state else None) or {}
            warn, least = armed.get("warn_mib"), record.memory.min_available_mib if record.memory else None
            if isinstance(warn, int) and least is not None and least < warn:
                lowest[rank] = min(lowest.get(rank, (least, warn)), (least, warn))
    for rank, (least, warn) in sorted(lowest.items()):
        yield f"{rank} came down to {least} MiB of available memory, below the warning at {warn} MiB"
