"""A promotion for people (PLAN.md) and for the playbooks (its inventory layer)."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from k3deploy.promotion.make import flags_of
from k3deploy.promotion.model import ProductionUnit, Promotion

DROPIN = "/etc/systemd/system/{unit}.d/50-k3deploy.conf"


def layer(promotion: Promotion) -> dict[str, Any]:
    """What playbooks/promote.yml and demote.yml read, as an inventory layer."""
    about = promotion.model_dump(
        include={"id", "action", "candidate", "arm", "run_id", "build_id", "owner", "files", "production_root"}
    )
    return {
        "all": {
            "vars": {
                "k3_run_promotion": about,
                "k3_run_owner": promotion.owner,
                "k3_run_reason": promotion.reason or f"{promotion.action} {promotion.candidate}",
            },
            "hosts": {
                rank: {"k3_run_promotion_units": {unit.unit: unit.dropin for unit in units}}
                for rank, units in promotion.ranks.items()
            },
        }
    }


def render(promotion: Promotion, directory: str) -> str:
    """PLAN.md: what would change, why it may, how to apply it, how to go back."""
    return "\n".join(_lines(promotion, directory)) + "\n"


def _lines(promotion: Promotion, directory: str) -> Iterator[str]:
    what = f"{promotion.action.capitalize()} {promotion.candidate}" + (f" ({promotion.arm})" if promotion.arm else "")
    yield f"# {what} on {promotion.cluster}"
    yield ""
    yield f"Plan {promotion.id}, made {promotion.created} by {promotion.owner}. Nothing is changed until it is applied."
    if promotion.reason:
        yield f"Reason: {promotion.reason}."
    yield ""
    if promotion.action == "promote":
        yield f"Run {promotion.run_id}: ACCEPT. Build {promotion.build_id}, the one that was judged, on every rank."
        yield ""
        yield "| gate of the runbook | evidence |"
        yield "|---|---|"
        for gate in promotion.gates:
            yield f"| {gate.title} | {gate.detail} |"
        yield ""
    for note in promotion.notes:
        yield f"- {note}"
    if promotion.notes:
        yield ""
    yield from _how(promotion, directory)
    for rank, units in promotion.ranks.items():
        for unit in units:
            yield from _unit(promotion, rank, unit)


def _how(promotion: Promotion, directory: str) -> Iterator[str]:
    inventory = promotion.inventory
    yield "## How to apply it"
    yield ""
    yield "```"
    yield f'k3deploy window open -i {inventory} --reason "{promotion.action} {promotion.candidate}"'
    if promotion.managed:
        yield f"ansible-playbook -i {inventory} -i {directory}/inventory playbooks/{promotion.action}.yml"
        yield "```"
        yield ""
        yield "The playbook refuses without a held window, records what was there before, and closes the window only"
        yield "when production answers as recorded before it. " + (
            "Else it puts back what was there and says so."
            if promotion.action == "promote"
            else "Else the window stays open, and it says so."
        )
    else:
        yield from _by_hand(promotion)
        yield f"k3deploy window close -i {inventory}"
        yield "```"
        yield ""
        yield "Production is the operator's own here (`k3_production.managed` is false): these steps are done by hand,"
        yield "with the texts below. Closing the window proves that production answers as recorded before it."
    yield ""
    back = "promote" if promotion.action == "demote" else "demote"
    if back == "demote":
        yield f"Back: `k3deploy demote -i {inventory}` makes the plan for it."
    else:
        yield f"Forward again: `k3deploy promote {promotion.candidate} -i {inventory}`."
    yield ""


def _by_hand(promotion: Promotion) -> Iterator[str]:
    if promotion.action == "promote":
        source = f"/opt/k3deploy/releases/{promotion.build_id}"
        yield "# on every rank"
        yield f"install -d {promotion.production_root} && cp -a {source} {promotion.production_root}/"
    yield "# on every rank, for each of its units below"
    if any(unit.dropin for units in promotion.ranks.values() for unit in units):
        yield f"$EDITOR {DROPIN.format(unit='UNIT')}        # exactly the text below"
    else:
        yield f"rm {DROPIN.format(unit='UNIT')}"
    yield "systemctl daemon-reload && systemctl restart WORKER_UNIT    # the head stays stopped: closing starts it"


def _unit(promotion: Promotion, rank: str, unit: ProductionUnit) -> Iterator[str]:
    yield f"## {rank}: {unit.unit}"
    yield ""
    if unit.argv:
        yield "What it runs, and what it would run:"
        yield ""
        yield "```diff"
        yield from _difference(unit)
        yield "```"
        yield ""
    path = DROPIN.format(unit=unit.unit)
    if unit.dropin:
        yield f"`{path}`" + (" (replaces k3deploy's earlier one)" if unit.previous else "")
        yield ""
        yield "```ini"
        yield unit.dropin.rstrip("\n")
        yield "```"
    else:
        yield f"`{path}` is removed" + ("." if unit.previous else " (it is not there).")
    yield ""
    if promotion.action == "promote" and unit.text_now:
        yield "The unit as systemd has it now:"
        yield ""
        yield "```ini"
        yield unit.text_now.rstrip("\n")
        yield "```"
        yield ""


def _difference(unit: ProductionUnit) -> Iterator[str]:
    before = [*flags_of(unit.argv_now), *_variables(unit.environment_now)]
    after = [*flags_of(unit.argv), *_variables(unit.environment)]
    for line in difflib.ndiff(before, after):
        if not line.startswith("?"):
            yield line[0] + " " + line[2:]


def _variables(environment: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in sorted(environment.items())]
