"""A row, the baseline and a cluster, fully resolved: what runs where, how it is measured, and what is to be expected.

``make_plan`` is a pure function of its inputs but for one reading of the model's own files; it touches no rank.
``render_run_layer`` turns a plan into the inventory layer from which the roles work.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from k3deploy.build_key import build_key
from k3deploy.errors import InputError, K3Error, Problem
from k3deploy.inventory import BuildSpec, Cluster, Model, Rank, Transport, Vocabulary
from k3deploy.matrix import BASELINE, BuildChange, Candidate, Finding, Gate, Guards, Matrix, Ring
from k3deploy.settings import flags, merge, render

if TYPE_CHECKING:
    from k3deploy.memory import ModelFacts, RankForecast

MIB = 1 << 20
SEED = 7
REPEATS = 2
DEADLINE_S = 1800  # for the cells of one block
COLD = ("pp256", "pp512", "pp1024", "pp2048", "pp4096", "tg100")
WARM = ("pp2048", "pp4096")
DECODE_PROMPT = 16
# What a row lists as evidence -> the harness' probe that yields it.
PROBES = {"shifted_prefix": "shifted_prefix", "graphs_reused": "graphs"}


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PlanError(K3Error):
    """The candidate cannot be made concrete on this cluster: the message says why, the remedy what to do."""

    exit_code = InputError.exit_code


class Process(_Data):
    """One process of one arm on one rank. ``argv[0]`` is relative to the arm's release."""

    argv: list[str]
    environment: dict[str, str]
    cpu_affinity: str = ""
    memlock_bytes: int
    listen: str | None = None
    url: str | None = None


class RankProcesses(_Data):
    """What one rank runs for one arm."""

    worker: Process | None = None
    head: Process | None = None
    guard_mib: int


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
    forecast: list[dict[str, Any]] = Field(default_factory=list, description="one entry a rank; empty without facts")
    notes: list[str] = Field(default_factory=list)


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
    """One workload point."""

    cell: str
    state: Literal["cold", "warm", "cached"]
    n_prompt: int
    n_predict: int


class Bench(_Data):
    """The harness' request, less the url."""

    deadline_s: int
    seed: int
    vocab: Vocabulary | None
    warmup: dict[str, list[int]]
    repeats: int
    cells: list[Cell]
    probes: list[str]


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
    bench: Bench

    @property
    def baseline(self) -> PlannedArm:
        return self.arms[0]


def make_plan(
    matrix: Matrix,
    cluster: Cluster,
    candidate: str,
    *,
    pairs: int = 1,
    cells: Sequence[str] | None = None,
    repeats: int = REPEATS,
    model_facts: ModelFacts | None = None,
) -> Plan:
    """Resolve ``candidate`` on ``cluster``.

    pairs: how often baseline and arms are measured beside each other. cells: names such as ``pp2048`` to measure
    instead of all. model_facts: facts of the model, instead of those that the inventory or the model's file give.

    Raises ``CandidateError`` (unknown or impossible candidate), ``PlanError`` (not possible on this cluster) and
    ``InputError`` (the model's sidecar or facts are wrong).
    """
    if pairs < 1 or repeats < 1:
        raise PlanError("pairs and repeats must be at least 1")
    resolved = matrix.resolve(candidate)
    model = _with_sidecar(cluster.model)
    facts = model_facts or _read_facts(model)
    planner = _Planner(matrix, cluster, resolved, facts)
    arms = planner.arms()
    baseline = arms[0]
    builds = {arm.build_key: {"name": arm.build, **_spec(planner.builds[arm.build])} for arm in arms}
    return Plan(
        candidate=candidate,
        cluster=cluster.name,
        inventory=cluster.inventory,
        ranks=[rank.name for rank in cluster.ranks],
        model=model,
        transport=cluster.transport,
        rows=[RowSummary.model_validate(row.model_dump(include=set(RowSummary.model_fields))) for row in resolved.rows],
        arms=arms,
        harness=planner.harness,
        gates=resolved.gates,
        guards=resolved.guards,
        evidence=_evidence(resolved),
        findings=[
            *(_known(BASELINE, finding) for finding in matrix.baseline.findings),
            *(_known(row_id, finding) for row_id, finding in resolved.findings),
        ],
        notes=planner.notes(baseline),
        builds=builds,
        blocks=_blocks(arms, pairs),
        bench=_bench(resolved, model, arms, cells, repeats),
    )


