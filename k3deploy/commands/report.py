"""`k3deploy report`: judge what was measured, again, and rewrite the reports."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from k3deploy.commands import judging
from k3deploy.commands.options import CONTEXT, RunType, console, json_option, print_json, runs_option
from k3deploy.errors import ExitCode

if TYPE_CHECKING:
    from k3deploy.store import Store

EPILOG = """\b
Examples:
  k3deploy report                    the newest run: verdict, report.html, report.md
  k3deploy report candidate-U9       the run whose id holds these words
  k3deploy report --list             every run with its verdict
  k3deploy report --list --json

Measures nothing and contacts no rank. The exit code is the verdict's, as for apply."""


@click.command(epilog=EPILOG, context_settings=CONTEXT)
@click.argument("run", type=RunType(), default="latest")
@runs_option
@click.option("--list", "listing", is_flag=True, help="List the runs instead.")
@json_option
def report(run: str, runs: Path, listing: bool, as_json: bool) -> int:
    """Judge RUN (default: the newest) from its records and write its reports."""
    from k3deploy.store import Store

    store = Store(runs)
    if listing:
        _list(store, as_json=as_json)
        return int(ExitCode.OK)
    found = store.load(run)
    outcome = judging.conclude(found)
    judging.show(outcome, found, as_json=as_json)
    return int(outcome.exit_code)


def _list(store: Store, *, as_json: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    summaries = [run.summary() for run in store.runs()]
    if as_json:
        print_json(summaries)
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("run", "cluster", "blocks", "verdict"):
        table.add_column(heading, no_wrap=True)
    for summary in summaries:
        cells = (summary["id"], summary["cluster"], str(summary["blocks"]), summary["verdict"] or "-")
        table.add_row(*(Text(cell) for cell in cells))
    console().print(table)
