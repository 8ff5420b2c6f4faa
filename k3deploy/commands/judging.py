"""From a run directory to a verdict and its reports: the step that apply and report share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3deploy.errors import ExitCode

if TYPE_CHECKING:
    from k3deploy.store import Run

EXIT_CODES = {
    "ACCEPT": ExitCode.OK,
    "REJECT": ExitCode.REJECT,
    "INCONCLUSIVE": ExitCode.INCONCLUSIVE,
    "INVALID": ExitCode.INVALID,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """A verdict as JSON data and as text, and where its report lies."""

    verdict: dict[str, Any]
    text: str
    html: Path
    exit_code: ExitCode


def conclude(run: Run) -> Outcome:
    """Assemble the facts, judge them, and write ``facts.json``, ``verdict.json`` and the reports."""
    from k3deploy import calibration, verification
    from k3deploy import facts as records
    from k3deploy.judge import judge
    from k3deploy.paths import write_json, write_text
    from k3deploy.plan.again import CALIBRATE
    from k3deploy.report import write_html
    from k3deploy.report.export import FORMATS
    from k3deploy.report.matrix import matrix_rows
    from k3deploy.report.text import render_markdown, render_matrix, render_text

    plan = run.plan()
    facts = records.assemble(run.path).model_copy(update={"verified": verification.find(run.path.parent, plan)})
    records.write_facts(run.path, facts)
    verdict = judge(plan, facts)
    mapping: dict[str, Any] = verdict.model_dump(mode="json")
    write_json(run.path / "verdict.json", mapping)
    html = write_html(run.path, plan, facts, verdict)
    write_text(run.path / "report.md", render_markdown(plan, facts, verdict, run.path))
    if plan["candidate"] == CALIBRATE and (found := calibration.calibration_of(plan, facts, verdict.arms[0])):
        calibration.write(run.path.parent, found)
    for name, render in FORMATS.values():
        write_text(run.path / name, render(plan, facts, verdict))
    text = render_text(verdict)
    if len(verdict.arms) > 1:
        text += "\n\n" + render_matrix(matrix_rows(plan, facts, verdict))
    return Outcome(mapping, text, html, EXIT_CODES[mapping["outcome"]])


def show(outcome: Outcome, run: Run, *, as_json: bool) -> None:
    """Print a verdict, and where everything of the run lies."""
    import click

    from k3deploy.commands.options import print_json

    if as_json:
        print_json({"run": run.id, "path": str(run.path), "verdict": outcome.verdict, "report": str(outcome.html)})
        return
    click.echo(outcome.text)
    click.echo(f"\nrecords  {run.path}\nreport   {outcome.html}")
