"""Inline SVG for the page: drawn by matplotlib, coloured by the page's own style sheet (light and dark).

Every colour is drawn as a placeholder that is replaced by a CSS variable, text stays text, and nothing depends on the
time of drawing: equal data gives equal bytes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from k3deploy.facts import Facts
from k3deploy.judge import NOT_INFERIOR, ArmVerdict
from k3deploy.report import words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# placeholder -> CSS variable; the placeholders are colours that nothing else draws
_INK, _FAINT, _GOOD, _BAD = "#010203", "#010204", "#010205", "#010206"
_ARMS = ("#010211", "#010212", "#010213", "#010214", "#010215", "#010216")
_VARIABLES = {
    _INK: "var(--ink)",
    _FAINT: "var(--faint)",
    _GOOD: "var(--good)",
    _BAD: "var(--bad)",
    **{colour: f"var(--arm{place})" for place, colour in enumerate(_ARMS)},
}
_WIDTH = 4.8  # inches: about the width of a phone, so that text keeps its size there
_LINE = 0.3


def ratio_chart(arm: ArmVerdict, delta: float) -> str:
    """The ratio of every judged cell with its interval, against the lines that gates ask for; "" if there is none.

    delta: the gain, as a share, that the verdict asked for.
    """
    found = [c for gate in arm.gates for c in gate.comparisons if c.ratio is not None]
    rows = [c for c in found if c.metric == "speed" or c.state == "cached"]
    if not rows:
        return ""
    with _axes(0.9 + _LINE * len(rows)) as (figure, axes):
        for height, comparison in enumerate(reversed(rows)):
            change = ((comparison.ratio or 1.0) - 1) * 100
            if comparison.low is not None and comparison.high is not None:
                ends = [(comparison.low - 1) * 100, (comparison.high - 1) * 100]
                axes.plot(ends, [height, height], color=_INK, linewidth=2)
            axes.plot([change], [height], "o", color=_INK, markersize=6)
        axes.set_yticks(
            range(len(rows)), [f"{c.cell} {c.state}  {words.percent(c.ratio)}" for c in reversed(rows)], color=_INK
        )
        axes.axvline(0, color=_FAINT, linewidth=1)
        axes.axvline(delta * 100, color=_GOOD, linewidth=1, linestyle="--")
        axes.axvline((NOT_INFERIOR - 1) * 100, color=_BAD, linewidth=1, linestyle="--")
        axes.set_ylim(-0.6, len(rows) - 0.4)
        axes.margins(x=0.08)
        low, high = axes.get_xlim()
        axes.set_xlim(min(low, -3), max(high, delta * 100 + 2))
        axes.set_xlabel("better than the baseline, %", color=_INK)
        return _svg(figure, f"ratios-{re.sub(r'[^A-Za-z0-9]', '-', arm.slug)}")


def block_chart(facts: Facts, cells: Sequence[tuple[str, str]]) -> str:
    """Speed of each block in the order of time, one panel a cell; "" without values.

    cells: (name, state) of the cells to draw.
    """
    panels = [(cell, values) for cell in cells if (values := _block_values(facts, cell))]
    if not panels:
        return ""
    arms = list(dict.fromkeys(block.arm for block in facts.blocks))
    with _axes(1.35 * len(panels) + 0.9, rows=len(panels)) as (figure, grid):
        for axes, ((name, state), values) in zip(grid, panels, strict=True):
            for index, arm, speeds in values:
                colour = _ARMS[arms.index(arm) % len(_ARMS)]
                axes.plot([index] * len(speeds), speeds, "o", color=colour, markersize=6)
            axes.set_title(f"{name} {state}, tokens per second", loc="left", fontsize=10, color=_INK)
            axes.margins(x=0.08, y=0.3)
            axes.set_xticks([block.index for block in facts.blocks])
            axes.set_ylim(bottom=max(0.0, axes.get_ylim()[0]))
        grid[-1].set_xlabel("block, in the order of time", color=_INK)
        return _svg(figure, "blocks")


def memory_chart(
    series: Mapping[str, Sequence[tuple[str, Sequence[float], Sequence[float]]]],
    arms: Sequence[str],
    floors: Mapping[str, int],
    warn_mib: int | None,
) -> str:
    """MemAvailable of each rank over time, one panel a rank, with floor and warn tier; "" without a record.

    series: {rank: [(arm, minutes, GiB)]}. floors: {rank: MiB}.
    """
    if not series:
        return ""
    with _axes(1.35 * len(series) + 0.9, rows=len(series)) as (figure, grid):
        for axes, (rank, lines) in zip(grid, sorted(series.items()), strict=True):
            for arm, minutes, available in lines:
                axes.plot(minutes, available, color=_ARMS[arms.index(arm) % len(_ARMS)], linewidth=1.5)
            if floor := floors.get(rank):
                axes.axhline(floor / 1024, color=_BAD, linewidth=1, linestyle="--")
            if warn_mib:
                axes.axhline(warn_mib / 1024, color=_FAINT, linewidth=1, linestyle="--")
            axes.set_title(f"{rank}, GiB available", loc="left", fontsize=10, color=_INK)
            axes.set_ylim(bottom=0)
        grid[-1].set_xlabel("minutes since the first block", color=_INK)
        return _svg(figure, "memory")


def arm_colours(facts: Facts) -> list[tuple[str, int]]:
    """(arm, number of its colour variable) for the legend, which the page itself draws."""
    return [(arm, place % len(_ARMS)) for place, arm in enumerate(dict.fromkeys(block.arm for block in facts.blocks))]


def _block_values(facts: Facts, wanted: tuple[str, str]) -> list[tuple[int, str, list[float]]]:
    values = []
    for block in facts.blocks:
        for cell in block.bench.cells if block.bench else []:
            if (cell.cell, cell.state) == wanted:
                speeds = [s.decode_per_second if cell.decodes else s.prefill_per_second for s in cell.valid()]
                values.append((block.index, block.arm, [speed for speed in speeds if speed is not None]))
    return [entry for entry in values if entry[2]]


@contextmanager
def _axes(height: float, rows: int = 0) -> Iterator[tuple[Figure, Any]]:
    """A figure without a window system, and its axes (one, or a list of ``rows``)."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    style: Any = {
        "svg.fonttype": "none",
        "text.parse_math": False,  # names come from people: a dollar sign is no formula
        "font.family": ["sans-serif"],
        "font.size": 10,
        "text.color": _INK,
        "axes.edgecolor": _FAINT,
        "axes.labelcolor": _INK,
        "axes.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "figure.facecolor": "none",
        "xtick.color": _INK,
        "ytick.color": _INK,
    }
    with rc_context(style):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        FigureCanvasSVG(figure)
        grid: Any = figure.subplots(max(rows, 1), 1, squeeze=False)
        yield figure, list(grid[:, 0]) if rows else grid[0, 0]


def _svg(figure: Figure, salt: str) -> str:
    """The figure as an ``<svg>`` element whose colours are the page's and whose ids are its own."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": salt}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    # the page sets the size by the column's width; two figures must not share an id
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'\bid="', f'id="{salt}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{salt}-", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    return text.strip()
