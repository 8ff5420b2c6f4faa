"""What the logs of a head and of its workers say, as observations. Pure functions of the text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from k3deploy.facts.schema import (
    Fatal,
    MemoryBreakdown,
    Observations,
)

# Observations that are added up over the logs of a block; others are the same in each, or belong to one.
COUNTS = {
    "rdma_connections",
    "rpc_errors",
    "flashkda_active",
    "flashkda_fallback",
    "kda_blocked_active",
    "kda_blocked_fallback",
    "kda_chunked_active",
    "kda_chunked_fallback",
    "iq1s_grouped_active",
    "iq1s_grouped_fallback",
    "iq1s_rows256_active",
    "iq1s_rows256_fallback",
    "iq1s_ncols_active",
    "iq1s_ncols_fallback",
}
_GRAPHS_REUSED = re.compile(r"graphs reused\s*=\s*(\d{1,18})(?!\d)")
_PIPELINE = re.compile(r"pipeline parallelism enabled(?:\s*\(n_copies\s*=\s*(\d{1,9})\))?")
_PIPELINE_GIVEN_UP = re.compile(r"retrying without pipeline parallelism")
_CONTEXT_MADE = re.compile(r"constructing llama_context")
_CACHE_REUSE_OFF = re.compile(
    r"cache_reuse is not supported by (?:this context|multimodal)|cache reuse is not supported - ignoring"
)
# `RPC0[10.0.0.2:50053] KV buffer size = 4.78 MiB`: every remote buffer is called RPC0, so the endpoint is the key.
_BUFFER = re.compile(r" (model|KV|RS|compute) buffer size\s*=\s*(\d{1,12}\.?\d{0,6}) MiB")
_KV_TYPES = re.compile(r"\bK \((\w+)\):\s*[\d.]+ MiB, V \((\w+)\)")
_ENDPOINT = re.compile(r"[\[(]([^\[\]()\s]+:\d{1,5})[\])]")
_BREAKDOWN_NAME = r"\|\s{1,9}- (?P<name>[^|\n]{1,120}?)\s{0,120}\|\s{0,120}"
_BREAKDOWN_PARTS = r"(?P<model>\d{1,12}) \+\s{1,40}(?P<context>\d{1,12}) \+\s{1,40}(?P<compute>\d{1,12})"
_BREAKDOWN_DEVICE = re.compile(
    _BREAKDOWN_NAME
    + r"(?P<total>\d{1,12}) =\s{1,40}(?P<free>\d{1,12}) \+ \(\s{0,40}\d{1,12} =\s{1,40}"
    + _BREAKDOWN_PARTS
    + r"\)"
)
_BREAKDOWN_OTHER = re.compile(_BREAKDOWN_NAME + r"\d{1,12} =\s{1,40}" + _BREAKDOWN_PARTS + r"\s{0,120}\|")
_RDMA_ACTIVATED = re.compile(r"RDMA activated: qpn=")
_RDMA_FAILED = re.compile(r"RDMA activate failed|RDMA CQ wc error")
_RPC_ERROR = re.compile(
    r"(?:send|recv) failed \(bytes_|RDMA CQ wc error|Remote RPC server crashed or returned malformed"
)
# From here on the server was told to stop: what breaks now (workers that are gone already) breaks nothing.
_TOLD_TO_STOP = re.compile(r"cleaning up before exit|Received (?:second )?interrupt")
_FLASHKDA = re.compile(r"K3_FLASHKDA_(ACTIVE|FALLBACK)")
_KDA_BLOCKED = re.compile(r"K3_KDA_BLOCKED_(ACTIVE|FALLBACK)")
_KDA_CHUNKED = re.compile(r"K3_KDA_CHUNKED_(ACTIVE|FALLBACK)")
_IQ1S_GROUPED = re.compile(r"K3_IQ1S_GROUPED_(ACTIVE|FALLBACK)")
_IQ1S_ROWS256 = re.compile(r"K3_IQ1S_ROWS256_(ACTIVE|FALLBACK)")
_IQ1S_NCOLS = re.compile(r"K3_IQ1S_NCOLS_(ACTIVE|FALLBACK)")
_RPC_TIMING = re.compile(
    r"K3_RPC_TIMING .*end_us=(\d{1,18}) prepare_us=(\d{1,15}) compute_us=(\d{1,15})"
    r" .*set_us=(\d{1,15}) .*get_us=(\d{1,15})"
)

# A line that ends a server, and what it means to the person who reads it.
_FATAL: Sequence[tuple[str, str]] = (
    (
        r"model does not support different K \(\w+\) and V \(\w+\) cache types",
        "this llama.cpp accepts only equal K and V cache types for an MLA model: set both alike",
    ),
    (
        r"quantized V cache was requested, but this requires Flash Attention|quantized V cache requires flash",
        "a quantized V cache needs flash attention: set flash_attn to on",
    ),
    (
        r"K cache type \w+ with block size \d+ does not divide",
        "the K cache type does not fit the model's head size: choose another type",
    ),
    (
        r"Remote RPC server crashed or returned malformed response",
        "a worker died, was killed or answered in another protocol: look at the workers' logs and journals",
    ),
    (r"Failed to connect to \S+", "a worker does not listen at that address"),
    (r"RPC handshake failed", "what listens there is no RPC server of this protocol"),
    (r"RPC server version mismatch", "head and worker are of different builds: install one release"),
    (r"Failed to parse endpoint", "an endpoint is not HOST:PORT"),
    (r"Failed to create server socket", "the worker's port is taken or its address is not on this rank"),
    (
        r"failed to allocate \S{0,40} ?buffer|unable to allocate \S{1,40} buffer|Failed to allocate",
        "a device has not enough free memory for this configuration",
    ),
    (r"error: invalid argument: \S+|unknown argument", "this build does not know one of the flags"),
    (
        r"couldn't bind HTTP server socket|failed to bind",
        "the head's port is taken or its address is wrong",
    ),
    (r"failed to load model|error loading model|failed to open GGUF", "the model file cannot be loaded"),
    (r"CUDA error|out of memory", "the CUDA device failed or is out of memory"),
    (r"GGML_ASSERT\(|ggml_abort", "llama.cpp stopped at an internal check"),
)
_FATAL_LIMIT = 20  # a crashing server can repeat itself; the first lines tell the story
_LINE_LIMIT = 400
_NAME_LIMIT = 120
# one pass over the log instead of one per pattern and line: logs of a long run have millions of lines
_ANY_FATAL = re.compile("|".join(f"(?P<f{place}>{pattern})" for place, (pattern, _) in enumerate(_FATAL)))


def parse_head_log(text: str) -> Observations:
    """Read a llama-server log (plain or JSON lines, ideally of verbosity 4); never raises, whatever the text is."""
    values: dict[str, Any] = {}
    graphs = _GRAPHS_REUSED.findall(text)
    if graphs:
        values["graphs_reused"] = int(graphs[-1])
    pipeline = _PIPELINE.search(text)
    if pipeline or _CONTEXT_MADE.search(text):
        values["pipeline_parallel"] = pipeline is not None and not _PIPELINE_GIVEN_UP.search(text)
    if pipeline and pipeline[1]:
        values["n_copies"] = int(pipeline[1])
    if _CACHE_REUSE_OFF.search(text):
        values["cache_reuse_disabled"] = True
    tables: dict[str, dict[str, float]] = {"model": {}, "KV": {}, "RS": {}, "compute": {}}
    for match in _BUFFER.finditer(text):
        before = text[max(0, match.start() - _NAME_LIMIT) : match.start()].split()
        kind, device, size = match[1], _device(before[-1] if before else ""), float(match[2])
        # A split model says one buffer a file; a context that is made again says its own anew.
        tables[kind][device] = size + (tables[kind].get(device, 0.0) if kind == "model" else 0.0)
    values["model_mib"], values["kv_cache_mib"] = tables["model"], tables["KV"]
    values["recurrent_mib"], values["compute_mib"] = tables["RS"], tables["compute"]
    types = _KV_TYPES.search(text)
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
        for pattern in (_BREAKDOWN_DEVICE, _BREAKDOWN_OTHER)
        for match in pattern.finditer(text)
    }
    return Observations(**values, **_transport(text), fatal=_fatal(text))


def parse_worker_log(text: str, rank: str = "") -> Observations:
    """Read an RPC server's log: transport, markers, times, fatal lines (led by ``rank``); never raises."""
    fatal = _fatal(text, f"{rank}: " if rank else "")
    return Observations(**_transport(text), **_markers(text), **_rpc_times(text, rank), fatal=fatal)