def render_run_layer(plan: Plan) -> dict[str, Any]:
    """The run's inventory layer: what the roles read (``k3_run_id`` and ``k3_run_dir`` are the store's to add)."""
    return {
        "all": {
            "vars": {
                "k3_run_builds": plan.builds,
                "k3_run_arms": [_layer_arm(arm, plan.bench) for arm in plan.arms],
                "k3_run_blocks": [block.model_dump() for block in plan.blocks],
                "k3_run_bench": plan.bench.model_dump(mode="json", exclude_none=True),
            },
            "hosts": {
                rank: {
                    # On the host, where it wins over group_vars: the hash that the inventory left to the sidecar.
                    "k3_model": plan.model.model_dump(mode="json", exclude={"sidecar", "facts"}, exclude_none=True),
                    "k3_run_processes": {
                        arm.slug: arm.processes[rank].model_dump(mode="json", exclude_none=True) for arm in plan.arms
                    },
                }
                for rank in plan.ranks
            },
        }
    }


def _layer_arm(arm: PlannedArm, bench: Bench) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": arm.name, "slug": arm.slug, "build_key": arm.build_key}
    if arm.warmup != bench.warmup:
        entry["bench"] = {"warmup": arm.warmup}
    return entry


def slug(name: str) -> str:
    """A name for directories and systemd instances."""
    return re.sub(r"[^A-Za-z0-9.]", "-", name)


