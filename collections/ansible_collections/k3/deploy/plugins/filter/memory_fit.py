"""Filter that compares a run's memory forecast with a rank, before production is drained for it."""

from __future__ import annotations

# Beside the forecast: a CUDA context, cuBLAS and the process itself take what nothing foresees; the floor is there for them.
NOTE = "not foreseen: CUDA contexts, libraries, the processes themselves"


def freed_by_drain(state, stated_mib):
    """(MiB, how that is known) that production, and what an interrupted run left, give back when production's head is stopped.

    state: k3.deploy.rank_state with ``holdings``. stated_mib: what the inventory says that production holds on this rank, or None.
    A production worker stays up, but what it holds is its head's and goes with its head's connection.
    """
    units = state["production"]["units"]
    holdings = state.get("holdings") or {}
    runs = [name for name, unit in units.items() if unit["active"] in ("active", "activating", "reloading")]
    left = sum(seen["anon_mib"] + seen["gpu_mib"] for name, seen in holdings.items() if name not in units)
    rest = f" and {left} MiB of an interrupted run" if left else ""
    if stated_mib is not None and runs:
        return int(stated_mib) + left, f"{stated_mib} MiB of production by the inventory{rest}"
    if not runs:
        return left, f"production does not run on this rank{rest}"
    seen = [holdings[name] for name in runs if name in holdings]
    if len(seen) < len(runs):
        bound = state["mem"]["MemTotal"] - state["mem"]["MemAvailable"]
        return bound, "what production holds is not known: at most all that is in use, so this is the best case"
    anon, gpu = sum(one["anon_mib"] for one in seen), sum(one["gpu_mib"] for one in seen)
    sources = sorted({one["gpu_from"] for one in seen if one["gpu_mib"]})
    by_gpu = f" and {gpu} MiB of its GPU by {', '.join(sources)}" if gpu else ""
    return anon + gpu + left, f"{anon} MiB resident in production's processes{by_gpu}{rest}"


def _table(forecasts):
    """The parts of each arm's forecast on this rank, aligned; a list of lines."""
    parts = list(dict.fromkeys(part for arm in forecasts for part in arm["parts"]))
    rows = [["", *(arm["arm"] for arm in forecasts)]]
    rows += [[part, *("%.0f" % arm["parts"].get(part, 0) for arm in forecasts)] for part in parts]
    rows += [["all together", *("%.0f" % arm["total_mib"] for arm in forecasts)]]
    rows += [["floor", *(str(arm["floor_mib"]) for arm in forecasts)]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    first, *others = widths
    lines = []
    for name, *cells in rows:
        lines.append(name.ljust(first) + "".join("  " + cell.rjust(width) for cell, width in zip(cells, others, strict=True)))
    return lines


def memory_problems(state, forecasts, stated_mib=None):
    """What of a run cannot keep its floor on a rank; at most one text, with the table of what takes what (MiB).

    forecasts: of this rank, one an arm: {arm, floor_mib, total_mib, parts: {name: MiB}}; empty without facts about the model.
    """
    if not forecasts:
        return []
    freed, how = freed_by_drain(state, stated_mib)
    total, now = state["mem"]["MemTotal"], state["mem"]["MemAvailable"]
    available = min(total, now + freed)
    short = {arm["arm"]: available - arm["total_mib"] for arm in forecasts if available - arm["total_mib"] < arm["floor_mib"]}
    if not short:
        return []
    words = ", ".join("%s would leave %.0f MiB" % item for item in short.items())
    lines = [
        f"memory: {words}, less than the floor; nothing was drained",
        f"  {available} MiB are available once production's head is stopped: {now} now, {freed} freed ({how}), at most MemTotal {total}",
        *("  " + line for line in _table(forecasts)),
        f"  {NOTE}. Shrink the candidate (ctx_size, ubatch_size, cache types), or correct k3_production_memory_mib if production holds more",
    ]
    return ["\n".join(lines)]


class FilterModule:
    """Registers the filter."""

    def filters(self):
        return {"memory_problems": memory_problems}
