"""The build key: a hash of everything that the controller knows to change a compiled tree.

Two specs with one key are one build. What only the builder can know (its toolchain, the content of a source tree) is
added there, as the second half of the build id.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from k3deploy import patches
from k3deploy.inventory import BuildSpec, Source

KEY_LENGTH = 16


def source_identity(source: Source) -> dict[str, Any]:
    """What makes a source the same source: an archive is its hash wherever it lies, a tree is its place."""
    keys = {"archive": ("sha256", "subdir"), "git": ("url", "ref", "subdir"), "tree": ("path",), "prebuilt": ("path",)}
    return {"kind": source.kind, **{key: getattr(source, key) for key in keys[source.kind]}}


def build_key(spec: BuildSpec, patch_directory: Path | None = None) -> str:
    """The first 16 hex digits of the sha256 over source identity, patch sets, backend, cmake, cuda and targets.

    A patch set counts by name and content, wherever it lies (``patch_directory``, else the collection). The order of
    patch sets counts (they are applied in order); the order of cmake settings and targets does not. Jobs,
    markers and what is known about the binary's behaviour change nothing that is compiled.
    """
    identity = {
        "source": source_identity(spec.source),
        "patch_sets": patches.hashes(spec.patch_sets, patch_directory),
        "backend": spec.backend,
        "cmake": spec.cmake,
        "cuda": None if spec.cuda is None else spec.cuda.model_dump(),
        "targets": sorted(spec.targets),
    }
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:KEY_LENGTH]
