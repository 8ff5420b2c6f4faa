"""The plan's data, as ``plan.json`` holds it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from k3deploy.errors import InputError, K3Error
from k3deploy.inventory import Model, Transport, Vocabulary
from k3deploy.matrix import Gate, Guards

MIB = 1 << 20


class PlanError(K3Error):
    """The candidate cannot be made concrete on this cluster: the message says why, the remedy what to do."""

    exit_code = InputError.exit_code


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Process(_Data):
    """One process of one arm on one rank. ``argv[0]`` is relative to the arm's release.

    listen: where others reach it. server: where it listens itself, while a timing proxy of its unit holds ``listen``.
    """

    argv: list[str]
    environment: dict[str, str]
    cpu_affinity: str = ""
    memlock_bytes: int
    listen: str | None = None
    server: str | None = None
    url: str | None = None


class RankProcesses(_Data):
    """What one rank runs for one arm."""

    worker: Process | None = None
    head: Process | None = None
    guard_mib: int


class ArmTransport(_Data):
    """What carries an arm's RPC traffic, and what proves it.

    rdma: the arm's setting. require: what its connections must be (tcp: anything). token_bytes: what an evaluated token
    moves over each connection at the very least, 0 where the model is not known.
    """

    rdma: Literal["auto", "pinned", "off"]
    require: Literal["tcp", "rdma"]
    chunk_bytes: int
    rx_depth: int
    token_bytes: int = 0


class Difference(_Data):
    """One setting that an arm has otherwise than the baseline, as they really run."""

    key: str
    baseline: str
    arm: str


class PlannedArm(_Data):
    """One arm, resolved."""

    name: str
    slug: str
    build: str
    build_key: str
    settings: dict[str, Any]
    differences: list[Difference] = Field(default_factory=list)
    warmup: dict[str, list[int]]
    processes: dict[str, RankProcesses]
    transport: ArmTransport
    forecast: list[dict[str, Any]] = Field(default_factory=list, description="one entry a rank; empty without facts")
    notes: list[str] = Field(default_factory=list)
    # Of a campaign, whose candidates have gates of their own; elsewhere the plan's hold for every arm.
    candidate: str = ""
    gates: dict[str, Gate] | None = None


class RowSummary(_Data):
    """What a reader of the plan needs of a row."""

    id: str
    title: str
    kind: str
    hypothesis: str
    guard: str
    rejection: str


class Known(_Data):
    """A finding with the row that it belongs to (``baseline`` for the baseline's own)."""

    row: str
    text: str
    contradicts: bool
    seen: str


class Block(_Data):
    """One server start of one arm."""

    index: int
    pair: int
    arm: str
    slug: str


class Cell(_Data):
    """One workload point. n_cached: how many of its first tokens are evaluated beforehand, where the cell says so."""

    cell: str
    state: Literal["cold", "warm", "cached"]
    n_prompt: int
    n_predict: int
    n_cached: int | None = None


class Bench(_Data):
    """The harness' request, less the url."""

    deadline_s: int
    seed: int
    vocab: Vocabulary | None
    warmup: dict[str, list[int]]
    repeats: int
    cells: list[Cell]
    probes: list[str]


class PlannedRule(_Data):
    """What an ACCEPT takes, fixed before anything is measured. delta: the smallest worthwhile gain, as a share. looks:
    after how many pairs an ACCEPT may be spoken. no_accept: why it may not be spoken at all, if so. seed: of the order.
    fixed: all pairs are measured, whatever the first ones say.
    """

    delta: float
    looks: list[int]
    seed: int
    no_accept: str = ""
    fixed: bool = False


class Plan(_Data):
    """Everything that a run will do, as data. ``Plan.model_validate_json(plan.model_dump_json()) == plan``."""

    candidate: str
    cluster: str
    inventory: str
    ranks: list[str]
    model: Model
    transport: Transport
    rows: list[RowSummary]
    arms: list[PlannedArm]
    harness: dict[str, Any]
    gates: dict[str, Gate]
    guards: Guards
    evidence: list[str]
    findings: list[Known]
    notes: list[str]
    builds: dict[str, dict[str, Any]]
    blocks: list[Block]
    rule: PlannedRule
    bench: Bench
    parity: dict[str, Any] = Field(default_factory=dict, description="the harness' parity request, less the arm")
    calibrated_as: str = Field("", description="stands for how the cluster's own baseline runs: see plain_baseline")

    @property
    def baseline(self) -> PlannedArm:
        return self.arms[0]
