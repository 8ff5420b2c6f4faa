"""Options and printing that several commands share."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from k3deploy.errors import ExitCode, K3Error
from k3deploy.paths import DEFAULT_INVENTORY, DEFAULT_RUNS

if TYPE_CHECKING:
    from rich.console import Console

    from k3deploy.matrix import Matrix

    _TextType = click.ParamType[str]
    _SecondsType = click.ParamType[int]
else:
    # Generic only in newer releases of click.
    _TextType = _SecondsType = click.ParamType

_F = TypeVar("_F", bound=Callable[..., Any])
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class UsageProblem(K3Error):
    """The command line asks for something that cannot be."""

    exit_code = ExitCode.USAGE


def inventory_option(function: _F) -> _F:
    return click.option(
        "--inventory",
        "-i",
        envvar="K3DEPLOY_INVENTORY",
        default=DEFAULT_INVENTORY,
        show_default=True,
        show_envvar=True,
        type=click.Path(path_type=Path),
        help="The cluster: an Ansible inventory.",
    )(function)


def matrix_option(function: _F) -> _F:
    return click.option(
        "--matrix",
        "matrix_dir",
        envvar="K3DEPLOY_MATRIX",
        show_envvar=True,
        type=click.Path(path_type=Path),
        help="Directory of rows.  [default: the inventory's k3_matrix, which is matrix/ beside it]",
    )(function)


def runs_option(function: _F) -> _F:
    return click.option(
        "--runs",
        envvar="K3DEPLOY_RUNS",
        default=DEFAULT_RUNS,
        show_default=True,
        show_envvar=True,
        type=click.Path(path_type=Path),
        help="Directory of run directories.",
    )(function)


def max_hours_option(function: _F) -> _F:
    return click.option(
        "--max-hours", type=click.FloatRange(min=0.01), help="Begin no round of blocks that would end later."
    )(function)


def delta_option(function: _F) -> _F:
    return click.option(
        "--delta", type=click.FloatRange(min=0.1), help="Smallest gain worth a change, in per cent.  [default: 2]"
    )(function)


def seed_option(function: _F) -> _F:
    return click.option(
        "--seed", type=click.IntRange(min=0), help="Of the order of the blocks.  [default: drawn, and recorded]"
    )(function)


def anyway_option(function: _F) -> _F:
    return click.option("--anyway", is_flag=True, help="Measure also where the pairs are too few to be accepted.")(
        function
    )


def json_option(function: _F) -> _F:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


class CandidateType(_TextType):
    """A candidate's name; completes to the rows of the matrix, after an @ to a row's values."""

    name = "candidate"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        del param
        # A broken matrix must not spill over the prompt: there is then nothing to complete.
        try:
            matrix = _matrix_beside(ctx.params.get("inventory"), ctx.params.get("matrix_dir"))
            head, plus, _ = incomplete.rpartition("+")
            names = [
                f"{head}+{name.removeprefix('candidate-')}" if plus else name for name, _ in candidate_names(matrix)
            ]
            titles = dict(zip(names, (title for _, title in candidate_names(matrix)), strict=True))
        except (K3Error, OSError):
            return []
        return [CompletionItem(name, help=title) for name, title in titles.items() if name.startswith(incomplete)]


def candidate_names(matrix: Matrix) -> list[tuple[str, str]]:
    """Every row as ``(candidate's name, title)``, each value of a sweep after its row."""
    names = []
    for row in matrix.rows.values():
        names.append((f"candidate-{row.id}", row.title))
        names += [(f"candidate-{row.id}@{value}", row.title) for value, _ in row.points() if value]
    return names


class DurationType(_SecondsType):
    """A length of time as people write it: 45s, 90m, 4h, 1h30m, 2d; in seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        parts = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", str(value).strip())
        units = (86400, 3600, 60, 1)
        seconds = sum(int(n) * unit for n, unit in zip(parts.groups(), units, strict=True) if n) if parts else 0
        if not 30 <= seconds <= 14 * 86400:
            self.fail(f"{value!r} is no duration from 30s to 14d; write it like 90m, 4h or 1h30m", param, ctx)
        return seconds


class RunType(_TextType):
    """A run's id, or ``latest``."""

    name = "run"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        del param
        from k3deploy.store import Store

        root = ctx.params.get("runs") or os.environ.get("K3DEPLOY_RUNS") or DEFAULT_RUNS
        try:
            names = ["latest", *(run.id for run in Store(Path(root)).runs())]
        except (K3Error, OSError):
            return []
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def _matrix_beside(inventory: Path | str | None, matrix_dir: Path | str | None) -> Matrix:
    """The matrix by place alone: asking Ansible for ``k3_matrix`` takes longer than a completion may."""
    from k3deploy.matrix import Matrix

    directory = matrix_dir or os.environ.get("K3DEPLOY_MATRIX")
    place = Path(inventory or os.environ.get("K3DEPLOY_INVENTORY") or DEFAULT_INVENTORY)
    return Matrix.load(Path(directory) if directory else place.parent / "matrix")


def load_matrix(inventory: Path, matrix_dir: Path | None) -> Matrix:
    """The matrix without the cluster: named, beside the inventory, or where the inventory's ``k3_matrix`` says."""
    from k3deploy import inventory as inventories

    if matrix_dir is None and not (inventory.parent / "matrix").is_dir() and inventory.exists():
        matrix_dir = Path(inventories.load(inventory).matrix)
    return _matrix_beside(inventory, matrix_dir)


def interactive() -> bool:
    """Is there a person at both ends of the terminal?"""
    return sys.stdin.isatty() and sys.stderr.isatty()


def live_display() -> bool:
    """May progress redraw itself on stderr?"""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("CI")


def console() -> Console:
    """Standard output for tables: coloured on a terminal unless NO_COLOR is set, wide when it is not one."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 160, highlight=False, soft_wrap=False)


def print_json(value: Any) -> None:
    """``value`` on standard output, indented, keys in their own order."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def warn(text: str, colour: str = "yellow") -> None:
    """A line on stderr."""
    from k3deploy.progress import printable

    click.secho(printable(text), fg=colour, err=True, color=False if os.environ.get("NO_COLOR") else None)
