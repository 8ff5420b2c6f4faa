"""From a candidate's name to a plan: the step that apply and plan share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from k3deploy.inventory import Cluster
    from k3deploy.plan import Plan


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan beside the cluster that it is for; ``mapping`` is the plan as JSON data."""

    inventory: Path
    cluster: Cluster
    plan: Plan
    mapping: dict[str, Any]


def make(
    candidate: str,
    inventory: Path,
    matrix_dir: Path | None,
    pairs: int | None = None,
    cells: Sequence[str] = (),
    repeats: int | None = None,
    delta: float | None = None,
    seed: int | None = None,
) -> Planned:
    """Load matrix and inventory and resolve the plan; raises ``K3Error``. Contacts no rank. delta: in per cent."""
    from k3deploy import inventory as inventories
    from k3deploy.matrix import Matrix
    from k3deploy.plan import campaign_candidates, make_campaign, make_plan

    cluster = inventories.load(inventory)
    matrix = Matrix.load(matrix_dir or Path(cluster.matrix))
    given = {"pairs": pairs, "repeats": repeats, "seed": seed, "delta": None if delta is None else delta / 100}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    make_one = make_plan if campaign_candidates(candidate) is None else make_campaign
    plan = make_one(matrix, cluster, candidate, cells=list(cells) or None, **options)
    # Absolute, so that a run resumed from another working directory has the same plan.
    plan = plan.model_copy(update={"inventory": str(inventory.resolve())})
    return Planned(inventory, cluster, plan, plan.model_dump(mode="json"))


def split_cells(text: str | None) -> list[str]:
    """``pp2048,tg100`` as a list; empty when nothing is named."""
    return [cell.strip() for cell in (text or "").split(",") if cell.strip()]


def tool_identity() -> dict[str, str]:
    """What of k3deploy itself could change the numbers: its version and the harness that measures."""
    from k3deploy import __version__
    from k3deploy.paths import harness_sha256

    return {"version": __version__, "harness_sha256": harness_sha256()}
