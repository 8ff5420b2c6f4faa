"""The reports: complete, self-contained, and harmless whatever the data says."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from k3deploy.facts import Facts, assemble
from k3deploy.judge import Verdict, judge
from k3deploy.judge.verdict import RankMemory
from k3deploy.report import words, write_html
from k3deploy.report.html import render_html
from k3deploy.report.text import render_markdown, render_text

RUN = Path(__file__).parents[1] / "fixtures/run-small"
PLAN: dict[str, Any] = json.loads((RUN / "plan.json").read_text())
FACTS = assemble(RUN)
VERDICT = judge(PLAN, FACTS)
VOID = {"meta", "br", "link", "img", "hr", "input"}


class Page(HTMLParser):
    """The page's tags, its text, and whether every tag is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == [], self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def html() -> str:
    return render_html(RUN, PLAN, FACTS, VERDICT)


def test_the_page_is_one_file_that_loads_nothing(html: str) -> None:
    page = Page(html)
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "base", "form"}
    for _, attributes in page.tags:
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#")
    assert "@import" not in html and not re.search(r"url\((?!#)", html)


def test_the_verdict_and_its_reason_come_first(html: str) -> None:
    text = " ".join(" ".join(Page(html).text).split())
    body = text[text.index("candidate-U2 on lab") :] if "candidate-U2 on lab" in text else text
    assert body.index("INCONCLUSIVE") < body.index("one server start per arm") < body.index("Gates")


def test_states_have_tables_of_their_own(html: str) -> None:
    for state in ("cold", "warm"):
        section = html.split(f"<h3>{state} ")[1].split("<h3>")[0]
        assert "pp2048" in section
    assert "<h3>cached " not in html  # nothing cached was measured


def test_every_process_is_shown_as_it_ran(html: str) -> None:
    for block in FACTS.blocks:
        for _rank, name, unit in block.units():
            assert name in html and " ".join(unit.argv) in html


def test_ids_in_the_page_are_unique(html: str) -> None:
    ids = [attributes["id"] for _, attributes in Page(html).tags if attributes.get("id")]
    assert len(ids) == len(set(ids))


def test_equal_data_gives_equal_bytes(html: str) -> None:
    assert render_html(RUN, PLAN, FACTS, VERDICT) == html


def test_colours_come_from_the_style_sheet_alone(html: str) -> None:
    charts = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    assert len(charts) == 3  # one per arm and the blocks
    for chart in charts:
        assert not re.search(r"#[0-9a-fA-F]{6}\b", chart)
    assert "prefers-color-scheme: dark" in html


HOSTILE = "<img src=x onerror=alert(1)> $x_{ {{ 7*7 }} & \"'`|*"


def hostile(value: Any) -> Any:
    """The same document with something nasty at the end of every free text."""
    if isinstance(value, dict):
        return {key: hostile(item) for key, item in value.items()}
    if isinstance(value, list):
        return [hostile(item) for item in value]
    return value + HOSTILE if isinstance(value, str) else value


def hostile_documents() -> tuple[dict[str, Any], Facts, Verdict]:
    facts = FACTS.model_dump(mode="json")
    for block in facts["blocks"]:
        block["arm"] += HOSTILE
        block["error"] = HOSTILE
        block["bench"]["props"] = hostile(block["bench"]["props"])
        block["bench"]["cells"][0]["samples"][0] |= {"valid": False, "why": HOSTILE}
        block["ranks"] = {rank + HOSTILE: record for rank, record in block["ranks"].items()}
        for record in block["ranks"].values():
            for unit in record["state"]["units"].values():
                unit["argv"] = hostile(unit["argv"])
    plan = hostile({**PLAN, "arms": [], "gates": {}, "blocks": []}) | {
        "arms": [{**arm, "name": arm["name"] + HOSTILE, "notes": [HOSTILE]} for arm in PLAN["arms"]],
        "gates": {name + HOSTILE: gate for name, gate in PLAN["gates"].items()},
        "blocks": PLAN["blocks"],
    }
    documents = Facts.model_validate(facts)
    return plan, documents, judge(plan, documents)


