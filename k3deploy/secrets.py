"""The rule for secrets, as the controller uses it: what is refused as an input, and how text is written without it.

The rule itself is one file of the collection, because ranks apply it too to what they report.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from k3deploy.errors import K3Error

COLLECTION = Path("collections/ansible_collections/k3/deploy")
RULE = "plugins/module_utils/masking.py"


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name (``HF_TOKEN``, ``api_key``, ``ansible_become_password``) holds a secret."""
    return bool(_rule().is_secret_name(name))


def mask_text(text: str, values: Iterable[str] = ()) -> str:
    """``text`` with private keys, credentials in URLs, values of secret names, and ``values`` hidden."""
    return str(_rule().mask_text(text, values))


def mask(value: Any, values: Iterable[str] = ()) -> Any:
    """``mask_text`` for every text inside ``value``, and for whatever stands under a secret name."""
    return _rule().mask(value, values)


def secret_values(values: Mapping[str, Any]) -> list[str]:
    """The texts under secret names, nested mappings included."""
    return list(_rule().secret_values(values))


def refuse_secret_name(name: str, kind: str) -> None:
    """Raise ``ValueError`` where a setting's name says that its value is a secret."""
    if is_secret_name(name):
        raise ValueError(
            f"{name} holds a secret by its name: {kind} is kept in plans, records and reports, "
            "so keep the value in a file on the rank that only its reader may open"
        )


def collection_file(name: str) -> ModuleType:
    """A file of the collection that knows nothing of Ansible, as a module: what ranks and controller must agree on."""
    for folder in Path(__file__).resolve().parents:
        path = folder / COLLECTION / name
        spec = importlib.util.spec_from_file_location(f"k3deploy_{path.stem}", path) if path.is_file() else None
        if spec is not None and spec.loader is not None:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    raise K3Error(
        f"{COLLECTION / name} was not found beside this package", remedy="run k3deploy from a checkout of the project"
    )


@cache
def _rule() -> ModuleType:
    return collection_file(RULE)
