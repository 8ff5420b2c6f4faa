"""Run one playbook: the only module that knows ansible-runner.

Every run gets a private working directory (0700) of its own, removed afterwards: a reused one would hand the last run's
extra variables to the next. Extra variables travel in a file of that directory, never on a command line.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from k3deploy.errors import InputError, K3Error
from k3deploy.paths import INVENTORY_PLUGINS, find_playbook, inventory_files, state_dir, write_text
from k3deploy.reach import explain
from k3deploy.secrets import mask, mask_text, secret_values
from k3deploy.yamlfile import load as load_yaml

Event = dict[str, Any]
Status = Literal["successful", "failed", "canceled", "timeout"]

# Set in the environment of every process that a run starts on the controller, so that they can be found again:
# Ansible's workers are session leaders, and killing ansible-playbook's process group leaves them alive.
_MARKER = "K3DEPLOY_RUN"
_GRACE_S = 5.0
_TEMPLATE = re.compile(r"\{[{%#]")
_LAUNCHER = """\
#!{python} -IS
import ctypes, os, signal, sys
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
if os.getppid() != {parent}:
    sys.exit(1)  # the parent was gone before the request
os.execv({real!r}, [{real!r}, *sys.argv[1:]])
"""
_KILLED = 137  # as a shell says it of SIGKILL
# Actions that Ansible settles on the controller: they cost no exchange with a rank.
_CONTROLLER_ACTIONS = frozenset(
    (
        *("add_host", "assert", "debug", "fail", "group_by", "meta", "pause", "set_fact", "set_stats"),
        *("import_playbook", "import_role", "import_tasks", "include_role", "include_tasks", "include_vars"),
        "validate_argument_spec",
    )
)


@dataclass(frozen=True, slots=True)
class HostFailure:
    """One task that failed on one host, a rescued failure included."""

    host: str
    task: str
    message: str
    phase: str = ""

    def __str__(self) -> str:
        return f"{self.host}: {self.task}: {self.message}"


@dataclass(slots=True)
class RunResult:
    """How a playbook ended.

    ``task_count`` counts tasks as Ansible started them. ``round_trips`` counts exchanges with a host: a task on a host,
    each item of its loop and each retry, less what is settled on the controller. ``handler_errors`` are faults of the
    caller's ``on_event``.
    """

    rc: int
    status: Status
    failures: list[HostFailure] = field(default_factory=list)
    unreachable: list[HostFailure] = field(default_factory=list)
    stats: dict[str, dict[str, int]] = field(default_factory=dict)
    task_count: int = 0
    round_trips: int = 0
    handler_errors: list[str] = field(default_factory=list)
    log: Path | None = None

    @property
    def ok(self) -> bool:
        return self.status == "successful" and self.rc == 0


def run_playbook(
    name: str | Path,
    inventories: Sequence[Path],
    extra: Mapping[str, Any],
    on_event: Callable[[Event], None] | None = None,
    cancel: Callable[[], bool] | None = None,
    artifacts_dir: Path | None = None,
    check: bool = False,
    diff: bool = False,
    limit: str | None = None,
    timeout_s: int | None = None,
) -> RunResult:
    """Run ``playbooks/<name>.yml`` (or the playbook at an absolute path) and wait for its end.

    ``on_event`` is called with every event of ansible-runner, in order, on one thread of its own. ``cancel`` is asked
    about once a second; when it says yes, ansible-playbook is interrupted, and killed after five seconds. What it
    started on a host lives on: long work there belongs in systemd units. ``artifacts_dir`` receives Ansible's output,
    with secrets masked, as ``ansible-<name>.log``.
    """
    import ansible_runner

    secrets = _known_secrets(extra, inventories)  # refuses what is no inventory
    playbook = Path(name) if Path(name).is_absolute() else find_playbook(str(name), inventories)
    tally = _Tally(on_event, secrets)
    marker = uuid.uuid4().hex
    arguments = [flag for flag, wanted in (("--check", check), ("--diff", diff)) if wanted]
    try:
        with _private_data_dir() as work, tally:
            interrupt = _Interrupt(cancel or (lambda: False), marker)
            runner = ansible_runner.run(
                private_data_dir=str(work),
                project_dir=str(playbook.parent),
                playbook=str(playbook),
                inventory=[str(path.resolve()) for path in inventories],
                extravars=_as_data(extra),
                envvars=_environment(playbook.parent, marker, _launcher(work)),
                settings={"pexpect_timeout": 1, "suppress_ansible_output": True},
                cmdline=" ".join(arguments) or None,
                limit=limit,
                timeout=timeout_s,
                fact_cache_type="memory",
                event_handler=tally.enqueue,
                cancel_callback=interrupt,
                quiet=True,
            )
            interrupted = interrupt.asked
            killed = runner.rc is None  # ended by a signal, ansible-runner knows no status
            if interrupted or killed or runner.status == "timeout":
                _kill_marked(marker)
            output = (Path(runner.config.artifact_dir) / "stdout").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        # A full disk, say. The caller hears of it as of any failure, and brings back what must be.
        _kill_marked(marker)
        place = f": {error.filename}" if error.filename else ""
        tally.result.rc, tally.result.status = 1, "failed"
        tally.result.failures.append(HostFailure("controller", playbook.name, f"{error.strerror}{place}"))
        return tally.result
    result = tally.result
    result.rc = _KILLED if killed else int(runner.rc)
    result.status = _status(runner.status, result.rc, interrupted)
    if killed and not interrupted:
        # The caller hears of it as of any failure, and brings back what must be.
        result.failures.append(HostFailure("controller", playbook.name, "ansible-playbook was killed by a signal"))
    if not result.ok and result.status == "failed" and not result.failures and not result.unreachable:
        # Ansible refused before any task: an inventory, a role or the playbook itself does not parse.
        result.failures.append(HostFailure("controller", playbook.name, mask_text(_last_lines(output), secrets)))
    if result.unreachable and not interrupted:
        result.unreachable = _with_what_they_answer(result.unreachable)
    if artifacts_dir is not None:
        result.log = artifacts_dir / f"ansible-{playbook.stem}.log"
        try:
            write_text(result.log, mask_text(output, secrets))
        except OSError as error:
            result.handler_errors.append(f"{result.log} was not written: {error.strerror}")
            result.log = None
    return result


def _with_what_they_answer(unreachable: Sequence[HostFailure]) -> list[HostFailure]:
    """Each failure with what its host still answers: a wedged host needs another remedy than one that is off."""
    said = {failure.host: failure.message for failure in unreachable}
    with ThreadPoolExecutor(max_workers=8) as pool:
        found = dict(zip(said, pool.map(explain, said.values(), said), strict=True))
    return [replace(failure, message=f"{failure.message}\n{found[failure.host]}") for failure in unreachable]


def _as_data(value: Any) -> Any:
    """Extra variables that Ansible carries as they are: what it reads from a file is a template to it otherwise."""
    if isinstance(value, Mapping):
        return {key: _as_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_data(item) for item in value]
    return {"__ansible_unsafe": value} if isinstance(value, str) and _TEMPLATE.search(value) else value


def _status(reported: str, rc: int, interrupted: bool) -> Status:
    # ansible-runner gives rc 254 for a timeout and for a cancel, and says "failed" when our own interrupt sufficed.
    if interrupted and rc != 0:
        return "canceled"
    if reported in ("successful", "timeout", "canceled"):
        return reported  # type: ignore[return-value]
    return "failed"


def _environment(playbooks: Path, marker: str, launcher: Path) -> dict[str, str]:
    environment = {
        _MARKER: marker,
        "ANSIBLE_INVENTORY_ENABLED": os.environ.get("ANSIBLE_INVENTORY_ENABLED", INVENTORY_PLUGINS),
        # ansible-runner switches the check off unless told otherwise.
        "ANSIBLE_HOST_KEY_CHECKING": "True",
        "ANSIBLE_NOCOLOR": "1",
        # Ansible starts in no other locale.
        "LC_ALL": "C.UTF-8",
        "PATH": os.pathsep.join([str(launcher), _search_path()]),
    }
    settings = playbooks / "ansible.cfg"
    if settings.is_file() and "ANSIBLE_CONFIG" not in os.environ:
        environment["ANSIBLE_CONFIG"] = str(settings)
    return environment


def _search_path() -> str:
    # The console scripts beside the interpreter first: k3deploy may have been called from outside its environment.
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _launcher(work: Path) -> Path:
    """A directory with an ``ansible-playbook`` that ends with this process, even when this process is killed.

    ansible-runner starts it deaf to the hangup of its terminal: left alone it would go on with the next task on the
    ranks, against whoever brings production back meanwhile.
    """
    real = shutil.which("ansible-playbook", path=_search_path())
    if real is None:
        raise K3Error("ansible-playbook was not found", remedy="install ansible-core beside k3deploy")
    script = work / "bin" / "ansible-playbook"
    script.parent.mkdir(mode=0o700)
    script.write_text(_LAUNCHER.format(python=sys.executable, parent=os.getpid(), real=real))
    script.chmod(0o700)
    return script.parent


@contextlib.contextmanager
def _private_data_dir() -> Iterator[Path]:
    parent = state_dir() / "ansible"
    parent.mkdir(mode=0o700, exist_ok=True)
    for stale in parent.iterdir():
        # A controller killed with SIGKILL could not tidy up; its directory may hold extra variables.
        pid = stale.name.partition("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            shutil.rmtree(stale, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=parent))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


class _Interrupt:
    """The cancel callback: SIGINT first, so that ansible-playbook ends its workers; SIGKILL after a grace."""

    def __init__(self, cancel: Callable[[], bool], marker: str) -> None:
        self._cancel = cancel
        self._marker = marker
        self._since: float | None = None

    @property
    def asked(self) -> bool:
        return self._since is not None

    def __call__(self) -> bool:
        if self._since is None:
            if not self._cancel():
                return False
            self._since = time.monotonic()
            for pid in _marked(self._marker):
                if _parent(pid) == os.getpid():
                    _send(pid, signal.SIGINT)
            return False
        return time.monotonic() - self._since > _GRACE_S


def _marked(marker: str) -> list[int]:
    """The controller's processes that belong to a run."""
    wanted = f"{_MARKER}={marker}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue  # gone, or another user's
    return found


