"""Where things lie on the controller: playbooks, the state directory, and files written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from k3deploy.errors import InputError, K3Error, Problem

DEFAULT_INVENTORY = "inventory/lab"
DEFAULT_RUNS = "runs"
# Ansible's usual ones without `script`, which runs whatever is executable in an inventory's directory.
INVENTORY_PLUGINS = "host_list,auto,yaml,ini,toml"


def state_dir() -> Path:
    """The user's private directory for locks, error logs and Ansible's working files; made (0700) on first use."""
    base = os.environ.get("K3DEPLOY_STATE")
    if base:
        path = Path(base)
    else:
        home = os.environ.get("XDG_STATE_HOME")
        path = (Path(home) if home else Path.home() / ".local" / "state") / "k3deploy"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not base and path.stat().st_mode & 0o077:  # made on the way to something else, with what the umask left
            path.chmod(0o700)
    except OSError as error:
        raise K3Error(
            f"the state directory {path} cannot be made: {error.strerror}",
            remedy="let K3DEPLOY_STATE name a directory of yours that can be written",
        ) from None
    return path


def find_playbook(name: str, near: Iterable[Path] = ()) -> Path:
    """The absolute path of ``playbooks/<name>.yml``.

    Looked for in the checkout that this package runs from, then above each path in ``near`` (the inventories) and above
    the working directory: an installed wheel carries no playbooks.
    """
    starts = [Path(__file__).resolve().parent, *(path.resolve() for path in near), Path.cwd()]
    for start in starts:
        for folder in (start, *start.parents):
            candidate = folder / "playbooks" / f"{name}.yml"
            if candidate.is_file():
                return candidate
    raise K3Error(
        f"the playbook playbooks/{name}.yml was not found near the inventory or above {Path.cwd()}",
        remedy="run k3deploy inside a checkout of the project, or keep the inventory in one",
    )


def harness_sha256() -> str:
    """The hash of the harness' files in this checkout, as the harness hashes itself: all of them, by their names."""
    root = find_playbook("apply").parent.parent
    files = sorted((root / "collections/ansible_collections/k3/deploy/roles/benchmark/files").glob("*.py"))
    whole = b"".join(file.read_bytes() for file in files)
    return hashlib.sha256(whole).hexdigest() if files else "not in this checkout"


def inventory_files(inventory: Path) -> list[Path]:
    """The files that an inventory may be written in: its own, and those of ``group_vars`` and ``host_vars`` beside it.

    Raises ``InputError`` for what is no inventory. A directory that merely holds one further down is none: Ansible
    would read everything below it.
    """
    if not (inventory.is_file() or inventory.is_dir()):
        raise InputError([Problem(inventory, 0, "no such inventory: it must be a file or a directory")])
    folder = inventory if inventory.is_dir() else inventory.parent
    found: list[Path] = []
    try:
        own = sorted(folder.iterdir()) if inventory.is_dir() else [inventory]
        if inventory.is_dir() and not any(
            path.suffix in _INVENTORY_SUFFIXES or path.name == "hosts" for path in own if path.is_file()
        ):
            raise InputError([Problem(inventory, 0, "no inventory: no hosts.yml or other inventory file is in it")])
        for kind in ("group_vars", "host_vars"):
            for place, _, names in os.walk(folder / kind, onerror=_raise):
                found += (Path(place, name) for name in sorted(names))
        wrong = [path for path in (*own, *found) if path.exists() and not (path.is_file() or path.is_dir())]
        large = [path for path in (*own, *found) if path.is_file() and path.stat().st_size > _INVENTORY_BYTES]
    except OSError as error:
        raise InputError([Problem(error.filename or folder, 0, f"cannot be read: {error.strerror}")]) from None
    problems = [Problem(path, 0, "is neither a file nor a directory") for path in wrong]  # Ansible waits for a pipe
    problems += [Problem(path, 0, f"is larger than {_INVENTORY_BYTES >> 20} MiB") for path in large]
    if problems:
        raise InputError(problems)
    own = [path for path in own if path.suffix in {".yml", ".yaml"}]
    found = [path for path in found if path.suffix in {".yml", ".yaml", ".json", ""}]
    return [path for path in (*own, *found) if path.is_file()]


_INVENTORY_SUFFIXES = frozenset((".yml", ".yaml", ".json", ".ini"))
_INVENTORY_BYTES = 4 << 20  # of one file: far above any, far below what keeps Ansible busy


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def write_text(path: Path, text: str, mode: int = 0o600) -> None:
    """Write ``text`` so that a reader, or a crash, sees either the old file or the whole new one."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    # The rename itself is durable only when the directory is.
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_json(path: Path, value: Any, mode: int = 0o600) -> None:
    """``write_text`` of ``value`` as indented JSON with sorted keys."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True) + "\n", mode)
