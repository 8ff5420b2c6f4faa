"""progress.py: events in, phases, lines and records out."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from k3deploy.progress import HEARTBEAT_S, Progress, duration, printable


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def play(name: str) -> dict[str, Any]:
    return {"event": "playbook_on_play_start", "event_data": {"name": name}}


def task(name: str) -> dict[str, Any]:
    return {"event": "playbook_on_task_start", "event_data": {"task": name}}


def host(kind: str, name: str, task: str = "t", **data: Any) -> dict[str, Any]:
    return {"event": kind, "event_data": {"host": name, "task": task, **data}}


def lines(stream: io.StringIO) -> list[str]:
    """The lines without their time of day."""
    return [line.split(" ", 1)[1] for line in stream.getvalue().splitlines()]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


def test_a_warning_that_more_ranks_give_is_told_once(stream: io.StringIO) -> None:
    with Progress(stream) as progress:
        progress.event(play("Preflight | look"))
        for rank, words in (("rank0", ["small disk"]), ("rank1", ["small disk", "old kernel"])):
            progress.event(host("runner_on_ok", rank, task="Warning | of it", res={"msg": words}))
    told = [line for line in lines(stream) if line.startswith("warning")]
    assert told == [
        "warning: rank0: small disk",
        "warning: rank1: the same as rank0",
        "warning: rank1: old kernel",
    ]


def test_plays_of_one_phase_are_one_phase_and_each_phase_has_a_first_and_a_last_line(
    clock: Clock, stream: io.StringIO
) -> None:
    with Progress(stream, clock=clock) as progress:
        progress.event(play("Preflight | look at every rank"))
        clock.now += 3
        progress.event(play("Build | unpack"))
        clock.now += 60
        progress.event(play("Build | compile"))
        clock.now += 65
    assert [(phase.name, phase.state) for phase in progress.phases] == [("preflight", "done"), ("build", "done")]
    assert lines(stream) == [
        "preflight: look at every rank",
        "preflight: done after 3 s",
        "build: unpack",
        "build: done after 2 min 05 s",
    ]


def test_tasks_open_the_phases_of_window_blocks_and_close(clock: Clock, stream: io.StringIO) -> None:
    with Progress(stream, blocks=["baseline", "U2@2048"], clock=clock) as progress:
        for name in (
            "Window | drain production, measure block by block",
            "Start | workers of baseline (block 0)",
            "Wait for the head",
            "Measure | run the harness on the head",
            "Record | block 0",
            "Start | workers of U2@2048 (block 1)",
            "Close | stop the candidate",
        ):
            progress.event(task(name))
    assert [phase.name for phase in progress.phases] == ["window", "block 1/2 baseline", "block 2/2 U2@2048", "close"]


def test_reported_progress_is_shown_by_host_and_recorded(clock: Clock, stream: io.StringIO, tmp_path: Path) -> None:
    events = tmp_path / "events.ndjson"
    with Progress(stream, events, clock=clock) as progress:
        progress.event(play("Measure | blocks in pairs"))
        reported = {"phase": "start", "message": "load", "done": 3, "total": "93"}
        progress.event(host("runner_retry", "rank0", res={"k3_progress": reported}))
        assert str(progress.phases[0].ranks["rank0"]) == "load 3/93"
        progress.event(host("runner_on_ok", "rank0", res={"k3_progress": {**reported, "done": 93}}))
        progress.event(host("runner_retry", "rank0", res={"k3_progress": {"phase": "measure", "message": "cells"}}))
    assert [phase.name for phase in progress.phases] == ["measure"]
    records = [json.loads(line) for line in events.read_text().splitlines()]
    assert {"phase_start", "phase_end", "progress"} == {record["event"] for record in records}
    first = next(record for record in records if record["event"] == "progress")
    assert (first["host"], first["step"], first["message"]) == ("rank0", "start", "load")
    assert (first["done"], first["total"]) == (3, 93)
    assert events.stat().st_mode & 0o777 == 0o600


def test_long_work_says_something_every_quarter_of_a_minute(clock: Clock, stream: io.StringIO) -> None:
    progress = Progress(stream, clock=clock)
    progress.event(play("Build | compile"))
    progress.event(task("Compile"))
    clock.now += HEARTBEAT_S - 1
    progress.heartbeat()
    assert lines(stream) == ["build: compile"]
    clock.now += 1
    progress.heartbeat()
    progress.heartbeat()
    assert lines(stream)[1:] == ["build: Compile (15 s)"]
    progress.event(host("runner_retry", "rank0", res={"k3_progress": {"message": "objects", "done": 7, "total": 180}}))
    clock.now += HEARTBEAT_S
    progress.heartbeat()
    assert lines(stream)[2:] == ["build: rank0 objects 7/180 (30 s)"]


def test_a_failed_task_fails_its_phase_and_an_ignored_one_does_not(clock: Clock, stream: io.StringIO) -> None:
    with Progress(stream, clock=clock) as progress:
        progress.event(play("Install | releases"))
        progress.event(host("runner_on_failed", "rank1", "may fail", ignore_errors=True))
        progress.event(play("Window | drain"))
        progress.event(host("runner_on_failed", "rank2", "Stop production"))
    assert [phase.state for phase in progress.phases] == ["done", "failed"]
    assert "window: rank2 failed at: Stop production" in lines(stream)


def test_terminal_escapes_from_a_rank_are_defused(clock: Clock, stream: io.StringIO) -> None:
    with Progress(stream, clock=clock) as progress:
        progress.event(play("Build | \x1b[2Jcompile"))
        progress.note("a\x1b]0;title\x07b")
    assert "\x1b" not in stream.getvalue() and "\x07" not in stream.getvalue()
    assert printable("naïve 東\tx\n") == "naïve 東\tx\n"


@pytest.mark.parametrize("live", [False, True])
def test_a_terminal_that_has_hung_up_does_not_end_the_run(
    clock: Clock, live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(5, "Input/output error")

    monkeypatch.setenv("FORCE_COLOR", "1")
    with Progress(Gone(), live=live, clock=clock) as progress:
        progress.event(play("Build | x"))
        progress.note("stopping")
    assert progress.phases[0].state == "done"


def test_the_live_display_shows_phases_ranks_and_notes(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    with Progress(stream, live=True, clock=clock) as progress:
        progress.event(play("Preflight | ranks"))
        clock.now += 2
        progress.event(play("Build | compile"))
        progress.event(
            host("runner_retry", "rank0", res={"k3_progress": {"message": "objects", "done": 7, "total": 9}})
        )
        progress.note("Ctrl-C: stopping")
        assert progress._live is not None
        progress._live.refresh()
    shown = stream.getvalue()
    for words in ("preflight", "build", "rank0", "objects 7/9", "Ctrl-C: stopping"):
        assert words in shown


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 00 s"), (125, "2 min 05 s"), (3725, "1 h 02 min")]
)
def test_durations_read_as_people_say_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text
