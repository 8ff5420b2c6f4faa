"""What memory an arm used: the allocator's numbers against the forecast, and how available memory moved.

Pure functions of data. Memory is in MiB.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# llama.cpp accounts for a device by three numbers; these parts of the forecast are in each. What no device buffer
# holds (checkpoints, pinned RDMA memory) is in none.
PARTS: Mapping[str, tuple[str, ...]] = {
    "model": ("weights_mib",),
    "context": ("kv_cache_mib", "recurrent_state_mib"),
    "compute": ("compute_mib", "attention_mask_mib", "kv_conversion_mib"),
}
LARGEST_ERROR = 0.10
_LEAST_ROWS = 20  # of a series, for a trend


@dataclass(frozen=True, slots=True)
class Allocation:
    """One rank: what was foreseen and what its devices hold, by part. ``error`` is foreseen over allocated, less 1.

    ``cut``: by how much the allocated numbers may be cut, all together.
    """

    rank: str
    foreseen: Mapping[str, float]
    allocated: Mapping[str, float]
    cut: float = 0.0

    @property
    def error(self) -> float | None:
        allocated = sum(self.allocated.values())
        return sum(self.foreseen.values()) / allocated - 1 if allocated else None

    @property
    def wrong(self) -> bool:
        """Whether the forecast is off by more than it may be, and than the printed numbers are cut by."""
        allocated, foreseen = sum(self.allocated.values()), sum(self.foreseen.values())
        return foreseen < allocated * (1 - LARGEST_ERROR) or foreseen > (allocated + self.cut) * (1 + LARGEST_ERROR)


def allocations(
    forecast: Sequence[Mapping[str, object]],
    endpoints: Mapping[str, str],
    breakdown: Mapping[str, Mapping[str, float]],
    printed: float,
) -> list[Allocation]:
    """The forecast beside the allocator's numbers, a rank each; ranks that only one of them knows are left out.

    forecast: a plan's entries of one arm, head first. endpoints: rank of each endpoint. breakdown: of the head's log,
    by endpoint or, for the head's own devices and host buffers, by name. printed: the step in
    which its numbers are printed.
    """
    if not forecast or not breakdown:
        return []
    head = str(forecast[0]["rank"])
    held: dict[str, list[Mapping[str, float]]] = {}
    for device, numbers in breakdown.items():
        held.setdefault(endpoints.get(device, head), []).append(numbers)
    found = []
    for entry in forecast:
        rank = str(entry["rank"])
        devices = held.get(rank, [])
        if not devices:
            continue
        foreseen = {part: sum(_size(entry.get(key)) for key in keys) for part, keys in PARTS.items()}
        allocated = {part: float(sum(numbers[part] for numbers in devices)) for part in PARTS}
        found.append(Allocation(rank, foreseen, allocated, printed * len(PARTS) * len(devices)))
    return found


def _size(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


@dataclass(frozen=True, slots=True)
class Trend:
    """By how much available memory changes from one request to the next, with its 95 % interval; falls are negative."""

    per_request: float
    low: float
    high: float
    requests: int


def trend(series: Sequence[Sequence[float]], ready_at: float | None, requests: int) -> Trend | None:
    """The slope of available memory while requests were served; None where there is too little to say.

    series: rows of (time in seconds, available memory, ...). ready_at: from when on requests were served, by the same
    clock. The slope is Theil and Sen's (the median over all pairs of rows): one request's short peak does not move it.
    """
    rows = [row for row in series if ready_at is not None and row[0] > ready_at]
    if len(rows) < _LEAST_ROWS or requests < 1 or rows[-1][0] <= rows[0][0]:
        return None
    from scipy.stats import theilslopes

    found = theilslopes([row[1] for row in rows], [row[0] for row in rows], alpha=0.95)
    seconds = (rows[-1][0] - rows[0][0]) / requests
    return Trend(
        float(found.slope) * seconds, float(found.low_slope) * seconds, float(found.high_slope) * seconds, requests
    )
