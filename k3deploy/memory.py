"""The memory forecast: what one configuration takes on each rank, in bytes, before anything is started.

Pure functions of the model's facts and the settings. What llama.cpp allocates by a rule is computed by that rule and
is exact: layer split, weights, K and V cache, recurrent state, context checkpoints, attention mask, pinned RDMA memory.
The rest of the compute buffers depends on how the graph allocator reuses memory: ``compute`` is an estimate, calibrated
against b11434's own figures (tests/fixtures/llama/README.md has them and the error).

Not foreseen: what a CUDA context, cuBLAS and the process itself take, and pages that the kernel caches.
"""

from __future__ import annotations

import ctypes
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from k3deploy.errors import InputError, K3Error, Problem

LayerKind = Literal["kda", "mla", "attention"]
Backend = Literal["cpu", "cuda"]

F32 = 4  # bytes of the recurrent state's, activations' and logits' elements

# Bytes and elements of one block of each cache type of llama-server.
CACHE_TYPES: dict[str, tuple[int, int]] = {
    "f32": (4, 1),
    "f16": (2, 1),
    "bf16": (2, 1),
    "q8_0": (34, 32),
    "q5_1": (24, 32),
    "q5_0": (22, 32),
    "q4_1": (20, 32),
    "q4_0": (18, 32),
    "iq4_nl": (18, 32),
}

