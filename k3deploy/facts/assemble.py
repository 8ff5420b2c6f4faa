"""Reading what a run left on disk into facts: block records, and the logs that they name."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from k3deploy import memory_use, yamlfile
from k3deploy.errors import InputError, Problem
from k3deploy.facts.logs import COUNTS, markers_said, parse_head_log, parse_worker_log
from k3deploy.facts.schema import (
    Allocation,
    Block,
    Facts,
    Model,
    Observations,
    Record,
    TransportProof,
    VoidBlock,
)

MAX_BYTES = 256 << 20  # of a record: hours of samples are a few MiB


def read_model(model: type[Model], path: Path) -> Model:
    """Read a JSON file into ``model``; raises ``InputError`` naming file and line of every problem."""
    try:
        text = yamlfile.read_bytes(path, MAX_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError([Problem(path, 0, f"not UTF-8 text (byte {error.start})")]) from None
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError([Problem(path, error.lineno, f"not valid JSON: {error.msg}", error.colno)]) from None
    except RecursionError:
        raise InputError([Problem(path, 0, "nested too deeply")]) from None
    if not isinstance(data, dict):
        raise InputError([Problem(path, 1, "must be a JSON object")])
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise InputError(yamlfile.problems(model, error, _locator(path))) from None


def _locator(path: Path) -> Any:
    """Where keys stand in a JSON file. Only needed when something is wrong, so the slow line-keeping reader will do."""
    try:
        return yamlfile.load(path).problem
    except InputError:  # too large for it, among others
        return lambda _keys, message: Problem(path, 0, message)


def assemble(run_dir: Path) -> Facts:
    """Put the block records of a run and what their logs say into one document; deterministic.

    Raises ``InputError`` with the problems of every record. A run whose first block is not recorded yet has no blocks.
    """
    plan = read_model(_Plan, run_dir / "plan.json")
    found: list[Problem] = []
    blocks: list[Block] = []
    for path in sorted((run_dir / "blocks").glob("[0-9]*.json")):
        try:
            blocks.append(_with_allocation(plan, _with_observations(run_dir, read_model(Block, path))))
        except InputError as error:
            found += error.problems
    void: list[VoidBlock] = []
    for path in sorted((run_dir / "void").glob("[0-9]*.json")):
        try:
            void.append(read_model(VoidBlock, path))
        except InputError as error:
            found += error.problems
    indexes = [block.index for block in blocks]
    for index in sorted({index for index in indexes if indexes.count(index) > 1}):
        found.append(Problem(run_dir / "blocks", 0, f"two records of block {index}"))
    if found:
        raise InputError(found)
    blocks.sort(key=lambda block: block.index)
    return Facts(run_id=run_dir.name, candidate=plan.candidate, blocks=blocks, void=void)


class _PlannedProcess(Record):
    listen: str | None = None


class _PlannedRank(Record):
    worker: _PlannedProcess | None = None


class _PlannedForecast(Record):
    """What the plan foresaw of one rank; the parts stand beside the name."""

    rank: str


class _PlannedArm(Record):
    name: str = ""
    processes: dict[str, _PlannedRank] = Field(default_factory=dict)
    forecast: list[_PlannedForecast] = Field(default_factory=list)


class _Plan(Record):
    """The plan, as far as the facts need it."""

    candidate: str = ""
    arms: list[_PlannedArm] = Field(default_factory=list)


def _with_observations(run_dir: Path, block: Block) -> Block:
    """Add what the block's logs say; what the record itself says wins, and the prefix probe settles cache reuse."""
    merged = Observations()
    markers: dict[str, Counter[str]] = {}
    for rank, record in sorted(block.ranks.items()):
        for kind, name in sorted(record.logs.items()):
            text = _read_log(run_dir, name)
            if text is None:
                continue
            found = parse_head_log(text) if kind == "head" else parse_worker_log(text, rank)
            if said := markers_said(found):
                markers.setdefault(rank, Counter()).update(said)
            merged = _merge(merged, found)
    probed = _prefix_reuse(block)
    if merged.cache_reuse_disabled is not None:
        probed.pop("cache_reuse_disabled", None)
    stated = {name: getattr(block.observations, name) for name in block.observations.model_fields_set}
    known = {name: value for name, value in stated.items() if value is not None}
    timed = {
        "slowest_rank_excess": _slowest_rank_excess(merged.rank_forward_ms),
        "rpc_p99": max(merged.rank_rpc_p99_ms.values(), default=None),
        "worker_link_idle": max(merged.rank_idle_share.values(), default=None),
        "rank_markers": {rank: dict(counts) for rank, counts in markers.items()},
        **_proven(block.transport, merged.rpc_errors),
    }
    return block.model_copy(update={"observations": merged.model_copy(update={**timed, **probed, **known})})


