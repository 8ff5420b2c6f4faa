"""`k3deploy window`: the maintenance window by hand, and how it stands."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from k3deploy.commands.options import (
    CONTEXT,
    DurationType,
    UsageProblem,
    interactive,
    inventory_option,
    json_option,
    live_display,
    print_json,
    warn,
)
from k3deploy.commands.rollback import Restoration, cluster_name, restore
from k3deploy.commands.stop import Stop
from k3deploy.errors import ExitCode, InterruptedRun, K3Error, LockedError

if TYPE_CHECKING:
    from k3deploy.runner import RunResult

# The name of every window that is not a run's, in the playbooks too.
BY_HAND = "by-hand"
LOCKED = "LOCKED: "

EPILOG = """\b
Examples:
  k3deploy window status -i inventory/gb10
  k3deploy window open -i inventory/gb10 --deadline 4h --reason "new firmware"
  k3deploy apply candidate-U9 -i inventory/gb10     inside it, and it stays open
  k3deploy window extend -i inventory/gb10 --deadline 2h
  k3deploy window close -i inventory/gb10
  k3deploy window close -i inventory/gb10 --force alice@desk     somebody else's, by the holder's name

Inside the window production is down and each rank's guard watches its memory and the window's end: then the ranks
bring production back by themselves, with this machine or without it. `k3deploy rollback` closes any window."""


@click.group(epilog=EPILOG, context_settings=CONTEXT)
def window() -> None:
    """Open, extend, close or show the maintenance window, for work by hand."""


_deadline = click.option(
    "--deadline", type=DurationType(), default="4h", show_default=True, help="When it ends by itself, from now."
)
_force = click.option("--force", default="", metavar="HOLDER", help="Another holder's window: type the holder's name.")


@window.command("open", context_settings=CONTEXT)
@inventory_option
@_deadline
@click.option("--reason", default="", help="Why; shown to whoever meets the window.")
@_force
@click.option("--yes", "-y", is_flag=True, help="Do not ask before production is drained.")
@json_option
def open_window(inventory: Path, deadline: int, reason: str, force: str, yes: bool, as_json: bool) -> int:
    """Drain production and hold it down for work by hand."""
    if not yes:
        if not interactive():
            raise UsageProblem("this drains production, and there is no terminal to ask on", remedy="add --yes")
        click.confirm(f"This drains production of {inventory}. Go on?", abort=True, err=True)
    extra = {"k3_run_reason": reason, "k3_run_deadline_s": deadline}
    found = _act("window_open", inventory, extra, force)
    return _show(found, as_json, "open: production is drained")


@window.command(context_settings=CONTEXT)
@inventory_option
@_deadline
@_force
@json_option
def extend(inventory: Path, deadline: int, force: str, as_json: bool) -> int:
    """Move the end of an open window, a run's too."""
    found = _act("window_extend", inventory, {"k3_run_deadline_s": deadline}, force, alone=False)
    return _show(found, as_json, "extended")


@window.command(context_settings=CONTEXT)
@inventory_option
@_force
@json_option
def close(inventory: Path, force: str, as_json: bool) -> int:
    """Stop what runs in it, bring production back and prove that it answers."""
    proof = _act("window_close", inventory, {}, force)
    if as_json:
        print_json({"restored": True, "production": proof})
    else:
        warn(_words(proof), "green")
    return int(ExitCode.OK)


@window.command("status", context_settings=CONTEXT)
@inventory_option
@json_option
def window_status(inventory: Path, as_json: bool) -> int:
    """Say who holds the window, since when and until when.

    Exit code 1 when its end has passed (something kept the ranks from ending it), and when the head was not reached.
    """
    from k3deploy.commands.status import gather, head_was_read

    report = gather(inventory)
    found = report["window"]
    if as_json:
        print_json(found)
    else:
        click.echo(words(found, known=head_was_read(report)))
        for host, problem in report["problems"].items():
            warn(f"{host}: {problem}", "red")
    return int(ExitCode.OK if head_was_read(report) and not stale(found) else ExitCode.FAILED)


def stale(found: Mapping[str, Any] | None) -> bool:
    """Whether a window's end has passed, by its rank's own clock."""
    return bool(found) and found is not None and found.get("left_s", 0) < 0


