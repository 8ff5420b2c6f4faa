"""Ctrl-C, SIGTERM and SIGHUP as requests that a long command answers when it is safe."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """While entered, the signals no longer end the process: they are counted, and ``on_signal`` is told the count.

    ``requested`` says whether to stop what is being done. ``restart()`` begins the next stretch of work, which takes
    ``patience`` further signals before it is asked to stop.
    """

    def __init__(self, on_signal: Callable[[int], None]) -> None:
        self.count = 0
        self._on_signal = on_signal
        self._limit = 1
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)

    def requested(self) -> bool:
        return self.count >= self._limit

    def restart(self, patience: int) -> None:
        self._limit = self.count + patience

    def _take(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.count += 1
        if number == signal.SIGHUP:
            leave_dead_terminal()
        self._on_signal(self.count)


def leave_dead_terminal() -> None:
    """Let what is written to a terminal that has hung up go nowhere: an error there would end what must be finished."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        # A terminal that has hung up is still a character device, and no terminal any more.
        if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
            os.dup2(null, descriptor)
    os.close(null)
