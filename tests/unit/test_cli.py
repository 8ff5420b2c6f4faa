"""cli.py: help, errors and exit codes; and the commands that need no rank."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from k3deploy import cli
from k3deploy.errors import ExitCode, InputError, LockedError, Problem
from k3deploy.store import Store

PROJECT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3DEPLOY_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("K3DEPLOY_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("K3DEPLOY_MATRIX", str(PROJECT / "inventory" / "matrix"))
    monkeypatch.delenv("K3DEPLOY_INVENTORY", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A command ``fail`` that raises whatever the test puts into the mapping's ``error``."""
    holder: dict[str, Any] = {}

    @click.command()
    def fail() -> None:
        raise holder["error"]

    original = cli.LazyGroup.get_command
    monkeypatch.setattr(
        cli.LazyGroup,
        "get_command",
        lambda self, ctx, name: fail if name == "fail" else original(self, ctx, name),
    )
    yield holder


def test_help_is_instant_because_it_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['k3deploy', '--help']\n"
        "from k3deploy.cli import run\n"
        "assert run() == 0\n"
        "slow = {'ansible', 'ansible_runner', 'pydantic', 'scipy', 'numpy', 'rich', 'yaml', 'gguf'}\n"
        "heavy = slow & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    used = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(used) < 0.3, "seconds of CPU"


def test_help_documents_every_exit_code_and_every_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--help"]) == 0
    out = capfd.readouterr().out
    for code in ExitCode:
        assert re.search(rf"^\s+{int(code)}  \S", out, re.MULTILINE), code
    for name in ("apply", "plan", "rollback", "status", "matrix", "facts", "report", "lab"):
        assert re.search(rf"^  {name}  ", out, re.MULTILINE)


