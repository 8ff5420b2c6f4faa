"""The cluster: what an Ansible inventory says, with Ansible's own precedence, as validated data.

``load(path)`` asks ``ansible-inventory`` (groups, host_vars, files and their precedence are Ansible's business) and
validates every variable that is ours. Beside that it reads the inventory's YAML files for two things that Ansible
does not do: naming the line of a mistake, and noticing a misspelt variable, which Ansible would silently ignore.
"""

from __future__ import annotations

import ipaddress
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from k3deploy.errors import InputError, Problem
from k3deploy.paths import INVENTORY_PLUGINS, inventory_files
from k3deploy.secrets import refuse_secret_name
from k3deploy.settings import EnvironmentValue, PlainText, Port, Settings
from k3deploy.yamlfile import Document, problems, suggest
from k3deploy.yamlfile import load as load_yaml

Variables = TypeVar("Variables", bound=BaseModel)
PREFIX = "k3_"
# What a run adds to the inventory in its own layer.
RUN_PREFIXES = ("k3_run_", "k3_window_")
TIMEOUT_S = 120


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


class _Data(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Source(_Data):
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


class Cuda(_Data):
    """The CUDA toolchain of a build."""

    nvcc: AbsolutePath
    architectures: PlainText
    flashkda_dir: AbsolutePath | None = None


class BuildSpec(_Data):
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


class Vocabulary(_Data):
    """Token ids that prompts may be made of."""

    first_id: Annotated[int, Field(ge=0)]
    last_id: Annotated[int, Field(ge=1)]
    bos: Annotated[int, Field(ge=0)] | None = None


class Model(_Data):
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


class Transport(_Data):
    """What carries the RPC traffic on this cluster, and the least that a link must move where it is measured."""

    require: Literal["tcp", "rdma"] = "tcp"
    bandwidth_floor_gbps: Annotated[int, Field(ge=1)] | None = None
    bandwidth_seconds: Annotated[int, Field(ge=1, le=30)] = 2

    @model_validator(mode="after")
    def _floor_needs_rdma(self) -> Transport:
        if self.bandwidth_floor_gbps is not None and self.require != "rdma":
            raise ValueError("bandwidth_floor_gbps goes with require: rdma")
        return self


class Parity(_Data):
    """How closely the arms' outputs are compared.

    suites: folder on the controller with short.jsonl, natural.jsonl and long-prefix.jsonl. every: the exact-output test
    looks at every n-th of its 256 positions, each a prompt of its own. n_probs: likeliest tokens compared there.
    n_predict: tokens of a suite's greedy continuations.
    """

    suites: PlainText = "../suites"
    every: Annotated[int, Field(ge=1, le=256)] = 1
    n_probs: Annotated[int, Field(ge=1, le=100)] = 10
    n_predict: Annotated[int, Field(ge=1, le=1024)] = 32


class Guard(_Data):
    """Limits of the guard on every rank, beside each arm's own floor (``guard_mib``).

    warn_mib: MemAvailable below which it warns. free_floor_mib: floor of MemFree less CmaFree, which is what a GPU
    driver on unified memory can have; 0 only records it. orphan_s: seconds after which a worker without its head is
    stopped. meminfo: the file that memory is read from; tests point it at one of their own.
    """

    warn_mib: Annotated[int, Field(ge=0)] = 4096
    free_floor_mib: Annotated[int, Field(ge=0)] = 0
    orphan_s: Seconds = 20
    meminfo: AbsolutePath = "/proc/meminfo"


class Production(_Data):
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


class _ClusterVariables(_Data):
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


class _RankVariables(_Data):
    """The variables of one rank, under the names that the inventory uses."""

    k3_fabric_address: Annotated[str, AfterValidator(_fabric_address)]
    k3_rdma_device: Identifier | None = None
    k3_rdma_gid: Annotated[int, Field(ge=0)] | None = None
    k3_memory_mib: Annotated[int, Field(ge=1)] | None = None
    k3_production_memory_mib: Annotated[int, Field(ge=1)] | None = None
    k3_cpus: Annotated[int, Field(ge=1)] | None = None
    k3_local_worker: bool = False

    @model_validator(mode="after")
    def _gid_needs_device(self) -> _RankVariables:
        if self.k3_rdma_gid is not None and self.k3_rdma_device is None:
            raise ValueError("k3_rdma_gid needs k3_rdma_device: an index means nothing without its device")
        return self


class Band(_Data):
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


class Bands(_Data):
    """Bands of what a rank's health reading measures, by name."""

    sm_clock_mhz: Band | None = None
    gemv_gb_s: Band | None = None
    copy_gb_s: Band | None = None
    temperature_c: Band | None = None
    power_w: Band | None = None
    cpu_copy_gb_s: Band | None = None
    cpu_hash_mb_s: Band | None = None


class Health(_Data):
    """How a rank's health is probed and what is healthy there."""

    probe_s: Annotated[float, Field(ge=0, le=2)] = 0.3
    bands: Bands = Field(default_factory=Bands)


class _RoleVariables(_Data):
    """What roles alone read of a rank; the plan has no use for it, but it must be right."""

    k3_devices: list[DeviceName] = Field(default_factory=list)
    k3_user_groups: list[Identifier] = Field(default_factory=list)
    k3_ccache_dir: PlainPath | Literal[""] = ""
    k3_health: Health = Field(default_factory=Health)


ROLE_VARIABLES = frozenset(_RoleVariables.model_fields)


class Rank(_Data):
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


class Cluster(_Data):
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


def load(*inventories: Path) -> Cluster:
    """Read and validate an inventory, later ones laid over earlier ones; raises ``InputError`` with every problem.

    Relative paths in variables start at the first inventory's directory.
    """
    inventory = inventories[0]
    files, found = _Files.read(inventories)
    if found:  # Ansible would say the same of an unreadable file, in other words
        raise InputError(found + files.misspelt())
    found += files.misspelt()
    listing = _ansible_inventory(inventories)
    return _Reader(inventory, listing, files, found).cluster()


def _ansible_inventory(inventories: Sequence[Path]) -> dict[str, Any]:
    """Ansible's own view of the inventory: ``{group: {hosts: [...]}, _meta: {hostvars: {...}}}``."""
    inventory = inventories[0]
    beside = Path(sys.executable).with_name("ansible-inventory")
    program = str(beside) if beside.exists() else shutil.which("ansible-inventory")
    if program is None:
        raise InputError([Problem(inventory, 0, "ansible-inventory is not installed beside k3deploy")])
    environment = {
        "ANSIBLE_INVENTORY_ENABLED": INVENTORY_PLUGINS,
        **os.environ,
        "ANSIBLE_INVENTORY_UNPARSED_FAILED": "true",
        "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "true",
        "ANSIBLE_NOCOLOR": "true",
        "LC_ALL": "C.UTF-8",  # Ansible starts in no other
        "ANSIBLE_DEPRECATION_WARNINGS": "false",
    }
    try:
        done = subprocess.run(
            [program, *(part for path in inventories for part in ("-i", str(path))), "--list"],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=TIMEOUT_S,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise InputError([Problem(inventory, 0, f"ansible-inventory did not end within {TIMEOUT_S} s")]) from None
    try:
        if done.returncode == 0 and isinstance(listing := json.loads(done.stdout), dict):
            return listing
    except json.JSONDecodeError:
        pass
    said = [line for line in done.stderr.splitlines() if line.strip() and "WARNING" not in line]
    reason = " ".join(said)[:600] or f"exit code {done.returncode}"
    raise InputError([Problem(inventory, 0, f"Ansible cannot read this inventory: {reason}")])


class _Files:
    """The inventory's YAML files: where each of our variables is defined."""

    def __init__(self, inventory: Path) -> None:
        self.inventory = inventory
        self.places: dict[str, list[tuple[Document, tuple[str | int, ...]]]] = {}

    @classmethod
    def read(cls, inventories: Sequence[Path]) -> tuple[_Files, list[Problem]]:
        files = cls(inventories[0])
        found: list[Problem] = []
        for path, is_vars in itertools.chain.from_iterable(map(_yaml_files, inventories)):
            try:
                document = load_yaml(path, any_tag=True)
            except InputError as error:
                found += error.problems
                continue
            for keys, name, _ in document.walk():
                if _is_variable(keys, is_vars=is_vars):
                    files.places.setdefault(name, []).append((document, keys))
        return files, found

    def misspelt(self) -> list[Problem]:
        """Variables with one of our prefixes that nothing reads."""
        found = []
        for name, places in self.places.items():
            if message := misspelt(name):
                document, keys = places[0]
                found.append(document.problem(keys, message))
        return found

    def problem(self, keys: Sequence[str | int], message: str, host: str = "") -> Problem:
        """A problem with variable ``keys[0]`` (and what is inside it), at the definition that applies to ``host``."""
        places = self.places.get(str(keys[0]), []) if keys else []
        if not places:
            return Problem(self.inventory, 0, message)
        own = [place for place in places if host in place[1] or host in (place[0].path.stem, place[0].path.parent.name)]
        document, path = (own or places)[0]
        return document.problem([*path, *keys[1:]], message)


def _yaml_files(inventory: Path) -> Iterator[tuple[Path, bool]]:
    """The inventory's own YAML files, and whether a file holds variables at its top level."""
    folder = inventory if inventory.is_dir() else inventory.parent
    for path in inventory_files(inventory):
        is_vars = path.parent != folder
        if not (is_vars and _is_vault(path)):
            yield path, is_vars


def _is_vault(path: Path) -> bool:
    try:
        with path.open("rb") as raw:
            return raw.read(14) == b"$ANSIBLE_VAULT"
    except OSError:
        return False


def _is_variable(keys: tuple[str | int, ...], *, is_vars: bool) -> bool:
    """Whether a key of an inventory file names a variable: top level, below ``vars``, or below a host."""
    if is_vars:
        return len(keys) == 1
    return len(keys) >= 2 and (keys[-2] == "vars" or (len(keys) >= 3 and keys[-3] == "hosts"))


@cache
def role_names() -> list[str]:
    """The collection's roles, where a checkout has them."""
    roles = _roles_folder()
    return sorted(path.name for path in roles.iterdir() if path.is_dir()) if roles.is_dir() else []


def misspelt(name: str) -> str:
    """What is wrong with a variable's name: nothing, or that it has one of our prefixes and nothing reads it."""
    if not name.startswith((PREFIX, *(f"{role}_" for role in role_names()))) or name.startswith(RUN_PREFIXES):
        return ""
    known = known_variables()
    if name in known:
        return ""
    return f"unknown variable {name!r}{suggest(name, known) or '; see docs/architecture.md for the names'}"


@cache
def known_variables() -> set[str]:
    """Every variable that something reads: the inventory's contract and the roles' argument specs."""
    known = {*_ClusterVariables.model_fields, *_RankVariables.model_fields, *ROLE_VARIABLES}
    for specs in sorted(_roles_folder().glob("*/meta/argument_specs.yml")):
        data = load_yaml(specs, any_tag=True).data or {}
        for entry in (data.get("argument_specs") or {}).values():
            known |= set((entry or {}).get("options") or {})
    return known


def _roles_folder() -> Path:
    root = Path(__file__).resolve().parent.parent
    return root / "collections" / "ansible_collections" / "k3" / "deploy" / "roles"


class _Reader:
    """One pass over Ansible's listing, collecting problems."""

    def __init__(self, inventory: Path, listing: dict[str, Any], files: _Files, found: list[Problem]) -> None:
        self.inventory = inventory
        self.listing = listing
        self.files = files
        self.found = found
        self.hostvars: dict[str, dict[str, Any]] = listing.get("_meta", {}).get("hostvars", {})

    def cluster(self) -> Cluster:
        heads = self._group("head", exactly_one=True)
        workers = self._group("workers")
        builders = self._group("builder", exactly_one=True)
        names = [*heads[:1], *(name for name in workers if name not in heads)]
        if both := sorted(set(heads) & set(workers)):
            self._add(
                f"{both[0]} is in both head and workers: a head's own share is k3_local_worker, not a second group"
            )
        if outside := [name for name in names if name not in self._members("ranks")]:
            self._add(f"{', '.join(outside)}: not in the group ranks, whose children must be head and workers")
        self._unknown()
        shared = self._shared(names)
        ranks = [self._rank(index, name) for index, name in enumerate(names)]
        addresses: dict[str, str] = {}
        for rank in filter(None, ranks):
            if other := addresses.get(rank.fabric_address):
                message = f"k3_fabric_address: {rank.fabric_address} is {other}'s address too"
                self.found.append(self.files.problem(["k3_fabric_address"], message, rank.name))
            addresses[rank.fabric_address] = rank.name
        variables = self._variables(shared)
        if variables is not None:
            self._cross_checks(variables)
        if self.found or variables is None:
            raise InputError(sorted(set(self.found), key=lambda problem: (str(problem.file), problem.line)))
        base = self.inventory if self.inventory.is_dir() else self.inventory.parent
        return Cluster(
            inventory=str(self.inventory),
            name=variables.k3_cluster,
            ranks=[rank for rank in ranks if rank is not None],
            builder=builders[0],
            root=variables.k3_root,
            user=variables.k3_user,
            model=_on_controller(variables.k3_model, base),
            builds=variables.k3_builds,
            build=variables.k3_build,
            candidate_head_port=variables.k3_candidate_head_port,
            transport=variables.k3_transport,
            parity=variables.k3_parity.model_copy(
                update={"suites": str(_controller_path(variables.k3_parity.suites, base))}
            ),
            production=variables.k3_production,
            scale=variables.k3_scale.values(),
            settings=variables.k3_settings.values(),
            matrix=str(_controller_path(variables.k3_matrix, base)),
            load_timeout_s=variables.k3_load_timeout_s,
        )

    def _add(self, message: str) -> None:
        self.found.append(Problem(self.inventory, 0, message))

    def _unknown(self) -> None:
        """Misspelt variables that the YAML files did not show: an inventory may be written in other forms."""
        names = {name for variables in self.hostvars.values() for name in variables}
        for name in sorted(names - set(self.files.places)):
            if message := misspelt(name):
                self._add(message)

    def _members(self, group: str) -> list[str]:
        """Hosts of a group and of its children, in the inventory's order."""
        entry = self.listing.get(group) or {}
        hosts = list(entry.get("hosts", []))
        for child in entry.get("children", []):
            hosts += [name for name in self._members(child) if name not in hosts]
        return hosts

    def _group(self, group: str, *, exactly_one: bool = False) -> list[str]:
        hosts = self._members(group)
        if exactly_one and len(hosts) != 1:
            self._add(f"the group {group} must hold exactly one host, it holds {len(hosts)}")
        elif not hosts:
            self._add(f"the group {group} is empty or missing")
        return hosts

    def _shared(self, names: Sequence[str]) -> dict[str, Any]:
        """The cluster-wide variables; they must be the same on every rank."""
        shared: dict[str, Any] = {}
        for name in names:
            for key, value in self.hostvars.get(name, {}).items():
                if key not in _ClusterVariables.model_fields:
                    continue
                if key in shared and shared[key] != value:
                    message = f"{key} differs between ranks ({name}): it is cluster-wide, put it in group_vars/all"
                    self.found.append(self.files.problem([key], message, name))
                shared.setdefault(key, value)
        return shared

    def _rank(self, index: int, name: str) -> Rank | None:
        given = {key: value for key, value in self.hostvars.get(name, {}).items() if key in _RankVariables.model_fields}
        variables = self._validated(_RankVariables, given, name)
        roles = {key: value for key, value in self.hostvars.get(name, {}).items() if key in ROLE_VARIABLES}
        plain = {key: value for key, value in roles.items() if not any(_templates(value, ()))}
        self._validated(_RoleVariables, plain, name)
        if variables is None:
            return None
        plain = {key.removeprefix(PREFIX): value for key, value in variables.model_dump().items()}
        if plain["local_worker"] and index:
            message = "k3_local_worker is for the head: every other rank runs a worker anyway"
            self.found.append(self.files.problem(["k3_local_worker"], message, name))
        return Rank(index=index, name=name, **plain)

    def _variables(self, shared: dict[str, Any]) -> _ClusterVariables | None:
        return self._validated(_ClusterVariables, shared, "")

    def _validated(self, model: type[Variables], given: dict[str, Any], host: str) -> Variables | None:
        templates = [keys for name, value in given.items() for keys in _templates(value, (name,))]
        for keys in templates:
            text = ".".join(str(key) for key in keys)
            message = f"{text}: must be a plain value, not a template or a secret: the plan reads it without Ansible"
            self.found.append(self.files.problem(keys, message, host))
        if templates:
            return None
        try:
            return model.model_validate(given)
        except ValidationError as error:
            where = f" (rank {host})" if host else ""
            self.found += problems(
                model, error, lambda keys, message: self.files.problem(keys, f"{message}{where}", host)
            )
            return None

    def _cross_checks(self, variables: _ClusterVariables) -> None:
        if variables.k3_build not in variables.k3_builds:
            valid = ", ".join(variables.k3_builds)
            message = f"k3_build: no build {variables.k3_build!r} in k3_builds (there is: {valid})"
            self.found.append(self.files.problem(["k3_build"], message))
        if urlsplit(variables.k3_production.head_url).port == variables.k3_candidate_head_port:
            message = f"k3_candidate_head_port: {variables.k3_candidate_head_port} is production's port"
            self.found.append(self.files.problem(["k3_candidate_head_port"], message))


def _controller_path(text: str, base: Path) -> Path:
    """A path on the controller: ``~/.cache`` is where XDG_CACHE_HOME says, relative ones start at the inventory."""
    cache = os.environ.get("XDG_CACHE_HOME")
    if cache and text.startswith("~/.cache/"):
        return Path(cache) / text.removeprefix("~/.cache/")
    return (base / Path(text).expanduser()).resolve()


def _on_controller(model: Model, base: Path) -> Model:
    """The model with its sidecar's path made absolute."""
    if model.sidecar is None:
        return model
    return model.model_copy(update={"sidecar": str(_controller_path(model.sidecar, base))})


def _templates(value: Any, keys: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    """Paths of values that only Ansible could resolve."""
    if isinstance(value, str):
        if re.search(r"\{\{|\{%", value):
            yield keys
    elif isinstance(value, dict):
        if value.keys() & {"__ansible_vault", "__ansible_unsafe"}:
            yield keys
            return
        for key, item in value.items():
            yield from _templates(item, (*keys, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _templates(item, (*keys, index))
