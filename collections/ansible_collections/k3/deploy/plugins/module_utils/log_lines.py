"""Which lines of a head's or a worker's log are read for facts: their one home. Standard library only.

The rank uses the words to choose what it keeps of a log that is too long to travel; the controller uses the patterns to read what came
(k3deploy/log_lines.py loads this file).
"""

from __future__ import annotations

import re
from typing import NamedTuple

_RDMA_BROKEN = "RDMA CQ wc error"


class Kind(NamedTuple):
    """Lines of one kind.

    words: fixed texts, of which every line that the pattern finds has one; looking for these is what a rank can do with hundreds of MiB.
    feeds: the observations that are wrong where lines of this kind are missing. keep: how many bytes of them a rank sends from a log's middle.
    """

    pattern: str
    words: tuple[str, ...]
    feeds: tuple[str, ...]
    keep: int = 256 << 10


def _marker(name):
    """The lines by which a kernel says, once a reason, whether it runs."""
    marker = f"K3_{name.upper()}_"
    return Kind(f"{marker}(ACTIVE|FALLBACK)", (f"{marker}ACTIVE", f"{marker}FALLBACK"), (f"{name}_active", f"{name}_fallback"))


MARKERS = ("flashkda", "kda_blocked", "kda_chunked", "iq1s_grouped", "iq1s_rows256", "iq1s_ncols")

# A line that ends a server, the words of it, and what it means to the person who reads it.
FATAL = (
    (
        r"model does not support different K \(\w+\) and V \(\w+\) cache types",
        ("model does not support different K (",),
        "this llama.cpp accepts only equal K and V cache types for an MLA model: set both alike",
    ),
    (
        r"quantized V cache was requested, but this requires Flash Attention|quantized V cache requires flash",
        ("quantized V cache was requested", "quantized V cache requires flash"),
        "a quantized V cache needs flash attention: set flash_attn to on",
    ),
    (
        r"K cache type \w+ with block size \d+ does not divide",
        ("K cache type ",),
        "the K cache type does not fit the model's head size: choose another type",
    ),
    (
        r"Remote RPC server crashed or returned malformed response",
        ("Remote RPC server crashed",),
        "a worker died, was killed or answered in another protocol: look at the workers' logs and journals",
    ),
    (r"Failed to connect to \S+", ("Failed to connect to ",), "a worker does not listen at that address"),
    (r"RPC handshake failed", ("RPC handshake failed",), "what listens there is no RPC server of this protocol"),
    (r"RPC server version mismatch", ("RPC server version mismatch",), "head and worker are of different builds: install one release"),
    (r"Failed to parse endpoint", ("Failed to parse endpoint",), "an endpoint is not HOST:PORT"),
    (
        r"Failed to create server socket",
        ("Failed to create server socket",),
        "the worker's port is taken or its address is not on this rank",
    ),
    (
        r"failed to allocate \S{0,40} ?buffer|unable to allocate \S{1,40} buffer|Failed to allocate",
        ("failed to allocate ", "unable to allocate ", "Failed to allocate"),
        "a device has not enough free memory for this configuration",
    ),
    (
        r"error: invalid argument: \S+|unknown argument",
        ("error: invalid argument: ", "unknown argument"),
        "this build does not know one of the flags",
    ),
    (
        r"couldn't bind HTTP server socket|failed to bind",
        ("couldn't bind HTTP server socket", "failed to bind"),
        "the head's port is taken or its address is wrong",
    ),
    (
        r"failed to load model|error loading model|failed to open GGUF",
        ("failed to load model", "error loading model", "failed to open GGUF"),
        "the model file cannot be loaded",
    ),
    (r"CUDA error|out of memory", ("CUDA error", "out of memory"), "the CUDA device failed or is out of memory"),
    (r"GGML_ASSERT\(|ggml_abort", ("GGML_ASSERT(", "ggml_abort"), "llama.cpp stopped at an internal check"),
)

_BREAKDOWN_NAME = r"\|\s{1,9}- (?P<name>[^|\n]{1,120}?)\s{0,120}\|\s{0,120}"
_BREAKDOWN_PARTS = r"(?P<model>\d{1,12}) \+\s{1,40}(?P<context>\d{1,12}) \+\s{1,40}(?P<compute>\d{1,12})"

