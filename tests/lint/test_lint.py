"""What the tree promises about itself: style, types, floors, and roles that say what they take."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
COLLECTION = ROOT / "collections/ansible_collections/k3/deploy"
ROLES = sorted(path for path in (COLLECTION / "roles").iterdir() if path.is_dir())
PLAYBOOKS = sorted((ROOT / "playbooks").glob("*.yml"))

# Written with brackets, so that this file does not hold what it looks for.
FORBIDDEN = {
    "unfinished work": re.compile(r"(?:#|//|--|\{#) *(?:TOD[O]|FIXM[E]|XX[X])\b"),
    "a path of one machine": re.compile(r"/wor[k]/(?:main|shared|steering)|/tm[p]/h[/-]|/roo[t]/main"),
    "a stub": re.compile(r"raise NotImplemente[d]Error|assert Tru[e]$", re.MULTILINE),
}


def run(*argv: str, cwd: Path = ROOT) -> None:
    """Run a program of the virtual environment; what it says is the failure's text."""
    environment = {
        **os.environ,
        "NO_COLOR": "1",
        "ANSIBLE_NOCOLOR": "1",
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }
    environment.pop("FORCE_COLOR", None)
    done = subprocess.run(
        [str(BIN / argv[0]), *argv[1:]], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(argv)}\n{done.stdout[-6000:]}{done.stderr[-3000:]}"


def test_ruff_finds_nothing() -> None:
    run("ruff", "check", ".")


def test_every_python_file_has_the_format() -> None:
    run("ruff", "format", "--check", ".")


def test_types_are_strict() -> None:
    run("mypy", "--strict")


def test_yamllint_finds_nothing() -> None:
    run("yamllint", "--strict", ".")


def test_a_module_imports_only_from_floors_below() -> None:
    run("lint-imports")


def test_ansible_lint_finds_nothing_in_the_production_profile() -> None:
    run("ansible-lint", "--offline", "--profile", "production", "--strict", "-q", "--nocolor")


@pytest.mark.parametrize("folder", [".", "playbooks"])
def test_every_playbook_parses(folder: str) -> None:
    """From the root and from inside playbooks/, each with its own ansible.cfg."""
    place = ROOT / folder
    run("ansible-playbook", "--syntax-check", *(os.path.relpath(playbook, place) for playbook in PLAYBOOKS), cwd=place)


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_argument_specs_and_defaults_say_the_same(role: Path) -> None:
    defaults: dict[str, Any] = load(role / "defaults/main.yml") or {}
    specs: dict[str, Any] = load(role / "meta/argument_specs.yml")["argument_specs"]
    specified: set[str] = set()
    for entry, spec in specs.items():
        options: dict[str, Any] = spec.get("options", {})
        specified |= options.keys()
        wrong = {
            name: f"specified {option.get('default')!r}, default {defaults.get(name)!r}"
            for name, option in options.items()
            if name not in defaults or option.get("default") != defaults[name]
        }
        assert wrong == {}, f"entry point {entry}"
        assert [name for name, option in options.items() if not option.get("description")] == []
    assert specified == defaults.keys()
    assert all(name.startswith(f"{role.name}_") for name in defaults)


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_every_entry_point_of_a_role_has_an_argument_spec(role: Path) -> None:
    """A tasks file that playbooks or scenarios call by name is checked for its arguments like the role itself."""
    specs = load(role / "meta/argument_specs.yml")["argument_specs"]
    called = {"main"}
    for path in [*(ROOT / "playbooks").rglob("*.yml"), *(COLLECTION / "extensions").rglob("*.yml")]:
        pairs = re.findall(r"name: k3\.deploy\.(\w+)\n\s*tasks_from: (\w+)", path.read_text(encoding="utf-8"))
        called |= {entry for name, entry in pairs if name == role.name}
    assert called <= specs.keys()
    assert [entry for entry in specs if not (role / f"tasks/{entry}.yml").is_file()] == []


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_every_role_has_a_readme_with_all_its_variables_and_a_scenario(role: Path) -> None:
    readme = (role / "README.md").read_text(encoding="utf-8")
    variables = load(role / "defaults/main.yml") or {}
    assert [name for name in variables if f"`{name}`" not in readme] == []
    assert (COLLECTION / "extensions/molecule" / role.name / "molecule.yml").is_file()


def tracked_texts() -> dict[str, str]:
    """Every text file that git knows, by its path."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    texts = {}
    for name in filter(None, listing.split("\0")):
        path = ROOT / name
        if path.is_symlink() or not path.is_file():
            continue
        try:
            texts[name] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
    return texts


def test_no_file_holds_unfinished_work_or_a_path_of_one_machine() -> None:
    found = [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {why}: {match[0]}"
        for name, text in tracked_texts().items()
        for why, pattern in FORBIDDEN.items()
        for match in pattern.finditer(text)
    ]
    assert found == []
