"""`k3deploy complete`: the shell's completion script."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from k3deploy.commands.options import CONTEXT

EPILOG = """\b
Examples:
  eval "$(k3deploy complete bash)"                          in ~/.bashrc
  eval "$(k3deploy complete zsh)"                           in ~/.zshrc
  k3deploy complete fish > ~/.config/fish/completions/k3deploy.fish

Candidates complete from the matrix: k3deploy apply candidate-U2<TAB>"""


@click.command(epilog=EPILOG, context_settings=CONTEXT)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def complete(ctx: click.Context, shell: str) -> None:
    """Print the completion script for SHELL."""
    completion = get_completion_class(shell)
    assert completion is not None  # the choices are click's own three
    click.echo(completion(ctx.find_root().command, {}, "k3deploy", "_K3DEPLOY_COMPLETE").source())
