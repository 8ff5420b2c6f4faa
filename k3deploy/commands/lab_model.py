"""``k3deploy lab model``: make a tiny ``kimi-k3`` model from a seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import click

from k3deploy.lab.model import MODEL_TYPES, SPECS, ModelType, default_directory, ensure_model


@click.command(
    name="model",
    epilog="""\b
Examples:
  k3deploy lab model                                   the lab's model, f16
  k3deploy lab model --spec tiny --type q8_0           a few MB, for quick tests
  k3deploy lab model --type iq1_s --binaries build/bin  through llama-imatrix and llama-quantize
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
    help="Directory with llama-imatrix and llama-quantize; for iq1_s only.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print the sidecar (hash, spec, seed, facts) with the model's path."
)
def model(spec: str, seed: int, model_type: str, out: Path | None, binaries: Path | None, as_json: bool) -> None:
    """Make a tiny kimi-k3 model from a seed, byte-identical for the same seed.

    It has the real architecture (KDA and MLA layers, latent experts, attention residuals), random weights and a working
    tokenizer. A sidecar <name>.json records its sha256 and facts; a model whose sidecar agrees is not made again.
    """
    made = ensure_model(out or default_directory(), SPECS[spec], seed, cast(ModelType, model_type), binaries)
    if as_json:
        record = json.loads(made.sidecar.read_text(encoding="utf-8"))
        click.echo(json.dumps({"path": str(made.path), "created": made.created, **record}, indent=2))
        return
    state = "made" if made.created else "already there"
    click.echo(f"{made.path}  {made.path.stat().st_size / 1e6:.1f} MB  sha256 {made.sha256[:16]}  ({state})")
