"""Write a page for each row of the matrix from the matrix itself: ``python docs/rows/generate.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from k3deploy import patches
from k3deploy.matrix import BuildChange, Gate, Matrix, Row
from k3deploy.settings import render

HERE = Path(__file__).parent
MATRIX = HERE.parents[1] / "inventory" / "matrix"


def gate_text(gate: Gate) -> str:
    """One gate in a line."""
    if gate.cells:
        what = {"speed": "speed", "ttft": "time to first token"}[gate.metric]
        subject = f"{what} of {', '.join(gate.cells)} ({gate.state})"
    else:
        subject = f"suite {gate.suite}" if gate.suite else str(gate.observation).replace("_", " ")
    limit = "" if gate.limit is None else f" {render(gate.limit)}"
    why = f" ({gate.why})" if gate.why else ""
    return f"{subject}: {gate.require.replace('_', ' ')}{limit}{why}"


def build_text(build: BuildChange) -> str:
    """Where the program of a row comes from."""
    if not build.patch_sets or not set(build.patch_sets) <= set(patches.list_names()):
        return f"It needs a build named `{build.name}` in the inventory's `k3_builds`: {build.needs}."
    sets = ", ".join(f"`{name}`" for name in build.patch_sets)
    options = ", ".join(f"`{name}={value}`" for name, value in build.cmake.items())
    return (
        f"It is built from the baseline's source with the patch set {sets} ([patch-sets.md](../patch-sets.md))"
        f"{f' and {options}' if options else ''}, unless the inventory's `k3_builds` names a build `{build.name}`: "
        f"{build.needs}. What it is and what was measured: [candidates.md](../candidates.md)."
    )


def lines(matrix: Matrix, row: Row) -> Iterator[str]:
    """A row's page."""
    yield f"# {row.id}: {row.title}"
    yield f"Kind: {row.kind}. Guard: {row.guard} Rejection: {row.rejection}"
    yield f"**Hypothesis.** {row.hypothesis}"
    yield "## What it changes"
    changes = []
    for arm in matrix.resolve(f"candidate-{row.id}").arms:
        text = ", ".join(f"`{key}` = {render(value)}" for key, value in arm.settings.items())
        changes.append(f"- `candidate-{arm.name}`: {text or 'no setting'}")
    yield "\n".join(changes)
    if row.against.values():
        text = ", ".join(f"`{key}` = {render(value)}" for key, value in row.against.values().items())
        yield f"It is compared with the baseline with {text}, not with production as it runs."
    if row.harness.values():
        text = ", ".join(f"`{key}` = {render(value)}" for key, value in row.harness.values().items())
        yield f"Every arm of it, the baseline too, is measured with {text}."
    if row.build is not None:
        yield build_text(row.build)
    if row.combines:
        yield f"It combines {', '.join(row.combines)}."
    if row.alone:
        yield f"It stands alone: {row.alone}"
    elif row.mixes_with:
        yield f"It mixes with {', '.join(row.mixes_with)}."
    yield "## Judged by"
    yield "\n".join(f"- {name.replace('_', ' ')}: {gate_text(gate)}" for name, gate in row.gates.items())
    if row.findings:
        yield "## What is known"
        yield "\n".join(
            f"- {'Against the hypothesis: ' if finding.contradicts else ''}{finding.text} ({finding.seen})"
            for finding in row.findings
        )


def pages() -> dict[str, str]:
    """File name -> content, for every row and an index."""
    matrix = Matrix.load(MATRIX)
    index = [
        "# The rows of the matrix",
        "Written by `generate.py` from `inventory/matrix/`.",
        "| row | what | kind |\n|---|---|---|",
    ]
    index[-1] += "".join(f"\n| [{row.id}]({row.id}.md) | {row.title} | {row.kind} |" for row in matrix.rows.values())
    found = {f"{row.id}.md": "\n\n".join(lines(matrix, row)) + "\n" for row in matrix.rows.values()}
    return {"README.md": "\n\n".join(index) + "\n", **found}


if __name__ == "__main__":
    for name, content in pages().items():
        (HERE / name).write_text(content)
