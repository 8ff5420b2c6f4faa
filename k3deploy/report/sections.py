"""What the reports show of parity, profile, memory over time, transport and void blocks, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from k3deploy import parity
from k3deploy.facts import Block, Facts
from k3deploy.judge.profile import rank_times
from k3deploy.report import words


@dataclass(frozen=True, slots=True)
class ParityRow:
    """One thing that an arm was asked, held against the baseline's answer."""

    arm: str
    what: str
    result: str
    differs: bool


def parity_rows(plan: Mapping[str, Any], facts: Facts) -> list[ParityRow]:
    """Every part of the parity test of each arm; the baseline's own contradictions first."""
    slugs = {str(arm.get("name")): str(arm.get("slug")) for arm in plan.get("arms") or []}
    answers = {name: answer for name in slugs if (answer := _answers(facts.of(name)))}
    if not answers:
        return []
    first = next(iter(slugs))
    rows = [_consistency(name, answer) for name, answer in answers.items()]
    if first not in answers:
        return rows
    for name, answer in answers.items():
        if name != first:
            rows += _against(answers[first], slugs[first], name, answer, slugs[name])
    return rows


def _answers(blocks: Sequence[Block]) -> parity.Parity | None:
    return next((b.bench.parity for b in blocks if b.bench and b.bench.parity.asked), None)


def _consistency(name: str, answer: parity.Parity) -> ParityRow:
    own = parity.inconsistencies(answer)
    return ParityRow(name, "chunks, slot reuse, erase, cancel", "; ".join(own) or "all alike", bool(own))


def _against(baseline: parity.Parity, slug: str, name: str, answer: parity.Parity, own_slug: str) -> list[ParityRow]:
    rows = []
    if output := parity.output_difference(baseline, answer):
        text = f"largest difference of a log-probability {output.max_error:.3g}, at position {output.position}"
        rows.append(ParityRow(name, f"output at {output.positions} positions", text, output.max_error > 0))
    if state := parity.state_difference(baseline, slug, answer, own_slug):
        text = f"largest difference {state.relative_error:.3g} of max|S| ({state.max_error:.3g} absolute)"
        rows.append(ParityRow(name, "recurrent state", text, state.relative_error > 0))
    for suite in baseline.suites.texts if baseline.suites else []:
        parted, compared = parity.divergences(baseline, answer, suite)
        if compared:
            text = "; ".join(map(str, parted)) or "every token alike"
            rows.append(ParityRow(name, f"suite {suite}, {compared} greedy texts", text, bool(parted)))
    return rows


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """How long one rank computed and transferred in an arm's blocks."""

    arm: str
    rank: str
    forward: str
    rpc: str
    idle: str


def profile_rows(facts: Facts) -> list[ProfileRow]:
    arms = dict.fromkeys(block.arm for block in facts.blocks)
    return [
        ProfileRow(
            arm,
            time.rank,
            words.quantity(time.forward_ms, "ms"),
            words.quantity(time.rpc_ms, "ms"),
            words.share(time.idle_share),
        )
        for arm in arms
        for time in rank_times(facts.of(arm))
    ]


@dataclass(frozen=True, slots=True)
class VoidRow:
    """A measurement that does not count."""

    block: int
    arm: str
    started: str
    why: str


def void_rows(facts: Facts) -> list[VoidRow]:
    return [VoidRow(void.index, void.arm, void.started or words.MISSING, void.void) for void in facts.void]


@dataclass(frozen=True, slots=True)
class TransportRow:
    """What carried one connection, in all blocks where it was the same."""

    worker: str
    result: str
    reason: str
    blocks: str


def transport_rows(facts: Facts) -> list[TransportRow]:
    found: dict[tuple[str, str, str], list[str]] = {}
    for block in facts.blocks:
        for one in block.transport.connections if block.transport else []:
            found.setdefault((one.worker, one.result, one.reason), []).append(str(block.index))
    return [TransportRow(*key, ", ".join(blocks)) for key, blocks in found.items()]


def floors(plan: Mapping[str, Any]) -> dict[str, int]:
    """{rank: MiB of the strictest floor over the arms}."""
    found: dict[str, int] = {}
    for arm in plan.get("arms") or []:
        for rank, processes in (arm.get("processes") or {}).items():
            found[rank] = max(found.get(rank, 0), int(processes.get("guard_mib") or 0))
    return found


def warn_tier(facts: Facts) -> int | None:
    """MiB below which the guards warned, as they were armed."""
    for block in facts.blocks:
        for record in block.ranks.values():
            warn = ((record.state.guard.get("armed") if record.state else None) or {}).get("warn_mib")
            if isinstance(warn, int):
                return warn
    return None


def memory_series(facts: Facts) -> dict[str, list[tuple[str, list[float], list[float]]]]:
    """{rank: [(arm, minutes since the first block, MemAvailable in GiB)]}, a line a block."""
    rows = [
        (rank, block.arm, record.memory.series)
        for block in facts.blocks
        for rank, record in sorted(block.ranks.items())
        if record.memory and len(record.memory.series) > 1
    ]
    start: dict[str, float] = {}
    for rank, _, series in rows:
        start[rank] = min(start.get(rank, series[0][0]), series[0][0])
    found: dict[str, list[tuple[str, list[float], list[float]]]] = {}
    for rank, arm, series in rows:
        minutes = [(row[0] - start[rank]) / 60 for row in series]
        found.setdefault(rank, []).append((arm, minutes, [row[1] / 1024 for row in series]))
    return found
