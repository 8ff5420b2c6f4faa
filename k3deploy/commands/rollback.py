"""`k3deploy rollback`: the candidate stopped everywhere, production back and proven."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from k3deploy.commands.options import CONTEXT, inventory_option, json_option, live_display, print_json, warn
from k3deploy.commands.stop import Stop
from k3deploy.errors import ExitCode, K3Error, LeftoverError, LockedError, NotRestoredError

if TYPE_CHECKING:
    from k3deploy.runner import RunResult

EPILOG = """\b
Examples:
  k3deploy rollback                      the lab
  k3deploy rollback -i inventory/gb10
  k3deploy rollback --restart-workers    production's workers too, where they hang
  ansible-playbook -i inventory/gb10 playbooks/rollback.yml    the same, without k3deploy

Safe at any time, twice, and with nothing deployed: what it must know lies on the ranks."""


# The play of rollback.yml that says what is left once production is back.
_LEFT = "Rollback | what is left"


@dataclass(slots=True)
class Restoration:
    """How bringing production back ended. ``proof`` is what production's module found on the head."""

    result: RunResult
    proof: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.proven and self.result.ok and not self.result.unreachable

    @property
    def proven(self) -> bool:
        """Whether production is back, whatever is left elsewhere.

        The playbook goes on without ranks that it cannot reach, and ends well where no host matched: only what the
        head itself said of production counts as proof.
        """
        return bool(self.proof)

    @property
    def words(self) -> str:
        if self.proof.get("as_recorded"):
            owner = (self.proof.get("window") or {}).get("owner")
            return f"production is back: it answers as recorded before the window{f' of {owner}' if owner else ''}"
        if self.proof.get("answers"):
            return "production answers"
        return str(self.proof.get("note") or "production is as it was found")

    @property
    def problems(self) -> list[str]:
        found = [str(failure) for failure in (*self.result.unreachable, *self.result.failures)]
        if not found and self.result.ok and not self.proof:
            found = ["no head was reached: does the inventory have the groups ranks and head?"]
        return found or ([] if self.ok else [f"rollback.yml ended with status {self.result.status}"])

    @property
    def left(self) -> list[str]:
        """What rollback.yml says is left, once production is proven: a sentence a rank."""
        said = [failure.message for failure in self.result.failures if failure.phase == _LEFT]
        return [line for message in said for line in message.splitlines()] or self.problems

    def error(self, inventory: Path) -> K3Error:
        """What someone must act on."""
        if not self.proven:
            details = "\n".join(f"  {line}" for problem in self.problems for line in problem.splitlines())
            return NotRestoredError(
                f"PRODUCTION IS NOT PROVEN TO BE BACK on {inventory}\n{details}",
                remedy=f"`k3deploy status -i {inventory}` shows the ranks; mend what is named above, then\n"
                f"  `k3deploy rollback -i {inventory}`",
            )
        details = "\n".join(f"  {line}" for line in self.left)
        return LeftoverError(
            f"{self.words}; but this is left:\n{details}",
            remedy=f"do what is named above, then `k3deploy rollback -i {inventory}` again",
        )


def restore(
    inventory: Path,
    on_event: Callable[[dict[str, Any]], None],
    cancel: Callable[[], bool],
    artifacts_dir: Path | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Restoration:
    """Run ``playbooks/rollback.yml`` with the user's inventory, and ``extra`` variables.

    With ``k3_run_id`` (and ``k3_run_owner``) only that run's window is closed, and nothing of another's is stopped.
    """
    from k3deploy.runner import run_playbook

    proof: dict[str, Any] = {}

    def watch(event: dict[str, Any]) -> None:
        result = (event.get("event_data") or {}).get("res")
        if isinstance(result, Mapping) and result.get("done") and isinstance(result.get("production"), Mapping):
            proof.update(result["production"])
        on_event(event)

    result = run_playbook("rollback", [inventory], dict(extra or {}), watch, cancel, artifacts_dir)
    return Restoration(result, proof)


def cluster_name(inventory: Path) -> str:
    """The name under which this controller locks the cluster."""
    from k3deploy import inventory as inventories

    try:
        return inventories.load(inventory).name
    except K3Error:
        # An inventory that no longer validates must not keep production down.
        return str(inventory.resolve())


@click.command(epilog=EPILOG, context_settings=CONTEXT)
@inventory_option
@click.option("--restart-workers", is_flag=True, help="Restart production's workers too; its head goes with them.")
@json_option
def rollback(inventory: Path, restart_workers: bool, as_json: bool) -> int:
    """Stop the candidate on every rank, bring production back and prove that it answers."""
    from k3deploy.progress import Progress
    from k3deploy.store import lock

    def on_signal(count: int) -> None:
        if count == 1:
            progress.note("production is being brought back; press Ctrl-C again to leave that undone")

    progress = Progress(sys.stderr, live=live_display())
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(lock(cluster_name(inventory), "rollback"))
        except LockedError as error:
            # Production comes first, as it does from another machine: a run that goes on here finds its window closed.
            warn(f"{error}; production is brought back all the same. Stop that run too: it may take a window later")
        stop = held.enter_context(Stop(on_signal))
        held.enter_context(progress)
        stop.restart(patience=2)
        extra = {"k3_restart_workers": True} if restart_workers else {}
        restoration = restore(inventory, progress.event, stop.requested, extra=extra)
    if as_json:
        print_json(
            {
                "restored": restoration.ok,
                "production": restoration.proof,
                "proven": restoration.proven,
                "problems": restoration.problems,
                "tasks": restoration.result.task_count,
                "round_trips": restoration.result.round_trips,
            }
        )
    if not restoration.ok:
        raise restoration.error(inventory)
    if not as_json:
        warn(restoration.words, "green")
    return int(ExitCode.OK)
