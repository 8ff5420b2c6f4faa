"""`k3deploy apply`: from a candidate's name to a verdict, with production back at the end whatever happens."""

from __future__ import annotations

import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from k3deploy.commands import consent, judging, planning, power
from k3deploy.commands.options import (
    CONTEXT,
    CandidateType,
    DurationType,
    RunType,
    UsageProblem,
    anyway_option,
    delta_option,
    inventory_option,
    json_option,
    live_display,
    matrix_option,
    max_hours_option,
    runs_option,
    seed_option,
    warn,
)
from k3deploy.commands.rollback import Restoration, restore
from k3deploy.commands.stop import Stop
from k3deploy.commands.window import locked as locked_words
from k3deploy.errors import ExitCode, InterruptedRun, K3Error, LockedError, PreflightError

if TYPE_CHECKING:
    from k3deploy.commands.cost import Cost
    from k3deploy.commands.planning import Planned
    from k3deploy.progress import Progress
    from k3deploy.runner import RunResult
    from k3deploy.store import Run

# What happens in these phases touches nothing of production: when one of them fails there is nothing to bring back.
_HARMLESS = frozenset(("preflight", "build", "install"))
# Tasks that a playbook ends with, whatever failed before.
_CLOSING = ("Close | ", "Guard | disarm")

EPILOG = """\b
Examples:
  k3deploy apply candidate-U2                          on the lab
  k3deploy apply candidate-U2@3072                     one value of a sweep
  k3deploy apply candidate-U2+U6 -i inventory/gb10     rows together, on the real cluster
  k3deploy apply candidate-U9 --check                  what would change on the ranks; changes nothing
  k3deploy apply --resume latest                       go on where a run was stopped
  k3deploy apply candidate-U2 -i inventory/gb10 --yes --reason "ticket 4711" --pairs 8

Ctrl-C once stops the work and brings production back. The exit code is the verdict: 0 ACCEPT, 10 REJECT,
11 INCONCLUSIVE, 12 INVALID; 20 means that production is not back. All codes: k3deploy --help."""


