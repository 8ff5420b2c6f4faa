"""What a block costs on a cluster, by the runs so far."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from k3deploy.store import Store

_NEWEST = 20  # blocks; older ones tell of another model or network


@dataclass(frozen=True, slots=True)
class Cost:
    """Mean seconds over so many blocks: of a whole block, and of the model's load in it."""

    blocks: int
    block_s: float
    load_s: float


def block_cost(store: Store, cluster: str, model_path: str | None = None) -> Cost | None:
    """``None`` where no block was measured on this cluster yet (of this model, if one is named)."""
    lengths: list[float] = []
    loads: list[float] = []
    for run in store.runs():
        if len(lengths) >= _NEWEST:
            break
        if run.cluster != cluster or not run.blocks:
            continue
        if model_path is not None and run.plan().get("model", {}).get("path") != model_path:
            continue
        for path in run.blocks:
            try:
                record = json.loads(path.read_text(encoding="utf-8"))
                length = _moment(record["ended"]) - _moment(record["started"])
                load = float(record.get("load_seconds") or 0)
            except (OSError, ValueError, KeyError, TypeError):
                continue  # a record that is not readable says nothing about time
            lengths.append(length)
            loads.append(load)
    if not lengths:
        return None
    return Cost(len(lengths), sum(lengths) / len(lengths), sum(loads) / len(loads))


def _moment(value: str | float) -> float:
    """Seconds since the epoch, from those or from an ISO time."""
    return datetime.fromisoformat(value).timestamp() if isinstance(value, str) else float(value)