def _parent(pid: int) -> int:
    try:
        # Field 4 of stat; the name in field 2 may hold blanks and brackets.
        return int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _kill_marked(marker: str) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        alive = [pid for pid in _marked(marker) if pid != os.getpid()]
        if not alive:
            return
        for pid in alive:
            _send(pid, number)
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline and any(Path("/proc", str(pid)).exists() for pid in alive):
            time.sleep(0.05)


class _Tally:
    """Takes events off ansible-runner's hands at once, then counts and forwards them on a thread of its own.

    A slow event handler would make ansible-runner miss its own deadlines and call the run timed out.
    """

    def __init__(self, on_event: Callable[[Event], None] | None, secrets: Sequence[str]) -> None:
        self.result = RunResult(rc=0, status="successful")
        self._secrets = secrets
        self._on_event = on_event
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._consume, name="k3deploy-events", daemon=True)

    def __enter__(self) -> _Tally:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._events.put(None)
        self._thread.join()

    def enqueue(self, event: Event) -> bool:
        self._events.put(event)
        return False  # ansible-runner need not keep the event's file

    def _consume(self) -> None:
        while (event := self._events.get()) is not None:
            self._count(event)
            if self._on_event is None:
                continue
            try:
                self._on_event(event)
            except Exception as error:
                # A fault in the display must not cost a measurement: the run goes on and the caller hears of it.
                self.result.handler_errors.append(f"{type(error).__name__}: {error}")

    def _count(self, event: Event) -> None:
        kind = event.get("event", "")
        data: dict[str, Any] = event.get("event_data") or {}
        if kind == "playbook_on_task_start":
            self.result.task_count += 1
        elif kind == "playbook_on_stats":
            self.result.stats = {
                key: dict(data.get(key) or {})
                for key in ("ok", "changed", "failures", "dark", "skipped", "rescued", "ignored")
            }
        if kind in _EXCHANGES:
            action = str(data.get("task_action") or "").rpartition(".")[2]
            looped = kind in ("runner_on_ok", "runner_on_failed") and "results" in (data.get("res") or {})
            # A loop's items are counted one by one as they come; its summary is not an exchange.
            if action not in _CONTROLLER_ACTIONS and not looped:
                self.result.round_trips += 1
        if kind == "runner_on_failed" and not data.get("ignore_errors"):
            self.result.failures.append(_failure(mask(data, self._secrets)))
        elif kind == "runner_on_unreachable":
            self.result.unreachable.append(_failure(mask(data, self._secrets)))