@click.command(epilog=EPILOG, context_settings=CONTEXT)
@click.argument("candidate", type=CandidateType(), required=False)
@inventory_option
@matrix_option
@runs_option
@click.option("--pairs", type=click.IntRange(1, 1000), help="Pairs of blocks (baseline and candidate) to measure.")
@click.option("--cells", help="Workload points, with commas: pp2048,pp4096,tg100.  [default: all]")
@click.option("--repeats", type=click.IntRange(1, 1000), help="Measurements of each cell in a block.  [default: 2]")
@max_hours_option
@delta_option
@seed_option
@anyway_option
@click.option("--resume", type=RunType(), help="Go on with this run (an id, or latest); measured blocks are kept.")
@click.option("--check", is_flag=True, help="Say what would change on every rank; change nothing.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask before production is drained.")
@click.option("--reason", default="", help="Why; kept with the run and shown to whoever meets the window.")
@click.option(
    "--deadline",
    type=DurationType(),
    help="When the ranks end the window by themselves, from its opening (4h, 90m).  [default: by the plan]",
)
@json_option
@click.pass_context
def apply(
    ctx: click.Context,
    candidate: str | None,
    inventory: Path,
    matrix_dir: Path | None,
    runs: Path,
    pairs: int | None,
    cells: str | None,
    repeats: int | None,
    max_hours: float | None,
    delta: float | None,
    seed: int | None,
    anyway: bool,
    resume: str | None,
    check: bool,
    yes: bool,
    reason: str,
    deadline: int | None,
    as_json: bool,
) -> int:
    """Build CANDIDATE, drain production, measure candidate and baseline in pairs, judge, and put production back."""
    if resume is None and candidate is None:
        raise UsageProblem("which candidate?", remedy="k3deploy matrix lists them; k3deploy apply candidate-U2")
    options: dict[str, Any] = {"pairs": pairs, "cells": cells, "repeats": repeats, "delta": delta, "seed": seed}
    request = Request(ctx, candidate, inventory, matrix_dir, runs, options, max_hours, resume, reason, deadline)
    return launch(request, check=check, yes=yes, anyway=anyway, as_json=as_json)


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for: a candidate or a run to resume, with the options that a later resume takes over."""

    ctx: click.Context
    candidate: str | None
    inventory: Path
    matrix_dir: Path | None
    runs: Path
    options: dict[str, Any]
    max_hours: float | None = None
    resume: str | None = None
    reason: str = ""
    deadline: int | None = None


def launch(
    request: Request, *, check: bool = False, yes: bool = False, anyway: bool = False, as_json: bool = False
) -> int:
    """Plan, ask, run and judge; the exit code."""
    from k3deploy.plan import render_run_layer
    from k3deploy.store import Store, lock

    store = Store(request.runs)
    candidate, inventory, options = str(request.candidate), request.inventory, dict(request.options)
    run: Run | None = None
    if request.resume is not None:
        run = store.load(request.resume)
        candidate, inventory, options = _as_before(request.ctx, run, request.candidate, inventory, options)
    elif options["seed"] is None:
        options["seed"] = secrets.randbelow(1 << 31)  # the order of the blocks; kept with the run
    planned, cost = _plan(request, candidate, inventory, options, run, anyway=anyway)
    layer = render_run_layer(planned.plan)
    layer["all"]["vars"]["k3_run_advisor"] = power.advisor(request.max_hours, cost)
    if check:
        return _check(planned, candidate, layer)
    with lock(planned.cluster.name, f"apply {candidate}") as open_for:
        deadline = request.deadline or consent.window_length(planned, run)
        consent.confirm(planned, store, run, yes, deadline)
        tool = planning.tool_identity()
        if run is not None:
            store.resume(run, planned.mapping, layer, tool, deadline)
        else:
            run = store.create(
                candidate,
                planned.mapping,
                layer,
                cluster=planned.cluster.name,
                inventory=inventory,
                tool=tool,
                options=options,
                reason=request.reason,
                deadline_s=deadline,
            )
        return carry_out(run, inventory, planned.mapping, as_json=as_json, open_for=open_for)


def _plan(
    request: Request, candidate: str, inventory: Path, options: dict[str, Any], run: Run | None, *, anyway: bool
) -> tuple[Planned, Cost | None]:
    """The plan, weighed by what is known of the cluster's spread; a resumed run keeps what its own plan said."""

    def make(pairs: int | None) -> Planned:
        cells = planning.split_cells(options["cells"])
        return planning.make(
            candidate,
            inventory,
            request.matrix_dir,
            pairs,
            cells,
            options["repeats"],
            delta=options["delta"],
            seed=options["seed"],
        )

    planned = make(options["pairs"])
    found, cost = power.known(planned, request.runs)
    if run is not None:
        return power.with_rule(planned, {"no_accept": run.plan().get("rule", {}).get("no_accept", "")}), cost
    if options["pairs"] is None and request.max_hours is not None:
        options["pairs"] = power.pairs_in(request.max_hours, len(planned.mapping["arms"]), cost)
        planned = make(options["pairs"])
        found, cost = power.known(planned, request.runs)
    warn(power.words(planned, found, cost), "cyan")
    return power.weigh(planned, found, cost, anyway=anyway), cost


def _as_before(
    ctx: click.Context, run: Run, candidate: str | None, inventory: Path, options: Mapping[str, Any]
) -> tuple[str, Path, dict[str, Any]]:
    """A resumed run's own candidate, inventory and options, where the command line does not name others."""
    if candidate is not None and candidate != run.candidate:
        raise UsageProblem(f"{run.id} is of {run.candidate}, not of {candidate}", remedy="leave the candidate out")
    if ctx.get_parameter_source("inventory") is ParameterSource.DEFAULT:
        inventory = Path(run.inventory)
    return run.candidate, inventory, {key: value or run.options.get(key) for key, value in options.items()}


