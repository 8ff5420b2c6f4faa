"""`k3deploy facts`: what a run measured."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import click

from k3deploy.commands.options import CONTEXT, RunType, console, json_option, print_json, runs_option
from k3deploy.errors import ExitCode

if TYPE_CHECKING:
    from k3deploy.facts import Cell, Facts

EPILOG = """\b
Examples:
  k3deploy facts                         the newest run
  k3deploy facts candidate-U2            the run whose id holds these words
  k3deploy facts --json > facts.json
  k3deploy facts --validate facts.json   exit code 3 and every problem with its line, if it is wrong"""


@click.command(epilog=EPILOG, context_settings=CONTEXT)
@click.argument("run", type=RunType(), default="latest")
@runs_option
@click.option(
    "--validate", "file", type=click.Path(path_type=Path), help="Check a facts file instead of printing a run."
)
@json_option
def facts(run: str, runs: Path, file: Path | None, as_json: bool) -> int:
    """Print the facts of RUN (default: the newest): every cell of every block, memory, and what the logs say."""
    from k3deploy.facts import assemble, load_facts
    from k3deploy.store import Store

    found = load_facts(file) if file is not None else assemble(Store(runs).load(run).path)
    if as_json:
        print_json(found.model_dump(mode="json"))
    elif file is not None:
        click.echo(f"{file}: valid, {len(found.blocks)} block(s) of {found.candidate}")
    else:
        _print(found)
    return int(ExitCode.OK)


def _print(found: Facts) -> None:
    from rich.table import Table
    from rich.text import Text

    out = console()
    out.print(Text(f"{found.run_id}: {len(found.blocks)} block(s)", "bold"))
    for block in found.blocks:
        minima = [
            f"{rank} {record.memory.min_available_mib} MiB"
            for rank, record in sorted(block.ranks.items())
            if record.memory is not None and record.memory.min_available_mib is not None
        ]
        out.print(Text(f"\nblock {block.index + 1}  {block.arm}  (pair {block.pair + 1})", "bold"))
        out.print(Text(f"  least memory available: {', '.join(minima) or 'not recorded'}"))
        table = Table(box=None, header_style="bold cyan", pad_edge=False, padding=(0, 2))
        for heading in ("cell", "state", "tokens/s", "first token ms", "samples", "not counted"):
            table.add_column(heading, justify="left" if heading in ("cell", "state", "not counted") else "right")
        for cell in block.bench.cells if block.bench is not None else []:
            refused = "; ".join(dict.fromkeys(sample.why for sample in cell.samples if not sample.valid))
            valid = cell.valid()
            first = [sample.ttft_ms for sample in valid if sample.ttft_ms is not None]
            cells = (cell.cell, cell.state, _rate(cell), _number(first), f"{len(valid)}/{len(cell.samples)}", refused)
            table.add_row(*(Text(text) for text in cells))
        out.print(table)
        if block.bench is not None and block.bench.error:
            out.print(Text(f"  error: {block.bench.error}", "red"))


def _rate(cell: Cell) -> str:
    rates = [sample.decode_per_second if cell.decodes else sample.prefill_per_second for sample in cell.valid()]
    return _number([rate for rate in rates if rate is not None])


def _number(values: list[float]) -> str:
    return f"{median(values):.1f}" if values else "-"