_EXCHANGES = frozenset(
    (
        "runner_on_ok",
        "runner_on_failed",
        "runner_on_unreachable",
        "runner_item_on_ok",
        "runner_item_on_failed",
        "runner_retry",
        "runner_on_async_poll",
    )
)


def _failure(data: Mapping[str, Any]) -> HostFailure:
    return HostFailure(
        host=str(data.get("host") or "?"),
        task=str(data.get("task") or "?"),
        message=_message(data.get("res") or {}),
        phase=str(data.get("play") or ""),
    )


def _message(result: Mapping[str, Any]) -> str:
    """What a person needs of a result: its message, every failed item's, the end of what a command printed."""
    if "censored" in result:
        return "failed (its output is hidden by no_log)"
    items = [item for item in result.get("results") or [] if isinstance(item, Mapping) and item.get("failed")]
    if items:
        return "; ".join(_message(item) for item in items)
    message = result.get("msg") or result.get("reason") or ""
    if isinstance(message, list):
        message = "\n".join(str(line) for line in message)
    parts = [message if isinstance(message, str) else json.dumps(message)]
    for stream in ("log_tail", "stderr", "module_stderr", "stdout", "module_stdout"):
        text = str(result.get(stream) or "").strip()
        if text:
            parts.append(_last_lines(text))
            break
    return (
        "\n".join(part.strip() for part in parts if part.strip())
        or f"failed without a message (rc {result.get('rc', '?')})"
    )


def _last_lines(text: str, count: int = 12) -> str:
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-count:]) or "no output"


def _known_secrets(extra: Mapping[str, Any], inventories: Sequence[Path]) -> list[str]:
    """Values under secret names: of the extra variables, of the environment, and written plainly in the inventories.

    What only a vault holds is never printed by a task of ours, and is masked by its name where another prints it.
    """
    found = [*secret_values(extra), *secret_values(dict(os.environ))]
    for path in (file for inventory in inventories for file in inventory_files(inventory)):
        with contextlib.suppress(InputError):
            data = load_yaml(path, any_tag=True).data
            found += secret_values(data if isinstance(data, dict) else {})
    return found
