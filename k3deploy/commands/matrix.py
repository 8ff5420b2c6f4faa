"""`k3deploy matrix`: what there is to try."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from k3deploy.commands.options import (
    CONTEXT,
    console,
    inventory_option,
    json_option,
    load_matrix,
    matrix_option,
    print_json,
)

if TYPE_CHECKING:
    from k3deploy.matrix import Matrix, Row

EPILOG = """\b
Examples:
  k3deploy matrix                    every row in a line
  k3deploy matrix show U9            one row: hypothesis, guard, gates, what is known
  k3deploy matrix --json | jq '.[].candidates'
  k3deploy matrix --matrix my/rows   rows of your own"""


@click.group(invoke_without_command=True, epilog=EPILOG, context_settings=CONTEXT)
@inventory_option
@matrix_option
@json_option
@click.pass_context
def matrix(ctx: click.Context, inventory: Path, matrix_dir: Path | None, as_json: bool) -> None:
    """List the rows that can be tried."""
    loaded = load_matrix(inventory, matrix_dir)
    if ctx.invoked_subcommand is not None:
        ctx.obj = loaded
        return
    if as_json:
        print_json([_as_dict(loaded, row) for row in loaded.rows.values()])
        return
    _table(loaded)


@matrix.command(epilog="Example: k3deploy matrix show U9", context_settings=CONTEXT)
@click.argument("row")
@json_option
@click.pass_obj
def show(loaded: Matrix, row: str, as_json: bool) -> None:
    """Show one ROW: what it changes, its gates and what is known about it."""
    # Also takes a candidate's name, and refuses an unknown row with the nearest one.
    found = loaded.resolve(f"candidate-{row.removeprefix('candidate-')}").rows[0]
    if as_json:
        print_json(_as_dict(loaded, found))
        return
    click.echo(loaded.explain(found.id))


def _as_dict(loaded: Matrix, row: Row) -> dict[str, Any]:
    values = [value for value, _ in row.points() if value]
    return {
        "candidates": [f"candidate-{row.id}", *(f"candidate-{row.id}@{value}" for value in values)],
        "arms": {arm.name: arm.settings for arm in loaded.resolve(f"candidate-{row.id}").arms},
        **row.model_dump(mode="json", by_alias=True, exclude_defaults=True),
    }


def _table(loaded: Matrix) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("candidate", "kind", "title", "values", "mixes with"):
        table.add_column(heading)
    for row in loaded.rows.values():
        values = ", ".join(value for value, _ in row.points() if value)
        mixes = "stands alone" if row.alone else ", ".join(row.mixes_with)
        table.add_row(*(Text(cell) for cell in (f"candidate-{row.id}", row.kind, row.title, values, mixes)))
    console().print(table)
