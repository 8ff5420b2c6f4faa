"""``report.html``: one self-contained file, readable on a phone, in light and in dark."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k3deploy.facts import Facts
from k3deploy.judge import Verdict

MAX_PANELS = 4  # cells drawn over time: those that gates judge, first


def write_html(run_dir: Path, plan: Mapping[str, Any], facts: Facts, verdict: Verdict) -> Path:
    """Write ``report.html`` into the run directory and return its path."""
    from k3deploy.paths import write_text

    path = run_dir / "report.html"
    write_text(path, render_html(run_dir, plan, facts, verdict))
    return path


def render_html(run_dir: Path, plan: Mapping[str, Any], facts: Facts, verdict: Verdict) -> str:
    """The page. All text is escaped; the charts are the only mark-up that comes from outside the template."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    from k3deploy.report import charts, sections, words
    from k3deploy.report.matrix import matrix_rows
    from k3deploy.report.view import make_view

    environment = Environment(
        loader=PackageLoader("k3deploy", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["w"] = words
    template = environment.get_template("report.html.j2")
    return template.render(
        v=make_view(run_dir, plan, facts, verdict),
        verdict=verdict,
        ratio_charts={arm.slug: Markup(charts.ratio_chart(arm, verdict.delta)) for arm in verdict.arms},
        block_chart=Markup(charts.block_chart(facts, _judged_cells(verdict))),
        memory_chart=Markup(
            charts.memory_chart(
                sections.memory_series(facts),
                [arm for arm, _ in charts.arm_colours(facts)],
                sections.floors(plan),
                sections.warn_tier(facts),
            )
        ),
        matrix=matrix_rows(plan, facts, verdict) if len(verdict.arms) > 1 else [],
        parity=sections.parity_rows(plan, facts),
        profile=sections.profile_rows(facts),
        void=sections.void_rows(facts),
        transport=sections.transport_rows(facts),
        arm_colours=charts.arm_colours(facts),
    )


def _judged_cells(verdict: Verdict) -> list[tuple[str, str]]:
    cells = [
        (comparison.cell, str(comparison.state))
        for arm in verdict.arms
        for gate in arm.gates
        for comparison in gate.comparisons
        if comparison.metric == "speed"
    ]
    return list(dict.fromkeys(cells))[:MAX_PANELS]
