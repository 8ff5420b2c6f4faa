"""IQ1_S through llama-imatrix and llama-quantize: of a build on this machine, or of the lab's on its rank 0."""

from __future__ import annotations

import os
import subprocess
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from k3deploy.errors import K3Error

if TYPE_CHECKING:
    from k3deploy.lab.cluster import Lab

RANK_MODELS = Path("/srv/models")  # the cache's models/, mounted read-only in every rank


def calibration_text(seed: int, words: int = 8000) -> str:
    """Text for the importance matrix: enough of it that every expert of every layer sees tokens."""
    import numpy as np

    letters = "etaoinshrdlcumwfgypbvkjxqz"
    draws = np.random.PCG64([seed, zlib.crc32(b"calibration")]).random_raw(words * 8).reshape(words, 8)
    text = []
    for row in draws.tolist():
        length = 2 + row[0] % 6
        text.append("".join(letters[draw % 26] for draw in row[1 : 1 + length]))
    return " ".join(text) + "\n"


def iq1_s_commands(
    binaries: Path, source: Path, target: Path, text: Path, imatrix: Path, threads: int = 1
) -> tuple[list[str], list[str]]:
    """The two command lines that make an IQ1_S model: llama-imatrix over ``text``, then llama-quantize with its result.

    Run them in this order; ``imatrix`` is an intermediate file. Which tensors stay in a finer type is llama-quantize's
    choice. One thread is the default because ggml's threads wait for each other by spinning: on a busy small machine
    two are many times slower than one.
    """
    measure = [
        str(binaries / "llama-imatrix"),
        *("-m", str(source)),
        *("-f", str(text)),
        *("-o", str(imatrix)),
        *("-c", "512", "-b", "512", "-t", str(threads), "--chunks", "8", "--no-ppl"),
    ]
    quantize = [
        str(binaries / "llama-quantize"),
        *("--imatrix", str(imatrix)),
        str(source),
        str(target),
        "IQ1_S",
        str(threads),
    ]
    return measure, quantize


def quantize_iq1_s(binaries: Path, source: Path, target: Path, seed: int, threads: int = 1) -> None:
    """Make the IQ1_S model of the f16 model ``source`` at ``target`` with llama.cpp's own tools; atomic (rename)."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".iq1_s-") as scratch:
        work = Path(scratch)
        # relative names: llama-quantize writes those of text and matrix into the model
        text, imatrix, partial = Path("calibration.txt"), Path("imatrix.gguf"), Path("model.gguf")
        (work / text).write_text(calibration_text(seed), encoding="utf-8")
        for argv in iq1_s_commands(binaries.resolve(), source.resolve(), partial, text, imatrix, threads):
            _run_tool(argv, work)
        (work / partial).replace(target)


def _run_tool(argv: Sequence[str], directory: Path) -> None:
    tool = Path(argv[0])
    # the tools of a build tree and of a release find their libraries beside themselves or in ../lib
    search = f"{tool.parent}:{tool.parent.parent / 'lib'}"
    try:
        done = subprocess.run(
            argv,
            cwd=directory,
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            env={**os.environ, "LD_LIBRARY_PATH": search, "GGML_NO_BACKTRACE": "1"},
        )
    except OSError as error:
        raise K3Error(
            f"cannot run {tool}: {error.strerror}", remedy="give the directory of a llama.cpp build with --binaries"
        ) from error
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
        raise K3Error(f"{tool.name} ended with exit code {done.returncode}:\n{tail}")


def quantize_in_lab(lab: Lab, source: Path, target: Path, seed: int) -> None:
    """Make the IQ1_S model of ``source`` (in the cache's ``models/``) at ``target``; atomic (rename).

    Raises K3Error when the lab holds no build with the two tools, or when one of them fails.
    """
    binaries = Path("$build/bin")
    text, matrix, model = Path("calibration.txt"), Path("imatrix.gguf"), Path("model.gguf")
    commands = iq1_s_commands(binaries, RANK_MODELS / source.name, model, text, matrix)
    script = "\n".join(
        [
            "set -eu",
            'build=$(dirname "$(dirname "$(ls -t /opt/k3deploy/builds/*/bin/llama-quantize | head -n 1)")")',
            "cd $(mktemp -d)",
            "trap 'rm -r \"$PWD\"' EXIT",
            f"cat > {text} <<'TEXT'\n{calibration_text(seed)}TEXT",
            'export LD_LIBRARY_PATH="$build/lib" GGML_NO_BACKTRACE=1',
            # Only the model goes to standard output; what the tools say goes to standard error.
            *(" ".join(argv) + " >&2" for argv in commands),
            f"cat {model}",
        ]
    )
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    argv = ["ssh", "-F", str(lab.config.ssh_config), "rank0", "bash -s"]
    try:
        with partial.open("wb") as sink:
            done = subprocess.run(argv, input=script.encode(), stdout=sink, stderr=subprocess.PIPE, check=False)
        if done.returncode != 0:
            tail = "\n".join(done.stderr.decode(errors="replace").strip().splitlines()[-8:])
            raise K3Error(
                f"the model could not be quantized on the lab's rank0:\n{tail}",
                remedy="k3deploy lab production builds the tools there; or name a build with --binaries",
            )
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