# llama-server's defaults where a setting is silent; slots share one K cache only in the automatic choice of four.
DEFAULT_BATCH, DEFAULT_UBATCH, DEFAULT_SLOTS, DEFAULT_CHECKPOINTS = 2048, 512, 4, 32
CONTEXT_PADDING = 256


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the forecast needs to know of a model; sizes in elements unless the name says bytes.

    ``layers`` has one kind a layer and ``layer_bytes`` its weights. ``input_bytes`` (token embeddings) stay in the
    head's host memory, ``output_bytes`` go with the output layer. Zero means that the model has no such part.
    """

    arch: str
    layers: tuple[LayerKind, ...]
    layer_bytes: tuple[int, ...]
    input_bytes: int
    output_bytes: int
    n_embd: int
    n_head: int
    n_vocab: int
    n_ctx_train: int
    n_head_kv: tuple[int, ...]
    key_length: int
    value_length: int
    kda_head_dim: int = 0
    conv_kernel: int = 0
    n_ff: int = 0
    n_ff_expert: int = 0
    n_expert_used: int = 0
    n_latent: int = 0
    residual_block: int = 0

    @property
    def n_layer(self) -> int:
        return len(self.layers)

    @property
    def is_mla(self) -> bool:
        """Full attention keeps a compressed K and no V (a view of K): K and V types must be equal."""
        return "mla" in self.layers

    @property
    def is_recurrent(self) -> bool:
        return "kda" in self.layers

    @property
    def recurrent_layer_bytes(self) -> int:
        """State of one KDA layer and sequence in F32: S (heads x dim x dim), the last inputs of three convolutions."""
        d_inner = self.n_head * self.kda_head_dim
        return F32 * (d_inner * self.kda_head_dim + 3 * max(self.conv_kernel - 1, 0) * d_inner)

    @property
    def recurrent_bytes(self) -> int:
        """Recurrent state of one sequence over all layers; also the size of one context checkpoint."""
        return self.layers.count("kda") * self.recurrent_layer_bytes

    def cache_row(self, layer: int, type_k: str, type_v: str) -> int:
        """Bytes that one token takes in the K and V cache of ``layer``."""
        if self.layers[layer] == "kda":
            return 0
        keys = row_bytes(type_k, self.key_length * self.n_head_kv[layer])
        return (
            keys if self.layers[layer] == "mla" else keys + row_bytes(type_v, self.value_length * self.n_head_kv[layer])
        )


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


def row_bytes(cache_type: str, length: int) -> int:
    """Bytes of ``length`` elements in a cache type of llama-server."""
    try:
        size, block = CACHE_TYPES[cache_type]
    except KeyError:
        raise K3Error(f"unknown cache type {cache_type!r}; known: {', '.join(CACHE_TYPES)}") from None
    if length % block:
        raise K3Error(f"cache type {cache_type} needs rows in multiples of {block}, this model has rows of {length}")
    return length // block * size


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


# --- facts -----------------------------------------------------------------------------------------------------------

MAX_LAYERS = 10_000  # far above any model, far below what makes tables of layers a burden
_LAYER_OF = re.compile(r"blk\.(\d+)\.")
_SPLIT_NAME = re.compile(r"-00001-of-(\d{5})\.gguf$")


def read_model_facts(path: Path) -> ModelFacts:
    """The facts of a GGUF, from its tensor table and keys; of a split model, give the first file."""
    from gguf import GGUFReader

    try:
        readers = [GGUFReader(part) for part in _parts(path)]
        keys = _Keys(path, {name: value.contents() for name, value in readers[0].fields.items()})
        sizes = [(tensor.name, int(tensor.n_bytes)) for reader in readers for tensor in reader.tensors]
        return keys.facts(sizes)
    except InputError:
        raise
    except Exception as error:  # the reader believes what a file says of itself: a damaged one breaks it anywhere
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise InputError([Problem(path, 0, f"cannot read the model: {reason}")]) from None


def _parts(path: Path) -> list[Path]:
    if not (found := _SPLIT_NAME.search(path.name)):
        return [path]
    count = int(found[1])
    stem = path.name[: found.start()]
    return [path.with_name(f"{stem}-{part:05d}-of-{count:05d}.gguf") for part in range(1, count + 1)]


class _Keys:
    """Metadata of one GGUF, with the architecture's prefix left out."""

    def __init__(self, path: Path, keys: Mapping[str, Any]) -> None:
        self.path = path
        self.all = keys
        self.arch = str(keys.get("general.architecture", ""))

    def number(self, name: str, default: int | None = None) -> int:
        value = self.all.get(f"{self.arch}.{name}", default)
        if value is None:
            raise InputError([Problem(self.path, 0, f"the model has no key {self.arch}.{name}")])
        count = int(max(value)) if isinstance(value, list) else int(value)
        least, most = (0 if default == 0 else 1), (MAX_LAYERS if name == "block_count" else 2**40)
        if not least <= count <= most:
            raise InputError([Problem(self.path, 0, f"{self.arch}.{name} is {count}: not a model that can be served")])
        return count

    def per_layer(self, name: str, n_layer: int, default: int) -> list[int]:
        value = self.all.get(f"{self.arch}.{name}", default)
        return [int(item) for item in value] if isinstance(value, list) else [int(value)] * n_layer

    def facts(self, sizes: Sequence[tuple[str, int]]) -> ModelFacts:
        n_layer, n_embd, n_head = (
            self.number("block_count"),
            self.number("embedding_length"),
            self.number("attention.head_count"),
        )
        n_head_kv = self.per_layer("attention.head_count_kv", n_layer, n_head)
        mla = f"{self.arch}.attention.key_length_mla" in self.all
        kda_head_dim = self.number("kda.head_dim", 0)
        layers = tuple(_kind(heads, mla, kda_head_dim) for heads in n_head_kv)
        if None in layers:
            raise InputError(
                [Problem(self.path, 0, f"{self.arch}: layer {layers.index(None)} has a state of an unknown size")]
            )
        layer_bytes, rest = [0] * n_layer, 0
        inputs = sum(size for name, size in sizes if name.startswith("token_embd."))
        for name, size in sizes:
            if found := _LAYER_OF.match(name):
                layer_bytes[int(found[1])] += size
            elif not name.startswith("token_embd."):
                rest += size
        tied = not any(name == "output.weight" for name, _ in sizes)
        tokens = self.all.get("tokenizer.ggml.tokens") or []
        return ModelFacts(
            arch=self.arch,
            layers=tuple(kind for kind in layers if kind is not None),
            layer_bytes=tuple(layer_bytes),
            input_bytes=inputs,
            output_bytes=rest + (inputs if tied else 0),
            n_embd=n_embd,
            n_head=n_head,
            n_vocab=self.number("vocab_size", len(tokens)),
            n_ctx_train=self.number("context_length"),
            n_head_kv=tuple(n_head_kv),
            key_length=self.number("attention.key_length", n_embd // max(n_head, 1)),
            value_length=self.number("attention.value_length", n_embd // max(n_head, 1)),
            kda_head_dim=kda_head_dim,
            conv_kernel=self.number("ssm.conv_kernel", 0),
            n_ff=self.number("feed_forward_length", 0),
            n_ff_expert=self.number("expert_feed_forward_length", 0),
            n_expert_used=self.number("expert_used_count", 0),
            n_latent=self.number("expert_latent_length", 0),
            residual_block=self.number("attn_res.block_size", 0),
        )


def _kind(heads_kv: int, mla: bool, kda_head_dim: int) -> LayerKind | None:
    if heads_kv:
        return "mla" if mla else "attention"
    return "kda" if kda_head_dim else None


_Positive = Annotated[int, Field(ge=1)]
_Count = Annotated[int, Field(ge=0)]


class _WrittenFacts(BaseModel):
    """Facts as an inventory writes them (``k3_model.facts``), for a model that is not at hand."""

    model_config = ConfigDict(strict=True, extra="forbid")

    n_layer: _Positive
    attention_layers: list[_Count] = Field(min_length=1, description="the layers with full attention, counted from 0")
    bytes: _Positive = Field(description="the whole model")
    input_bytes: _Count = 0
    output_bytes: _Count = 0
    layer_bytes: list[_Positive] | None = Field(default=None, description="where they are not all alike")
    arch: str = ""
    mla: bool = True
    n_embd: _Positive
    n_head: _Positive
    n_head_kv: _Positive = 1
    n_vocab: _Positive
    n_ctx_train: _Positive
    key_length: _Positive
    value_length: _Positive
    kda_head_dim: _Count = 0
    conv_kernel: _Count = 0
    n_ff: _Count = 0
    n_ff_expert: _Count = 0
    n_expert_used: _Count = 0
    n_latent: _Count = 0
    residual_block: _Count = 0

    @model_validator(mode="after")
    def _consistent(self) -> _WrittenFacts:
        if max(self.attention_layers) >= self.n_layer:
            raise ValueError(f"attention_layers: layers are numbered 0 to {self.n_layer - 1}")
        if len(set(self.attention_layers)) < self.n_layer and not self.kda_head_dim:
            raise ValueError("kda_head_dim: needed, since some layers are not in attention_layers")
        if self.layer_bytes is not None and len(self.layer_bytes) != self.n_layer:
            raise ValueError(f"layer_bytes: one entry a layer ({self.n_layer}), not {len(self.layer_bytes)}")
        return self


def model_facts_from_mapping(mapping: Mapping[str, Any], source: Path | str = "k3_model.facts") -> ModelFacts:
    """The facts that an inventory holds. Layers are all alike in bytes unless ``layer_bytes`` says otherwise."""
    try:
        written = _WrittenFacts.model_validate(dict(mapping))
    except ValidationError as error:
        raise InputError(
            [
                Problem(source, 0, f"{'.'.join(map(str, item['loc']))}: {item['msg']}".removeprefix(": "))
                for item in error.errors()
            ]
        ) from None
    full = set(written.attention_layers)
    layers = tuple(_written_kinds(written, full))
    each, extra = divmod(written.bytes - written.input_bytes - written.output_bytes, written.n_layer)
    alike = [each + (layer < extra) for layer in range(written.n_layer)]
    shared = written.model_dump(exclude={"n_layer", "attention_layers", "bytes", "layer_bytes", "mla", "n_head_kv"})
    return ModelFacts(
        **shared,
        layers=layers,
        layer_bytes=tuple(written.layer_bytes or alike),
        n_head_kv=tuple(written.n_head_kv if layer in full else 0 for layer in range(written.n_layer)),
    )


def _written_kinds(written: _WrittenFacts, full: set[int]) -> Iterator[LayerKind]:
    for layer in range(written.n_layer):
        if layer not in full:
            yield "kda"
        else:
            yield "mla" if written.mla else "attention"
