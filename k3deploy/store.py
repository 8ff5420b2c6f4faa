"""Run directories and the controller's lock.

A run directory is ``<runs>/<UTC time>-<candidate>-<6 hex>`` (0700). The hexadecimal part is the start of the run's
*digest*, a hash of all that could change the numbers: the plan and the identity of the tool that measures. A run is
resumed only with the same digest.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import hashlib
import json
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from k3deploy.errors import ExitCode, InputError, K3Error, LockedError
from k3deploy.paths import state_dir, write_json, write_text
from k3deploy.secrets import mask_text
from k3deploy.yamlfile import read_bytes

_TEMPLATE = re.compile(r"\{[{%#]")
_RUN_ID = re.compile(r"^\d{8}T\d{6}-.+-[0-9a-f]{6}$")
LATEST = "latest"
MAX_BYTES = 64 << 20  # of a file of a run directory: a plan is some 100 KiB


class RunNotFound(K3Error):
    """No run of that name, or none at all."""

    exit_code = ExitCode.BAD_INPUT


class ResumeError(K3Error):
    """A run cannot be continued: something that could change the numbers has changed."""

    exit_code = ExitCode.BAD_INPUT


@dataclass(frozen=True, slots=True)
class Run:
    """One run directory.

    ``tool`` is what the digest covers besides the plan; ``options`` is what the plan was made with, for a later resume.
    """

    path: Path
    candidate: str
    created: str
    digest: str
    cluster: str
    inventory: str
    tool: Mapping[str, Any]
    options: Mapping[str, Any]
    owner: str
    reason: str

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def layer(self) -> Path:
        """The run's inventory layer (a directory)."""
        return self.path / "inventory"

    @property
    def events(self) -> Path:
        return self.path / "events.ndjson"

    @property
    def blocks(self) -> list[Path]:
        """Records of the blocks that are measured, in order."""
        return sorted((self.path / "blocks").glob("[0-9]*.json"))

    @property
    def void(self) -> list[Path]:
        """Records of the blocks that do not count."""
        return sorted((self.path / "void").glob("[0-9]*.json"))

    def plan(self) -> dict[str, Any]:
        return _read(self.path / "plan.json")

    def verdict(self) -> dict[str, Any] | None:
        path = self.path / "verdict.json"
        return _read(path) if path.exists() else None

    def summary(self) -> dict[str, Any]:
        """What a listing says of the run."""
        verdict = self.verdict() or {}
        return {
            "id": self.id,
            "candidate": self.candidate,
            "cluster": self.cluster,
            "created": self.created,
            "blocks": len(self.blocks),
            "verdict": verdict.get("outcome") or verdict.get("verdict"),
            "path": str(self.path),
        }


