"""Everything that was measured, as validated data: block records, ``facts.json``, and what the logs say.

``assemble(run_dir)`` reads ``blocks/*.json`` and the logs that they name and returns ``Facts``; nothing is judged
here. Memory is in MiB, times are in milliseconds unless the name ends in ``_seconds``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from k3deploy import memory_use, yamlfile
from k3deploy.errors import InputError, Problem
from k3deploy.parity import Parity

State = Literal["cold", "warm", "cached"]
Model = TypeVar("Model", bound=BaseModel)


class _Record(BaseModel):
    """What ranks and the harness wrote: unknown keys are kept, so that a newer rank loses nothing here."""

    model_config = ConfigDict(extra="allow", frozen=True)


class Sample(_Record):
    """One request. ``valid`` is false for a request that does not count, and ``why`` says why."""

    repeat: int = 0
    order: int | None = None
    prompt_n: int | None = None
    cache_n: int | None = None
    prompt_ms: float | None = None
    predicted_n: int | None = None
    predicted_ms: float | None = None
    ttft_ms: float | None = None
    wall_ms: float | None = None
    tokens_sha256: str | None = None
    batches: list[int] | None = None
    valid: bool
    why: str = ""

    @property
    def prefill_per_second(self) -> float | None:
        """Prompt tokens per second by the server's own clock."""
        if not self.prompt_n or not self.prompt_ms or self.prompt_ms <= 0:
            return None
        return self.prompt_n / self.prompt_ms * 1e3

    @property
    def decode_per_second(self) -> float | None:
        """Generated tokens per second: the first token comes out of the prefill, so n - 1 of them took the time."""
        if not self.predicted_n or self.predicted_n < 2 or not self.predicted_ms or self.predicted_ms <= 0:
            return None
        return (self.predicted_n - 1) / self.predicted_ms * 1e3


class Cell(_Record):
    """One workload point in one state, with all its samples in this block."""

    cell: str
    state: State
    n_prompt: int
    n_predict: int
    samples: list[Sample]

    @property
    def decodes(self) -> bool:
        """Whether the cell's speed is that of decoding (``tg100``) and not of prefill (``pp2048``)."""
        return self.cell.startswith("tg")

    def valid(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.valid]


class Bench(_Record):
    """What the harness measured in one block; ``error`` says why it stopped early."""

    cells: list[Cell]
    probes: dict[str, Any] = Field(default_factory=dict)
    props: dict[str, Any] = Field(default_factory=dict)
    warmup: list[dict[str, Any]] = Field(default_factory=list)
    parity: Parity = Field(default_factory=Parity)
    foreign_check: str | None = None
    foreign: list[str] = Field(default_factory=list, description="what shows that others sent requests")
    harness_sha256: str | None = None
    error: str | None = None


class Memory(_Record):
    """Memory of one rank over one block, in MiB; MemAvailable where the name says nothing else.

    ``min_driver_free_mib`` is MemFree less CmaFree, what a GPU driver on unified memory can have. ``pressure_max``:
    the largest share of 10 s that waited for memory, in percent (-1: not known). ``series``: rows of time (seconds
    since the epoch by the rank's clock, as ``ready_at``), MemAvailable, MemFree, CmaFree, Cached and the pressure
    (some, full).
    """

    min_available_mib: int | None = None
    min_at: str | None = None
    samples: int = 0
    load_min_mib: int | None = None
    run_min_mib: int | None = None
    min_free_mib: int | None = None
    min_driver_free_mib: int | None = None
    cached_at_min_mib: int | None = None
    pressure_max: float | None = None
    ready_at: float | None = None
    series: list[list[float]] = Field(default_factory=list)


class GuardTrip(_Record):
    """The rank's guard stopped the candidate: ``what`` (memory, free, orphan, blind), and the same in ``words``."""

    what: str
    words: str
    at: float | None = None

    @property
    def is_floor(self) -> bool:
        return self.what in ("memory", "free")


class Allocation(_Record):
    """One rank's forecast beside what its devices hold, in MiB by part (model, context, compute)."""

    foreseen_mib: dict[str, float]
    allocated_mib: dict[str, float]
    error: float | None = None
    wrong: bool = False


class Unit(_Record):
    """One systemd unit as it really runs."""

    active: str = ""
    sub: str = ""
    pid: int | None = None
    exe: str | None = None
    exe_sha256: str | None = None
    argv: list[str] = Field(default_factory=list)
    environment: dict[str, str] = Field(default_factory=dict)
    build_id: str | None = None


