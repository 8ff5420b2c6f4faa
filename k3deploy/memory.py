"""The memory forecast: what one configuration takes on each rank, in bytes, before anything is started.

Pure functions of the model's facts and the settings. What llama.cpp allocates by a rule is computed by that rule and
is exact: layer split, weights, K and V cache, recurrent state, context checkpoints, attention mask, pinned RDMA memory.
The rest of the compute buffers depends on how the graph allocator reuses memory: ``compute`` is an estimate, calibrated
against b11434's own figures (tests/fixtures/llama/README.md has them and the error).

Not foreseen: what a CUDA context, cuBLAS and the process itself take, and pages that the kernel caches.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

from k3deploy.errors import K3Error
from k3deploy.model_facts import F32, LayerKind, ModelFacts

Backend = Literal["cpu", "cuda"]


# llama-server's defaults where a setting is silent; slots share one K cache only in the automatic choice of four.
DEFAULT_BATCH, DEFAULT_UBATCH, DEFAULT_SLOTS, DEFAULT_CHECKPOINTS = 2048, 512, 4, 32
CONTEXT_PADDING = 256


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank as the forecast sees it; the head comes first.

    ``device`` says whether it holds a share of the layers (a CPU head holds one through its local rpc server);
    ``local_worker`` that the share is served by such an rpc server. ``memory_bytes`` decides the split where
    ``tensor_split`` is not set.
    """

    name: str
    memory_bytes: int = 0
    device: bool = True
    local_worker: bool = False


@dataclass(frozen=True, slots=True)
class RdmaRing:
    """Compile-time sizes of the RDMA transport: every connection pins one sending and ``depth`` receiving chunks."""

    chunk_bytes: int = 256 * 1024
    depth: int = 24

    @property
    def connection_bytes(self) -> int:
        return self.chunk_bytes * (self.depth + 1)


@dataclass(frozen=True, slots=True)
class RankForecast:
    """What one rank needs. ``items`` are bytes by part, in a fixed order, the parts that are zero included."""

    rank: str
    layers: tuple[int, ...]
    kinds: Mapping[LayerKind, int]
    output_layer: bool
    items: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.items.values())


# --- where a layer goes ----------------------------------------------------------------------------------------------


def split_layers(n_layer: int, shares: Sequence[float], n_gpu_layers: int = -1) -> list[int | None]:
    """The device of each layer, and last of the output layer, as ``--split-mode layer`` assigns them.

    ``shares`` are the proportions (``--tensor-split``), one a device. None is the head's CPU: the layers that
    ``n_gpu_layers`` leaves there (negative: none). The output layer counts as one layer. Compared in single precision,
    as llama.cpp does, so that a border which falls on a layer falls the same way.
    """
    on_devices = n_layer + 1 if n_gpu_layers < 0 else min(n_gpu_layers, n_layer + 1)
    if not shares or sum(shares) <= 0 or not on_devices:
        return [None] * (n_layer + 1)
    ends = list(accumulate(shares, lambda total, share: _f32(total + _f32(share))))
    borders = [_f32(end / ends[-1]) for end in ends]
    first = n_layer + 1 - on_devices
    return [
        None if layer < first else bisect_right(borders, _f32((layer - first) / on_devices))
        for layer in range(n_layer + 1)
    ]


def _f32(value: float) -> float:
    return ctypes.c_float(value).value