def carry_out(
    run: Run,
    inventory: Path,
    plan: Mapping[str, Any],
    *,
    as_json: bool = False,
    open_for: Callable[[float], object] = lambda _seconds: None,
) -> int:
    """Run the playbook, bring production back if that did not end well, judge what was measured; the exit code.

    open_for: is told for how many seconds the window is open, once it is.
    """
    from k3deploy.progress import Progress
    from k3deploy.runner import run_playbook

    def on_signal(count: int) -> None:
        progress.note(_signal_words(count, bringing_back, run, inventory))

    def on_event(event: dict[str, Any]) -> None:
        result = (event.get("event_data") or {}).get("res")
        if isinstance(result, Mapping) and isinstance(result.get("deadline_left_s"), int | float):
            open_for(result["deadline_left_s"])
        if isinstance(result, Mapping) and isinstance(result.get("production"), Mapping):
            kept = result["production"].get("note") if result.get("close") is False else None
            if kept:
                progress.note(str(kept))
            if result.get("done") and result["production"].get("answers"):
                proof.update(result["production"])
        progress.event(event)

    bringing_back = False
    earlier = set(run.void)
    proof: dict[str, Any] = {}
    mine = {"k3_run_id": run.id, "k3_run_owner": run.owner}
    progress = Progress(sys.stderr, run.events, live=live_display(), blocks=[block["arm"] for block in plan["blocks"]])
    warn(f"run {run.id}", "cyan")
    with Stop(on_signal) as stop, progress:
        started = time.monotonic()
        result = run_playbook("apply", [inventory, run.layer], {}, on_event, stop.requested, run.path / "logs")
        _account(progress, "apply", result, time.monotonic() - started)
        if not result.ok:
            progress.finish("stopped" if result.status == "canceled" else "failed")
        locked = locked_words(result)
        if _closed(result, proof):
            progress.note(Restoration(result, proof).words)
        elif not result.ok and not locked and any(phase.name not in _HARMLESS for phase in progress.phases):
            bringing_back = True
            stop.restart(patience=2)
            progress.note("bringing production back")
            restoration = restore(inventory, progress.event, stop.requested, run.path / "logs", mine)
            _account(progress, "rollback", restoration.result, time.monotonic() - started)
            if not restoration.ok:
                raise restoration.error(inventory)
            progress.note(restoration.words)
        outcome = None
        if run.blocks or run.void:
            progress.phase("judge", "gates on what was measured")
            outcome = judging.conclude(run)
    for error in result.handler_errors[:3]:
        warn(f"the progress display failed: {error}")
    if outcome is not None:
        judging.show(outcome, run, as_json=as_json)
    if locked:
        raise LockedError(locked, remedy=f"k3deploy window status -i {inventory} shows how it stands")
    if not result.ok:
        failure = _failure(result, progress, run)
        if outcome is None or not _stands(outcome.exit_code, result, set(run.void) - earlier):
            raise failure
        warn(f"the run ended early: {failure}")
    if outcome is None:
        raise K3Error("the playbook ended well but recorded no block", remedy=f"see {result.log}")
    return int(outcome.exit_code)


def _closed(result: RunResult, proof: Mapping[str, Any]) -> bool:
    """Whether a playbook that failed brought production back by itself, on every rank and with proof."""
    if result.status != "failed" or not proof or result.unreachable:
        return False
    return not any(failure.task.startswith(_CLOSING) for failure in result.failures)


def _stands(verdict: ExitCode, result: RunResult, void: Collection[Path]) -> bool:
    """Whether a verdict is the exit code of a run that ended early. void: the records of what broke in it.

    What the guards stopped, or what was measured before, rejects the candidate whatever else broke. And a measurement
    does not count, rather than that something is broken, where a block's transport was not proven.
    """
    if result.status == "canceled" or verdict not in (ExitCode.REJECT, ExitCode.INVALID):
        return False
    return verdict == ExitCode.REJECT or _unproven(result, void)


