"""The verdict for a terminal, and the whole report as Markdown."""

from __future__ import annotations

import io
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from k3deploy.facts import Facts
from k3deploy.judge import ArmVerdict, Comparison, Verdict
from k3deploy.report import sections, words
from k3deploy.report.matrix import HEADINGS, MatrixRow, matrix_rows
from k3deploy.report.view import View, make_view

STYLES = {"ACCEPT": "bold green", "REJECT": "bold red", "INCONCLUSIVE": "bold yellow", "INVALID": "bold magenta"}
GATE_STYLES = {"pass": "green", "fail": "red", "open": "yellow"}
MIN_WIDTH = 60
MAX_WIDTH = 140


def render_matrix(rows: Sequence[MatrixRow], *, width: int | None = None) -> str:
    """A campaign's matrix as a table for a terminal, without a final newline."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in HEADINGS:
        table.add_column(heading, overflow="fold")
    for row in rows:
        cells = {**asdict(row), "verdict": Text(row.verdict, style=STYLES[row.verdict])}
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in cells.values()))
    console = Console(file=io.StringIO(), width=width or _columns())
    with console.capture() as capture:
        console.print(table, highlight=False)
    return "\n".join(line.rstrip() for line in capture.get().rstrip().split("\n"))


def _columns() -> int:
    return min(MAX_WIDTH, max(MIN_WIDTH, shutil.get_terminal_size((100, 40)).columns))


def render_text(verdict: Verdict, *, width: int | None = None, color: bool | None = None) -> str:
    """The verdict as tables for a terminal, without a final newline.

    width: columns (the terminal's own by default). color: ANSI colours; by default when standard output is a terminal.
    """
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

    columns = width or _columns()
    coloured = sys.stdout.isatty() if color is None else color
    parts: list[Any] = [Text.assemble((verdict.outcome, STYLES[verdict.outcome]), f"  {verdict.candidate}")]
    parts.append(Text(verdict.reason))
    for arm in verdict.arms:
        parts += [Text(), Text.assemble((arm.arm, "bold"), "  ", (arm.outcome, STYLES[arm.outcome]))]
        table = Table(box=None, pad_edge=False, show_header=True, header_style="dim")
        for name, justify in (("gate", "left"), ("", "left"), ("", "left"), ("baseline", "right"), ("arm", "right")):
            table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
        table.add_column("better by", justify="right")
        table.add_column("95 % interval", justify="left", overflow="fold")
        for gate in arm.gates:
            state = Text(words.GATE_WORDS[gate.outcome], style=GATE_STYLES[gate.outcome])
            if not gate.comparisons:
                table.add_row(Text(gate.name), state, Text(words.requirement(gate)), "", "", "", Text(gate.reason))
            for place, found in enumerate(gate.comparisons):
                first = place == 0
                table.add_row(Text(gate.name if first else ""), state if first else "", *_cells(found))
        parts.append(table)
        problems = [f"{check.name}: {problem}" for check in arm.checks for problem in check.problems]
        parts += [Text(f"! {problem}", style="magenta") for problem in problems]
        parts += [Text(f"{'against the hypothesis: ' if s.contradicts else ''}{s.text}") for s in arm.findings]
    console = Console(
        file=io.StringIO(), width=columns, force_terminal=coloured, color_system="standard" if coloured else None
    )
    with console.capture() as capture:
        console.print(Group(*parts), highlight=False)
    return "\n".join(line.rstrip() for line in capture.get().rstrip().split("\n"))


def _cells(found: Comparison) -> list[str]:
    return [
        f"{found.cell} {found.state} {words.metric(found)}",
        words.quantity(found.baseline, found.unit),
        words.quantity(found.arm, found.unit),
        words.percent(found.ratio),
        words.interval(found),
    ]


def render_markdown(plan: Mapping[str, Any], facts: Facts, verdict: Verdict, run_dir: Path | None = None) -> str:
    """The report as Markdown. run_dir: where ``run.json`` lies, for the provenance."""
    view = make_view(run_dir or Path(facts.run_id), plan, facts, verdict)
    lines = [
        f"# {verdict.outcome}: {_escape(verdict.candidate)}",
        "",
        _escape(verdict.reason),
        "",
        f"{verdict.pairs} complete pairs of server starts, run {_code(verdict.run_id)}.",
    ]
    if len(verdict.arms) > 1:
        rows = [list(asdict(row).values()) for row in matrix_rows(plan, facts, verdict)]
        lines += ["", "## All arms", "", *_table(HEADINGS, rows)]
    for arm in verdict.arms:
        lines += _arm_lines(arm, view)
    for state in view.states:
        lines += ["", f"## Cells, {state}: {words.STATE_WORDS[state]}", ""]
        rows = [
            [
                found.cell,
                words.metric(found),
                arm.arm,
                *_cells(found)[1:],
                words.bootstrap(found),
                f"{found.baseline_samples} + {found.arm_samples}",
            ]
            for arm in verdict.arms
            for found in arm.cells
            if found.state == state
        ]
        lines += _table(
            ["cell", "measure", "arm", "baseline", "arm", "better by", "95 % interval", "bootstrap", "samples"], rows
        )
    lines += ["", "## Blocks in the order of time", ""]
    lines += _table(
        [
            *("block", "pair", "arm", "started", "load", "model in page cache before", "samples", "graphs reused"),
            *("pipelined", "problem"),
        ],
        [list(map(str, asdict(b).values())) for b in view.blocks],
    )
    lines += _section_lines(plan, facts)
    lines += ["", "## Findings", ""]
    lines += [
        f"- {'**against the hypothesis:** ' if contradicts else ''}{_escape(text)} ({_escape(source)})"
        for source, text, contradicts in view.findings
    ]
    lines += ["", "## Processes as they ran", ""]
    for process in view.processes:
        lines += [f"- {_escape(process.rank)}, {_code(process.unit)}, build {_code(process.build)}:"]
        lines += [f"  {_code(' '.join([*process.environment, *process.argv]))}"]
    lines += ["", "## Provenance", ""]
    lines += _table(["what", "value"], [list(row) for row in view.provenance])
    lines += ["", "## How to have it again", "", *(f"    {command}" for command in view.reproduce)]
    return "\n".join(lines) + "\n"


def _section_lines(plan: Mapping[str, Any], facts: Facts) -> list[str]:
    """Parity, time per rank, transport and void blocks, each where there is something to show."""
    tables: list[tuple[str, list[str], list[list[str]]]] = [
        (
            "Blocks that do not count",
            ["block", "arm", "started", "why"],
            [[str(v.block), v.arm, v.started, v.why] for v in sections.void_rows(facts)],
        ),
        (
            "Parity",
            ["arm", "asked", "against the baseline"],
            [[p.arm, p.what, p.result] for p in sections.parity_rows(plan, facts)],
        ),
        (
            "Time per rank",
            ["arm", "rank", "computing", "transferring", "idle between graphs"],
            [[p.arm, p.rank, p.forward, p.rpc, p.idle] for p in sections.profile_rows(facts)],
        ),
        (
            "Transport of each connection",
            ["worker", "carried by", "evidence", "blocks"],
            [[t.worker, t.result, t.reason, t.blocks] for t in sections.transport_rows(facts)],
        ),
    ]
    return [line for title, header, rows in tables if rows for line in ("", f"## {title}", "", *_table(header, rows))]


def _arm_lines(arm: ArmVerdict, view: View) -> list[str]:
    lines = ["", f"## {_escape(arm.arm)}: {arm.outcome}", "", *(f"- {_escape(reason)}" for reason in arm.reasons)]
    looks = words.looks(view.verdict.looks, arm.alpha, arm.pairs)
    lines += ["", "### Gates", "", f"{looks}.", ""]
    rows: list[list[str]] = []
    for gate in arm.gates:
        head = [gate.name, words.GATE_WORDS[gate.outcome], words.requirement(gate)]
        if not gate.comparisons:
            rows.append([*head, gate.reason, "", "", "", "", ""])
        rows += [[*head, *_cells(found), words.bootstrap(found)] for found in gate.comparisons]
    lines += _table(
        ["gate", "result", "requires", "what", "baseline", "arm", "better by", "95 % interval", "bootstrap"], rows
    )
    problems = [f"{check.name}: {problem}" for check in arm.checks for problem in check.problems]
    if problems:
        lines += ["", "### Validity checks that failed", "", *(f"- {_escape(problem)}" for problem in problems)]
    if view.differences.get(arm.arm):
        lines += ["", "### Differences from the baseline", ""]
        lines += _table(["setting", "baseline", "arm"], [[d.key, d.baseline, d.arm] for d in view.differences[arm.arm]])
    lines += ["", "### Lowest available memory per rank", ""]
    lines += _table(
        [
            *("rank", "floor", "lowest", "while loading", "while measuring", "baseline's lowest"),
            *("lowest MemFree less CmaFree", "allocated", "change a request"),
        ],
        [
            [
                m.rank,
                *map(
                    words.memory,
                    (m.guard_mib, m.min_available_mib, m.load_min_mib, m.run_min_mib, m.baseline_min_mib),
                ),
                words.memory(m.min_driver_free_mib),
                words.allocated(m),
                words.trend(m),
            ]
            for m in arm.memory
        ],
    )
    return lines


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [" | ".join(["", *header, ""]).strip(), "|" + " --- |" * len(header)]
    return lines + [" | ".join(["", *(_escape(cell) for cell in row), ""]).strip() for row in rows]


def _escape(text: str) -> str:
    """Text that Markdown shows as it is: no mark-up, no HTML, one line."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", " ".join(str(text).split()))


def _code(text: str) -> str:
    return f"`{' '.join(text.split()).replace('`', chr(39))}`"
