"""IQ1_S on the lab: llama-imatrix and llama-quantize run on rank 0, where the lab's llama.cpp was built."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from k3deploy.errors import K3Error
from k3deploy.lab.cluster import Lab
from k3deploy.lab.model import calibration_text, iq1_s_commands

RANK_MODELS = Path("/srv/models")  # the cache's models/, mounted read-only in every rank


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
