"""The cache of made models: a GGUF and beside it a sidecar with its hash, recipe and facts."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from k3deploy.errors import K3Error
from k3deploy.lab.model import (
    ARCH,
    BOS,
    CONV_KERNEL,
    FIRST_MERGE,
    FORMAT,
    KDA_HEAD_DIM,
    KV_LORA_RANK,
    ROPE_DIM,
    ModelSpec,
    ModelType,
    make_model,
)


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model on disk; ``created`` says whether this call made it."""

    path: Path
    sidecar: Path
    sha256: str
    created: bool


def default_directory() -> Path:
    """Where models are kept unless told otherwise: ``$XDG_CACHE_HOME/k3deploy/models``."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "k3deploy" / "models"


def model_name(spec: ModelSpec, seed: int, model_type: ModelType) -> str:
    """File name without suffix, such as ``k3-lab-seed7-q8_0``."""
    return f"k3-{spec.name}-seed{seed}-{model_type}"


# (source, target, seed): makes the IQ1_S model of an f16 one
Quantizer = Callable[[Path, Path, int], None]


def ensure_model(
    directory: Path, spec: ModelSpec, seed: int, model_type: ModelType, quantizer: Quantizer | None = None
) -> ModelFile:
    """The model and its sidecar in ``directory``, made unless both are there and agree.

    ``quantizer`` runs llama-imatrix and llama-quantize and is needed for IQ1_S only.
    """
    path = directory / f"{model_name(spec, seed, model_type)}.gguf"
    sidecar = path.with_suffix(".json")
    recipe = {"format": FORMAT, "spec": asdict(spec), "seed": seed, "type": model_type}
    known = _recorded_hash(path, sidecar, recipe)
    if known:
        return ModelFile(path, sidecar, known, created=False)
    directory.mkdir(parents=True, exist_ok=True)
    if model_type == "iq1_s":
        if quantizer is None:
            raise K3Error("an IQ1_S model is made with llama-imatrix and llama-quantize: no quantizer was given")
        source = ensure_model(directory, spec, seed, "f16")
        quantizer(source.path, path, seed)
    else:
        make_model(path, spec, seed, model_type)
    sha256 = file_sha256(path)
    record = {
        "name": path.stem,
        "file": path.name,
        "bytes": path.stat().st_size,
        "sha256": sha256,
        **recipe,
        "arch": ARCH,
        "vocab": {"first_id": FIRST_MERGE, "last_id": spec.n_vocab - 1, "bos": BOS},
        "facts": model_facts(spec, path.stat().st_size),
    }
    partial = sidecar.with_name(f".{sidecar.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    partial.replace(sidecar)
    return ModelFile(path, sidecar, sha256, created=True)


def model_facts(spec: ModelSpec, size: int) -> dict[str, Any]:
    """The architecture in the form of an inventory's ``k3_model.facts``; ``size`` is the file's, in bytes."""
    return {
        "arch": ARCH,
        "n_layer": spec.n_layer,
        "attention_layers": [layer for layer in range(spec.n_layer) if spec.is_mla(layer)],
        "bytes": size,
        "n_embd": spec.n_embd,
        "n_head": spec.n_head,
        "n_vocab": spec.n_vocab,
        "n_ctx_train": spec.n_ctx,
        "key_length": KV_LORA_RANK + ROPE_DIM,
        "value_length": KV_LORA_RANK,
        "kda_head_dim": KDA_HEAD_DIM,
        "conv_kernel": CONV_KERNEL,
        "n_ff": spec.n_ff,
        "n_ff_expert": spec.n_ff_expert,
        "n_expert_used": spec.n_expert_used,
        "n_latent": spec.n_latent,
        "residual_block": spec.residual_block,
    }


def _recorded_hash(path: Path, sidecar: Path, recipe: dict[str, Any]) -> str | None:
    """The sidecar's hash if it speaks of this recipe and the file still has that hash."""
    try:
        record = json.loads(sidecar.read_text(encoding="utf-8"))
        stale = any(record.get(key) != value for key, value in recipe.items())
        if stale or file_sha256(path) != record["sha256"]:
            return None
        return str(record["sha256"])
    except (OSError, ValueError, KeyError, AttributeError):
        return None


def file_sha256(path: Path) -> str:
    """The sha256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
