"""What a model is to the forecast: layers, widths, bytes, from a GGUF's own tables or from an inventory's facts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from k3deploy.errors import InputError, K3Error, Problem

LayerKind = Literal["kda", "mla", "attention"]
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


def row_bytes(cache_type: str, length: int) -> int:
    """Bytes of ``length`` elements in a cache type of llama-server."""
    try:
        size, block = CACHE_TYPES[cache_type]
    except KeyError:
        raise K3Error(f"unknown cache type {cache_type!r}; known: {', '.join(CACHE_TYPES)}") from None
    if length % block:
        raise K3Error(f"cache type {cache_type} needs rows in multiples of {block}, this model has rows of {length}")
    return length // block * size


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


MAX_READS = 5_000_000  # several times what a vocabulary of 160 000 tokens with its merges takes
MAX_LAYERS = 10_000  # far above any model, far below what makes tables of layers a burden
_LAYER_OF = re.compile(r"blk\.(\d+)\.")
_SPLIT_NAME = re.compile(r"-00001-of-(\d{5})\.gguf$")


def read_model_facts(path: Path) -> ModelFacts:
    """The facts of a GGUF, from its tensor table and keys; of a split model, give the first file."""
    try:
        readers = [_reader(part) for part in _parts(path)]
        keys = _Keys(path, {name: value.contents() for name, value in readers[0].fields.items()})
        sizes = [(tensor.name, int(tensor.n_bytes)) for reader in readers for tensor in reader.tensors]
        return keys.facts(sizes)
    except InputError:
        raise
    except Exception as error:  # the reader believes what a file says of itself: a damaged one breaks it anywhere
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise InputError([Problem(path, 0, f"cannot read the model: {reason}")]) from None


def _reader(path: Path) -> Any:
    """gguf's own reader, which alone would follow a damaged length for years; here reading ends with the file."""
    from gguf import GGUFReader

    class Bounded(GGUFReader):
        reads = 0

        def _get(self, offset: int, *rest: Any, **more: Any) -> Any:
            self.reads += 1
            if self.reads > MAX_READS:
                raise ValueError(f"it has more than {MAX_READS} values beside its tensors: a length in it is damaged")
            found = super()._get(offset, *rest, **more)
            # The characters of an empty string are the one thing that may have no size at the very end.
            if offset > len(self.data) or (offset == len(self.data) and "count" not in more and len(rest) < 2):
                raise ValueError("it ends before what it says of itself")
            return found

    return Bounded(path)


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