class _Planner:
    """Settings of the matrix and of the cluster, made into processes."""

    def __init__(self, matrix: Matrix, cluster: Cluster, candidate: Candidate, facts: ModelFacts | None) -> None:
        self.matrix = matrix
        self.cluster = cluster
        self.candidate = candidate
        self.facts = facts
        self.builds = dict(cluster.builds)
        self.harness = merge(matrix.baseline.harness.values(), candidate.harness)

    def arms(self) -> list[PlannedArm]:
        """The baseline, then the candidate's arms."""
        change = self.candidate.build
        build = self.cluster.build if change is None else self._build(change)
        baseline = self._arm(BASELINE, {}, self.cluster.build)
        arms = [baseline, *(self._arm(arm.name, arm.settings, build) for arm in self.candidate.arms)]
        if len({arm.slug for arm in arms}) != len(arms):
            raise PlanError(f"two arms have one name on disk: {', '.join(arm.slug for arm in arms)}")
        return [baseline, *(self._compared(arm, baseline) for arm in arms[1:])]

    def notes(self, baseline: PlannedArm) -> list[str]:
        """What holds for every arm."""
        notes = []
        intended = self.matrix.baseline.settings.values()
        for key, value in self.cluster.scale.items():
            if key in intended and intended[key] != value:
                notes.append(
                    f"this cluster pins {key} to {render(value)} in every arm (matrix: {render(intended[key])})"
                )
        spec = self.cluster.builds[baseline.build]
        for variable, marker in self.matrix.baseline.markers.items():
            if variable in baseline.settings.get("environment", {}) and marker not in spec.markers:
                notes.append(
                    f"{variable} is set, but build {baseline.build} does not promise the marker {marker}: "
                    "the switch has no effect in such a build"
                )
        if self.facts is None:
            notes.append("no memory forecast: neither k3_model.facts nor the model's file is at hand")
        if self.cluster.model.sha256 is None and self.cluster.model.sidecar is None:
            notes.append("k3_model.sha256 is not known: the model's bytes are not verified")
        return notes

    def _build(self, change: BuildChange) -> str:
        """The name of the build that a row needs: the cluster's own, or the baseline's with the row's patch sets."""
        if change.name not in self.builds:
            self.builds[change.name] = self._patched(change)
        return change.name

    def _patched(self, change: BuildChange) -> BuildSpec:
        from k3deploy import patches

        base = self.cluster.builds[self.cluster.build]
        known = patches.list_names()
        if change.patch_sets and all(name in known for name in change.patch_sets):
            names = [*base.patch_sets, *(name for name in change.patch_sets if name not in base.patch_sets)]
            chosen = patches.select(names)
            if base.source.kind == "prebuilt":
                raise PlanError(
                    f"{self.candidate.name} changes the source, but {self.cluster.name}'s build {self.cluster.build} "
                    "is prebuilt",
                    remedy=f"Give its source in the inventory, or name a build that has it: k3_builds.{change.name}.",
                )
            needs_cuda = [one.name for one in chosen if one.manifest.backend == "cuda"]
            if base.backend == "cpu" and needs_cuda:
                raise PlanError(
                    f"{self.candidate.name} needs CUDA: patch set {', '.join(needs_cuda)} changes CUDA kernels, and "
                    f"{self.cluster.name} builds for the CPU",
                    remedy="Try it on a cluster whose build has backend: cuda.",
                )
            return base.model_copy(update={"patch_sets": names, "cmake": {**base.cmake, **change.cmake}})
        needed = f"patch set {', '.join(change.patch_sets)}" if change.patch_sets else "a binary that is not made here"
        raise PlanError(
            f"{self.candidate.name} needs {needed}, which is not available on {self.cluster.name}: {change.needs}",
            remedy=(
                f"Name a build that contains it: k3_builds.{change.name} in the inventory, of kind tree or prebuilt. "
                f"There is: {', '.join(self.cluster.builds)}."
            ),
        )

    def _arm(self, name: str, row: Mapping[str, Any], build: str) -> PlannedArm:
        spec = self.builds[build]
        settings = merge(
            self.matrix.baseline.settings.values(), self.harness, self.cluster.settings, row, self.cluster.scale
        )
        notes = [
            f"this cluster pins {key} to {render(pinned)}: the row's {render(row[key])} has no effect here"
            for key, pinned in self.cluster.scale.items()
            if key in row and row[key] != pinned and row[key] != self.matrix.baseline.settings.values().get(key)
        ]
        notes += self._kv_types(settings, spec)
        self._check(name, settings, spec)
        notes += self._cpu_notes(settings)
        ladder = settings.get("graph_ladder") or {}
        forecast, memory_notes = self._memory(settings, spec, build)
        notes += memory_notes
        return PlannedArm(
            name=name,
            slug=slug(name),
            build=build,
            build_key=build_key(spec),
            settings=settings,
            warmup={"prefill": ladder.get("prefill", []), "decode": ladder.get("decode", [])},
            processes={rank.name: self._processes(rank, settings, spec) for rank in self.cluster.ranks},
            forecast=forecast,
            notes=notes,
        )

    def _compared(self, arm: PlannedArm, baseline: PlannedArm) -> PlannedArm:
        one, other = _flat(baseline.settings), _flat(arm.settings)
        differences = [
            Difference(key=key, baseline=render(one.get(key)), arm=render(other.get(key)))
            for key in [*one, *(key for key in other if key not in one)]
            if one.get(key) != other.get(key)
        ]
        if arm.build_key != baseline.build_key:
            differences.append(Difference(key="build", baseline=baseline.build, arm=arm.build))
        notes = [note for note in arm.notes if note not in baseline.notes]
        notes += _memory_difference(arm.forecast, baseline.forecast)
        if not differences:
            notes.append("this arm is the baseline: what is measured is the spread of the measurement itself")
        return arm.model_copy(update={"differences": differences, "notes": notes})

    def _kv_types(self, settings: dict[str, Any], spec: BuildSpec) -> list[str]:
        """Make V follow K where the binary refuses the pair, and say so."""
        key_type, value_type = settings.get("cache_type_k", "f16"), settings.get("cache_type_v", "f16")
        if self.facts is None or not self.facts.is_mla or spec.mla_kv_types == "free" or key_type == value_type:
            return []
        settings["cache_type_v"] = key_type
        return [
            f"K {key_type} with V {value_type} cannot start: this build refuses K and V of different types for an MLA "
            f"model; it runs as {key_type}/{key_type} (V is a view of K and takes no memory of its own)"
        ]

    def _check(self, name: str, settings: Mapping[str, Any], spec: BuildSpec) -> None:
        """Refuse what would fail late or be changed silently."""
        if "rpc_port" not in settings:
            raise PlanError(f"{name}: no rpc_port is set", remedy="Set it in the matrix' baseline.yml.")
        batch, ubatch = settings.get("batch_size", 2048), settings.get("ubatch_size", 512)
        if ubatch > batch:
            raise PlanError(
                f"{name}: ubatch_size {ubatch} is larger than batch_size {batch}: llama-server would clamp it silently",
                remedy="Raise batch_size in the row, or lower ubatch_size.",
            )
        devices = self._devices(spec)
        split = settings.get("tensor_split")
        if split is not None and len(split) != len(devices):
            raise PlanError(
                f"{name}: tensor_split has {len(split)} shares, {self.cluster.name} has {len(devices)} devices "
                f"({', '.join(devices)})",
                remedy=(
                    "On a CPU head set k3_local_worker: true, so that the head's own share is a local RPC server; "
                    "else set tensor_split in k3_scale."
                ),
            )
        if settings["rpc_port"] == self.cluster.production.worker_port:
            raise PlanError(f"{name}: rpc_port {settings['rpc_port']} is the port of production's workers")
        if settings.get("rdma") == "pinned":
            without = [rank.name for rank in self.cluster.ranks if rank.rdma_device is None]
            if without:
                raise PlanError(
                    f"{name}: rdma: pinned needs the RDMA device of every rank; none is given for {', '.join(without)}",
                    remedy="Set k3_rdma_device for each rank in the inventory.",
                )

    def _cpu_notes(self, settings: Mapping[str, Any]) -> list[str]:
        cpus = self.cluster.head.cpus
        if cpus is None:
            return []
        notes = []
        wanted = settings.get("cpu_range_batch")
        if wanted is not None and int(wanted.partition("-")[2]) >= cpus:
            notes.append(
                f"cpu_range_batch {wanted} names CPUs that {self.cluster.head.name} ({cpus} CPUs) does not have"
            )
        for key in ("threads", "threads_batch"):
            if settings.get(key, 0) > cpus:
                notes.append(f"{key} {settings[key]} is more than the {cpus} CPUs of {self.cluster.head.name}")
        return notes

    def _memory(
        self, settings: Mapping[str, Any], spec: BuildSpec, build: str
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """The forecast of one arm, and what of it a reader must not miss."""
        change = self.candidate.build
        ring = change.ring if change is not None and change.name == build else None
        notes = []
        allowed = self._memlock(settings) // MIB
        pinned = 0 if ring is None else ring.chunk_kib * (ring.depth + 1) / 1024
        if allowed and pinned > allowed:
            notes.append(
                f"an RPC connection of this build pins {pinned:g} MiB, {allowed} MiB are allowed: the registration "
                "fails, and the connection falls back to TCP without a log line"
            )
        if self.facts is None:
            return [], notes
        try:
            forecast = _forecast(self.facts, self.cluster, settings, spec, ring)
        except K3Error as error:
            return [], [*notes, str(error)]
        floor = self._floor(settings)
        notes += [
            f"the forecast leaves {entry['left_mib']:.0f} MiB on {entry['rank']}, the floor is {floor} MiB"
            for entry in forecast
            if entry.get("left_mib", floor) < floor
        ]
        return forecast, notes

    def _floor(self, settings: Mapping[str, Any]) -> int:
        floor: int = settings.get("guard_mib", 0)
        return max(floor, self.candidate.guards.rank_available_mib or 0)

    def _devices(self, spec: BuildSpec) -> list[str]:
        """The head's devices in split order. RPC devices would come before a local GPU by default."""
        local = [] if spec.backend == "cpu" or self.cluster.head.local_worker else ["CUDA0"]
        return local + [f"RPC{number}" for number in range(len(self.cluster.workers))]

    def _processes(self, rank: Rank, settings: Mapping[str, Any], spec: BuildSpec) -> RankProcesses:
        return RankProcesses(
            worker=self._worker(rank, settings, spec) if rank.runs_worker else None,
            head=self._head(rank, settings, spec) if rank.is_head else None,
            guard_mib=self._floor(settings),
        )

    def _worker(self, rank: Rank, settings: Mapping[str, Any], spec: BuildSpec) -> Process:
        port = str(settings["rpc_port"])
        # Never -c: a worker's tensor cache would hash and keep activations in the middle of a measurement.
        argv = [f"bin/{spec.worker_program}", "--host", rank.fabric_address, "--port", port]
        if "worker_threads" in settings:
            argv += ["--threads", str(settings["worker_threads"])]
        return Process(
            argv=argv,
            environment=_environment(rank, settings),
            cpu_affinity=settings.get("worker_cpu_affinity", ""),
            memlock_bytes=self._memlock(settings),
            listen=f"{rank.fabric_address}:{port}",
        )

    def _head(self, rank: Rank, settings: Mapping[str, Any], spec: BuildSpec) -> Process:
        workers = self.cluster.workers
        port = str(self.cluster.candidate_head_port)
        endpoints = [f"{worker.fabric_address}:{settings['rpc_port']}" for worker in workers]
        argv = [
            "bin/llama-server",
            *("--host", rank.fabric_address, "--port", port, "--model", self.cluster.model.path),
            *("--rpc", ",".join(endpoints), "--device", ",".join(self._devices(spec))),
            *flags(settings),
        ]
        return Process(
            argv=argv,
            environment=_environment(rank, settings),
            memlock_bytes=self._memlock(settings) * len(workers),  # one connection a worker
            url=f"http://{rank.fabric_address}:{port}",
        )

    def _memlock(self, settings: Mapping[str, Any]) -> int:
        limits = [settings.get("memlock_mib"), self.candidate.guards.memlock_mib_per_connection]
        return min(limit for limit in limits if limit is not None) * MIB if any(limits) else 0


def _environment(rank: Rank, settings: Mapping[str, Any]) -> dict[str, str]:
    environment = dict(settings.get("environment") or {})
    match settings.get("rdma"):
        case "pinned":
            environment["GGML_RDMA_DEV"] = str(rank.rdma_device)
            if rank.rdma_gid is not None:
                environment["GGML_RDMA_GID"] = str(rank.rdma_gid)
        case "off":
            environment["GGML_RPC_NO_RDMA"] = "1"
    return environment


def _spec(spec: BuildSpec) -> dict[str, Any]:
    return spec.model_dump(mode="json", exclude_none=True)


def _known(row: str, finding: Finding) -> Known:
    return Known(row=row, text=finding.text, contradicts=finding.contradicts, seen=finding.seen)


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with the environment spread out, so that one variable is one difference."""
    flat = {key: value for key, value in settings.items() if key != "environment"}
    return flat | {f"environment.{name}": value for name, value in (settings.get("environment") or {}).items()}


def _memory_difference(arm: Sequence[Mapping[str, Any]], baseline: Sequence[Mapping[str, Any]]) -> list[str]:
    """What an arm takes more or less than the baseline on each rank, with the parts that make the difference."""
    texts = []
    for entry, before in zip(arm, baseline, strict=False):
        parts = [key for key in {**before, **entry} if key.endswith("_mib") and key not in {"total_mib", "left_mib"}]
        changed = {key: entry.get(key, 0) - before.get(key, 0) for key in parts}
        inside = [
            f"{key.removesuffix('_mib').replace('_', ' ')} {size:+.0f}"
            for key, size in changed.items()
            if abs(size) >= 1
        ]
        if inside:
            texts.append(f"{entry['rank']} {entry['total_mib'] - before['total_mib']:+.0f} MiB ({', '.join(inside)})")
    return [f"memory against the baseline: {'; '.join(texts)}"] if texts else []


def _evidence(candidate: Candidate) -> list[str]:
    return list(dict.fromkeys(name for row in candidate.rows for name in row.evidence))


def _blocks(arms: Sequence[PlannedArm], pairs: int) -> list[Block]:
    """Baseline and arms beside each other; every second round runs backwards, so that a drift cancels."""
    rounds = [arms if pair % 2 == 0 else list(reversed(arms)) for pair in range(pairs)]
    order = [(pair, arm) for pair, one_round in enumerate(rounds) for arm in one_round]
    return [Block(index=index, pair=pair, arm=arm.name, slug=arm.slug) for index, (pair, arm) in enumerate(order)]


def _bench(
    candidate: Candidate, model: Model, arms: Sequence[PlannedArm], only: Sequence[str] | None, repeats: int
) -> Bench:
    wanted: list[tuple[str, Literal["cold", "warm", "cached"]]] = [
        *((name, "cold") for name in COLD),
        *((name, "warm") for name in WARM),
    ]
    for gate in candidate.gates.values():
        wanted += [(name, gate.state) for name in gate.cells if (name, gate.state) not in wanted]
    if only is not None:
        names = [name for name, _ in wanted]
        if unknown := [name for name in only if name not in names]:
            raise PlanError(f"no cell {unknown[0]!r} (cells: {', '.join(dict.fromkeys(names))})")
        needed = {name: gate for gate, check in candidate.gates.items() for name in check.cells}
        if missing := [name for name in needed if name not in only]:
            raise PlanError(f"the gate {needed[missing[0]]} judges {missing[0]}: measure it too")
        wanted = [(name, state) for name, state in wanted if name in only]
    cells = [_cell(name, state) for name, state in wanted]
    context = min(arm.settings.get("ctx_size", 0) // arm.settings.get("parallel", 1) for arm in arms)
    for cell in cells:
        if context and cell.n_prompt + cell.n_predict > context:
            raise PlanError(f"{cell.cell} does not fit into a context of {context} tokens a slot")
    evidence = _evidence(candidate)
    return Bench(
        deadline_s=DEADLINE_S,
        seed=SEED,
        vocab=model.vocab,
        warmup=arms[0].warmup,
        repeats=repeats,
        cells=cells,
        probes=[probe for name, probe in PROBES.items() if name in evidence],
    )


def _cell(name: str, state: Literal["cold", "warm", "cached"]) -> Cell:
    size = int(name[2:])
    if name.startswith("pp"):
        return Cell(cell=name, state=state, n_prompt=size, n_predict=1)
    return Cell(cell=name, state=state, n_prompt=DECODE_PROMPT, n_predict=size)


def _with_sidecar(model: Model) -> Model:
    """The model with the hash and the vocabulary that its sidecar holds, where the inventory leaves them out."""
    if model.sidecar is None:
        return model
    path = Path(model.sidecar)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not JSON"
        raise InputError(
            [Problem(path, 0, f"cannot read the model's sidecar: {reason}")],
            remedy="Make the model: k3deploy lab model",
        ) from None
    if not isinstance(record, dict):
        raise InputError([Problem(path, 0, "the model's sidecar must be a JSON object")])
    merged = {
        **{key: record[key] for key in ("sha256", "vocab") if key in record},
        **model.model_dump(exclude_none=True),
    }
    if merged.get("name") != record.get("name", model.name):
        raise InputError([Problem(path, 0, f"speaks of {record['name']}, the inventory names {model.name}")])
    try:
        return Model.model_validate(merged)
    except ValueError as error:
        raise InputError([Problem(path, 0, f"the model's sidecar is wrong: {error}")]) from None


def _read_facts(model: Model) -> ModelFacts | None:
    """The model's architecture: from the GGUF beside the sidecar, else from the inventory, else nothing."""
    from k3deploy.memory import model_facts_from_mapping, read_model_facts

    if model.sidecar is not None and (gguf := Path(model.sidecar).with_suffix(".gguf")).is_file():
        return read_model_facts(gguf)
    return None if model.facts is None else model_facts_from_mapping(model.facts)


def _forecast(
    facts: ModelFacts,
    cluster: Cluster,
    settings: Mapping[str, Any],
    spec: BuildSpec,
    ring: Ring | None,
) -> list[dict[str, Any]]:
    """One entry a rank: what it holds, MiB by part (those that no rank has are left out), the sum, and what is left."""
    from k3deploy import memory

    ranks = [
        memory.Rank(
            name=rank.name,
            memory_bytes=(rank.memory_mib or 0) * MIB,
            device=rank.runs_worker or spec.backend == "cuda",
            local_worker=rank.local_worker,
        )
        for rank in cluster.ranks
    ]
    rdma = None
    if settings.get("rdma") != "off" and cluster.transport.require == "rdma":
        rdma = memory.RdmaRing(ring.chunk_kib * 1024, ring.depth) if ring else memory.RdmaRing()
    found = memory.forecast(facts, settings, ranks, backend=spec.backend, rdma=rdma)
    parts = [part for part in found[0].items if any(one.items[part] for one in found)]
    return [_forecast_entry(rank, one, parts) for rank, one in zip(cluster.ranks, found, strict=True)]


def _forecast_entry(rank: Rank, found: RankForecast, parts: Sequence[str]) -> dict[str, Any]:
    held = ", ".join(f"{found.kinds[kind]} {kind}" for kind in sorted(found.kinds)) or "none"
    entry: dict[str, Any] = {"rank": rank.name, "layers": held + (", output" if found.output_layer else "")}
    entry |= {f"{part}_mib": _mib(found.items[part]) for part in parts}
    entry["total_mib"] = _mib(found.total)
    if rank.memory_mib is not None:
        entry["left_mib"] = round(rank.memory_mib - found.total / MIB, 1)
    return entry


def _mib(size: int) -> float:
    return round(size / MIB, 1)
