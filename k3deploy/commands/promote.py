"""`k3deploy promote` and `k3deploy demote`: a plan for production, refused unless everything speaks for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from k3deploy.commands.options import (
    CONTEXT,
    CandidateType,
    RunType,
    UsageProblem,
    inventory_option,
    json_option,
    print_json,
    runs_option,
    warn,
)
from k3deploy.errors import ExitCode, K3Error, PreflightError

if TYPE_CHECKING:
    from k3deploy.inventory import Cluster
    from k3deploy.promotion import Promotion, RankNow
    from k3deploy.store import Run

EPILOG = """\b
Examples:
  k3deploy promote candidate-U2 -i inventory/gb10           by its newest run that has a verdict
  k3deploy promote candidate-U2 --run latest --check        is it refused, and what would it be? Writes nothing
  k3deploy promote candidate-U2 --json
Then, when you want it:
  k3deploy window open -i inventory/gb10 --reason "promote U2"
  ansible-playbook -i inventory/gb10 -i promotions/<id>/inventory playbooks/promote.yml

\b
Refused (exit code 4, every reason at once) unless the run's verdict is ACCEPT, each of the runbook's five gates has
recorded evidence, and every rank still holds the very build that was judged."""

DEMOTE_EPILOG = """\b
Examples:
  k3deploy demote -i inventory/gb10
  k3deploy demote -i inventory/gb10 --check
Then:
  k3deploy window open -i inventory/gb10 --reason "demote U2"
  ansible-playbook -i inventory/gb10 -i promotions/<id>/inventory playbooks/demote.yml

Refused (exit code 4) where nothing is promoted."""


def promotions_option(function: Any) -> Any:
    return click.option(
        "--promotions",
        envvar="K3DEPLOY_PROMOTIONS",
        default="promotions",
        show_default=True,
        show_envvar=True,
        type=click.Path(path_type=Path),
        help="Directory of promotion plans.",
    )(function)


_reason = click.option("--reason", default="", help="Why; kept with the plan and on the ranks.")
_check = click.option("--check", is_flag=True, help="Judge and print the plan; write nothing.")


class Refused(PreflightError):
    """Something speaks against it; nothing was written."""


@click.command(epilog=EPILOG, context_settings=CONTEXT)
@click.argument("candidate", type=CandidateType())
@click.option(
    "--run", "reference", type=RunType(), help="The run that judged it.  [default: its newest with a verdict]"
)
@inventory_option
@runs_option
@promotions_option
@_reason
@_check
@json_option
@click.pass_context
def promote(
    ctx: click.Context,
    candidate: str,
    reference: str | None,
    inventory: Path,
    runs: Path,
    promotions: Path,
    reason: str,
    check: bool,
    as_json: bool,
) -> int:
    """Plan what production would run after promoting CANDIDATE; change nothing on any rank."""
    from k3deploy import facts as records
    from k3deploy import inventory as inventories
    from k3deploy.plan.model import Plan
    from k3deploy.promotion import promotion, refusals, runbook_gates
    from k3deploy.promotion.make import build_ids, programs
    from k3deploy.store import operator

    run = _run(runs, candidate, reference)
    if ctx.get_parameter_source("inventory") is ParameterSource.DEFAULT:
        inventory = Path(run.inventory)
    cluster = inventories.load(inventory)
    plan = records.read_model(Plan, run.path / "plan.json")
    verdict = run.verdict() or {}
    facts = records.assemble(run.path)
    arm = next((arm for arm in plan.arms[1:] if arm.name == verdict.get("best_arm")), plan.arms[1])
    gates = runbook_gates(facts, plan.baseline.name, arm.name)
    problems = refusals(verdict, gates, facts, arm, None)
    if cluster.name != run.cluster:
        problems.append(f"the run is of cluster {run.cluster}, the inventory {inventory} is of {cluster.name}")
    ranks: dict[str, RankNow] = {}
    if not problems:  # what is wrong with the run needs no rank to be said
        (build_id,) = build_ids(facts, arm)
        ranks = read_ranks(inventory, {"build_id": build_id, "files": programs(facts, arm)})
        problems = refusals(verdict, gates, facts, arm, ranks)
    if problems:
        raise _refused(f"{candidate} is not promoted", run.id, problems, as_json)
    made = promotion(cluster, plan, facts, arm, gates, ranks, run_id=run.id, owner=operator(), reason=reason)
    return _deliver(made, promotions, cluster, check=check, as_json=as_json)


@click.command(epilog=DEMOTE_EPILOG, context_settings=CONTEXT)
@inventory_option
@promotions_option
@_reason
@_check
@json_option
def demote(inventory: Path, promotions: Path, reason: str, check: bool, as_json: bool) -> int:
    """Plan how production goes back to what it ran before the last promotion; change nothing on any rank."""
    from k3deploy import inventory as inventories
    from k3deploy.promotion import demotion
    from k3deploy.store import operator

    cluster = inventories.load(inventory)
    ranks = read_ranks(inventory, {})
    promoted = any((rank.record or {}).get("current") for rank in ranks.values())
    if not promoted and not any(unit.dropin for rank in ranks.values() for unit in rank.units.values()):
        raise _refused("nothing is demoted", "", [f"nothing is promoted on {cluster.name}"], as_json)
    made = demotion(cluster, ranks, owner=operator(), reason=reason)
    return _deliver(made, promotions, cluster, check=check, as_json=as_json)


def _run(runs: Path, candidate: str, reference: str | None) -> Run:
    """The run that is to be promoted: the one named, or the candidate's newest that has a verdict."""
    from k3deploy.store import Store

    store = Store(runs)
    if reference is not None:
        run = store.load(reference)
        if run.candidate != candidate:
            raise UsageProblem(
                f"{run.id} is of {run.candidate}, not of {candidate}", remedy="name that one, or its run"
            )
        return run
    found = next((run for run in store.runs() if run.candidate == candidate and run.verdict()), None)
    if found is None:
        raise Refused(
            f"{candidate} is not promoted: no run of it in {runs} has a verdict", remedy=f"k3deploy apply {candidate}"
        )
    return found


