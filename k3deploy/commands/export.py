"""`k3deploy export`: a run in the forms that other programs read."""

from __future__ import annotations

from pathlib import Path

import click

from k3deploy.commands.options import CONTEXT, RunType, runs_option
from k3deploy.errors import ExitCode

EPILOG = """\b
Examples:
  k3deploy export                                            llama-bench's JSON of the newest run
  k3deploy export candidate-U9 --format csv > samples.csv    every request, one a line
  k3deploy export --format junit -o verdict.xml              gates and checks as test cases, for a CI server
  k3deploy export --format prometheus -o /var/lib/node_exporter/textfile/k3deploy.prom

csv, junit, llama-bench and prometheus also lie in the run directory after every apply and report."""


@click.command(epilog=EPILOG, context_settings=CONTEXT)
@click.argument("run", type=RunType(), default="latest")
@runs_option
@click.option(
    "--format",
    "form",
    type=click.Choice(["llama-bench", "csv", "junit", "prometheus"]),
    default="llama-bench",
    show_default=True,
    help="The form to write.",
)
@click.option("--output", "-o", type=click.Path(path_type=Path, dir_okay=False), help="A file instead of the screen.")
def export(run: str, runs: Path, form: str, output: Path | None) -> int:
    """Write what RUN (default: the newest) measured for another program."""
    from k3deploy import facts as records
    from k3deploy.judge import judge
    from k3deploy.paths import write_text
    from k3deploy.report.export import FORMATS
    from k3deploy.store import Store

    found = Store(runs).load(run)
    plan, facts = found.plan(), records.assemble(found.path)
    text = FORMATS[form][1](plan, facts, judge(plan, facts))
    if output is None:
        click.echo(text, nl=False)
    else:
        write_text(output, text, mode=0o644)  # whoever asked for a file wants another program to read it
    return int(ExitCode.OK)
