"""The report in a real browser: something is there, in light and in dark, and a phone need not scroll sideways."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from test_report_sections import facts_with, page, remembered, timed

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync --disable-quic"
)
PHONE, DESK = 400, 1200
LIGHT, DARK = 1, 0  # Blink's numbers of prefers-color-scheme

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium (make test does)")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with every section; its title becomes the width that it needs and the width that it has."""

    def fill(block: dict[str, object]) -> None:
        timed(block)
        remembered(block)

    path = tmp_path_factory.mktemp("page") / "report.html"
    measure = "<script>document.title = `${document.documentElement.scrollWidth} ${innerWidth}`</script>"
    path.write_text(page(facts_with(fill, pairs=2)) + measure)
    return path


def browse(report: Path, width: int, scheme: int, *what: str) -> str:
    assert BROWSER
    argv = [BROWSER, *QUIET.split(), "--hide-scrollbars", f"--user-data-dir={report.parent / 'profile'}"]
    argv += [f"--window-size={width},1600", f"--blink-settings=preferredColorScheme={scheme}", *what, report.as_uri()]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_no_part_of_the_page_is_wider_than_the_screen(report: Path, width: int) -> None:
    title = re.search(r"<title>(\d+) (\d+)</title>", browse(report, width, LIGHT, "--dump-dom"))
    assert title, "the page's script did not run to its end"
    assert int(title[1]) <= int(title[2])


def test_light_and_dark_are_each_painted_in_their_own_colours(report: Path) -> None:
    from matplotlib.image import imread

    brightness = {}
    for scheme in (LIGHT, DARK):
        picture = report.with_name(f"{scheme}.png")
        browse(report, DESK, scheme, f"--screenshot={picture}")
        pixels = imread(picture)[:, :, :3]
        assert pixels.std() > 0.05, "the page is blank"
        brightness[scheme] = float(pixels.mean())
    assert brightness[LIGHT] > 0.8 and brightness[DARK] < 0.3
