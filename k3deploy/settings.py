"""The vocabulary of settings: what a baseline, a row or a cluster may set, and how llama-server spells it.

A setting is one of llama-server's long flags with ``-`` written as ``_`` (``ubatch_size`` is
``--ubatch-size``), or one of a few keys that are not flags of the head (environment, ports, what the harness
does). Matrix and inventory share this vocabulary, so that a misspelt key is found in both with the same words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from k3deploy.secrets import refuse_secret_name


def _on_off(value: object) -> object:
    """YAML reads a bare ``on`` or ``off`` as a boolean; the flag wants the word back."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return value


def _comma_list(value: object) -> object:
    """Accept ``1,1,1,1`` beside ``[1, 1, 1, 1]`` for proportions, as people copy them from command lines."""
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?(,\d+(\.\d+)?)*", value):
        return [float(part) if "." in part else int(part) for part in value.split(",")]
    return value


def no_control_characters(value: str) -> str:
    """Refuse what cannot stand in a unit file, an environment file or an argument vector."""
    if any(ord(character) < 32 or 127 <= ord(character) < 160 or character in "\u2028\u2029" for character in value):
        raise ValueError("must not contain newlines or other control characters")
    return value


def _not_secret(name: str) -> str:
    refuse_secret_name(name, "an environment of a candidate")
    return name


def _cpu_list(value: str) -> str:
    for part in value.split(","):
        low, _, high = part.partition("-")
        if high and int(low) > int(high):
            raise ValueError(f"range {part} runs backwards")
    return value


PlainText = Annotated[str, Field(min_length=1), AfterValidator(no_control_characters)]
CpuRange = Annotated[str, Field(pattern=r"^\d{1,3}-\d{1,3}$"), AfterValidator(_cpu_list)]
CpuList = Annotated[str, Field(pattern=r"^\d{1,3}(-\d{1,3})?(,\d{1,3}(-\d{1,3})?)*$"), AfterValidator(_cpu_list)]
CpuMask = Annotated[str, Field(pattern=r"^(0x)?[0-9a-fA-F]+$")]
RdmaRingText = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,5}x[1-9][0-9]{0,3}$")]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
CountOrUnlimited = Annotated[int, Field(ge=-1)]
Port = Annotated[int, Field(ge=1, le=65535)]
Toggle = Literal[0, 1]
OnOff = Annotated[Literal["on", "off"], BeforeValidator(_on_off)]
OnOffAuto = Annotated[Literal["on", "off", "auto"], BeforeValidator(_on_off)]
CacheType = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"]
EnvironmentName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$"), AfterValidator(_not_secret)]
EnvironmentValue = Annotated[str, AfterValidator(no_control_characters)]


