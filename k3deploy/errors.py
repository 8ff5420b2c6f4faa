"""The exception tree and the exit codes: the one place where a failure gets its number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path


class ExitCode(IntEnum):
    """Exit codes of every command, documented in docs/operator.md."""

    OK = 0  # done; for apply: ACCEPT
    FAILED = 1  # something broke: a rank, Ansible, the service
    USAGE = 2  # the command line itself is wrong (click's own code)
    BAD_INPUT = 3  # inventory, matrix or facts are invalid
    PREFLIGHT = 4  # a rank is not fit; nothing was changed
    LOCKED = 5  # another run holds the maintenance window
    REJECT = 10  # verdicts of apply, judge and report
    INCONCLUSIVE = 11
    INVALID = 12
    NOT_RESTORED = 20  # production does not answer as recorded: act now
    LEFTOVER = 21  # production is back; something of the candidate is left on a rank
    INTERRUPTED = 130  # Ctrl-C or SIGTERM; production was brought back


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a file that a person wrote.

    ``line`` and ``column`` count from 1; 0 means "the whole file".
    """

    file: Path | str
    line: int
    message: str
    column: int = 0

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else f"{self.file}"
        return f"{place}: {self.message}"


class K3Error(Exception):
    """Base of every error that is shown to the user without a traceback."""

    exit_code: ExitCode = ExitCode.FAILED

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


class InputError(K3Error):
    """Files that people write are wrong: carries all problems at once."""

    exit_code = ExitCode.BAD_INPUT

    def __init__(self, problems: Sequence[Problem], *, remedy: str = "") -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems), remedy=remedy)


class PreflightError(K3Error):
    """A rank is not fit for the job; nothing was changed."""

    exit_code = ExitCode.PREFLIGHT


class LockedError(K3Error):
    """Someone else holds the maintenance window."""

    exit_code = ExitCode.LOCKED


class NotRestoredError(K3Error):
    """Production does not answer as recorded after the window."""

    exit_code = ExitCode.NOT_RESTORED


class LeftoverError(K3Error):
    """Production is proven to be back, and a rank still has to be cleaned."""

    exit_code = ExitCode.LEFTOVER


class InterruptedRun(K3Error):
    """The user or the system asked to stop."""

    exit_code = ExitCode.INTERRUPTED