# --- settings --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Server:
    """The settings as llama-server resolves them: paddings, limits and defaults applied."""

    slots: int
    cells: int  # K cache rows, all slots together
    slot_cells: int  # rows that one sequence sees
    ubatch: int
    type_k: str
    type_v: str
    flash_attn: bool
    checkpoints: int
    n_gpu_layers: int
    tensor_split: tuple[float, ...]

    @classmethod
    def of(cls, facts: ModelFacts, settings: Mapping[str, Any]) -> _Server:
        mode = settings.get("split_mode") or "layer"
        if mode != "layer":
            raise K3Error(f"no memory forecast for split_mode {mode}: only layers over devices are foreseen")
        parallel = settings.get("parallel")
        slots = parallel or DEFAULT_SLOTS
        unified = settings.get("kv_unified", parallel is None)
        cells = _pad(settings.get("ctx_size") or facts.n_ctx_train)
        slot_cells = cells if unified else _pad(cells // slots)
        type_k = settings.get("cache_type_k") or "f16"
        batch = settings.get("batch_size") or DEFAULT_BATCH
        n_gpu_layers = settings.get("n_gpu_layers")
        checkpoints = settings.get("ctx_checkpoints")
        return cls(
            slots=slots,
            cells=cells if unified else slot_cells * slots,
            slot_cells=slot_cells,
            ubatch=min(settings.get("ubatch_size") or DEFAULT_UBATCH, batch, cells),
            type_k=type_k,
            type_v=type_k if facts.is_mla else settings.get("cache_type_v") or "f16",
            flash_attn=settings.get("flash_attn") != "off",
            checkpoints=DEFAULT_CHECKPOINTS if checkpoints is None else checkpoints,
            n_gpu_layers=-1 if n_gpu_layers is None else n_gpu_layers,
            tensor_split=tuple(settings.get("tensor_split") or ()),
        )


def _pad(tokens: int) -> int:
    return -(-tokens // CONTEXT_PADDING) * CONTEXT_PADDING


# --- the forecast ----------------------------------------------------------------------------------------------------


def forecast(
    facts: ModelFacts,
    settings: Mapping[str, Any],
    ranks: Sequence[Rank],
    *,
    backend: Backend = "cpu",
    rdma: RdmaRing | None = None,
    pipeline_copies: int = 4,
) -> list[RankForecast]:
    """What each of ``ranks`` needs under ``settings`` (keys of the settings vocabulary), in the order given.

    ``rdma`` is None on TCP. ``pipeline_copies`` is the build's GGML_SCHED_MAX_COPIES: with several devices and every
    layer on one of them, each input of a rank's graph (the attention mask among them) exists that many times.
    Raises K3Error for what cannot be foreseen (another split mode, a cache type that does not fit the model).
    """
    server = _Server.of(facts, settings)
    devices = [rank for rank in ranks if rank.device]
    shares = _shares(server, devices)
    places = split_layers(facts.n_layer, shares, server.n_gpu_layers)
    pipelined = len(devices) > 1 and None not in places
    copies = pipeline_copies if pipelined else 1
    result = []
    for rank in ranks:
        index = devices.index(rank) if rank.device else None
        layers = tuple(layer for layer, place in enumerate(places[:-1]) if index is not None and place == index)
        output = index is not None and places[-1] == index
        items = _device_items(facts, server, layers, output, copies, backend)
        if rank is ranks[0]:
            _add(items, _host_items(facts, server, places, copies))
        items["rdma_pinned"] = _connections(rank, ranks) * rdma.connection_bytes if rdma else 0
        kinds: dict[LayerKind, int] = {}
        for layer in layers:
            kinds[facts.layers[layer]] = kinds.get(facts.layers[layer], 0) + 1
        result.append(RankForecast(rank.name, layers, kinds, output, items))
    return result


def _shares(server: _Server, devices: Sequence[Rank]) -> list[float]:
    """Proportions per device: missing ones are zero and surplus ones ignored; by memory where none is set."""
    if any(server.tensor_split):
        given = [*server.tensor_split, *([0.0] * len(devices))]
        return given[: len(devices)]
    if all(rank.memory_bytes for rank in devices):
        return [float(rank.memory_bytes) for rank in devices]
    return [1.0] * len(devices)


def _connections(rank: Rank, ranks: Sequence[Rank]) -> int:
    """RPC connection ends on ``rank``: a worker has one; the head one per worker, and both ends of its local one."""
    if rank is not ranks[0]:
        return int(rank.device)
    workers = sum(1 for other in ranks[1:] if other.device)
    return workers + 2 * int(rank.local_worker)


def _device_items(
    facts: ModelFacts, server: _Server, layers: Sequence[int], output: bool, copies: int, backend: Backend
) -> dict[str, int]:
    """The share of one device: its layers, and what computing them takes."""
    attention = [layer for layer in layers if facts.layers[layer] != "kda"]
    recurrent = len(layers) - len(attention)
    rows = sum(facts.cache_row(layer, server.type_k, server.type_v) for layer in attention)
    return {
        "weights": sum(facts.layer_bytes[layer] for layer in layers) + (facts.output_bytes if output else 0),
        "kv_cache": server.cells * rows,
        "kv_conversion": _conversion(facts, server, attention) if backend == "cuda" else 0,
        "recurrent_state": recurrent * server.slots * facts.recurrent_layer_bytes,
        "attention_mask": copies * _mask(server) if attention else 0,
        "compute": _compute(facts, server, layers, output, copies) if layers or output else 0,
        "checkpoints": 0,
    }


def _host_items(facts: ModelFacts, server: _Server, places: Sequence[int | None], copies: int) -> dict[str, int]:
    """The head's own process: token embeddings, layers left on its CPU, graph inputs, logits, checkpoints."""
    layers = [layer for layer, place in enumerate(places[:-1]) if place is None]
    items = _device_items(facts, server, layers, places[-1] is None, copies, "cpu") if layers else {}
    inputs = 2 * (copies + 1) * server.ubatch * facts.n_embd * F32
    _add(
        items,
        {
            "weights": facts.input_bytes,
            "attention_mask": 0 if items.get("attention_mask") else copies * _mask(server),
            "compute": inputs + server.slots * facts.n_vocab * F32,
            "checkpoints": server.checkpoints * server.slots * facts.recurrent_bytes,
        },
    )
    return items


def _add(items: dict[str, int], more: Mapping[str, int]) -> None:
    for name, size in more.items():
        items[name] = items.get(name, 0) + size


def _mask(server: _Server) -> int:
    """One attention mask: a value for every token of the microbatch and every cache row that it may see."""
    return server.ubatch * server.slot_cells * (2 if server.flash_attn else 4)


def _conversion(facts: ModelFacts, server: _Server, attention: Sequence[int]) -> int:
    """CUDA's flash attention reads f16: a quantised cache is converted whole, one layer at a time."""
    if not attention or not server.flash_attn:
        return 0
    widest = 0
    for layer in attention:
        heads = facts.n_head_kv[layer]
        lengths = 0 if server.type_k in ("f16", "f32", "bf16") else facts.key_length
        if facts.layers[layer] == "attention" and server.type_v not in ("f16", "f32", "bf16"):
            lengths += facts.value_length
        widest = max(widest, heads * lengths)
    return server.cells * widest * 2


def _compute(facts: ModelFacts, server: _Server, layers: Sequence[int], output: bool, copies: int) -> int:
    """Estimate of one device's compute buffer without the masks.

    Two parts live at once, both proportional to the microbatch: the graph inputs that come from the rank before (copied
    for the pipeline; with attention residuals that is the stack of banked layers twice over, raw and normalised), and
    the largest layer's activations. The factors are fitted to b11434.
    """
    n_embd = facts.n_embd
    start = layers[0] if layers else facts.n_layer
    entering = _banked(facts, start)
    # a rank that begins with a banking layer receives the stack with the new entry already in it
    crossing = 2 * entering + 2 + (_banked(facts, start + 1) - entering if layers else 0)
    inputs = copies * n_embd * (4 if start == 0 else crossing)
    peaks = [_layer_elements(facts, layer, entering) for layer in layers]
    if output:
        peaks.append(n_embd * (3 * _banked(facts, facts.n_layer) + 2))
    return F32 * server.ubatch * (inputs + max(peaks, default=0)) + _attention_scores(facts, server, layers)


def _banked(facts: ModelFacts, layer: int) -> int:
    """Entries of the residual stack before ``layer`` runs."""
    return -(-layer // facts.residual_block) if facts.residual_block else 0


def _layer_elements(facts: ModelFacts, layer: int, entering: int) -> int:
    """Activations of one layer at their widest, in elements a token."""
    n_embd = facts.n_embd
    stack = _banked(facts, layer + 1)
    own = (stack - entering) * n_embd  # the part of the stack that was made on this device
    if facts.layers[layer] == "kda":
        mixing = 6 * facts.n_head * facts.kda_head_dim + 3 * n_embd
    else:
        # queries beside the absorbed queries or the output, both as long as a K row
        mixing = facts.n_head * (facts.key_length + facts.value_length) + 5 * n_embd
    experts = 3 * facts.n_expert_used * (facts.n_ff_expert + (facts.n_latent or n_embd)) // 2 + 3 * n_embd
    feeding = experts if facts.n_expert_used else 3 * facts.n_ff + 2 * n_embd
    residuals = (3 * stack + 1) * n_embd if facts.residual_block and stack > entering else 0
    return max(mixing + own, feeding + own, residuals)


def _attention_scores(facts: ModelFacts, server: _Server, layers: Sequence[int]) -> int:
    """Without flash attention: the scores of all heads, and the transposed V of an MLA layer."""
    if server.flash_attn or all(facts.layers[layer] == "kda" for layer in layers):
        return 0
    return server.slot_cells * (server.ubatch * facts.n_head * F32 + facts.value_length * 2)