def _rpc_times(text: str, rank: str) -> dict[str, dict[str, float]]:
    """What a timed worker says, over all graphs: every rank sees the same microbatches.

    Milliseconds computed and transferred; the 99th percentile of a graph's transfers, in milliseconds; and the share of
    the time between two graphs in which the worker had nothing to do, as the median (a pause between requests is rare).
    """
    times = [tuple(map(int, found)) for found in _RPC_TIMING.findall(text)]
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
    activated = len(_RDMA_ACTIVATED.findall(text))
    return {
        "rdma_activated": activated > 0 and not _RDMA_FAILED.search(text),
        "rdma_connections": activated,
        "rpc_errors": len(_RPC_ERROR.findall(_while_serving(text))),
    }


def _while_serving(text: str) -> str:
    end = _TOLD_TO_STOP.search(text)
    return text[: end.start()] if end else text


def _markers(text: str) -> dict[str, int]:
    found = _FLASHKDA.findall(text)
    blocked = _KDA_BLOCKED.findall(text)
    chunked = _KDA_CHUNKED.findall(text)
    grouped = _IQ1S_GROUPED.findall(text)
    rows256 = _IQ1S_ROWS256.findall(text)
    ncols = _IQ1S_NCOLS.findall(text)
    return {
        "flashkda_active": found.count("ACTIVE"),
        "flashkda_fallback": found.count("FALLBACK"),
        "kda_blocked_active": blocked.count("ACTIVE"),
        "kda_blocked_fallback": blocked.count("FALLBACK"),
        "kda_chunked_active": chunked.count("ACTIVE"),
        "kda_chunked_fallback": chunked.count("FALLBACK"),
        "iq1s_grouped_active": grouped.count("ACTIVE"),
        "iq1s_grouped_fallback": grouped.count("FALLBACK"),
        "iq1s_rows256_active": rows256.count("ACTIVE"),
        "iq1s_rows256_fallback": rows256.count("FALLBACK"),
        "iq1s_ncols_active": ncols.count("ACTIVE"),
        "iq1s_ncols_fallback": ncols.count("FALLBACK"),
    }


def _device(name: str) -> str:
    """``RPC0[10.0.0.2:50053]`` and ``RPC0 (10.0.0.2:50053)`` -> ``10.0.0.2:50053``; a local device keeps its name."""
    endpoint = _ENDPOINT.search(name)
    return endpoint[1] if endpoint else name.strip()


def _fatal(text: str, lead: str = "") -> list[Fatal]:
    found: list[Fatal] = []
    seen: set[str] = set()
    text = _while_serving(text)
    for match in _ANY_FATAL.finditer(text):
        if match[0] in seen:
            continue
        seen.add(match[0])
        start = max(text.rfind("\n", 0, match.start()) + 1, match.start() - _LINE_LIMIT)
        line = text[start : match.end() + _LINE_LIMIT].split("\n", 1)[0].strip()
        meaning = _FATAL[int(str(match.lastgroup)[1:])][1]
        found.append(Fatal(line=f"{lead}{line[:_LINE_LIMIT]}", meaning=meaning))
        if len(found) == _FATAL_LIMIT:
            break
    return found
