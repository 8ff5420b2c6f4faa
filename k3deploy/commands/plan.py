"""`k3deploy plan`: what apply would run, rank by rank."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from k3deploy.commands import planning, power
from k3deploy.commands.options import (
    CONTEXT,
    CandidateType,
    console,
    delta_option,
    inventory_option,
    json_option,
    matrix_option,
    print_json,
    runs_option,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

EPILOG = """\b
Examples:
  k3deploy plan candidate-U2
  k3deploy plan candidate-U9 -i inventory/gb10         the seed cluster's memory, rank by rank
  k3deploy plan candidate-U2+U6 --pairs 6
  k3deploy plan candidate-next --json | jq '.arms[1].differences'

Contacts no rank and changes nothing."""


@click.command(epilog=EPILOG, context_settings=CONTEXT)
@click.argument("candidate", type=CandidateType())
@inventory_option
@matrix_option
@click.option("--pairs", type=click.IntRange(1, 1000), help="Pairs of blocks (baseline and candidate) to measure.")
@click.option("--cells", help="Workload points, with commas: pp2048,pp4096,tg100.  [default: all]")
@click.option("--repeats", type=click.IntRange(1, 1000), help="Measurements of each cell in a block.  [default: 2]")
@delta_option
@runs_option
@json_option
def plan(
    candidate: str,
    inventory: Path,
    matrix_dir: Path | None,
    pairs: int | None,
    cells: str | None,
    repeats: int | None,
    delta: float | None,
    runs: Path,
    as_json: bool,
) -> None:
    """Resolve CANDIDATE: processes, differences from the baseline, memory, gates and blocks."""
    planned = planning.make(candidate, inventory, matrix_dir, pairs, planning.split_cells(cells), repeats, delta)
    if as_json:
        print_json(planned.mapping)
        return
    show(console(), planned.mapping, power.words(planned, *power.known(planned, runs)))


def show(out: Console, plan: Mapping[str, Any], promise: str = "") -> None:
    """Print a plan (as JSON data) for people. promise: what its pairs can show, in words."""
    out.print(_text(f"{plan['candidate']} on {plan['cluster']} ({', '.join(plan['ranks'])})", "bold"))
    for row in plan["rows"]:
        out.print(_text(f"  {row['id']}  {row['title']} ({row['kind']})"))
        out.print(_text(f"      {row['hypothesis']}", "dim"))
    _differences(out, plan)
    _processes(out, plan)
    _forecast(out, plan)
    _gates(out, plan)
    _blocks(out, plan, promise)
    _remarks(out, plan)


def _differences(out: Console, plan: Mapping[str, Any]) -> None:
    table = table_of("difference from the baseline", "baseline", *(arm["name"] for arm in plan["arms"][1:]))
    keys: dict[str, str] = {}
    for arm in plan["arms"][1:]:
        keys.update({entry["key"]: entry["baseline"] for entry in arm["differences"]})
    for key, baseline in keys.items():
        found = [{entry["key"]: entry["arm"] for entry in arm["differences"]} for arm in plan["arms"][1:]]
        _row(table, key, baseline, *(entries.get(key, "=") for entries in found))
    if keys:
        _section(out, table)


def _processes(out: Console, plan: Mapping[str, Any]) -> None:
    """The baseline's processes in full, the other arms' where they differ."""
    baseline = plan["arms"][0]["processes"]
    for arm in plan["arms"]:
        table = table_of(arm["name"], f"release {arm['build']} ({arm['build_key']})")
        for rank, processes in arm["processes"].items():
            for kind in ("worker", "head"):
                process = processes.get(kind)
                if process is None or (arm is not plan["arms"][0] and process == baseline[rank].get(kind)):
                    continue
                _row(table, f"{rank} {kind}", _command(process))
        if table.row_count:
            _section(out, table)


def _command(process: Mapping[str, Any]) -> str:
    environment = [f"{name}={shlex.quote(value)}" for name, value in process["environment"].items()]
    extras = [f"cpus {process['cpu_affinity']}"] if process.get("cpu_affinity") else []
    if process.get("memlock_bytes"):
        extras.append(f"memlock {process['memlock_bytes'] >> 20} MiB")
    suffix = f"   [{', '.join(extras)}]" if extras else ""
    return " ".join([*environment, shlex.join(process["argv"])]) + suffix


def _forecast(out: Console, plan: Mapping[str, Any]) -> None:
    columns = list(dict.fromkeys(key for arm in plan["arms"] for entry in arm["forecast"] for key in entry))
    if not columns:
        return
    table = table_of("memory forecast", *(column.replace("_", " ") for column in columns))
    for arm in plan["arms"]:
        for entry in arm["forecast"]:
            _row(table, arm["name"], *(_cell(entry.get(column)) for column in columns))
    _section(out, table)


def _gates(out: Console, plan: Mapping[str, Any]) -> None:
    table = table_of("gate", "looks at", "requires")
    for name, gate in plan["gates"].items():
        subject = ", ".join(gate["cells"]) + f" {gate['state']} ({gate['metric']})" if gate["cells"] else ""
        limit = "" if gate["limit"] is None else f" {gate['limit']}"
        _row(
            table, name, subject or gate["suite"] or gate["observation"], f"{gate['require']}{limit}".replace("_", " ")
        )
    for name, limit in plan["guards"].items():
        if limit is not None:
            _row(table, f"guard {name}", "every rank, all the time" if name.startswith("rank") else "", str(limit))
    _section(out, table)


def _blocks(out: Console, plan: Mapping[str, Any], promise: str) -> None:
    bench = plan["bench"]
    order = "  ".join(f"{block['index'] + 1} {block['arm']}" for block in plan["blocks"])
    cells = ", ".join(f"{cell['cell']} {cell['state']}" for cell in bench["cells"])
    table = table_of("measurement", "")
    _row(table, f"{len(plan['blocks'])} blocks", order)
    _row(table, "cells of each", f"{cells}; {bench['repeats']} times")
    _rule(table, plan, promise)
    if bench["probes"]:
        _row(table, "probes", ", ".join(bench["probes"]))
    _section(out, table)


def _rule(table: Table, plan: Mapping[str, Any], promise: str) -> None:
    from k3deploy import stats

    rule = plan["rule"]
    alpha = stats.ALPHA / (len(plan["arms"]) - 1)
    spent = [f"{n} pairs (at most {stats.spent(n / rule['looks'][-1], alpha):.2%} spent)" for n in rule["looks"]]
    least = stats.least_pairs(len(plan["arms"]) - 1)
    when = f"after {', '.join(spent)}" if rule["looks"][-1] >= least else f"with {least} pairs or more only"
    _row(table, "ACCEPT", f"the whole interval above +{rule['delta'] * 100:.3g} %: {when}")
    if promise:
        _row(table, "promise", promise)


def _remarks(out: Console, plan: Mapping[str, Any]) -> None:
    notes = [("", note) for note in plan["notes"]]
    notes += [(arm["name"], note) for arm in plan["arms"] for note in arm["notes"]]
    notes += [
        (known["row"], ("against the hypothesis: " if known["contradicts"] else "") + known["text"])
        for known in plan["findings"]
    ]
    if notes:
        table = table_of("note", "")
        for subject, note in notes:
            _row(table, subject or "all", note)
        _section(out, table)


def table_of(*headings: str) -> Table:
    """An empty table in the style of every listing."""
    from rich.table import Table

    table = Table(box=None, header_style="bold cyan", pad_edge=False, padding=(0, 2, 0, 0))
    for number, heading in enumerate(headings):
        table.add_column(heading, no_wrap=number == 0, overflow="fold")
    return table


def _row(table: Table, *cells: str) -> None:
    table.add_row(*(_text(cell) for cell in cells))


def _section(out: Console, table: Table) -> None:
    out.print()
    out.print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_cell(item)}" for key, item in value.items())
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", ".join(_cell(item) for item in value)
    return str(value)


def _text(text: str, style: str = "") -> Any:
    from rich.text import Text

    return Text(text, style)
