"""What someone is told and asked before production is drained: for how long, and until when at most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from k3deploy.commands.options import UsageProblem, interactive, warn

if TYPE_CHECKING:
    from k3deploy.commands.planning import Planned
    from k3deploy.store import Run, Store

_LAB = "lab"
# What a window takes beside its blocks' loads and cells: taking it, starting workers, stopping, and a margin.
_BLOCK_EXTRA_S = 120
_WINDOW_EXTRA_S = 900


def window_length(planned: Planned, run: Run | None) -> int:
    """Seconds until a run's window ends by itself: all that its blocks may take, each up to its own deadline, those
    included that may have to be measured again."""
    from k3deploy.judge.step import spares

    cluster = planned.cluster
    planned_blocks = len(planned.mapping["blocks"])
    left = planned_blocks - (len(run.blocks) if run is not None else 0) + spares(planned_blocks)
    block = cluster.load_timeout_s + planned.plan.bench.deadline_s + _BLOCK_EXTRA_S
    return int(cluster.production.drain_timeout_s + left * block + _WINDOW_EXTRA_S)


def confirm(planned: Planned, store: Store, run: Run | None, yes: bool, deadline: int) -> None:
    """Ask before production is drained. Without a terminal, go on only with --yes or on the lab."""
    from k3deploy.progress import duration

    cluster = planned.cluster
    warn(f"the window ends by itself {duration(deadline)} after it opens (--deadline); the ranks see to that", "cyan")
    if yes or (cluster.name == _LAB and not interactive()):
        return
    blocks: Sequence[Any] = planned.mapping["blocks"]
    left = len(blocks) - (len(run.blocks) if run is not None else 0)
    what = (
        f"This drains {cluster.production.head_unit} on {cluster.head.name} of cluster {cluster.name} "
        f"({len(cluster.ranks)} ranks) for {left} block(s), {_expected(store, cluster.name, left)}."
    )
    if not interactive():
        raise UsageProblem(f"{what} There is no terminal to ask on.", remedy="add --yes if that is what you want")
    click.echo(what, err=True)
    click.confirm("Go on?", abort=True, err=True)


def _expected(store: Store, cluster: str, blocks: int) -> str:
    """How long that many blocks took on this cluster before."""
    from k3deploy.commands.cost import block_cost
    from k3deploy.progress import duration

    cost = block_cost(store, cluster)
    if cost is None:
        return "for how long is not known yet: no block was measured on this cluster so far"
    return f"about {duration(cost.block_s * blocks)} by earlier runs"
