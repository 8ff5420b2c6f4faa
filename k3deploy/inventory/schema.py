"""The schema of a cluster: the variables that an inventory may set, with their limits and defaults."""

from __future__ import annotations

import ipaddress
import re
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from k3deploy.secrets import refuse_secret_name
from k3deploy.settings import EnvironmentValue, PlainText, Port, Settings


def _absolute(value: str) -> str:
    path = PurePosixPath(value)
    if not path.is_absolute() or ".." in path.parts:
        raise ValueError("must be an absolute path without '..'")
    return value


def _fabric_address(value: str) -> str:
    try:
        address = ipaddress.ip_address(value)
    except ValueError:
        raise ValueError(f"{value!r} is not an IP address") from None
    if address.is_unspecified or address.is_multicast:
        raise ValueError(f"{value} is not one machine's address: the RPC port would be open to every network")
    if address.version == 6:
        raise ValueError(f"{value} is IPv6: llama.cpp cuts host:port at the first colon, give the rank's IPv4 address")
    return value


def _http_url(value: str) -> str:
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError:
        raise ValueError("must look like http://ADDRESS:PORT") from None
    if parts.username is not None or parts.password is not None:
        raise ValueError("must not hold a name or a password: what stands here is shown and recorded")
    if parts.scheme != "http" or not parts.hostname or parts.path not in {"", "/"} or parts.query or parts.fragment:
        raise ValueError("must look like http://ADDRESS:PORT")
    if port == 0 or not re.fullmatch(r"[A-Za-z0-9._:-]+", parts.hostname):
        raise ValueError("must look like http://ADDRESS:PORT")
    return value.rstrip("/")


def _source_url(value: str) -> str:
    if value.startswith("-"):
        raise ValueError("must not begin with '-'")
    if re.match(r"[a-z][a-z0-9+.-]*://[^/@]*:[^/@]*@", value, re.IGNORECASE):
        raise ValueError("must not hold a password: it would be recorded; give the builder's git its credentials")
    return value


def _option_name(name: str) -> str:
    refuse_secret_name(name, "the configure line of a build")
    return name


