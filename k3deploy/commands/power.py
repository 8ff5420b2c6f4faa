"""What a run can show before it is begun: how many pairs, how many hours, how small a gain; and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3deploy.errors import PreflightError

if TYPE_CHECKING:
    from k3deploy.calibration import Power
    from k3deploy.commands.cost import Cost
    from k3deploy.commands.planning import Planned


def known(planned: Planned, runs: Path) -> tuple[Power, Cost | None]:
    """What calibration and earlier runs say of this plan."""
    from k3deploy import calibration
    from k3deploy.commands.cost import block_cost
    from k3deploy.store import Store

    mapping, root = planned.mapping, Store(runs).root
    kept = calibration.find(root, mapping)
    found = calibration.power(mapping, kept, None if kept else calibration.of_other_settings(root, mapping))
    return found, block_cost(Store(runs), planned.cluster.name, mapping["model"]["path"])


def words(planned: Planned, power: Power, cost: Cost | None) -> str:
    """``8 pairs, about 6 h 20 min, detects +3.1 % (spread 1.2 %, calibrated by RUN)``, and what stands against it."""
    from k3deploy.progress import duration

    blocks = len(planned.mapping["blocks"])
    parts = [f"{power.pairs} pair{'s' if power.pairs > 1 else ''}"]
    if cost is None:
        parts.append("for how long is not known yet")
    else:
        parts.append(f"about {duration(cost.block_s * blocks)} (a load takes {duration(cost.load_s)})")
    if power.detects is not None and power.spread is not None and power.calibration is not None:
        source = f"spread {power.spread * 100:.1f} % by {power.calibration.run_id}"
        parts.append(f"detects +{power.detects * 100:.1f} % ({source})")
    else:
        parts.append("what gain that detects is not known")
    if power.hardest is not None:
        cell, needed = power.hardest
        if needed is None or needed > power.pairs:
            number = "no affordable number of pairs" if needed is None else f"{needed} pairs"
            parts.append(f"and it takes {number} to show that {cell} is not slower")
    text = ", ".join(parts)
    return f"{text}. No ACCEPT: {power.problem}" if power.problem else text


def weigh(planned: Planned, power: Power, cost: Cost | None, *, anyway: bool) -> Planned:
    """The plan with what stands against an ACCEPT written into it.

    Raises ``PreflightError`` for a run that would be long enough to be accepted, but whose pairs are known to be too
    few for the spread, unless ``anyway``. A single pair, or a cluster that is not calibrated, is only a look: allowed.
    """
    from k3deploy import stats
    from k3deploy.plan.again import CALIBRATE

    if planned.plan.candidate == CALIBRATE or not power.problem:
        return planned
    serious = power.pairs >= stats.MIN_PAIRS and power.calibration is not None
    if serious and not anyway:
        raise PreflightError(f"{power.problem}; nothing was changed", remedy=_remedy(planned, power, cost))
    return with_rule(planned, {"no_accept": power.problem})


def _remedy(planned: Planned, power: Power, cost: Cost | None) -> str:
    from k3deploy.progress import duration

    ways = [power.remedy] if power.remedy else []
    if not ways and power.needed is not None and power.needed > power.pairs:
        arms = len(planned.mapping["arms"])
        time = f" (about {duration(cost.block_s * arms * power.needed)})" if cost else ""
        ways.append(f"--pairs {power.needed}{time}")
    ways.append("a larger --delta, if only a larger gain is worth the change")
    ways.append("--anyway, which ends INCONCLUSIVE at best")
    return "; or ".join(ways)


def with_rule(planned: Planned, changes: dict[str, Any]) -> Planned:
    """The same plan with another rule."""
    from dataclasses import replace

    rule = planned.plan.rule.model_copy(update=changes)
    plan = planned.plan.model_copy(update={"rule": rule})
    return replace(planned, plan=plan, mapping=plan.model_dump(mode="json"))


def pairs_in(hours: float, arms: int, cost: Cost | None) -> int:
    """How many rounds of ``arms`` blocks fit into so many hours; one where nothing is known of their length."""
    if cost is None or cost.block_s <= 0:
        return 1
    return max(1, int(hours * 3600 / (cost.block_s * arms)))


def advisor(max_hours: float | None, cost: Cost | None) -> list[str]:
    """The command line by which the playbook asks what comes next; the run directory is added to it."""
    import sys
    import time

    argv = [sys.executable, "-m", "k3deploy.commands.advise"]
    if max_hours is not None:
        argv += ["--until", str(int(time.time() + max_hours * 3600))]
    if cost is not None:
        argv += ["--block-s", f"{cost.block_s:.1f}"]
    return argv