def read_ranks(inventory: Path, about: Mapping[str, Any]) -> dict[str, RankNow]:
    """Production as it is, and the release in question, from every rank."""
    from k3deploy.promotion import RankNow
    from k3deploy.runner import run_playbook

    ranks: dict[str, RankNow] = {}

    def collect(event: dict[str, Any]) -> None:
        data = event.get("event_data") or {}
        result = data.get("res")
        if isinstance(result, Mapping) and isinstance(result.get("rank"), Mapping):
            ranks[str(data["host"])] = RankNow.model_validate(result["rank"])

    result = run_playbook("promotion_read", [inventory], {"k3_run_promotion": dict(about)}, collect)
    if not result.ok or not ranks:
        said = [str(failure) for failure in (*result.unreachable, *result.failures)] or ["no rank was read"]
        raise K3Error("production could not be read\n" + "\n".join(f"  {line}" for line in said))
    return ranks


def _refused(what: str, run_id: str, problems: list[str], as_json: bool) -> Refused:
    if as_json:
        print_json({"refused": problems, "run": run_id or None})
    lines = "\n".join(f"  {problem}" for problem in problems)
    return Refused(f"{what}{f' by run {run_id}' if run_id else ''}\n{lines}", remedy="nothing was written or changed")


def _deliver(made: Promotion, promotions: Path, cluster: Cluster, *, check: bool, as_json: bool) -> int:
    """Write the plan's directory (unless this is a check) and say what is next."""
    from k3deploy.paths import write_json, write_text
    from k3deploy.promotion import layer, render
    from k3deploy.store import layer_text

    place = (promotions / made.id).absolute()
    text = render(made, str(promotions / made.id))
    if not check:
        write_json(place / "plan.json", made.model_dump(mode="json"))
        write_text(place / "inventory" / "promotion.yml", layer_text(layer(made)))
        write_text(place / "PLAN.md", text)
    if as_json:
        print_json({"promotion": made.model_dump(mode="json"), "path": None if check else str(place)})
    elif check:
        click.echo(text)
    else:
        click.echo(f"plan     {place / 'PLAN.md'}")
        if cluster.production.managed:
            layers = f"-i {cluster.inventory} -i {promotions / made.id}/inventory"
            click.echo(
                f"apply    k3deploy window open -i {cluster.inventory} --reason '{made.action} {made.candidate}'"
            )
            click.echo(f"         ansible-playbook {layers} playbooks/{made.action}.yml")
        warn("nothing is changed yet: read the plan first", "cyan")
    return int(ExitCode.OK)