def _unproven(result: RunResult, void: Collection[Path]) -> bool:
    """Whether a run ended for its transport and for nothing else: all ranks were there, and the window was closed."""
    from k3deploy.facts import VoidBlock, read_model

    if not void or result.unreachable or any(failure.task.startswith(_CLOSING) for failure in result.failures):
        return False
    proofs = [read_model(VoidBlock, path).transport for path in void]
    return all(proof is not None and proof.problems for proof in proofs)


def _failure(result: RunResult, progress: Progress, run: Run) -> K3Error:
    """What went wrong, as the error whose exit code says it."""
    kept = f"{len(run.blocks)} measured block(s) are kept; go on with: k3deploy apply --resume {run.id}"
    if result.status == "canceled":
        return InterruptedRun("stopped as asked", remedy=kept)
    found = [*result.unreachable, *result.failures]
    lines = "\n".join(f"  {line}" for failure in found for line in str(failure).splitlines())
    phase = next((phase.name for phase in progress.phases if phase.state == "failed"), "apply")
    if phase == "preflight":
        return PreflightError(
            f"preflight: not fit, nothing was changed\n{lines}", remedy=f"Ansible's words: {result.log}"
        )
    return K3Error(f"{phase} failed\n{lines}", remedy=f"Ansible's words: {result.log}\n  {kept}")


def _account(progress: Progress, playbook: str, result: RunResult, elapsed: float) -> None:
    progress.record(
        event="playbook_end",
        playbook=playbook,
        status=result.status,
        rc=result.rc,
        tasks=result.task_count,
        round_trips=result.round_trips,
        elapsed_s=round(elapsed, 3),
    )


def _signal_words(count: int, bringing_back: bool, run: Run, inventory: Path) -> str:
    by_hand = f"k3deploy rollback -i {inventory}"
    if not bringing_back:
        if count == 1:
            return "stopping: the work ends, then production is brought back"
        return f"still stopping run {run.id}; production comes back next. By hand, if need be: {by_hand}"
    return f"production is being brought back; once more leaves that undone, to be finished by: {by_hand}"


def _check(planned: Planned, candidate: str, layer: Mapping[str, Any]) -> int:
    """``apply.yml --check --diff`` with a run layer that is thrown away."""
    from k3deploy.progress import Progress
    from k3deploy.runner import run_playbook
    from k3deploy.store import Store

    with tempfile.TemporaryDirectory(prefix="k3deploy-check-") as place:
        run = Store(Path(place)).create(
            candidate,
            planned.mapping,
            layer,
            cluster=planned.cluster.name,
            inventory=planned.inventory,
            tool={},
            options={},
            reason="check",
        )
        asked: list[int] = []
        with Stop(asked.append) as stop, Progress(sys.stderr, live=live_display()) as progress:
            result = run_playbook(
                "apply",
                [planned.inventory, run.layer],
                {},
                progress.event,
                stop.requested,
                run.path,
                check=True,
                diff=True,
            )
        if result.log is not None:
            click.echo(result.log.read_text(encoding="utf-8"))
    if result.status == "canceled":
        raise InterruptedRun("stopped as asked; a check changes nothing")
    if not result.ok:
        found = [*result.unreachable, *result.failures]
        raise PreflightError(
            "\n".join(["the check failed; nothing was changed", *(f"  {failure}" for failure in found)])
        )
    changed = {host: count for host, count in result.stats.get("changed", {}).items() if count}
    words = ", ".join(f"{host} {count}" for host, count in sorted(changed.items()))
    warn(f"would change (tasks): {words}" if changed else "would change nothing", "green")
    return int(ExitCode.OK)
