"""What is known of the model beside the inventory: its sidecar, and its architecture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from k3deploy.errors import InputError, Problem
from k3deploy.inventory import Model
from k3deploy.yamlfile import MAX_BYTES, read_bytes

if TYPE_CHECKING:
    from k3deploy.model_facts import ModelFacts


def with_sidecar(model: Model) -> Model:
    """The model with the hash and the vocabulary that its sidecar holds, where the inventory leaves them out."""
    if model.sidecar is None:
        return model
    path = Path(model.sidecar)
    try:
        record = json.loads(read_bytes(path, MAX_BYTES))
    except (InputError, ValueError, RecursionError) as error:
        reason = error.problems[0].message if isinstance(error, InputError) else "not JSON"
        raise InputError(
            [Problem(path, 0, f"the model's sidecar: {reason}")],
            remedy="Make the model: k3deploy lab model",
        ) from None
    if not isinstance(record, dict):
        raise InputError([Problem(path, 0, "the model's sidecar must be a JSON object")])
    merged = {
        **{key: record[key] for key in ("sha256", "vocab") if key in record},
        **model.model_dump(exclude_none=True),
    }
    if merged.get("name") != record.get("name", model.name):
        raise InputError([Problem(path, 0, f"speaks of {record['name']}, the inventory names {model.name}")])
    try:
        return Model.model_validate(merged)
    except ValueError as error:
        raise InputError([Problem(path, 0, f"the model's sidecar is wrong: {error}")]) from None


def read_facts(model: Model) -> ModelFacts | None:
    """The model's architecture: from the GGUF beside the sidecar, else from the inventory, else nothing."""
    from k3deploy.model_facts import model_facts_from_mapping, read_model_facts

    if model.sidecar is not None and (gguf := Path(model.sidecar).with_suffix(".gguf")).is_file():
        return read_model_facts(gguf)
    return None if model.facts is None else model_facts_from_mapping(model.facts)