def test_text_from_outside_is_never_mark_up_in_the_page() -> None:
    plan, facts, verdict = hostile_documents()
    text = render_html(RUN, plan, facts, verdict)
    page = Page(text)
    assert "img" not in {tag for tag, _ in page.tags}
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert HOSTILE in "".join(page.text)  # shown as it is


def test_text_from_outside_is_never_mark_up_in_markdown() -> None:
    plan, facts, verdict = hostile_documents()
    text = render_markdown(plan, facts, verdict)
    outside_code = re.sub(r"`[^`\n]*`|^    .*$", "", text, flags=re.MULTILINE)
    assert not re.search(r"(?<!\\)<img", outside_code)


def test_text_from_outside_is_never_console_mark_up() -> None:
    _, _, verdict = hostile_documents()
    named = verdict.model_copy(update={"reason": "[bold]not bold[/bold] [/x]"})
    assert "[bold]not bold[/bold] [/x]" in render_text(named, width=120, color=False)


def test_the_terminal_shows_the_same_numbers_as_the_page(html: str) -> None:
    text = render_text(VERDICT, width=140, color=False)
    for arm in VERDICT.arms:
        for gate in arm.gates:
            for found in gate.comparisons:
                shown = f"{((found.ratio or 1) - 1) * 100:+.1f} %"
                assert shown in text and shown in html
    assert "\x1b[" not in text


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_terminal_line_is_wider_than_asked(width: int) -> None:
    assert max(len(line) for line in render_text(VERDICT, width=width, color=False).splitlines()) <= width


def test_markdown_tables_have_as_many_cells_as_their_header() -> None:
    lines = render_markdown(PLAN, FACTS, VERDICT).splitlines()
    for number, line in enumerate(lines):
        if line.startswith("| ---"):
            columns = line.count("|")
            row = number - 1
            while row < len(lines) and lines[row].startswith("|"):
                assert len(re.findall(r"(?<!\\)\|", lines[row])) == columns, lines[row]
                row += 1


def test_an_invalid_run_without_numbers_still_has_reports(tmp_path: Path) -> None:
    facts = FACTS.model_copy(update={"blocks": []})
    verdict = judge(PLAN, facts)
    assert "INVALID" in write_html(tmp_path, PLAN, facts, verdict).read_text()
    assert "INVALID" in render_text(verdict, width=100) and "INVALID" in render_markdown(PLAN, facts, verdict)


def test_a_sample_that_does_not_count_is_listed_with_its_reason() -> None:
    facts = FACTS.model_dump(mode="json")
    facts["blocks"][0]["bench"]["cells"][0]["samples"][0] |= {"valid": False, "why": "prefix hit: cache_n is 9, not 0"}
    documents = Facts.model_validate(facts)
    assert "prefix hit: cache_n is 9, not 0" in render_html(RUN, PLAN, documents, judge(PLAN, documents))


def test_the_report_says_how_to_have_the_run_again(html: str) -> None:
    assert "k3deploy apply candidate-U2 --inventory inventory/lab" in html
    assert "ansible-playbook -i inventory/lab -i" in html


def test_a_ranks_memory_stands_beside_what_was_foreseen_of_it() -> None:
    known = RankMemory(
        **{"rank": "rank2", "min_available_mib": 1600, "load_min_mib": 1700, "run_min_mib": 1600},
        **{"baseline_min_mib": None, "guard_mib": 1536, "min_driver_free_mib": 512},
        **{"foreseen_mib": 231.0, "allocated_mib": 217.7, "forecast_error": 0.061, "trend_mib_per_request": -10.25},
    )
    assert (words.allocated(known), words.trend(known)) == ("218 MiB (forecast +6 %)", "-10.25 MiB")
    unknown = RankMemory.model_validate({**known.model_dump(), "allocated_mib": None, "trend_mib_per_request": None})
    assert (words.allocated(unknown), words.trend(unknown)) == (words.MISSING, words.MISSING)
