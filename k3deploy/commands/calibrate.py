"""`k3deploy calibrate`: the baseline against itself, through the same path as every candidate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from k3deploy.commands import apply as applying
from k3deploy.commands.options import (
    CONTEXT,
    DurationType,
    RunType,
    inventory_option,
    json_option,
    matrix_option,
    max_hours_option,
    print_json,
    runs_option,
    warn,
)
from k3deploy.errors import ExitCode

if TYPE_CHECKING:
    from k3deploy.calibration import Calibration
    from k3deploy.store import Run

PAIRS = 6

EPILOG = """\b
Examples:
  k3deploy calibrate                                    on the lab
  k3deploy calibrate -i inventory/gb10 --pairs 8 --yes
  k3deploy calibrate --resume latest

What it measures holds for this cluster, model, build and settings of the baseline, and is what later runs are planned
by: how many pairs it takes to show a gain, and whether the first or the second of a pair has it easier. Measure again
when one of them changes. Exit codes: 0 measured, 11 too few pairs, 12 the measurement does not count; else as for
apply."""


@click.command(epilog=EPILOG, context_settings=CONTEXT)
@inventory_option
@matrix_option
@runs_option
@click.option(
    "--pairs", type=click.IntRange(3, 1000), help=f"Pairs of blocks, the baseline in both.  [default: {PAIRS}]"
)
@click.option("--cells", help="Workload points, with commas: pp2048,pp4096,tg100.  [default: all]")
@click.option("--repeats", type=click.IntRange(1, 1000), help="Measurements of each cell in a block.  [default: 2]")
@max_hours_option
@click.option("--resume", type=RunType(), help="Go on with this calibration (a run's id, or latest).")
@click.option("--yes", "-y", is_flag=True, help="Do not ask before production is drained.")
@click.option("--reason", default="", help="Why; kept with the run and shown to whoever meets the window.")
@click.option("--deadline", type=DurationType(), help="When the ranks end the window by themselves (4h, 90m).")
@json_option
@click.pass_context
def calibrate(
    ctx: click.Context,
    inventory: Path,
    matrix_dir: Path | None,
    runs: Path,
    pairs: int | None,
    cells: str | None,
    repeats: int | None,
    max_hours: float | None,
    resume: str | None,
    yes: bool,
    reason: str,
    deadline: int | None,
    as_json: bool,
) -> int:
    """Measure the baseline against itself: the spread of its starts, and what being first or second does."""
    from k3deploy import calibration
    from k3deploy.plan.again import CALIBRATE
    from k3deploy.store import Store

    if pairs is None and resume is None:
        pairs = PAIRS
    options: dict[str, Any] = {"pairs": pairs, "cells": cells, "repeats": repeats, "delta": None, "seed": None}
    request = applying.Request(
        ctx, CALIBRATE, inventory, matrix_dir, runs, options, max_hours, resume, reason, deadline
    )
    code = applying.launch(request, yes=yes)
    if code not in (ExitCode.OK, ExitCode.REJECT, ExitCode.INCONCLUSIVE):
        return code
    store = Store(runs)
    run = store.load(resume or "latest")
    found = calibration.find(store.root, run.plan())
    if found is None or found.run_id != run.id:
        warn(_nothing_of(run, found))
        return int(ExitCode.INCONCLUSIVE)
    if as_json:
        print_json(found.model_dump(mode="json"))
    else:
        show(found)
    return int(ExitCode.OK)


def _nothing_of(run: Run, earlier: Calibration | None) -> str:
    """What a run without a calibration of its own takes, and what later runs are weighed by until then."""
    kept = f"; what {earlier.run_id} found is still what plans are weighed by" if earlier else ""
    more = f"go on with k3deploy calibrate --resume {run.id}, or measure again with more --pairs"
    return f"INCONCLUSIVE: {run.id} has too few pairs that count; a calibration takes three of them: {more}{kept}"


def show(found: Calibration) -> None:
    """What was found, cell by cell, and what it means for the next run."""
    from k3deploy.commands.options import console
    from k3deploy.commands.plan import table_of

    table = table_of("cell", "spread", "against itself", "95 % interval", "second in a pair", "pairs for +2 % ± 1 %")
    for cell in found.cells:
        table.add_row(
            f"{cell.cell} {cell.state} {cell.metric}",
            f"{cell.spread * 100:.2f} %",
            _percent(cell.ratio),
            f"{_percent(cell.low)} to {_percent(cell.high)}",
            f"{_percent(cell.order)} ({_percent(cell.order_low)} to {_percent(cell.order_high)})",
            _pairs(cell.spread),
        )
    out = console()
    out.print()
    out.print(f"calibration of {found.cluster}, build {found.build_key}, {found.pairs} pairs (run {found.run_id})")
    out.print(table)


def _pairs(spread: float) -> str:
    import math

    from k3deploy import stats
    from k3deploy.judge import DELTA

    needed = stats.pairs_for(math.log1p(DELTA) / 2, spread)
    return f"more than {stats.PAIRS_CAP}" if needed is None else str(needed)


def _percent(ratio: float) -> str:
    return f"{(ratio - 1) * 100:+.1f} %"
