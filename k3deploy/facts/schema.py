"""The schema of what was measured: a block's record, and the facts of a run. Nothing is read or judged here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from k3deploy.parity import Parity

State = Literal["cold", "warm", "cached"]
Model = TypeVar("Model", bound=BaseModel)


class Record(BaseModel):
    """What ranks and the harness wrote: unknown keys are kept, so that a newer rank loses nothing here."""

    model_config = ConfigDict(extra="allow", frozen=True)


class Sample(Record):
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


class Cell(Record):
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

    def misplaced(self) -> list[Sample]:
        """Samples that the harness calls valid and whose own counts say that they belong to another state or size."""
        return [sample for sample in self.valid() if not self._holds(sample)]

    def _holds(self, sample: Sample) -> bool:
        evaluated, cached = sample.prompt_n, sample.cache_n
        if evaluated is None or cached is None:
            return False
        hit = cached > 0 if self.state == "cached" else cached == 0
        return hit and evaluated + cached == self.n_prompt


class Bench(Record):
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


class Memory(Record):
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


class GuardTrip(Record):
    """The rank's guard stopped the candidate: ``what`` (memory, free, orphan, blind), and the same in ``words``."""

    what: str
    words: str
    at: float | None = None

    @property
    def is_floor(self) -> bool:
        return self.what in ("memory", "free")


class Allocation(Record):
    """One rank's forecast beside what its devices hold, in MiB by part (model, context, compute)."""

    foreseen_mib: dict[str, float]
    allocated_mib: dict[str, float]
    error: float | None = None
    wrong: bool = False


class Unit(Record):
    """One systemd unit as it really runs."""

    active: str = ""
    sub: str = ""
    pid: int | None = None
    exe: str | None = None
    exe_sha256: str | None = None
    argv: list[str] = Field(default_factory=list)
    environment: dict[str, str] = Field(default_factory=dict)
    build_id: str | None = None


class ProductionState(Record):
    """Production on a rank; ``files``: path -> sha256 of what the inventory names of it."""

    files: dict[str, str | None] = Field(default_factory=dict)


class RankState(Record):
    """A rank as one round trip reports it."""

    host: str = ""
    time: float | None = None  # seconds since the epoch, by the rank's own clock
    kernel: str = ""
    production: ProductionState | None = None
    os: str = ""
    arch: str = ""
    mem: dict[str, float] = Field(default_factory=dict)
    guard: dict[str, Any] = Field(default_factory=dict)
    units: dict[str, Unit] = Field(default_factory=dict)
    nccl: dict[str, bool] = Field(default_factory=dict, description="was NCCL found when the build of a slug was made")


class HealthFinding(Record):
    """What the rules made of a rank's health: a fault voids the block, a warning is told."""

    rule: str
    severity: Literal["fault", "warning"]
    text: str
    remedy: str = ""


class RankHealth(Record):
    """A rank's raw health before and after a block (the results of ``rank_health``), and what the rules found in it."""

    before: dict[str, Any] = Field(default_factory=dict)
    after: dict[str, Any] = Field(default_factory=dict)
    findings: list[HealthFinding] = Field(default_factory=list)


class RankBlock(Record):
    """One rank during one block; ``logs`` maps ``worker`` and ``head`` to paths below the run directory."""

    state: RankState | None = None
    memory: Memory | None = None
    guard: GuardTrip | None = None
    health: RankHealth | None = None
    logs: dict[str, str] = Field(default_factory=dict)


class Connection(Record):
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


class TransportProof(Record):
    """The transport of a block: every connection, what broke while it ran, and what makes it not count."""

    require: Literal["rdma", "tcp"]
    transport: Literal["RDMA", "TCP", "mixed", "unknown", "none"]
    connections: list[Connection]
    events: list[str] = Field(default_factory=list)
    problems: list[str] = Field(default_factory=list)
    reconnected: list[str] = Field(default_factory=list, description="connections whose queue pairs changed")
    resolved: dict[str, dict[str, Any]] = Field(default_factory=dict, description="a rank's device and GID at launch")


class MemoryBreakdown(Record):
    """llama.cpp's own account of one device, in MiB."""

    model: int
    context: int
    compute: int
    total: int | None = None
    free: int | None = None


class Fatal(Record):
    """A log line that ends a server, with what it means."""

    line: str
    meaning: str


class Observations(Record):
    """What one head log (and the workers' logs) say about a block. ``None``: the logs do not speak about it.

    truncated: observations of which no more than a part is known, since a log was longer than what a rank sends of it.
    """

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
    iq1s_rows256_active: int | None = None
    iq1s_rows256_fallback: int | None = None
    iq1s_ncols_active: int | None = None
    iq1s_ncols_fallback: int | None = None
    rank_forward_ms: dict[str, float] = Field(default_factory=dict)
    rank_rpc_ms: dict[str, float] = Field(default_factory=dict)
    rank_rpc_p99_ms: dict[str, float] = Field(default_factory=dict)
    rank_idle_share: dict[str, float] = Field(default_factory=dict)
    rpc_p99: float | None = None
    worker_link_idle: float | None = None
    slowest_rank_excess: float | None = None
    fatal: list[Fatal] = Field(default_factory=list)
    rank_markers: dict[str, dict[str, int]] = Field(
        default_factory=dict, description="the markers of each rank that said any, head and worker together"
    )
    truncated: list[str] = Field(default_factory=list)


class Block(Record):
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


class VoidBlock(Record):
    """A block that does not count; ``void`` says why. It was measured again, or broke off (``broken``).

    transport: the proof, where it was made; its ``problems`` are why a block broke that is not carried as it must be.
    """

    index: int
    pair: int
    arm: str
    started: str | None = None
    ended: str | None = None
    void: str = ""
    broken: bool = False
    transport: TransportProof | None = None


class Verified(Record):
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


class Facts(Record):
    """Everything measured in one run; ``void`` keeps what does not count. verified: by the arm's name."""

    version: Literal[1] = 1
    run_id: str
    candidate: str
    blocks: list[Block]
    void: list[VoidBlock] = Field(default_factory=list)
    verified: dict[str, Verified] = Field(default_factory=dict)

    def of(self, arm: str) -> list[Block]:
        return [block for block in self.blocks if block.arm == arm]
