"""`k3deploy lab production`: the lab's own production service, so that there is something to drain and bring back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from k3deploy.commands import planning
from k3deploy.commands.options import CONTEXT, inventory_option, live_display, matrix_option
from k3deploy.commands.stop import Stop
from k3deploy.errors import InterruptedRun, K3Error
from k3deploy.lab.cluster import Lab
from k3deploy.lab.source import ensure_source

if TYPE_CHECKING:
    from k3deploy.inventory import Cluster


@click.command(
    context_settings=CONTEXT,
    epilog="""\b
Examples:
  k3deploy lab production        fetch the source, build (minutes the first time), start on port 50052

Safe to repeat: nothing is built, copied or restarted that did not change.""",
)
@inventory_option
@matrix_option
def production(inventory: Path, matrix_dir: Path | None) -> None:
    """Build llama.cpp in the lab and bring its production service up."""
    from k3deploy import inventory as inventories

    lab = Lab.from_environment()
    _check_addresses(lab, inventories.load(inventory))
    ensure_source(lab.config.cache_dir / "src", progress=click.echo)
    bring_up(inventory, matrix_dir)


def bring_up(inventory: Path, matrix_dir: Path | None) -> None:
    """Build the baseline and run it as a production service on the ranks of a cluster whose name begins with lab."""
    from k3deploy.paths import state_dir, write_text
    from k3deploy.plan import render_run_layer
    from k3deploy.progress import Progress
    from k3deploy.runner import run_playbook
    from k3deploy.store import layer_text, lock

    # Any row that runs the baseline's own build has the baseline as its first arm.
    planned = planning.make("candidate-U2", inventory, matrix_dir)
    place = state_dir() / "lab-production" / planned.cluster.name
    layer = _baseline_alone(render_run_layer(planned.plan))
    layer["all"]["vars"] |= {"k3_run_id": "lab-production", "k3_run_dir": str(place)}
    write_text(place / "inventory" / "run.yml", layer_text(layer))
    asked: list[int] = []
    with (
        lock(planned.cluster.name, "lab production"),
        Stop(asked.append) as stop,
        Progress(sys.stderr, live=live_display()) as progress,
    ):
        result = run_playbook(
            "lab_production", [inventory, place / "inventory"], {}, progress.event, stop.requested, place / "logs"
        )
    if result.status == "canceled":
        raise InterruptedRun("stopped as asked; the same command goes on where it stood")
    if not result.ok:
        failures = "\n".join(f"  {failure}" for failure in [*result.unreachable, *result.failures])
        raise K3Error(f"the lab's production did not come up\n{failures}", remedy=f"Ansible's words: {result.log}")
    click.echo(f"production serves at {planned.cluster.production.head_url}")


def _check_addresses(lab: Lab, cluster: Cluster) -> None:
    """An inventory with another lab's addresses would wait for ranks that are not there."""
    named = {rank.name: rank.fabric_address for rank in cluster.ranks}
    there = {rank.name: str(rank.address) for rank in lab.config.ranks}
    if named != there:
        own = lab.config.inventory_dir / "hosts.yml"
        raise K3Error(
            f"{cluster.inventory} is not of the lab {lab.config.name}: "
            f"it has {', '.join(named.values())}, the lab {', '.join(there.values())}",
            remedy=f"give -i a copy of {cluster.inventory} in which hosts.yml is {own}",
        )


def _baseline_alone(layer: dict[str, Any]) -> dict[str, Any]:
    """The run layer cut down to its first arm and that arm's build."""
    variables = layer["all"]["vars"]
    baseline = variables["k3_run_arms"][0]
    variables["k3_run_arms"] = [baseline]
    variables["k3_run_builds"] = {baseline["build_key"]: variables["k3_run_builds"][baseline["build_key"]]}
    variables["k3_run_blocks"] = []
    return layer
