"""`k3deploy history` and `k3deploy compare`: runs beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from k3deploy.commands.options import CONTEXT, RunType, console, json_option, print_json, runs_option, warn
from k3deploy.errors import ExitCode, K3Error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from k3deploy.facts import Facts
    from k3deploy.store import Run, Store

HISTORY_EPILOG = """\b
Examples:
  k3deploy history            every verdict by time, and how the baseline moved
  k3deploy history U9         the verdicts of one row alone
  k3deploy history --json

A shift is a change of the baseline's level that lasted three server starts or more: a slow power state, a new driver, a
worse link. Baselines are put beside each other only where command lines, environment, build, model and harness are the
same. Measures nothing and contacts no rank."""

COMPARE_EPILOG = """\b
Examples:
  k3deploy compare latest 20261130T142200
  k3deploy compare U2 U9 --json

Shows what the two runs differ in and the speed of every cell that both measured. It judges nothing: only arms measured
in adjacent blocks of one run can be judged."""


@click.command(epilog=HISTORY_EPILOG, context_settings=CONTEXT)
@click.argument("row", required=False)
@runs_option
@json_option
def history(row: str | None, runs: Path, as_json: bool) -> int:
    """Show the verdicts over time (of ROW, if given) and where the baseline's speed shifted."""
    from dataclasses import asdict

    from k3deploy import history as past
    from k3deploy.store import Store

    known = _readable(Store(runs))
    if not known:
        raise K3Error(f"no run in {runs} has measured anything yet", remedy="k3deploy apply candidate-U2 makes one")
    wanted = [entry for entry in known if row is None or row in _rows(entry[0].candidate)]
    if not wanted:
        rows = sorted({name for run, _, _ in known for name in _rows(run.candidate)})
        raise K3Error(f"no run of row {row}", remedy=f"there are runs of: {', '.join(rows)}")
    lines = past.series([(plan, facts) for _, plan, facts in known])
    found = [(line, past.shifts([point.value for point in line.points])) for line in lines]
    verdicts = [_verdict(run) for run, _, _ in wanted]
    if as_json:
        baselines = [{**asdict(line), "shifts": [asdict(shift) for shift in moved]} for line, moved in found]
        print_json({"verdicts": verdicts, "baselines": baselines})
        return int(ExitCode.OK)
    table = _table("run", "candidate", "cluster", "verdict", "reason")
    for verdict in verdicts:
        table.add_row(*(str(verdict[key] or "-") for key in ("run", "candidate", "cluster", "verdict", "reason")))
    console().print(table)
    table = _table("baseline", "cell", "starts", "last t/s", "spread", "shifts")
    for line, moved in found:
        table.add_row(*_baseline_row(line, moved))
    console().print(table)
    return int(ExitCode.OK)


def _baseline_row(line: Any, moved: Sequence[Any]) -> list[str]:
    import math

    from k3deploy.history import noise

    values = [point.value for point in line.points]
    words = [f"{(shift.ratio - 1) * 100:+.1f} % from {line.points[shift.at].when}" for shift in moved]
    spread = f"{noise(values) * 100:.1f} %" if len(values) > 1 else "-"
    shown = [line.identity, f"{line.cell} {line.state}", str(len(values)), f"{math.exp(values[-1]):.1f}", spread]
    return [*shown, "; ".join(words) or ("none" if len(values) >= 6 else "too few starts")]


@click.command(epilog=COMPARE_EPILOG, context_settings=CONTEXT)
@click.argument("one", type=RunType())
@click.argument("other", type=RunType())
@runs_option
@json_option
def compare(one: str, other: str, runs: Path, as_json: bool) -> int:
    """Put two runs beside each other: what differs between them, and the speed of each cell."""
    from k3deploy import facts as records
    from k3deploy import history as past
    from k3deploy.store import Store

    both = [Store(runs).load(reference) for reference in (one, other)]
    speeds = [past.levels(records.assemble(run.path)) for run in both]
    before, after = ({**past.comparable(run.plan()), "tool": run.tool} for run in both)
    differing = past.differences(before, after)
    cells: list[dict[str, Any]] = [
        {"arm": arm, "cell": cell, "state": state, "one": mine[0], "other": theirs[0], "starts": [mine[1], theirs[1]]}
        for (arm, cell, state), mine in speeds[0].items()
        if (theirs := speeds[1].get((arm, cell, state)))
    ]
    if as_json:
        places = [{"place": place, "one": mine, "other": theirs} for place, mine, theirs in differing]
        print_json({"runs": [run.id for run in both], "differences": places, "cells": cells})
        return int(ExitCode.OK)
    table = _table("differs", both[0].id, both[1].id)
    for difference in differing:
        table.add_row(*difference)
    console().print(table if differing else "the two runs were made alike: same arms, builds, model and tool")
    table = _table("arm", "cell", "t/s", "t/s", "change", "server starts")
    for entry in cells:
        change = f"{(entry['other'] / entry['one'] - 1) * 100:+.1f} %"
        speeds_shown = (f"{entry['one']:.1f}", f"{entry['other']:.1f}", change)
        table.add_row(
            entry["arm"], f"{entry['cell']} {entry['state']}", *speeds_shown, "{} and {}".format(*entry["starts"])
        )
    empty = [run.id for run in both if not run.blocks]
    why_none = f"nothing was measured in {' and '.join(empty)}" if empty else "no arm measured the same cell in both"
    console().print(table if cells else why_none)
    return int(ExitCode.OK)


def _readable(store: Store) -> list[tuple[Run, dict[str, Any], Facts]]:
    """Runs that measured something, oldest first; one that cannot be read is said and left out."""
    from k3deploy import facts as records
    from k3deploy.errors import InputError

    found = []
    for run in reversed(store.runs()):
        try:
            if run.blocks:
                found.append((run, run.plan(), records.assemble(run.path)))
        except (InputError, OSError, KeyError) as error:
            warn(f"left out {run.id}: {error}")
    return found


def _rows(candidate: str) -> list[str]:
    """The rows in a name: candidate-U2@3072+U6 has U2 and U6, campaign-next,U9 has next and U9."""
    from k3deploy.plan import campaign_candidates

    names = campaign_candidates(candidate) or [candidate]
    parts = [part for name in names for part in name.removeprefix("candidate-").split("+")]
    return list(dict.fromkeys(part.partition("@")[0] for part in parts))


def _verdict(run: Run) -> dict[str, Any]:
    verdict = run.verdict() or {}
    about = {"run": run.id, "candidate": run.candidate, "cluster": run.cluster}
    return {**about, "verdict": verdict.get("outcome"), "reason": verdict.get("reason")}


def _table(*headings: str) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