KINDS = {
    # What ends the reading of some others comes first: what breaks after it (workers that are gone already) breaks nothing.
    "told_to_stop": Kind(
        r"cleaning up before exit|Received (?:second )?interrupt",
        ("cleaning up before exit", "Received interrupt", "Received second interrupt"),
        ("rpc_errors", "fatal"),
    ),
    "graphs_reused": Kind(r"graphs reused\s*=\s*(\d{1,18})(?!\d)", ("graphs reused",), ("graphs_reused",)),
    "pipeline": Kind(
        r"pipeline parallelism enabled(?:\s*\(n_copies\s*=\s*(\d{1,9})\))?",
        ("pipeline parallelism enabled",),
        ("pipeline_parallel", "n_copies"),
    ),
    "pipeline_given_up": Kind(r"retrying without pipeline parallelism", ("retrying without pipeline parallelism",), ("pipeline_parallel",)),
    "context_made": Kind(r"constructing llama_context", ("constructing llama_context",), ("pipeline_parallel",)),
    "cache_reuse_off": Kind(
        r"cache_reuse is not supported by (?:this context|multimodal)|cache reuse is not supported - ignoring",
        ("cache_reuse is not supported by ", "cache reuse is not supported - ignoring"),
        ("cache_reuse_disabled",),
    ),
    # `RPC0[10.0.0.2:50053] KV buffer size = 4.78 MiB`: every remote buffer is called RPC0, so the endpoint is the key.
    "buffer": Kind(
        r" (model|KV|RS|compute) buffer size\s*=\s*(\d{1,12}\.?\d{0,6}) MiB",
        (" buffer size",),
        ("model_mib", "kv_cache_mib", "recurrent_mib", "compute_mib"),
    ),
    "kv_types": Kind(r"\bK \((\w+)\):\s*[\d.]+ MiB, V \((\w+)\)", (" MiB, V (",), ("kv_types",)),
    "breakdown_device": Kind(
        _BREAKDOWN_NAME + r"(?P<total>\d{1,12}) =\s{1,40}(?P<free>\d{1,12}) \+ \(\s{0,40}\d{1,12} =\s{1,40}" + _BREAKDOWN_PARTS + r"\)",
        ("memory_breakdown",),
        ("memory_breakdown",),
    ),
    "breakdown_other": Kind(
        _BREAKDOWN_NAME + r"\d{1,12} =\s{1,40}" + _BREAKDOWN_PARTS + r"\s{0,120}\|", ("memory_breakdown",), ("memory_breakdown",)
    ),
    "rdma_activated": Kind(r"RDMA activated: qpn=", ("RDMA activated: qpn=",), ("rdma_activated", "rdma_connections")),
    "rdma_failed": Kind(rf"RDMA activate failed|{_RDMA_BROKEN}", ("RDMA activate failed", _RDMA_BROKEN), ("rdma_activated",)),
    "rpc_error": Kind(
        rf"(?:send|recv) failed \(bytes_|{_RDMA_BROKEN}|Remote RPC server crashed or returned malformed",
        ("send failed (bytes_", "recv failed (bytes_", _RDMA_BROKEN, "Remote RPC server crashed"),
        ("rpc_errors",),
    ),
    # What a proof of the transport and the record of a broken block name; it feeds no observation.
    "broken": Kind(
        rf"{_RDMA_BROKEN}.*|(?:send|recv) failed \(.*|Remote RPC server crashed.*|RPC server version mismatch.*|RPC handshake failed.*"
        r"|Unknown command.*|.*size mismatch.*|.*[Tt]imed? ?out.*",
        (
            *(_RDMA_BROKEN, "send failed (", "recv failed (", "Remote RPC server crashed", "RPC server version mismatch", "RPC handshake failed"),
            *("Unknown command", "size mismatch", "imed out", "imedout", "ime out", "imeout"),
        ),
        (),
    ),
    **{name: _marker(name) for name in MARKERS},
    # A line a graph: hours of decoding are tens of thousands.
    "rpc_timing": Kind(
        r"K3_RPC_TIMING .*end_us=(\d{1,18}) prepare_us=(\d{1,15}) compute_us=(\d{1,15}) .*set_us=(\d{1,15}) .*get_us=(\d{1,15})",
        ("K3_RPC_TIMING ",),
        ("rank_forward_ms", "rank_rpc_ms", "rank_rpc_p99_ms", "rank_idle_share", "rpc_p99", "worker_link_idle", "slowest_rank_excess"),
        keep=8 << 20,
    ),
    "fatal": Kind("|".join(pattern for pattern, _, _ in FATAL), tuple(word for _, words, _ in FATAL for word in words), ("fatal",)),
}

# What a rank writes into the place of what it left out. Brackets and all: a server writes no such line of its own.
GAP = "[k3deploy: {} bytes left out here, but for the lines below that are counted]"
LOST = "[k3deploy: {} lines of {} left out here]"
END = "[k3deploy: the end of the log]"
_LOST = re.compile(r"^\[k3deploy: \d{1,15} lines of (\w{1,40}) left out here\]$", re.MULTILINE)


def lost_kinds(text):
    """The kinds of which lines are missing in an excerpt, although they are counted."""
    return [name for name in dict.fromkeys(_LOST.findall(text)) if name in KINDS] if "[k3deploy: " in text else []


# Lines of numbers alone. They are most of a long log, hold nothing that could be a secret, and looking for one in them takes seconds a MiB.
_ONLY_NUMBERS = re.compile(r"((?:^K3_RPC_TIMING(?: kind=[a-z]{1,20}| [a-z_]{1,20}=\d{1,20}){1,20}\n)+)", re.MULTILINE)


def around_numbers(text):
    """A text in pieces: those at odd places are lines of numbers alone."""
    return _ONLY_NUMBERS.split(text)
