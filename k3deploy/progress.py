"""Progress of a run, from Ansible's events: by phase and rank on a terminal, in plain timed lines elsewhere.

A *phase* comes from the name of a play, or of a task that opens a phase inside a play: ``Build | compile``, ``Close |
bring production back``, ``Start | workers, block 1 (U2@2048)``. Inside a phase, a task's result may carry
``k3_progress: {phase, message, done, total}``, in the tries of an ``until`` loop as well. Every phase and every
``k3_progress`` is also written to ``events.ndjson``.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, cast

from k3deploy.secrets import mask

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.live import Live

HEARTBEAT_S = 15.0
# Phases that tasks open inside a longer play; a task that names its block belongs to that block's phase.
_TASK_PHASES = frozenset(("window", "close"))
# A task of this name carries sentences for the reader that stop nothing.
_WARNING = "Warning | "
_BLOCK = re.compile(r"\bblock (\d+)\b")
State = Literal["running", "done", "failed", "stopped"]


def printable(text: str) -> str:
    """``text`` without the control characters, terminal escapes among them, that a remote process may have sent."""
    return "".join(c if c in "\n\t" or (c.isprintable()) else "\N{REPLACEMENT CHARACTER}" for c in text)


def duration(seconds: float) -> str:
    """``5 s``, ``2 min 05 s``, ``1 h 02 min``."""
    whole = int(seconds + 0.5)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


@dataclass(slots=True)
class RankState:
    """The newest word from one host."""

    message: str = ""
    done: int = 0
    total: int = 0

    def __str__(self) -> str:
        count = f" {self.done}/{self.total}" if self.total else ""
        return f"{self.message}{count}".strip()


@dataclass(slots=True)
class Phase:
    """One stretch of a run. Times are of the monotonic clock, in seconds."""

    name: str
    title: str
    started: float
    ended: float | None = None
    state: State = "running"
    task: str = ""
    ranks: dict[str, RankState] = field(default_factory=dict)


class _Lenient:
    """A stream whose reader may go (a terminal that hangs up) without ending the run."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Progress:
    """Feed it events (from any thread); it shows and records them. Use as a context manager.

    ``blocks`` names the arm of each block, for phases like ``block 2/4 U2@2048``.

    ``live`` picks the display that redraws itself; otherwise each phase gives a line at its start and one at its end,
    and a line at least every ``HEARTBEAT_S`` in between.
    """

    def __init__(
        self,
        stream: IO[str],
        events: Path | None = None,
        *,
        live: bool = False,
        blocks: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.phases: list[Phase] = []
        self._stream = _Lenient(stream)
        self._events_path = events
        self._events: IO[str] | None = None
        self._wants_live = live
        self._blocks = tuple(blocks)
        self._warned: dict[str, str] = {}  # sentence -> the rank that said it first
        self._console: Console | None = None
        self._live: Live | None = None
        self._clock = clock
        # Reentrant: a signal handler may print a note while its own thread is inside.
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._ticker: threading.Thread | None = None
        self._last_line = clock()

    # The life of the display.

    def __enter__(self) -> Progress:
        if self._events_path is not None:
            handle = os.open(self._events_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            self._events = os.fdopen(handle, "a", encoding="utf-8", buffering=1)
        if self._wants_live:
            from rich.console import Console
            from rich.live import Live

            self._console = Console(file=cast("IO[str]", self._stream), highlight=False)
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4)
            self._live.start()
        else:
            self._ticker = threading.Thread(target=self._tick, name="k3deploy-heartbeat", daemon=True)
            self._ticker.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.finish("failed" if kind is not None else "done")
        self._stop.set()
        if self._ticker is not None:
            self._ticker.join()
        if self._live is not None:
            self._live.stop()
        self._close_events()

    # What callers tell it.

    def event(self, event: Mapping[str, Any]) -> None:
        """Take one event of ansible-runner."""
        kind = event.get("event", "")
        data: Mapping[str, Any] = event.get("event_data") or {}
        with self._lock:
            if kind == "playbook_on_play_start":
                name, _, title = str(data.get("name") or data.get("play") or "").partition(" | ")
                self.phase(name.strip().lower() or "play", title.strip())
            elif kind == "playbook_on_task_start":
                self._task(printable(str(data.get("task") or "")))
            elif kind.startswith("runner_"):
                self._host_event(kind, data)

    def phase(self, name: str, title: str = "") -> None:
        """Begin a phase, ending the one before; a phase that already runs goes on, under the new title."""
        name, title = printable(name), printable(title)
        with self._lock:
            current = self._current()
            if current is not None and current.name == name:
                current.title = title or current.title
                return
            self.finish("done")
            self.phases.append(Phase(name, title, self._clock()))
            self._record(event="phase_start", phase=name, title=title)
            self._line(f"{name}: {title}" if title else f"{name}: begins")

    def finish(self, state: State = "done") -> None:
        """End the running phase, if one runs; one with a failed task ends as failed whatever ``state`` says."""
        with self._lock:
            current = self._current()
            if current is None:
                return
            current.ended = self._clock()
            if current.state == "running":
                current.state = state
            elapsed = current.ended - current.started
            self._record(event="phase_end", phase=current.name, state=current.state, elapsed_s=round(elapsed, 3))
            self._line(f"{current.name}: {current.state} after {duration(elapsed)}")

    def note(self, text: str) -> None:
        """A line for the reader, above the live display."""
        text = printable(text)
        with self._lock:
            self._record(event="note", message=text)
            if self._console is not None:
                from rich.text import Text

                self._console.print(Text(text))
            else:
                self._line(text)

    def record(self, **entry: Any) -> None:
        """Write an entry of the caller's own to ``events.ndjson``."""
        with self._lock:
            self._record(**entry)

    # Inside.

    def _current(self) -> Phase | None:
        return self.phases[-1] if self.phases and self.phases[-1].ended is None else None

    def _task(self, task: str) -> None:
        name, bar, title = task.partition(" | ")
        if block := _BLOCK.search(title):
            index = int(block[1])
            arm = f" {self._blocks[index]}" if index < len(self._blocks) else ""
            self.phase(f"block {index + 1}/{max(len(self._blocks), index + 1)}{arm}", f"{name.lower()}: {title}")
        elif bar and name.lower() in _TASK_PHASES:
            self.phase(name.lower(), title)
        if self.phases:
            self.phases[-1].task = title if bar else task

    def _host_event(self, kind: str, data: Mapping[str, Any]) -> None:
        host = printable(str(data.get("host") or ""))
        result = data.get("res") or {}
        reported = result.get("k3_progress") if isinstance(result, Mapping) else None
        if isinstance(reported, Mapping):
            self._reported(host, reported)
        if kind == "runner_on_ok" and str(data.get("task") or "").startswith(_WARNING):
            self._warnings(host, result)
        current = self._current()
        if current is None:
            return
        if kind == "runner_on_start":
            current.ranks.setdefault(host, RankState()).message = _title(str(data.get("task") or ""))
        elif kind in ("runner_on_ok", "runner_on_skipped") and not isinstance(reported, Mapping):
            current.ranks.pop(host, None)
        elif kind == "runner_on_unreachable" or (kind == "runner_on_failed" and not data.get("ignore_errors")):
            current.state = "failed"
            word = "unreachable" if kind == "runner_on_unreachable" else "failed"
            task = _title(str(data.get("task") or ""))
            current.ranks[host] = RankState(f"{word}: {task}")
            self._record(event=word, host=host, task=task)
            self._line(f"{current.name}: {host} {word} at: {task}")

    def _warnings(self, host: str, result: Mapping[str, Any]) -> None:
        sentences = result.get("msg")
        for sentence in map(str, sentences if isinstance(sentences, list) else [sentences]):
            first = self._warned.setdefault(sentence, host)
            self.note(f"warning: {host}: {sentence if first == host else f'the same as {first}'}")

    def _reported(self, host: str, reported: Mapping[str, Any]) -> None:
        current = self._current()
        if current is None:
            return
        state = RankState(
            printable(str(reported.get("message") or "")), _int(reported, "done"), _int(reported, "total")
        )
        current.ranks[host] = state
        self._record(
            event="progress",
            phase=current.name,
            host=host,
            step=printable(str(reported.get("phase") or "")),
            message=state.message,
            done=state.done,
            total=state.total,
        )

    def _record(self, **entry: Any) -> None:
        if self._events is None:
            return
        stamp = datetime.now(UTC).isoformat(timespec="milliseconds")
        try:
            self._events.write(json.dumps({"time": stamp, **mask(entry)}) + "\n")
        except OSError as error:
            # A full disk must not keep anybody from bringing production back.
            self._close_events()
            self.note(f"{self._events_path} is written no further: {error.strerror}")

    def _close_events(self) -> None:
        events, self._events = self._events, None
        if events is not None:
            with contextlib.suppress(OSError):
                events.close()

    def _line(self, text: str) -> None:
        if self._wants_live:
            return
        self._last_line = self._clock()
        self._stream.write(f"{datetime.now():%H:%M:%S} {text}\n")
        self._stream.flush()

    def _tick(self) -> None:
        while not self._stop.wait(0.5):
            self.heartbeat()

    def heartbeat(self) -> None:
        """In plain mode, say what goes on when nothing was said for ``HEARTBEAT_S``."""
        with self._lock:
            current = self._current()
            if current is None or self._clock() - self._last_line < HEARTBEAT_S:
                return
            words = [f"{host} {state}" for host, state in sorted(current.ranks.items()) if str(state)]
            what = ", ".join(words) or current.task or "working"
            self._line(f"{current.name}: {what} ({duration(self._clock() - current.started)})")

    def _render(self) -> Group:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        styles = {"running": "bold cyan", "done": "green", "failed": "bold red", "stopped": "yellow"}
        marks = {"running": "*", "done": "+", "failed": "x", "stopped": "-"}
        with self._lock:
            now = self._clock()
            phases = Table.grid(padding=(0, 1))
            for phase in self.phases:
                elapsed = (phase.ended if phase.ended is not None else now) - phase.started
                phases.add_row(
                    Text(marks[phase.state], styles[phase.state]),
                    Text(phase.name, styles[phase.state] if phase.state != "done" else ""),
                    Text(duration(elapsed), "dim"),
                    Text(phase.title, "dim"),
                )
            current = self._current()
            if current is None:
                return Group(phases)
            ranks = Table.grid(padding=(0, 1))
            for host, state in sorted(current.ranks.items()):
                bar = ProgressBar(total=state.total, completed=state.done, width=20) if state.total else Text("")
                ranks.add_row(Text(f"    {host}"), bar, Text(str(state), overflow="ellipsis", no_wrap=True))
            if not current.ranks:
                ranks.add_row(Text(f"    {current.task}", "dim"))
            return Group(phases, ranks)


_DIGITS = 18  # more is no count of anything


def _title(task: str) -> str:
    """A task's name without the phase before its bar: the phase is shown anyway."""
    return printable(task.partition(" | ")[2] or task)


def _int(values: Mapping[str, Any], key: str) -> int:
    """A count that a rank reported; 0 where it is none."""
    value = values.get(key)
    if isinstance(value, float):
        return int(value) if math.isfinite(value) else 0
    # Jinja hands numbers over as text where a template made them.
    if isinstance(value, str):
        return int(value) if value.isdecimal() and len(value) <= _DIGITS else 0
    return value if isinstance(value, int) else 0
