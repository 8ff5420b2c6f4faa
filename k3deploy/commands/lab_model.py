"""``k3deploy lab model``: make a tiny ``kimi-k3`` model from a seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import click

from k3deploy.commands.options import UsageProblem
from k3deploy.lab.model import MODEL_TYPES, SPECS, ModelType
from k3deploy.lab.model_cache import Quantizer, default_directory, ensure_model
from k3deploy.lab.quantize import quantize_iq1_s


@click.command(
    name="model",
    epilog="""\b
Examples:
  k3deploy lab model                                   the lab's model, f16
  k3deploy lab model --spec tiny --type q8_0           a few MB, for quick tests
  k3deploy lab model --type iq1_s                      through llama-imatrix and llama-quantize on the lab's rank0
  k3deploy lab model --type iq1_s --binaries build/bin  the same with tools of this machine
""",
)
@click.option("--spec", type=click.Choice(sorted(SPECS)), default="lab", show_default=True, help="Which sizes.")
@click.option("--seed", type=click.IntRange(min=0), default=7, show_default=True, help="Same seed, same bytes.")
@click.option("--type", "model_type", type=click.Choice(MODEL_TYPES), default="f16", show_default=True)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory of models.  [default: $XDG_CACHE_HOME/k3deploy/models]",
)
@click.option(
    "--binaries",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory with llama-imatrix and llama-quantize; for iq1_s only.  [default: those of the lab's rank0]",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print the sidecar (hash, spec, seed, facts) with the model's path."
)
def model(spec: str, seed: int, model_type: str, out: Path | None, binaries: Path | None, as_json: bool) -> None:
    """Make a tiny kimi-k3 model from a seed, byte-identical for the same seed.

    It has the real architecture (KDA and MLA layers, latent experts, attention residuals), random weights and a working
    tokenizer. A sidecar <name>.json records its sha256 and facts; a model whose sidecar agrees is not made again.
    """
    made = ensure_model(
        out or default_directory(), SPECS[spec], seed, cast(ModelType, model_type), _quantizer(out, binaries)
    )
    if as_json:
        record = json.loads(made.sidecar.read_text(encoding="utf-8"))
        click.echo(json.dumps({"path": str(made.path), "created": made.created, **record}, indent=2))
        return
    state = "made" if made.created else "already there"
    click.echo(f"{made.path}  {made.path.stat().st_size / 1e6:.1f} MB  sha256 {made.sha256[:16]}  ({state})")


def _quantizer(out: Path | None, binaries: Path | None) -> Quantizer:
    """How an IQ1_S model is made: by tools of this machine, or on the lab, which sees the cache's models alone."""

    def quantize(source: Path, target: Path, seed: int) -> None:
        if binaries is not None:
            quantize_iq1_s(binaries, source, target, seed)
        elif out is not None:
            raise UsageProblem("--out with --type iq1_s needs --binaries: the lab sees the default directory alone")
        else:
            from k3deploy.lab.cluster import Lab
            from k3deploy.lab.quantize import quantize_in_lab

            quantize_in_lab(Lab.from_environment(), source, target, seed)

    return quantize