class RankState(_Record):
    """A rank as one round trip reports it."""

    host: str = ""
    time: float | None = None  # seconds since the epoch, by the rank's own clock
    kernel: str = ""
    os: str = ""
    arch: str = ""
    mem: dict[str, float] = Field(default_factory=dict)
    guard: dict[str, Any] = Field(default_factory=dict)
    units: dict[str, Unit] = Field(default_factory=dict)


class HealthFinding(_Record):
    """What the rules made of a rank's health: a fault voids the block, a warning is told."""

    rule: str
    severity: Literal["fault", "warning"]
    text: str
    remedy: str = ""


class RankHealth(_Record):
    """A rank's raw health before and after a block (the results of ``rank_health``), and what the rules found in it."""

    before: dict[str, Any] = Field(default_factory=dict)
    after: dict[str, Any] = Field(default_factory=dict)
    findings: list[HealthFinding] = Field(default_factory=list)


class RankBlock(_Record):
    """One rank during one block; ``logs`` maps ``worker`` and ``head`` to paths below the run directory."""

    state: RankState | None = None
    memory: Memory | None = None
    guard: GuardTrip | None = None
    health: RankHealth | None = None
    logs: dict[str, str] = Field(default_factory=dict)


class Connection(_Record):
    """What carried the connection from the head to one worker, and what proves or contradicts it.

    cause: of TCP, device, gid, memlock, peer or environment. Pairs are (head, worker).
    """

    worker: str
    endpoint: str = ""
    result: Literal["RDMA", "TCP", "unknown"]
    cause: str | None = None
    reason: str = ""
    qp: str | None = None
    mtu: list[int] | None = None
    rx_depth: list[int] | None = None
    tcp_bytes: int | None = None
    rdma_bytes: list[int | None] | None = None
    message_bytes: int | None = None


class TransportProof(_Record):
    """The transport of a block: every connection, what broke while it ran, and what makes it not count."""

    require: Literal["rdma", "tcp"]
    transport: Literal["RDMA", "TCP", "mixed", "unknown", "none"]
    connections: list[Connection]
    events: list[str] = Field(default_factory=list)
    problems: list[str] = Field(default_factory=list)
    reconnected: list[str] = Field(default_factory=list, description="connections whose queue pairs changed")
    resolved: dict[str, dict[str, Any]] = Field(default_factory=dict, description="a rank's device and GID at launch")


class MemoryBreakdown(_Record):
    """llama.cpp's own account of one device, in MiB."""

    model: int
    context: int
    compute: int
    total: int | None = None
    free: int | None = None


class Fatal(_Record):
    """A log line that ends a server, with what it means."""

    line: str
    meaning: str


class Observations(_Record):
    """What one head log (and the workers' logs) say about a block. ``None``: the logs do not speak about it."""

    graphs_reused: int | None = None
    pipeline_parallel: bool | None = None
    n_copies: int | None = None
    cache_reuse_disabled: bool | None = None
    model_mib: dict[str, float] = Field(default_factory=dict)
    kv_cache_mib: dict[str, float] = Field(default_factory=dict)
    recurrent_mib: dict[str, float] = Field(default_factory=dict)
    compute_mib: dict[str, float] = Field(default_factory=dict)
    kv_types: dict[str, str] = Field(default_factory=dict)
    memory_breakdown: dict[str, MemoryBreakdown] = Field(default_factory=dict)
    prefix_reuse_effective: bool | None = None
    prefix_reuse_identical: bool | None = None
    rdma_activated: bool | None = None
    rdma_connections: int | None = None
    rpc_errors: int | None = None
    reconnected: int | None = None
    flashkda_active: int | None = None
    flashkda_fallback: int | None = None
    kda_blocked_active: int | None = None
    kda_blocked_fallback: int | None = None
    kda_chunked_active: int | None = None
    kda_chunked_fallback: int | None = None
    iq1s_grouped_active: int | None = None
    iq1s_grouped_fallback: int | None = None
    rank_forward_ms: dict[str, float] = Field(default_factory=dict)
    rank_rpc_ms: dict[str, float] = Field(default_factory=dict)
    rank_rpc_p99_ms: dict[str, float] = Field(default_factory=dict)
    rank_idle_share: dict[str, float] = Field(default_factory=dict)
    rpc_p99: float | None = None
    worker_link_idle: float | None = None
    slowest_rank_excess: float | None = None
    fatal: list[Fatal] = Field(default_factory=list)