def _proven(proof: TransportProof | None, logged_errors: int | None) -> dict[str, Any]:
    """What a proof of the transport says better than log lines alone."""
    if proof is None:
        return {}
    activated = sum(connection.result == "RDMA" for connection in proof.connections)
    return {
        "rdma_activated": proof.transport == "RDMA",
        "rdma_connections": activated,
        "rpc_errors": max(logged_errors or 0, len(proof.events)),
        "reconnected": len(proof.reconnected),
    }


def _with_allocation(plan: _Plan, block: Block) -> Block:
    """Add what the plan foresaw of each rank's memory beside what the head's log says was allocated."""
    arm = next((arm for arm in plan.arms if arm.name == block.arm), _PlannedArm())
    workers = {rank: planned.worker for rank, planned in arm.processes.items()}
    endpoints = {worker.listen: rank for rank, worker in workers.items() if worker is not None and worker.listen}
    forecast = [entry.model_dump() for entry in arm.forecast]
    found = memory_use.allocations(forecast, endpoints, *_allocated(block.observations))
    allocation = {
        one.rank: Allocation(
            foreseen_mib=dict(one.foreseen), allocated_mib=dict(one.allocated), error=one.error, wrong=one.wrong
        )
        for one in found
    }
    return block.model_copy(update={"allocation": allocation})


def _allocated(observed: Observations) -> tuple[dict[str, dict[str, float]], float]:
    """MiB by device and part, and the step in which they are printed: the buffers as they were allocated, which a head
    says while it loads, or else its account at the end."""
    if observed.model_mib and observed.compute_mib:
        tables = {
            "model": [observed.model_mib],
            "context": [observed.kv_cache_mib, observed.recurrent_mib],
            "compute": [observed.compute_mib],
        }
        devices = dict.fromkeys(device for parts in tables.values() for table in parts for device in table)
        return {
            device: {part: sum(table.get(device, 0.0) for table in parts) for part, parts in tables.items()}
            for device in devices
        }, 0.01
    return {
        device: {part: float(getattr(numbers, part)) for part in memory_use.PARTS}
        for device, numbers in observed.memory_breakdown.items()
    }, 1.0


def _slowest_rank_excess(forward_ms: Mapping[str, float]) -> float | None:
    """By how much of the others' mean the slowest rank's forward time is above it; ``None`` below two ranks."""
    if len(forward_ms) < 2:
        return None
    slowest = max(forward_ms, key=lambda rank: forward_ms[rank])
    others = [value for rank, value in forward_ms.items() if rank != slowest]
    mean = sum(others) / len(others)
    return round(forward_ms[slowest] / mean - 1, 4) if mean > 0 else None


def _prefix_reuse(block: Block) -> dict[str, bool]:
    """What the shifted-prefix probe proves by behaviour: the server's log may say nothing about it."""
    probe = block.bench.probes.get("shifted_prefix") if block.bench else None
    if not isinstance(probe, dict) or not isinstance(probe.get("effective"), bool):
        return {}
    found = {"prefix_reuse_effective": probe["effective"]}
    if isinstance(probe.get("identical"), bool):
        found["prefix_reuse_identical"] = probe["identical"]
    if any("--cache-reuse" in unit.argv for _rank, _name, unit in block.units()):
        found["cache_reuse_disabled"] = not probe["effective"]
    return found


def _read_log(run_dir: Path, name: str) -> str | None:
    """The log's text, or ``None`` if it is not there: a log that was never written is no reason to lose the numbers."""
    try:
        return (run_dir / name).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _merge(one: Observations, other: Observations) -> Observations:
    """Both logs' observations: counts add up, tables join, the first that knows anything else decides."""
    values: dict[str, Any] = {}
    for name in Observations.model_fields:
        left, right = getattr(one, name), getattr(other, name)
        if isinstance(left, dict):
            values[name] = {**right, **left}
        elif isinstance(left, list):
            values[name] = [*left, *(item for item in right if item not in left)]
        elif left is None or right is None:
            values[name] = right if left is None else left
        elif name in COUNTS:
            values[name] = left + right
        elif name == "rdma_activated":
            values[name] = left and right  # one end that stays on TCP is enough to be no RDMA
        else:
            values[name] = left
    return Observations(**values)


def write_facts(run_dir: Path, facts: Facts) -> Path:
    """Write ``facts.json`` of a run."""
    from k3deploy.paths import write_json

    path = run_dir / "facts.json"
    write_json(path, facts.model_dump(mode="json"))
    return path


def load_facts(path: Path) -> Facts:
    """Read ``facts.json`` again; raises ``InputError``."""
    return read_model(Facts, path)
