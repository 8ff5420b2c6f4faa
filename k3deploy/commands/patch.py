"""`k3deploy patch`: the changes to the upstream source that rows need."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from k3deploy.commands.options import CONTEXT, console, json_option, print_json
from k3deploy.errors import ExitCode, K3Error

if TYPE_CHECKING:
    from k3deploy.patches import PatchSet

EPILOG = """\b
Examples:
  k3deploy patch list                          what there is, and for which row
  k3deploy patch check ~/llama.cpp             does each set still fit that tree? (also: a newer upstream)
  k3deploy patch apply ~/llama.cpp u8-rpc-timing
A build applies the sets of its `patch_sets` by itself, to a copy of the source."""

TREE = click.argument("tree", type=click.Path(path_type=Path, exists=True, file_okay=False))
WORDS = {
    "ready": "fits",
    "applied": "already in",
    "moved": "another version; every hunk still applies",
    "refused": "does not apply",
}


@click.group(epilog=EPILOG, context_settings=CONTEXT)
def patch() -> None:
    """List, check and apply patch sets."""


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    del ctx, param
    from k3deploy import patches

    try:
        return [CompletionItem(name) for name in patches.list_names() if name.startswith(incomplete)]
    except K3Error:
        return []


@patch.command("list", context_settings=CONTEXT)
@json_option
def list_(as_json: bool) -> None:
    """List the patch sets."""
    from rich.table import Table
    from rich.text import Text

    from k3deploy import patches

    found = patches.available().values()
    if as_json:
        print_json([one.manifest.model_dump(mode="json") | {"sha256": one.sha256} for one in found])
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("patch set", "row", "for", "builds", "options", "what"):
        table.add_column(heading)
    for one in found:
        manifest = one.manifest
        upstream = f"{manifest.upstream.project} {manifest.upstream.build}"
        options = ", ".join(option.name for option in manifest.options)
        cells = (one.name, manifest.row or "", upstream, manifest.backend, options, manifest.what)
        table.add_row(*(Text(cell) for cell in cells))
    console().print(table)


@patch.command(context_settings=CONTEXT, epilog="Exit code 3 when a set does not fit; the tree is not changed.")
@TREE
@click.argument("sets", nargs=-1, shell_complete=_complete)
@json_option
def check(tree: Path, sets: tuple[str, ...], as_json: bool) -> int:
    """Say for each of SETS (all, when none is named) whether it fits TREE, file by file and hunk by hunk."""
    from k3deploy import patches

    # Each by itself: two sets that change one file are both of interest on a newer upstream.
    chosen = [patches.select([name])[0] for name in sets] if sets else list(patches.available().values())
    found = {one.name: patches.check(one, tree) for one in chosen}
    fits = {name: all(entry.state in ("ready", "applied") for entry in states) for name, states in found.items()}
    if as_json:
        print_json(
            [
                {"name": name, "fits": fits[name], "files": [entry.model_dump() for entry in states]}
                for name, states in found.items()
            ]
        )
    else:
        for name, states in found.items():
            click.echo(f"{name}: {'fits' if fits[name] else 'does not fit'}")
            for entry in states:
                click.echo(f"  {entry.path}: {WORDS[entry.state]}")
                for detail in entry.details:
                    click.echo(f"    {detail}")
    return int(ExitCode.OK if all(fits.values()) else ExitCode.BAD_INPUT)


@patch.command(context_settings=CONTEXT)
@TREE
@click.argument("sets", nargs=-1, required=True, shell_complete=_complete)
@json_option
def apply(tree: Path, sets: tuple[str, ...], as_json: bool) -> None:
    """Apply SETS to TREE in the order given; a set is applied wholly or not at all."""
    from k3deploy import patches

    chosen: list[PatchSet] = patches.select(sets)
    patches.apply(chosen, tree)
    if as_json:
        print_json([{"name": one.name, "files": [item.path for item in one.manifest.files]} for one in chosen])
        return
    for one in chosen:
        click.echo(f"{one.name}: {', '.join(item.path for item in one.manifest.files)}")