class Block(_Record):
    """One server start of one arm with all its cells."""

    index: int
    pair: int
    arm: str
    slug: str
    started: str
    ended: str | None = None
    load_seconds: float | None = None
    bench: Bench | None = None
    ranks: dict[str, RankBlock] = Field(default_factory=dict)
    transport: TransportProof | None = None
    observations: Observations = Field(default_factory=Observations)
    allocation: dict[str, Allocation] = Field(default_factory=dict)
    error: str | None = None

    def cell(self, name: str, state: State) -> Cell | None:
        cells = self.bench.cells if self.bench else []
        return next((cell for cell in cells if cell.cell == name and cell.state == state), None)

    def trips(self) -> list[GuardTrip]:
        """What the ranks' guards stopped this block for, floors first."""
        found = [record.guard for _, record in sorted(self.ranks.items()) if record.guard is not None]
        return sorted(found, key=lambda trip: not trip.is_floor)

    def microbatches(self, cell: Cell) -> list[int] | None:
        """The sizes in which a cell's prompt was evaluated: the server's batches, cut at the head's ubatch size."""
        size = next((size for _, _, unit in self.units() if (size := _ubatch_size(unit.argv))), None)
        batches = next((sample.batches for sample in cell.valid() if sample.batches), None)
        if size is None or batches is None:
            return None
        return [min(size, batch - start) for batch in batches for start in range(0, batch, size)]

    @property
    def page_cached(self) -> float | None:
        """Which share of the model's file was in the head's page cache before the load; ``None`` if nothing says it."""
        for record in self.ranks.values():
            seen = record.health.before.get("page_cache") if record.health else None
            if isinstance(seen, Mapping) and seen.get("bytes") and isinstance(seen.get("resident_bytes"), int | float):
                return float(seen["resident_bytes"]) / float(seen["bytes"])
        return None

    def units(self) -> Iterable[tuple[str, str, Unit]]:
        """Every unit of the block as (rank, unit name, unit), ranks in order."""
        for rank, record in sorted(self.ranks.items()):
            if record.state is not None:
                for name, unit in sorted(record.state.units.items()):
                    yield rank, name, unit


def _ubatch_size(argv: Sequence[str]) -> int | None:
    for flag, value in pairwise(argv):
        if flag in ("--ubatch-size", "-ub") and value.isdigit():
            return int(value) or None
    return None


class VoidBlock(_Record):
    """A block that does not count; ``void`` says why. It was measured again, or broke off."""

    index: int
    pair: int
    arm: str
    started: str | None = None
    ended: str | None = None
    void: str = ""


class Verified(_Record):
    """What `k3deploy verify` saw of an arm's kernels on one GPU.

    Errors are against FP64: of an output, and of the terminal state relative to max|S|; ``None`` where the operator has
    none. kernel_speedup: of the case that gains least. fallbacks: the reasons that the kernels gave.
    """

    host: str
    device: str
    driver: str
    date: str
    kernel_speedup: float | None
    max_output_error: float | None
    max_state_error: float | None
    passed: int
    failed: list[str]
    active: int
    fallbacks: list[str]
    markers: list[str]
    cases: list[dict[str, Any]]


class Facts(_Record):
    """Everything measured in one run; ``void`` keeps what does not count. verified: by the arm's name."""

    version: Literal[1] = 1
    run_id: str
    candidate: str
    blocks: list[Block]
    void: list[VoidBlock] = Field(default_factory=list)
    verified: dict[str, Verified] = Field(default_factory=dict)

    def of(self, arm: str) -> list[Block]:
        return [block for block in self.blocks if block.arm == arm]


# --- reading and assembling ------------------------------------------------------------------------------------------


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


class _PlannedProcess(_Record):
    listen: str | None = None


class _PlannedRank(_Record):
    worker: _PlannedProcess | None = None


class _PlannedForecast(_Record):
    """What the plan foresaw of one rank; the parts stand beside the name."""

    rank: str


class _PlannedArm(_Record):
    name: str = ""
    processes: dict[str, _PlannedRank] = Field(default_factory=dict)
    forecast: list[_PlannedForecast] = Field(default_factory=list)


class _Plan(_Record):
    """The plan, as far as the facts need it."""

    candidate: str = ""
    arms: list[_PlannedArm] = Field(default_factory=list)


