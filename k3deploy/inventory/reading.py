"""Reading an inventory: Ansible's own listing, checked variable by variable, each problem with its file and line."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from k3deploy.errors import InputError, Problem
from k3deploy.inventory.schema import (
    ROLE_VARIABLES,
    Cluster,
    ClusterVariables,
    Model,
    Rank,
    RankVariables,
    RoleVariables,
)
from k3deploy.paths import INVENTORY_PLUGINS, inventory_files
from k3deploy.yamlfile import Document, problems, suggest
from k3deploy.yamlfile import load as load_yaml

Variables = TypeVar("Variables", bound=BaseModel)
PREFIX = "k3_"
# What a run adds to the inventory in its own layer.
RUN_PREFIXES = ("k3_run_", "k3_window_")
TIMEOUT_S = 120


def load(*inventories: Path) -> Cluster:
    """Read and validate an inventory, later ones laid over earlier ones; raises ``InputError`` with every problem.

    Relative paths in variables start at the first inventory's directory.
    """
    inventory = inventories[0]
    files, found = Files.read(inventories)
    if found:  # Ansible would say the same of an unreadable file, in other words
        raise InputError(found + files.misspelt())
    found += files.misspelt()
    listing = _ansible_inventory(inventories)
    return Reader(inventory, listing, files, found).cluster()


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


class Files:
    """The inventory's YAML files: where each of our variables is defined."""

    def __init__(self, inventory: Path) -> None:
        self.inventory = inventory
        self.places: dict[str, list[tuple[Document, tuple[str | int, ...]]]] = {}

    @classmethod
    def read(cls, inventories: Sequence[Path]) -> tuple[Files, list[Problem]]:
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
    known = {*ClusterVariables.model_fields, *RankVariables.model_fields, *ROLE_VARIABLES}
    for specs in sorted(_roles_folder().glob("*/meta/argument_specs.yml")):
        data = load_yaml(specs, any_tag=True).data or {}
        for entry in (data.get("argument_specs") or {}).values():
            known |= set((entry or {}).get("options") or {})
    return known


def _roles_folder() -> Path:
    root = Path(__file__).resolve().parents[2]
    return root / "collections" / "ansible_collections" / "k3" / "deploy" / "roles"


class Reader:
    """One pass over Ansible's listing, collecting problems."""

    def __init__(self, inventory: Path, listing: dict[str, Any], files: Files, found: list[Problem]) -> None:
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
                if key not in ClusterVariables.model_fields:
                    continue
                if key in shared and shared[key] != value:
                    message = f"{key} differs between ranks ({name}): it is cluster-wide, put it in group_vars/all"
                    self.found.append(self.files.problem([key], message, name))
                shared.setdefault(key, value)
        return shared

    def _rank(self, index: int, name: str) -> Rank | None:
        given = {key: value for key, value in self.hostvars.get(name, {}).items() if key in RankVariables.model_fields}
        variables = self._validated(RankVariables, given, name)
        roles = {key: value for key, value in self.hostvars.get(name, {}).items() if key in ROLE_VARIABLES}
        plain = {key: value for key, value in roles.items() if not any(_templates(value, ()))}
        self._validated(RoleVariables, plain, name)
        if variables is None:
            return None
        plain = {key.removeprefix(PREFIX): value for key, value in variables.model_dump().items()}
        if plain["local_worker"] and index:
            message = "k3_local_worker is for the head: every other rank runs a worker anyway"
            self.found.append(self.files.problem(["k3_local_worker"], message, name))
        return Rank(index=index, name=name, **plain)

    def _variables(self, shared: dict[str, Any]) -> ClusterVariables | None:
        return self._validated(ClusterVariables, shared, "")

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

    def _cross_checks(self, variables: ClusterVariables) -> None:
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
