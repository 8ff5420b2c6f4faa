"""`k3deploy campaign`: many rows in one window, with shared baseline blocks, to a matrix of verdicts."""

from __future__ import annotations

from pathlib import Path

import click

from k3deploy.commands.apply import apply
from k3deploy.commands.options import (
    CONTEXT,
    CandidateType,
    DurationType,
    UsageProblem,
    anyway_option,
    delta_option,
    inventory_option,
    json_option,
    matrix_option,
    max_hours_option,
    runs_option,
    seed_option,
)

EPILOG = """\b
Examples:
  k3deploy campaign next U9 U10                        on the lab
  k3deploy campaign U2 U3 U7 -i inventory/gb10 --pairs 8 --yes
  k3deploy campaign next U9 --max-hours 12 --delta 3   what fits into a night, for gains of 3 %
  k3deploy apply --resume latest                       go on where a campaign was stopped

Every arm of every candidate is measured in the same rounds as the baseline, one at a time. The arms share the chance
of a false ACCEPT (Holm). A candidate that is impossible here, or has a baseline of its own, is left out and named. The
exit code is that of the best arm: 0 ACCEPT, 10 REJECT, 11 INCONCLUSIVE, 12 INVALID."""


@click.command(epilog=EPILOG, context_settings=CONTEXT)
@click.argument("candidates", type=CandidateType(), nargs=-1)
@inventory_option
@matrix_option
@runs_option
@click.option("--pairs", type=click.IntRange(1, 1000), help="Rounds of blocks (baseline and every arm) to measure.")
@click.option("--repeats", type=click.IntRange(1, 1000), help="Measurements of each cell in a block.  [default: 2]")
@max_hours_option
@delta_option
@seed_option
@anyway_option
@click.option("--yes", "-y", is_flag=True, help="Do not ask before production is drained.")
@click.option("--reason", default="", help="Why; kept with the run and shown to whoever meets the window.")
@click.option("--deadline", type=DurationType(), help="When the ranks end the window by themselves (4h, 90m).")
@json_option
@click.pass_context
def campaign(
    ctx: click.Context,
    candidates: tuple[str, ...],
    inventory: Path,
    matrix_dir: Path | None,
    runs: Path,
    pairs: int | None,
    repeats: int | None,
    max_hours: float | None,
    delta: float | None,
    seed: int | None,
    anyway: bool,
    yes: bool,
    reason: str,
    deadline: int | None,
    as_json: bool,
) -> int:
    """Measure CANDIDATES and one shared baseline in a single window; end with a matrix of verdicts."""
    from k3deploy.plan import campaign_name

    if not candidates:
        raise UsageProblem("which candidates?", remedy="k3deploy matrix lists them; k3deploy campaign next U9")
    names = list(dict.fromkeys(name.removeprefix("candidate-") for name in candidates))
    code: int = ctx.invoke(
        apply,
        candidate=campaign_name(names),
        inventory=inventory,
        matrix_dir=matrix_dir,
        runs=runs,
        pairs=pairs,
        repeats=repeats,
        max_hours=max_hours,
        delta=delta,
        seed=seed,
        anyway=anyway,
        yes=yes,
        reason=reason,
        deadline=deadline,
        as_json=as_json,
    )
    return code