@pytest.mark.parametrize("command", [name for name in cli.COMMANDS if name != "lab"])
def test_every_command_teaches_by_example(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run([command, "--help"]) == 0
    out = capfd.readouterr().out
    assert "Examples:" in out and f"k3deploy {command}" in out


def test_what_lists_can_print_json() -> None:
    for name in ("plan", "status", "matrix", "facts", "report", "rollback", "apply"):
        command = cli.cli.get_command(click.Context(cli.cli), name)  # type: ignore[attr-defined]
        assert any("--json" in parameter.opts for parameter in command.params), name


def test_an_error_is_its_message_its_remedy_and_its_exit_code(
    failing: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    failing["error"] = LockedError("cluster lab is in use", remedy="wait for it")
    assert cli.run(["fail"]) == 5
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == "error: cluster lab is in use\n  remedy: wait for it\n"


def test_all_problems_of_the_input_are_shown_at_once(
    failing: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    failing["error"] = InputError([Problem("a.yml", 3, "unknown key"), Problem("b.yml", 0, "missing")])
    assert cli.run(["fail"]) == 3
    err = capfd.readouterr().err
    assert "2 problems" in err and "a.yml:3: unknown key" in err and "b.yml: missing" in err


def test_an_unexpected_exception_leaves_its_traceback_in_a_private_file(
    failing: dict[str, Any], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    failing["error"] = ZeroDivisionError("somewhere deep")
    assert cli.run(["fail"]) == 1
    err = capfd.readouterr().err
    assert "Traceback" not in err and "ZeroDivisionError: somewhere deep" in err
    (kept,) = (tmp_path / "state" / "errors").iterdir()
    assert str(kept) in err
    assert "Traceback" in kept.read_text() and kept.stat().st_mode & 0o777 == 0o600


def test_escapes_in_a_message_do_not_reach_the_terminal(
    failing: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    failing["error"] = LockedError("held by \x1b]0;owned\x07")
    cli.run(["fail"])
    assert "\x1b" not in capfd.readouterr().err


def test_ctrl_c_before_anything_ran_is_130(failing: dict[str, Any]) -> None:
    failing["error"] = KeyboardInterrupt()
    assert cli.run(["fail"]) == 130


def test_a_misspelt_command_gets_the_nearest_one(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["aply"]) == 2
    assert "did you mean apply?" in capfd.readouterr().err


def test_a_reader_that_stops_early_is_no_error_message() -> None:
    program = f"{sys.executable} -c 'from k3deploy.cli import main; main()'"
    done = subprocess.run(
        ["bash", "-c", f"{program} matrix --json | head -c 1"], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("[", "")


def test_candidates_and_sweep_values_complete() -> None:
    assert _complete("apply", "candidate-U2") == ["candidate-U2", "candidate-U2@2048", "candidate-U2@3072"]
    assert "candidate-U2+U6" in _complete("plan", "candidate-U2+U6")
    assert _complete("", "rep") == ["report"]


def test_a_broken_matrix_completes_to_nothing_and_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "baseline.yml").write_text(": [")
    monkeypatch.setenv("K3DEPLOY_MATRIX", str(tmp_path))
    assert _complete("apply", "candidate-") == []


def _complete(command: str, word: str) -> list[str]:
    words = f"k3deploy {command} {word}".replace("  ", " ")
    done = subprocess.run(
        [sys.executable, "-c", "from k3deploy.cli import main; main()"],
        env={
            **os.environ,
            "_K3DEPLOY_COMPLETE": "bash_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_names_the_program(shell: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["complete", shell]) == 0
    assert "_K3DEPLOY_COMPLETE" in capfd.readouterr().out


def test_the_matrix_lists_rows_and_shows_one(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["matrix", "--json"]) == 0
    rows = json.loads(capfd.readouterr().out)
    assert {"U1", "U9", "next"} <= {row["id"] for row in rows}
    assert cli.run(["matrix"]) == 0
    assert "candidate-U9" in capfd.readouterr().out
    assert cli.run(["matrix", "show", "U9"]) == 0
    assert "f16" in capfd.readouterr().out
    assert cli.run(["matrix", "show", "U99"]) == 3


def test_runs_are_listed_with_their_verdicts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    store = Store(tmp_path / "runs")
    run = store.create(
        "candidate-U2", {"blocks": []}, {"all": {}}, cluster="lab", inventory=tmp_path, tool={}, options={}
    )
    assert cli.run(["report", "--list", "--json"]) == 0
    (listed,) = json.loads(capfd.readouterr().out)
    assert (listed["id"], listed["verdict"]) == (run.id, None)
    assert cli.run(["report", "--list"]) == 0
    assert run.id in capfd.readouterr().out


def test_asking_for_a_run_where_there_is_none_is_bad_input(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["facts"]) == 3
    assert "no run in" in capfd.readouterr().err


def test_a_facts_file_is_validated_with_line_numbers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "facts.json"
    file.write_text('{"run_id": "x",\n "candidate": "candidate-U2",\n "blocks": 7}')
    assert cli.run(["facts", "--validate", str(file)]) == 3
    assert f"{file}:3" in capfd.readouterr().err
    file.write_text('{"run_id": "x", "candidate": "candidate-U2", "blocks": []}')
    assert cli.run(["facts", "--validate", str(file)]) == 0


def test_no_color_is_respected(failing: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    failing["error"] = LockedError("x")
    said: list[dict[str, Any]] = []
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(click, "secho", lambda *_, **options: said.append(options))
    cli.run(["fail"])
    assert said and all(options["color"] is False for options in said)


def test_production_is_not_tried_on_another_labs_addresses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (
        ("K3DEPLOY_LAB", "elsewhere"),
        ("XDG_CACHE_HOME", str(tmp_path)),
        ("K3DEPLOY_STATE", str(tmp_path)),
    ):
        monkeypatch.setenv(name, value)
    inventory = Path(__file__).parents[2] / "inventory" / "lab"
    assert cli.run(["lab", "production", "-i", str(inventory)]) == 1
    said = capsys.readouterr().err
    assert "is not of the lab elsewhere" in said and "hosts.yml" in said