def digest(plan: Mapping[str, Any], tool: Mapping[str, Any]) -> str:
    """The hash of all that could change the numbers."""
    canonical = json.dumps({"plan": plan, "tool": tool}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def operator() -> str:
    """Who works here, as windows and runs name them: K3DEPLOY_OWNER, else user@host."""
    return os.environ.get("K3DEPLOY_OWNER") or f"{getpass.getuser()}@{socket.gethostname()}"


class Store:
    """The run directories below ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()

    def create(
        self,
        candidate: str,
        plan: Mapping[str, Any],
        layer: Mapping[str, Any],
        *,
        cluster: str,
        inventory: Path,
        tool: Mapping[str, Any],
        options: Mapping[str, Any],
        reason: str = "",
        deadline_s: int | None = None,
    ) -> Run:
        """Make a run directory with ``plan.json``, ``run.json`` and the inventory layer, and point ``latest`` at it."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        identity = digest(plan, tool)
        now = datetime.now(UTC)
        path = self.root / f"{now:%Y%m%dT%H%M%S}-{_slug(candidate)}-{identity[:6]}"
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            raise K3Error(f"the run {path.name} exists already", remedy="try again in a second") from None
        about: dict[str, Any] = {
            "candidate": candidate,
            "created": now.isoformat(timespec="seconds"),
            "digest": identity,
            "cluster": cluster,
            "inventory": str(inventory.absolute()),
            "tool": dict(tool),
            "options": dict(options),
            "owner": operator(),
            "reason": mask_text(reason),
        }
        run = Run(path, **about)
        for folder in ("inventory", "blocks", "logs", "ranks"):
            (path / folder).mkdir(mode=0o700)
        write_json(path / "plan.json", plan)
        self.write_layer(run, layer, deadline_s)
        # Last: a directory without run.json is not a run.
        write_json(path / "run.json", about)
        self._point_latest(run)
        return run

    def write_layer(self, run: Run, layer: Mapping[str, Any], deadline_s: int | None = None) -> None:
        """Write ``inventory/run.yml``: the plan's layer plus the run's name, place, owner, reason and window."""
        hosts = dict(layer.get("all", {}))
        hosts["vars"] = {
            **hosts.get("vars", {}),
            "k3_run_id": run.id,
            "k3_run_dir": str(run.path),
            "k3_run_owner": run.owner,
            "k3_run_reason": run.reason,
            **({"k3_run_deadline_s": deadline_s} if deadline_s else {}),
        }
        write_text(run.layer / "run.yml", layer_text({**layer, "all": hosts}))

    def runs(self) -> list[Run]:
        """All runs, newest first."""
        if not self.root.is_dir():
            return []
        names = sorted((path.name for path in self.root.iterdir() if _RUN_ID.match(path.name)), reverse=True)
        return [self._open(self.root / name) for name in names if (self.root / name / "run.json").is_file()]

    def load(self, reference: str = LATEST) -> Run:
        """The run with this id, an unambiguous part of its id, a path to its directory, or ``latest``."""
        for path in (self.root / reference, Path(reference)):
            with contextlib.suppress(OSError, ValueError):  # longer than a name can be
                if (path / "run.json").is_file():
                    return self._open(path.resolve())
        matches = [run for run in self.runs() if reference in run.id]
        if len(matches) == 1:
            return matches[0]
        if matches:
            known = ", ".join(run.id for run in matches[:8])
            raise RunNotFound(f"{reference!r} is not one run of {self.root}", remedy=f"it could be: {known}")
        if reference == LATEST:
            raise RunNotFound(f"there is no run in {self.root} yet", remedy="k3deploy apply makes one")
        known = ", ".join(run.id for run in self.runs()[:8]) or "none"
        raise RunNotFound(f"no run {reference!r} in {self.root}", remedy=f"the newest are: {known}")

    def resume(
        self,
        run: Run,
        plan: Mapping[str, Any],
        layer: Mapping[str, Any],
        tool: Mapping[str, Any],
        deadline_s: int | None = None,
    ) -> None:
        """Make ``run`` ready to be continued with ``plan``; raises ``ResumeError`` naming every key that differs."""
        if digest(plan, tool) != run.digest:
            before = {"plan": run.plan(), "tool": run.tool}
            keys = list(_differences(before, json.loads(json.dumps({"plan": plan, "tool": tool})), ""))
            shown = "\n".join(f"  {line}" for line in keys[:20])
            more = f"\n  and {len(keys) - 20} more" if len(keys) > 20 else ""
            raise ResumeError(
                f"{run.id} was measured under another plan; these differ:\n{shown}{more}",
                remedy="start a new run (leave --resume out), or bring the old settings back",
            )
        self.write_layer(run, layer, deadline_s)
        self._point_latest(run)

    def _open(self, path: Path) -> Run:
        about = _read(path / "run.json")
        keys = [field.name for field in fields(Run) if field.name != "path"]
        if missing := [key for key in keys if key not in about]:
            raise RunNotFound(f"{path / 'run.json'} is incomplete: it has no {', '.join(missing)}")
        return Run(path, **{key: about[key] for key in keys})

    def _point_latest(self, run: Run) -> None:
        link = self.root / f".{LATEST}.{os.getpid()}"
        link.unlink(missing_ok=True)
        link.symlink_to(run.id)
        link.replace(self.root / LATEST)


def layer_text(layer: Mapping[str, Any]) -> str:
    """An inventory layer as YAML. What looks like a template is tagged: Ansible carries it and does not evaluate it."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        tag = "!unsafe" if _TEMPLATE.search(value) else "tag:yaml.org,2002:str"
        return dumper.represent_scalar(tag, value)

    Dumper.add_representer(str, text)
    return yaml.dump(layer, Dumper=Dumper, sort_keys=False, default_flow_style=False, width=120, allow_unicode=True)


@contextlib.contextmanager
def lock(cluster: str, purpose: str) -> Iterator[Callable[[float], None]]:
    """Hold the controller's lock on a cluster; raises ``LockedError`` saying who holds it.

    Yields what tells others how many seconds the holder's window is open from now on. The lock goes with the process,
    however that ends.
    """
    folder = state_dir() / "locks"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{_slug(cluster)}.lock"
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockedError(
                f"cluster {cluster} is in use by {_holder(path)}",
                remedy="wait for it, or stop it with Ctrl-C where it runs: it brings production back first",
            ) from None
        holder = {"pid": os.getpid(), "user": _user(), "since": _moment(), "purpose": purpose}

        def tell(**more: str) -> None:
            text = json.dumps({**holder, **more}).encode()
            os.pwrite(handle, text, 0)
            os.ftruncate(handle, len(text))

        tell()
        yield lambda seconds: tell(until=_moment(seconds))
    finally:
        # Closing gives the lock up. The file stays: removing it would let two processes lock two files of one name.
        os.close(handle)


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        until = f", its window ends at {holder['until']}" if "until" in holder else ""
        return f"{holder['purpose']} (pid {holder['pid']}, user {holder['user']}, since {holder['since']}{until})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another k3deploy, which has only just started"


def _moment(seconds: float = 0) -> str:
    """A time so many seconds from now, by this machine's clock."""
    return (datetime.now().astimezone() + timedelta(seconds=seconds)).isoformat(timespec="seconds")


def _user() -> str:
    """The user's name; the number where the system knows no name for it."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+_-]", "-", text)


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_bytes(path, MAX_BYTES))
    except InputError as error:
        raise RunNotFound(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise RunNotFound(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RunNotFound(f"{path} does not hold a JSON object")
    return value


def _differences(before: Any, after: Any, place: str) -> Iterator[str]:
    """``plan.arms[1].settings.ubatch_size: 2048 -> 3072`` for every leaf that differs."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in sorted({*before, *after}):
            yield from _differences(before.get(key), after.get(key), f"{place}.{key}" if place else str(key))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from _differences(one, other, f"{place}[{index}]")
    elif before != after:
        yield f"{place}: {_short(before)} -> {_short(after)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