AbsolutePath = Annotated[PlainText, AfterValidator(_absolute)]
# Stands bare in unit files and in search paths, so nothing in it may mean something there.
PlainPath = Annotated[str, Field(pattern=r"^/[A-Za-z0-9/_.+@-]+$"), AfterValidator(_absolute)]
DeviceName = Annotated[str, Field(pattern=r"^(char-|block-|/dev/)[A-Za-z0-9/_.*-]+$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
UnitName = Annotated[str, Field(pattern=r"^[A-Za-z0-9@_.\\:-]+\.service$")]
Identifier = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
BuildName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
CmakeName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$"), AfterValidator(_option_name)]
Seconds = Annotated[int, Field(ge=1)]


class Data(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Source(Data):
    """Where a build's source comes from. All paths are on the builder."""

    kind: Literal["archive", "git", "tree", "prebuilt"]
    path: AbsolutePath | None = None
    sha256: Sha256 | None = None
    subdir: PlainText | None = None
    url: Annotated[PlainText, AfterValidator(_source_url)] | None = None
    ref: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9/_.+-]*$")] | None = None

    @model_validator(mode="after")
    def _complete(self) -> Source:
        needed = {"archive": ("path", "sha256"), "git": ("url", "ref"), "tree": ("path",), "prebuilt": ("path",)}[
            self.kind
        ]
        allowed = {*needed, *{"archive": ("subdir", "url"), "git": ("subdir",)}.get(self.kind, ())}
        given = {name for name in ("path", "sha256", "subdir", "url", "ref") if getattr(self, name) is not None}
        if missing := [name for name in needed if name not in given]:
            raise ValueError(f"a source of kind {self.kind} needs {', '.join(missing)}")
        if surplus := sorted(given - allowed):
            raise ValueError(f"a source of kind {self.kind} takes no {', '.join(surplus)}")
        return self


class Cuda(Data):
    """The CUDA toolchain of a build."""

    nvcc: AbsolutePath
    architectures: PlainText
    flashkda_dir: AbsolutePath | None = None


class BuildSpec(Data):
    """One build: source, changes, flags and toolchain. Its key is made from exactly these."""

    source: Source
    patch_sets: list[Identifier] = Field(default_factory=list)
    backend: Literal["cpu", "cuda"]
    cmake: dict[CmakeName, EnvironmentValue] = Field(default_factory=dict)
    cuda: Cuda | None = None
    targets: list[Identifier] = Field(default_factory=lambda: ["ggml-rpc-server", "llama-server"], min_length=1)
    jobs: Annotated[int, Field(ge=1)] | None = None
    markers: list[PlainText] = Field(default_factory=list)
    mla_kv_types: Literal["equal", "free"] = "equal"

    @model_validator(mode="after")
    def _check(self) -> BuildSpec:
        if (self.backend == "cuda") != (self.cuda is not None):
            raise ValueError("cuda goes with backend: cuda, and only with it")
        for program in ("rpc-server", "llama-server"):
            if not any(target.endswith(program) for target in self.targets):
                raise ValueError(f"targets lacks a {program}")
        return self

    @property
    def worker_program(self) -> str:
        """The RPC server's name in this build (older trees call it ``rpc-server``)."""
        return next(target for target in self.targets if target.endswith("rpc-server"))


class Vocabulary(Data):
    """Token ids that prompts may be made of."""

    first_id: Annotated[int, Field(ge=0)]
    last_id: Annotated[int, Field(ge=1)]
    bos: Annotated[int, Field(ge=0)] | None = None


class Model(Data):
    """The model that is served. ``path`` is on the head.

    ``sidecar`` is a JSON file on the controller with ``sha256`` and ``vocab``, written by whoever made the model; when
    the GGUF itself lies beside it, the forecast reads that. ``facts`` are for a model that is not on the controller.
    """

    name: PlainText
    path: AbsolutePath
    arch: PlainText
    sha256: Sha256 | None = None
    vocab: Vocabulary | None = None
    facts: dict[str, Any] | None = None
    sidecar: PlainText | None = None


class Transport(Data):
    """What carries the RPC traffic on this cluster, and the least that a link must move where it is measured."""

    require: Literal["tcp", "rdma"] = "tcp"
    bandwidth_floor_gbps: Annotated[int, Field(ge=1)] | None = None
    bandwidth_seconds: Annotated[int, Field(ge=1, le=30)] = 2

    @model_validator(mode="after")
    def _floor_needs_rdma(self) -> Transport:
        if self.bandwidth_floor_gbps is not None and self.require != "rdma":
            raise ValueError("bandwidth_floor_gbps goes with require: rdma")
        return self


class Parity(Data):
    """How closely the arms' outputs are compared.

    suites: folder on the controller with short.jsonl, natural.jsonl and long-prefix.jsonl. every: the exact-output test
    looks at every n-th of its 256 positions, each a prompt of its own. n_probs: likeliest tokens compared there.
    n_predict: tokens of a suite's greedy continuations.
    """

    suites: PlainText = "../suites"
    every: Annotated[int, Field(ge=1, le=256)] = 1
    n_probs: Annotated[int, Field(ge=1, le=100)] = 10
    n_predict: Annotated[int, Field(ge=1, le=1024)] = 32


class Guard(Data):
    """Limits of the guard on every rank, beside each arm's own floor (``guard_mib``).

    warn_mib: MemAvailable below which it warns. free_floor_mib: floor of MemFree less CmaFree, which is what a GPU
    driver on unified memory can have; 0 only records it. orphan_s: seconds after which a worker without its head is
    stopped. meminfo: the file that memory is read from; tests point it at one of their own.
    """

    warn_mib: Annotated[int, Field(ge=0)] = 4096
    free_floor_mib: Annotated[int, Field(ge=0)] = 0
    orphan_s: Seconds = 20
    meminfo: AbsolutePath = "/proc/meminfo"


class Production(Data):
    """The service that is drained for a window and brought back after it; read, stopped and started, never written."""

    head_unit: UnitName
    worker_unit: UnitName
    head_url: Annotated[str, AfterValidator(_http_url)]
    worker_port: Port
    # On the head, readable by root; the key in it is sent to production and to nobody else.
    api_key_file: AbsolutePath | None = None
    binaries: list[AbsolutePath] = Field(default_factory=list)
    unit_files: list[AbsolutePath] = Field(default_factory=list)
    drain_timeout_s: Seconds = 300
    start_timeout_s: Seconds = 1800
    # How its memory is proven to be back once its head has stopped; freed_mib where its processes do not show it.
    memory_timeout_s: Seconds = 120
    memory_slack_mib: Annotated[int, Field(ge=0)] = 1024
    freed_mib: Annotated[int, Field(ge=0)] | None = None
    managed: bool = Field(default=False, description="may promote.yml and demote.yml write production's drop-ins?")
    root: PlainPath | None = None


class ClusterVariables(Data):
    """The cluster-wide variables, under the names that the inventory uses."""

    k3_cluster: Identifier
    k3_root: PlainPath = "/opt/k3deploy"
    k3_user: Identifier = "k3deploy"
    k3_model: Model
    k3_builds: dict[BuildName, BuildSpec]
    k3_build: BuildName = "default"
    k3_candidate_head_port: Port
    k3_transport: Transport = Field(default_factory=Transport)
    k3_parity: Parity = Field(default_factory=Parity)
    k3_production: Production
    k3_guard: Guard = Field(default_factory=Guard)
    k3_scale: Settings = Field(default_factory=Settings)
    k3_settings: Settings = Field(default_factory=Settings)
    k3_matrix: PlainText = "../matrix"
    k3_load_timeout_s: Seconds = 1800


class RankVariables(Data):
    """The variables of one rank, under the names that the inventory uses."""

    k3_fabric_address: Annotated[str, AfterValidator(_fabric_address)]
    k3_rdma_device: Identifier | None = None
    k3_rdma_gid: Annotated[int, Field(ge=0)] | None = None
    k3_memory_mib: Annotated[int, Field(ge=1)] | None = None
    k3_production_memory_mib: Annotated[int, Field(ge=1)] | None = None
    k3_cpus: Annotated[int, Field(ge=1)] | None = None
    k3_local_worker: bool = False

    @model_validator(mode="after")
    def _gid_needs_device(self) -> RankVariables:
        if self.k3_rdma_gid is not None and self.k3_rdma_device is None:
            raise ValueError("k3_rdma_gid needs k3_rdma_device: an index means nothing without its device")
        return self


class Band(Data):
    """What is healthy of something that is measured; outside it a block is void."""

    min: float | None = None
    max: float | None = None

    @model_validator(mode="after")
    def _some(self) -> Band:
        if self.min is None and self.max is None:
            raise ValueError("must give min, max or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min:g} is above max {self.max:g}")
        return self


class Bands(Data):
    """Bands of what a rank's health reading measures, by name."""

    sm_clock_mhz: Band | None = None
    gemv_gb_s: Band | None = None
    copy_gb_s: Band | None = None
    temperature_c: Band | None = None
    power_w: Band | None = None
    cpu_copy_gb_s: Band | None = None
    cpu_hash_mb_s: Band | None = None


class Health(Data):
    """How a rank's health is probed and what is healthy there."""

    probe_s: Annotated[float, Field(ge=0, le=2)] = 0.3
    bands: Bands = Field(default_factory=Bands)


class RoleVariables(Data):
    """What roles alone read of a rank; the plan has no use for it, but it must be right."""

    k3_devices: list[DeviceName] = Field(default_factory=list)
    k3_user_groups: list[Identifier] = Field(default_factory=list)
    k3_ccache_dir: PlainPath | Literal[""] = ""
    k3_health: Health = Field(default_factory=Health)


ROLE_VARIABLES = frozenset(RoleVariables.model_fields)


class Rank(Data):
    """One host of the cluster. Rank 0 is the head."""

    index: int
    name: str
    fabric_address: str
    rdma_device: str | None = None
    rdma_gid: int | None = None
    memory_mib: int | None = None
    production_memory_mib: int | None = None
    cpus: int | None = None
    local_worker: bool = False

    @property
    def is_head(self) -> bool:
        return self.index == 0

    @property
    def runs_worker(self) -> bool:
        """Every rank but the head, and the head too where its own share of layers is a local RPC server."""
        return self.local_worker or not self.is_head


class Cluster(Data):
    """An inventory, validated: the ranks (head first) and the cluster-wide variables."""

    inventory: str
    name: str
    ranks: list[Rank]
    builder: str
    root: str
    user: str
    model: Model
    builds: dict[str, BuildSpec]
    build: str
    candidate_head_port: int
    transport: Transport
    parity: Parity
    production: Production
    scale: dict[str, Any]
    settings: dict[str, Any]
    matrix: str
    load_timeout_s: int

    @property
    def head(self) -> Rank:
        return self.ranks[0]

    @property
    def workers(self) -> list[Rank]:
        """Ranks with an RPC server, in the order of the head's ``--rpc`` list."""
        return [rank for rank in self.ranks if rank.runs_worker]