def _with_observations(run_dir: Path, block: Block) -> Block:
    """Add what the block's logs say; what the record itself says wins, and the prefix probe settles cache reuse."""
    merged = Observations()
    for rank, record in sorted(block.ranks.items()):
        for kind, name in sorted(record.logs.items()):
            text = _read_log(run_dir, name)
            if text is None:
                continue
            if kind == "head":
                merged = _merge(merged, parse_head_log(text))
            else:
                merged = _merge(merged, parse_worker_log(text, rank))
    probed = _prefix_reuse(block)
    if merged.cache_reuse_disabled is not None:
        probed.pop("cache_reuse_disabled", None)
    stated = {name: getattr(block.observations, name) for name in block.observations.model_fields_set}
    known = {name: value for name, value in stated.items() if value is not None}
    timed = {
        "slowest_rank_excess": _slowest_rank_excess(merged.rank_forward_ms),
        "rpc_p99": max(merged.rank_rpc_p99_ms.values(), default=None),
        "worker_link_idle": max(merged.rank_idle_share.values(), default=None),
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
        elif name in _COUNTS:
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


# --- logs ------------------------------------------------------------------------------------------------------------

_COUNTS = {
    "rdma_connections",
    "rpc_errors",
    "flashkda_active",
    "flashkda_fallback",
    "kda_blocked_active",
    "kda_blocked_fallback",
    "kda_chunked_active",
    "kda_chunked_fallback",
    "iq1s_grouped_active",
    "iq1s_grouped_fallback",
}
_GRAPHS_REUSED = re.compile(r"graphs reused\s*=\s*(\d{1,18})(?!\d)")
_PIPELINE = re.compile(r"pipeline parallelism enabled(?:\s*\(n_copies\s*=\s*(\d{1,9})\))?")
_PIPELINE_GIVEN_UP = re.compile(r"retrying without pipeline parallelism")
_CONTEXT_MADE = re.compile(r"constructing llama_context")
_CACHE_REUSE_OFF = re.compile(
    r"cache_reuse is not supported by (?:this context|multimodal)|cache reuse is not supported - ignoring"
)
# `RPC0[10.0.0.2:50053] KV buffer size = 4.78 MiB`: every remote buffer is called RPC0, so the endpoint is the key.
_BUFFER = re.compile(r" (model|KV|RS|compute) buffer size\s*=\s*(\d{1,12}\.?\d{0,6}) MiB")
_KV_TYPES = re.compile(r"\bK \((\w+)\):\s*[\d.]+ MiB, V \((\w+)\)")
_ENDPOINT = re.compile(r"[\[(]([^\[\]()\s]+:\d{1,5})[\])]")
_BREAKDOWN_NAME = r"\|\s{1,9}- (?P<name>[^|\n]{1,120}?)\s{0,120}\|\s{0,120}"
_BREAKDOWN_PARTS = r"(?P<model>\d{1,12}) \+\s{1,40}(?P<context>\d{1,12}) \+\s{1,40}(?P<compute>\d{1,12})"
_BREAKDOWN_DEVICE = re.compile(
    _BREAKDOWN_NAME
    + r"(?P<total>\d{1,12}) =\s{1,40}(?P<free>\d{1,12}) \+ \(\s{0,40}\d{1,12} =\s{1,40}"
    + _BREAKDOWN_PARTS
    + r"\)"
)
_BREAKDOWN_OTHER = re.compile(_BREAKDOWN_NAME + r"\d{1,12} =\s{1,40}" + _BREAKDOWN_PARTS + r"\s{0,120}\|")
_RDMA_ACTIVATED = re.compile(r"RDMA activated: qpn=")
_RDMA_FAILED = re.compile(r"RDMA activate failed|RDMA CQ wc error")
_RPC_ERROR = re.compile(
    r"(?:send|recv) failed \(bytes_|RDMA CQ wc error|Remote RPC server crashed or returned malformed"
)
# From here on the server was told to stop: what breaks now (workers that are gone already) breaks nothing.
_TOLD_TO_STOP = re.compile(r"cleaning up before exit|Received (?:second )?interrupt")
_FLASHKDA = re.compile(r"K3_FLASHKDA_(ACTIVE|FALLBACK)")
_KDA_BLOCKED = re.compile(r"K3_KDA_BLOCKED_(ACTIVE|FALLBACK)")
_KDA_CHUNKED = re.compile(r"K3_KDA_CHUNKED_(ACTIVE|FALLBACK)")
_IQ1S_GROUPED = re.compile(r"K3_IQ1S_GROUPED_(ACTIVE|FALLBACK)")
_RPC_TIMING = re.compile(
    r"K3_RPC_TIMING .*end_us=(\d{1,18}) prepare_us=(\d{1,15}) compute_us=(\d{1,15})"
    r" .*set_us=(\d{1,15}) .*get_us=(\d{1,15})"
)

# A line that ends a server, and what it means to the person who reads it.
_FATAL: Sequence[tuple[str, str]] = (
    (
        r"model does not support different K \(\w+\) and V \(\w+\) cache types",
        "this llama.cpp accepts only equal K and V cache types for an MLA model: set both alike",
    ),
    (
        r"quantized V cache was requested, but this requires Flash Attention|quantized V cache requires flash",
        "a quantized V cache needs flash attention: set flash_attn to on",
    ),
    (
        r"K cache type \w+ with block size \d+ does not divide",
        "the K cache type does not fit the model's head size: choose another type",
    ),
    (
        r"Remote RPC server crashed or returned malformed response",
        "a worker died, was killed or answered in another protocol: look at the workers' logs and journals",
    ),
    (r"Failed to connect to \S+", "a worker does not listen at that address"),
    (r"RPC handshake failed", "what listens there is no RPC server of this protocol"),
    (r"RPC server version mismatch", "head and worker are of different builds: install one release"),
    (r"Failed to parse endpoint", "an endpoint is not HOST:PORT"),
    (r"Failed to create server socket", "the worker's port is taken or its address is not on this rank"),
    (
        r"failed to allocate \S{0,40} ?buffer|unable to allocate \S{1,40} buffer|Failed to allocate",
        "a device has not enough free memory for this configuration",
    ),
    (r"error: invalid argument: \S+|unknown argument", "this build does not know one of the flags"),
    (
        r"couldn't bind HTTP server socket|failed to bind",
        "the head's port is taken or its address is wrong",
    ),
    (r"failed to load model|error loading model|failed to open GGUF", "the model file cannot be loaded"),
    (r"CUDA error|out of memory", "the CUDA device failed or is out of memory"),
    (r"GGML_ASSERT\(|ggml_abort", "llama.cpp stopped at an internal check"),
)
_FATAL_LIMIT = 20  # a crashing server can repeat itself; the first lines tell the story
_LINE_LIMIT = 400
_NAME_LIMIT = 120
# one pass over the log instead of one per pattern and line: logs of a long run have millions of lines
_ANY_FATAL = re.compile("|".join(f"(?P<f{place}>{pattern})" for place, (pattern, _) in enumerate(_FATAL)))


def parse_head_log(text: str) -> Observations:
    """Read a llama-server log (plain or JSON lines, ideally of verbosity 4); never raises, whatever the text is."""
    values: dict[str, Any] = {}
    graphs = _GRAPHS_REUSED.findall(text)
    if graphs:
        values["graphs_reused"] = int(graphs[-1])
    pipeline = _PIPELINE.search(text)
    if pipeline or _CONTEXT_MADE.search(text):
        values["pipeline_parallel"] = pipeline is not None and not _PIPELINE_GIVEN_UP.search(text)
    if pipeline and pipeline[1]:
        values["n_copies"] = int(pipeline[1])
    if _CACHE_REUSE_OFF.search(text):
        values["cache_reuse_disabled"] = True
    tables: dict[str, dict[str, float]] = {"model": {}, "KV": {}, "RS": {}, "compute": {}}
    for match in _BUFFER.finditer(text):
        before = text[max(0, match.start() - _NAME_LIMIT) : match.start()].split()
        kind, device, size = match[1], _device(before[-1] if before else ""), float(match[2])
        # A split model says one buffer a file; a context that is made again says its own anew.
        tables[kind][device] = size + (tables[kind].get(device, 0.0) if kind == "model" else 0.0)
    values["model_mib"], values["kv_cache_mib"] = tables["model"], tables["KV"]
    values["recurrent_mib"], values["compute_mib"] = tables["RS"], tables["compute"]
    types = _KV_TYPES.search(text)
    if types:
        values["kv_types"] = {"k": types[1], "v": types[2]}
    # printed once before loading (a projection) and perhaps again at the end: the last one is what was used
    values["memory_breakdown"] = {
        _device(match["name"]): MemoryBreakdown(
            model=int(match["model"]),
            context=int(match["context"]),
            compute=int(match["compute"]),
            total=int(match["total"]) if "total" in match.groupdict() else None,
            free=int(match["free"]) if "free" in match.groupdict() else None,
        )
        for pattern in (_BREAKDOWN_DEVICE, _BREAKDOWN_OTHER)
        for match in pattern.finditer(text)
    }
    return Observations(**values, **_transport(text), fatal=_fatal(text))


def parse_worker_log(text: str, rank: str = "") -> Observations:
    """Read an RPC server's log: transport, markers, times, fatal lines (led by ``rank``); never raises."""
    fatal = _fatal(text, f"{rank}: " if rank else "")
    return Observations(**_transport(text), **_markers(text), **_rpc_times(text, rank), fatal=fatal)


def _rpc_times(text: str, rank: str) -> dict[str, dict[str, float]]:
    """What a timed worker says, over all graphs: every rank sees the same microbatches.

    Milliseconds computed and transferred; the 99th percentile of a graph's transfers, in milliseconds; and the share of
    the time between two graphs in which the worker had nothing to do, as the median (a pause between requests is rare).
    """
    times = [tuple(map(int, found)) for found in _RPC_TIMING.findall(text)]
    if not sum(compute for _, _, compute, _, _ in times):
        return {}
    transfers = sorted(sent + got for *_, sent, got in times)
    found = {
        "rank_forward_ms": sum(compute for _, _, compute, _, _ in times) / 1000,
        "rank_rpc_ms": sum(transfers) / 1000,
        "rank_rpc_p99_ms": transfers[math.ceil(0.99 * len(transfers)) - 1] / 1000,
    }
    idle = [
        max(0.0, 1 - (prepare + compute + sent + got) / (end - before[0]))
        for before, (end, prepare, compute, sent, got) in pairwise(times)
        if end > before[0]
    ]
    if idle:
        found["rank_idle_share"] = round(median(idle), 4)
    return {name: {rank: value} for name, value in found.items()}


def _transport(text: str) -> dict[str, Any]:
    """A silent fall-back to TCP leaves no line at all, so RDMA is what was activated and never failed."""
    activated = len(_RDMA_ACTIVATED.findall(text))
    return {
        "rdma_activated": activated > 0 and not _RDMA_FAILED.search(text),
        "rdma_connections": activated,
        "rpc_errors": len(_RPC_ERROR.findall(_while_serving(text))),
    }


def _while_serving(text: str) -> str:
    end = _TOLD_TO_STOP.search(text)
    return text[: end.start()] if end else text


def _markers(text: str) -> dict[str, int]:
    found = _FLASHKDA.findall(text)
    blocked = _KDA_BLOCKED.findall(text)
    chunked = _KDA_CHUNKED.findall(text)
    grouped = _IQ1S_GROUPED.findall(text)
    return {
        "flashkda_active": found.count("ACTIVE"),
        "flashkda_fallback": found.count("FALLBACK"),
        "kda_blocked_active": blocked.count("ACTIVE"),
        "kda_blocked_fallback": blocked.count("FALLBACK"),
        "kda_chunked_active": chunked.count("ACTIVE"),
        "kda_chunked_fallback": chunked.count("FALLBACK"),
        "iq1s_grouped_active": grouped.count("ACTIVE"),
        "iq1s_grouped_fallback": grouped.count("FALLBACK"),
    }


def _device(name: str) -> str:
    """``RPC0[10.0.0.2:50053]`` and ``RPC0 (10.0.0.2:50053)`` -> ``10.0.0.2:50053``; a local device keeps its name."""
    endpoint = _ENDPOINT.search(name)
    return endpoint[1] if endpoint else name.strip()


def _fatal(text: str, lead: str = "") -> list[Fatal]:
    found: list[Fatal] = []
    seen: set[str] = set()
    text = _while_serving(text)
    for match in _ANY_FATAL.finditer(text):
        if match[0] in seen:
            continue
        seen.add(match[0])
        start = max(text.rfind("\n", 0, match.start()) + 1, match.start() - _LINE_LIMIT)
        line = text[start : match.end() + _LINE_LIMIT].split("\n", 1)[0].strip()
        meaning = _FATAL[int(str(match.lastgroup)[1:])][1]
        found.append(Fatal(line=f"{lead}{line[:_LINE_LIMIT]}", meaning=meaning))
        if len(found) == _FATAL_LIMIT:
            break
    return found