class GraphLadder(BaseModel):
    """Requests sent once after a start, so that later requests of these sizes find their graphs built."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    prefill: list[Positive] = Field(default_factory=list, description="prompt sizes in tokens")
    decode: list[Positive] = Field(default_factory=list, description="numbers of tokens decoded")


class Settings(BaseModel):
    """Every setting that is known, all optional: a key that is absent is not spoken about, null removes it.

    Sizes are in tokens unless the name says otherwise; ``*_mib`` are MiB.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    # Flags of llama-server (the head).
    ctx_size: Positive | None = None
    batch_size: Positive | None = None
    ubatch_size: Positive | None = None
    keep: CountOrUnlimited | None = None
    parallel: Positive | None = None
    threads: Positive | None = None
    threads_batch: Positive | None = None
    threads_http: Positive | None = None
    cpu_mask: CpuMask | None = None
    cpu_range: CpuRange | None = None
    cpu_strict: Toggle | None = None
    cpu_mask_batch: CpuMask | None = None
    cpu_range_batch: CpuRange | None = None
    cpu_strict_batch: Toggle | None = None
    prio: Annotated[int, Field(ge=-1, le=3)] | None = None
    prio_batch: Annotated[int, Field(ge=0, le=3)] | None = None
    poll: Annotated[int, Field(ge=0, le=100)] | None = None
    poll_batch: Toggle | None = None
    numa: Literal["distribute", "isolate", "numactl"] | None = None
    flash_attn: OnOffAuto | None = None
    cache_type_k: CacheType | None = None
    cache_type_v: CacheType | None = None
    kv_offload: bool | None = None
    kv_unified: bool | None = None
    swa_full: bool | None = None
    split_mode: Literal["none", "layer", "row", "tensor"] | None = None
    tensor_split: Annotated[list[int | float], BeforeValidator(_comma_list), Field(min_length=1)] | None = None
    main_gpu: Count | None = None
    n_gpu_layers: Count | None = None
    override_tensor: PlainText | None = None
    cpu_moe: bool | None = None
    n_cpu_moe: Count | None = None
    n_cpu_ffn: Count | None = None
    op_offload: bool | None = None
    repack: bool | None = None
    no_host: bool | None = None
    load_mode: Literal["auto", "none", "mmap", "mlock", "mmap+mlock", "dio"] | None = None
    lazy_mode: Literal["on", "auto", "off"] | None = None
    check_tensors: bool | None = None
    fit: OnOff | None = None
    warmup: bool | None = None
    cont_batching: bool | None = None
    context_shift: bool | None = None
    cache_prompt: bool | None = None
    cache_reuse: Count | None = None
    cache_ram: CountOrUnlimited | None = Field(default=None, description="MiB of the server's prompt cache")
    cache_idle_slots: bool | None = None
    ctx_checkpoints: Count | None = None
    checkpoint_min_step: Count | None = None
    slot_prompt_similarity: Annotated[float, Field(ge=0, le=1)] | None = None
    rope_scaling: Literal["none", "linear", "yarn"] | None = None
    rope_scale: float | None = None
    rope_freq_base: float | None = None
    rope_freq_scale: float | None = None
    timeout: Positive | None = Field(default=None, description="seconds")
    jinja: bool | None = None
    metrics: bool | None = None
    slots: bool | None = None
    verbosity: Annotated[int, Field(ge=0, le=9)] | None = None

    # Not flags of the head.
    environment: dict[EnvironmentName, EnvironmentValue] | None = None
    rpc_port: Port | None = Field(default=None, description="port of every candidate worker")
    worker_threads: Positive | None = None
    worker_cpu_affinity: CpuList | None = None
    rdma: Literal["auto", "pinned", "off"] | None = Field(
        default=None, description="auto: as the program finds it; pinned: device and GID as found at launch; off: TCP"
    )
    rdma_ring: RdmaRingText | None = Field(
        default=None, description="KiB of an RDMA message x receive buffers of a connection, compiled in: 1024x63"
    )
    rpc_profile: Literal["proxy"] | None = Field(
        default=None, description="proxy: a proxy beside each worker times its graphs; TCP only"
    )
    memlock_mib: Positive | None = Field(default=None, description="pinned memory allowed for one RPC connection")
    graph_ladder: GraphLadder | None = None
    pretokenized: bool | None = Field(default=None, description="prompts are sent as exact token ids")
    guard_mib: Positive | None = Field(default=None, description="floor of MemAvailable on every rank")

    @model_validator(mode="before")
    @classmethod
    def _empty_means_nothing(cls, value: object) -> object:
        return {} if value is None else value

    def values(self) -> dict[str, Any]:
        """Only what was spoken about, as plain data (null included)."""
        return self.model_dump(mode="json", exclude_unset=True)


NOT_FLAGS = frozenset(
    {
        "environment",
        "rpc_port",
        "worker_threads",
        "worker_cpu_affinity",
        "rdma",
        "rdma_ring",
        "rpc_profile",
        "memlock_mib",
        "graph_ladder",
        "pretokenized",
        "guard_mib",
    }
)
# Flags that exist in one form only: giving them switches something on, leaving them away is the default.
ONE_SIDED = frozenset({"swa_full", "cpu_moe", "no_host", "check_tensors", "metrics"})


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Later layers win, key by key; ``environment`` is merged name by name; null removes a key."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            if key == "environment" and value is not None:
                merged[key] = {**merged.get(key, {}), **value}
            elif value is None:
                merged.pop(key, None)
            else:
                merged[key] = value
    return merged


def render(value: Any) -> str:
    """A value as llama-server and people read it: lists with commas, numbers without a needless ``.0``."""
    if value is None:
        return "(not set)"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ",".join(render(item) for item in value)
    if isinstance(value, Mapping):
        return " ".join(f"{key}={render(item)}" for key, item in value.items())
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def flags(settings: Mapping[str, Any]) -> list[str]:
    """The part of the head's argument vector that comes from settings, in the vocabulary's order."""
    arguments: list[str] = []
    for key in Settings.model_fields:
        value = settings.get(key)
        if value is None or key in NOT_FLAGS:
            continue
        name = "--" + key.replace("_", "-")
        if not isinstance(value, bool):
            arguments += [name, render(value)]
        elif value:
            arguments.append(name)
        elif key not in ONE_SIDED:
            arguments.append("--no-" + key.replace("_", "-"))
    return arguments