def words(found: Mapping[str, Any] | None, *, known: bool = True) -> str:
    """A window as ``status`` shows it; not ``known`` where the head, which holds it, was not reached."""
    from k3deploy.progress import duration

    if not found and not known:
        return "maintenance window: not known, its rank was not reached"
    if not found:
        return "maintenance window: closed"
    if found.get("damaged"):
        return "maintenance window: its file cannot be read; k3deploy rollback brings production back and puts it aside"
    work = "work by hand" if found.get("kind") == "hand" else f"run {found.get('run_id')}"
    lines = [f"maintenance window: held by {found.get('owner') or 'someone'} for {work}"]
    lines[0] += f" ({found.get('reason') or 'no reason given'})"
    lines.append(f"  since {_moment(found.get('opened'))}, until {_moment(found.get('deadline'))}")
    left = found.get("left_s")
    if stale(found) and left is not None:
        lines[1] += f": STALE, its end passed {duration(-left)} ago"
        lines.append("  k3deploy rollback stops what is left of it and brings production back")
    elif left is not None:
        lines[1] += f" ({duration(left)} left)"
    if found.get("closing"):
        lines.append("  closing: production is on its way back")
    if found.get("guest"):
        lines.append(f"  run {found['guest']} works in it")
    return "\n".join(lines)


def locked(result: RunResult) -> str:
    """What the head said of a window that somebody else holds; empty when that is not why it failed."""
    said = next((failure.message for failure in result.failures if LOCKED in failure.message), "")
    return said.partition(LOCKED)[2].strip()


def _moment(seconds: Any) -> str:
    if not isinstance(seconds, int | float):
        return "unknown"
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _words(proof: Mapping[str, Any]) -> str:
    if proof.get("as_recorded"):
        return "the window is closed; production answers as recorded before it"
    return "production answers" if proof.get("answers") else str(proof.get("note") or "closed")


def _show(found: Mapping[str, Any], as_json: bool, what: str) -> int:
    if as_json:
        print_json(found)
    else:
        warn(what, "green")
        click.echo(words(found))
    return int(ExitCode.OK)


def _act(playbook: str, inventory: Path, extra: Mapping[str, Any], force: str, *, alone: bool = True) -> dict[str, Any]:
    """Run one of the window's playbooks; what the head's module said of production or of the window.

    With ``alone``, under the controller's lock: extending is for a window in which something runs here.
    """
    import contextlib

    from k3deploy.progress import Progress
    from k3deploy.runner import run_playbook
    from k3deploy.store import lock, operator

    owner = operator()
    extra = {**extra, "k3_run_owner": owner, "k3_window_force": force}
    found: dict[str, Any] = {}

    def watch(event: dict[str, Any]) -> None:
        result = (event.get("event_data") or {}).get("res")
        if isinstance(result, Mapping) and result.get("done") and isinstance(result.get("production"), Mapping):
            found.update(result["production"])
            if "deadline_left_s" in result:
                found["left_s"] = result["deadline_left_s"]
        progress.event(event)

    def on_signal(count: int) -> None:
        if count == 1:
            progress.note("stopping")

    progress = Progress(sys.stderr, live=live_display())
    held = lock(cluster_name(inventory), f"window {playbook.partition('_')[2]}") if alone else contextlib.nullcontext()
    with held, Stop(on_signal) as stop, progress:
        result = run_playbook(playbook, [inventory], extra, watch, stop.requested)
        said = locked(result)
        if not result.ok and not said and playbook == "window_open":
            stop.restart(patience=2)
            progress.note("bringing production back")
            mine = {"k3_run_id": BY_HAND, "k3_run_owner": owner, "window_kind": "hand"}
            restoration = restore(inventory, progress.event, stop.requested, extra=mine)
            if not restoration.ok:
                raise restoration.error(inventory)
    if result.ok:
        return found
    if said and force:
        raise UsageProblem(f"--force {force} is not the holder: {said}", remedy="type the holder's name as it is shown")
    if said:
        raise LockedError(said, remedy="--force HOLDER, with the holder's name, if you must")
    if result.status == "canceled":
        raise InterruptedRun("stopped as asked")
    if playbook == "window_close":
        raise Restoration(result, {}).error(inventory)
    failures = "\n".join(f"  {line}" for f in (*result.unreachable, *result.failures) for line in str(f).splitlines())
    remedy = "k3deploy window status shows how it stands"
    raise K3Error(f"{playbook.replace('_', ' ')} failed\n{failures}", remedy=remedy)
