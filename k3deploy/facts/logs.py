"""What the logs of a head and of its workers say, as observations. Pure functions of the text."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from statistics import median
from typing import Any

from k3deploy.facts.schema import Fatal, MemoryBreakdown, Observations
from k3deploy.log_lines import FATAL, MARKERS, PATTERNS, has, lost

MARKED = ("active", "fallback")
# Observations that are added up over the logs of a block; others are the same in each, or belong to one.
COUNTS = {
    "rdma_connections",
    "rpc_errors",
    *(f"{marker}_{what}" for marker in MARKERS for what in MARKED),
}
_ENDPOINT = re.compile(r"[\[(]([^\[\]()\s]+:\d{1,5})[\])]")
_FATAL_LIMIT = 20  # a crashing server can repeat itself; the first lines tell the story
_LINE_LIMIT = 400
_NAME_LIMIT = 120
# one pass over the log instead of one per pattern and line: logs of a long run have millions of lines
_ANY_FATAL = re.compile("|".join(f"(?P<f{place}>{pattern})" for place, (pattern, _) in enumerate(FATAL)))


def parse_head_log(text: str) -> Observations:
    """Read a llama-server log (plain or JSON lines, ideally of verbosity 4); never raises, whatever the text is."""
    values: dict[str, Any] = {}
    graphs = PATTERNS["graphs_reused"].findall(text)
    if graphs:
        values["graphs_reused"] = int(graphs[-1])
    pipeline = PATTERNS["pipeline"].search(text)
    if pipeline or PATTERNS["context_made"].search(text):
        values["pipeline_parallel"] = pipeline is not None and not PATTERNS["pipeline_given_up"].search(text)
    if pipeline and pipeline[1]:
        values["n_copies"] = int(pipeline[1])
    if PATTERNS["cache_reuse_off"].search(text):
        values["cache_reuse_disabled"] = True
    tables: dict[str, dict[str, float]] = {"model": {}, "KV": {}, "RS": {}, "compute": {}}
    for match in PATTERNS["buffer"].finditer(text):
        before = text[max(0, match.start() - _NAME_LIMIT) : match.start()].split()
        kind, device, size = match[1], _device(before[-1] if before else ""), float(match[2])
        # A split model says one buffer a file; a context that is made again says its own anew.
        tables[kind][device] = size + (tables[kind].get(device, 0.0) if kind == "model" else 0.0)
    values["model_mib"], values["kv_cache_mib"] = tables["model"], tables["KV"]
    values["recurrent_mib"], values["compute_mib"] = tables["RS"], tables["compute"]
    types = PATTERNS["kv_types"].search(text)
    if types:
        values["kv_types"] = {"k": types[1], "v": types[2]}
    # printed once before loading (a projection) and perhaps again at the end: the last one is what was used
    values["memory_breakdown"] = {
        _device(match["name"]): MemoryBreakdown(
            model=int(match["model"]),
            context=int(match["context"]),
            compute=int(match["compute"]),
            total=int(match["total"]) if "total" in match.groupdict() else None,
            free=int(match["free"]) if "free" in match.groupdict() else None,
        )
        for pattern in (PATTERNS["breakdown_device"], PATTERNS["breakdown_other"])
        for match in pattern.finditer(text)
    }
    # A head whose own device holds layers runs kernels like a worker's.
    return Observations(**values, **_transport(text), **_markers(text), fatal=_fatal(text), truncated=lost(text))


def parse_worker_log(text: str, rank: str = "") -> Observations:
    """Read an RPC server's log: transport, markers, times, fatal lines (led by ``rank``); never raises."""
    fatal = _fatal(text, f"{rank}: " if rank else "")
    return Observations(
        **_transport(text), **_markers(text), **_rpc_times(text, rank), fatal=fatal, truncated=lost(text)
    )


def _rpc_times(text: str, rank: str) -> dict[str, dict[str, float]]:
    """What a timed worker says, over all graphs: every rank sees the same microbatches.

    Milliseconds computed and transferred; the 99th percentile of a graph's transfers, in milliseconds; and the share of
    the time between two graphs in which the worker had nothing to do, as the median (a pause between requests is rare).
    """
    times = [tuple(map(int, found)) for found in PATTERNS["rpc_timing"].findall(text)]
    if not sum(compute for _, _, compute, _, _ in times):
        return {}
    transfers = sorted(sent + got for *_, sent, got in times)
    found = {
        "rank_forward_ms": sum(compute for _, _, compute, _, _ in times) / 1000,
        "rank_rpc_ms": sum(transfers) / 1000,
        "rank_rpc_p99_ms": transfers[math.ceil(0.99 * len(transfers)) - 1] / 1000,
    }
    idle = [
        max(0.0, 1 - (prepare + compute + sent + got) / (end - before[0]))
        for before, (end, prepare, compute, sent, got) in pairwise(times)
        if end > before[0]
    ]
    if idle:
        found["rank_idle_share"] = round(median(idle), 4)
    return {name: {rank: value} for name, value in found.items()}


def _transport(text: str) -> dict[str, Any]:
    """A silent fall-back to TCP leaves no line at all, so RDMA is what was activated and never failed."""
    activated = len(PATTERNS["rdma_activated"].findall(text))
    return {
        "rdma_activated": activated > 0 and not PATTERNS["rdma_failed"].search(text),
        "rdma_connections": activated,
        "rpc_errors": len(PATTERNS["rpc_error"].findall(_while_serving(text))),
    }


def _while_serving(text: str) -> str:
    end = PATTERNS["told_to_stop"].search(text)
    return text[: end.start()] if end else text


def markers_said(observed: Observations) -> dict[str, int]:
    """The markers of one log that stand in it at least once."""
    counts = ((f"{name}_{what}", getattr(observed, f"{name}_{what}")) for name in MARKERS for what in MARKED)
    return {name: count for name, count in counts if count}


def _markers(text: str) -> dict[str, int]:
    """How often each kernel said that it runs, and that it does not."""
    found = {name: PATTERNS[name].findall(text) for name in MARKERS}
    return {
        f"{name}_{what.lower()}": words.count(what) for name, words in found.items() for what in map(str.upper, MARKED)
    }


def _device(name: str) -> str:
    """``RPC0[10.0.0.2:50053]`` and ``RPC0 (10.0.0.2:50053)`` -> ``10.0.0.2:50053``; a local device keeps its name."""
    endpoint = _ENDPOINT.search(name)
    return endpoint[1] if endpoint else name.strip()


def _fatal(text: str, lead: str = "") -> list[Fatal]:
    if not has(text, "fatal"):
        return []
    found: list[Fatal] = []
    seen: set[str] = set()
    text = _while_serving(text)
    for match in _ANY_FATAL.finditer(text):
        if match[0] in seen:
            continue
        seen.add(match[0])
        start = max(text.rfind("\n", 0, match.start()) + 1, match.start() - _LINE_LIMIT)
        line = text[start : match.end() + _LINE_LIMIT].split("\n", 1)[0].strip()
        meaning = FATAL[int(str(match.lastgroup)[1:])][1]
        found.append(Fatal(line=f"{lead}{line[:_LINE_LIMIT]}", meaning=meaning))
        if len(found) == _FATAL_LIMIT:
            break
    return found
