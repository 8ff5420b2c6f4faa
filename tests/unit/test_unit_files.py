"""Unit templates: what stands in them is exactly what was asked for or refused, and each unit stays confined."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

COLLECTION = Path(__file__).parents[2] / "collections/ansible_collections/k3/deploy"
sys.path.insert(0, str(COLLECTION.parents[2]))

from ansible.errors import AnsibleFilterError  # noqa: E402
from ansible_collections.k3.deploy.plugins.filter import checks, systemd  # noqa: E402

DEVICES = ["char-nvidia", "char-nvidia-uvm", "char-nvidia-caps", "char-infiniband_verbs", "/dev/infiniband/uverbs0"]
BAD_WORDS = [
    "",
    " ",
    "a b",
    "a\nb",
    "a\rb",
    "a\u2028b",
    "a;b",
    'a"b',
    "%i",
    "$HOME",
    "{{ 1 }}",
    "-a",
    "../b",
    "a\\",
    "ä",
    "#",
]
TEMPLATES = sorted((COLLECTION / "roles").glob("*/templates/*.service.j2"))
CANDIDATE = [path for path in TEMPLATES if path.parts[-3] != "lab_production"]


def render(template: Path, **changed: Any) -> str:
    role = template.parts[-3]
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters.update(
        {f"k3.deploy.{name}": function for name, function in systemd.FilterModule().filters().items()}
    )
    values = {
        f"{role}_root": "/opt/k3deploy",
        f"{role}_user": "k3deploy",
        f"{role}_devices": DEVICES,
        f"{role}_protect_home": "read-only",
    }
    return environment.from_string(template.read_text()).render({**values, **changed})


@pytest.mark.parametrize("word", BAD_WORDS)
def test_a_word_that_could_mean_more_than_itself_is_refused(word: str) -> None:
    with pytest.raises(AnsibleFilterError):
        systemd.unit_word(word, path=True)


@given(st.text(max_size=30))
def test_a_bare_word_is_one_word_without_a_meaning_or_refused(text: str) -> None:
    try:
        word = systemd.unit_word(text)
    except AnsibleFilterError:
        return
    assert word == text and not re.search(r"[\s%$\\\"'/{}]", word)


@pytest.mark.parametrize("template", CANDIDATE, ids=lambda path: path.name)
@pytest.mark.parametrize("name", ["root", "user"])
def test_an_injected_line_never_reaches_a_unit(template: Path, name: str) -> None:
    role = template.parts[-3]
    if f"{role}_{name}" not in template.read_text():
        pytest.skip(f"says nothing of its {name}")
    with pytest.raises(AnsibleFilterError):
        render(template, **{f"{role}_{name}": "/opt/x\nExecStartPre=/bin/evil"})


@pytest.mark.parametrize("template", CANDIDATE, ids=lambda path: path.name)
def test_every_unit_is_confined_with_the_devices_of_a_real_rank(template: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    unit = tmp_path / template.name.removesuffix(".j2").replace(".service", "@x.service")
    unit.write_text(render(template))
    argv = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(unit)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if "--offline" in done.stderr:
        pytest.skip("this systemd-analyze reads no unit files")
    figure = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert figure is not None, done.stderr
    assert float(figure[1]) <= checks.MOST_EXPOSED, done.stdout


def test_a_unit_that_something_weakened_stops_the_measurement() -> None:
    unit = {"active": "active", "exposure": 6.1}
    (said,) = checks._confinement_problems(
        {"k3-candidate-head@x.service": unit, "other": {"active": "active", "exposure": 4.0}}
    )
    assert "6.1" in said and "k3-candidate-head@x.service" in said
