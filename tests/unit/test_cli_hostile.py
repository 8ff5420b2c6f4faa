"""Command lines, files and machines as they should not be: words and a documented exit code, no traceback, no hang."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from k3deploy import cli, store
from k3deploy.errors import ExitCode
from k3deploy.paths import state_dir
from k3deploy.progress import Progress
from k3deploy.runner import run_playbook

ROOT = Path(__file__).parents[2]
PROGRAM = Path(sys.executable).with_name("k3deploy")
MATRIX = str(ROOT / "inventory/matrix")
CODES = {int(code) for code in ExitCode}


@pytest.fixture(autouse=True)
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("K3DEPLOY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("K3DEPLOY_STATE", str(tmp_path / "state"))


Say = Callable[..., tuple[int, str]]


@pytest.fixture
def say(capfd: pytest.CaptureFixture[str]) -> Say:
    def run(*arguments: str) -> tuple[int, str]:
        code = cli.run(arguments)
        out, err = capfd.readouterr()
        said = out + err
        assert "Traceback" not in said and "internal error" not in said, said
        assert code in CODES
        return code, said

    return run


@pytest.mark.parametrize(
    "candidate",
    (
        *("", "candidate-", "candidate-U99", "candidate-{{ 7 * 7 }}", "candidate-U2\n", "candidate-U2@"),
        *(
            "candidate-U2@0",
            "candidate-U2+",
            "candidate-U2+U2",
            "candidate-../../x",
            "candidate-\udcff",
            "candidate-$(id)",
        ),
        "candidate-" + "U" * 5000,
    ),
)
def test_a_wrong_candidate(say: Say, candidate: str) -> None:
    code, said = say("matrix", "--matrix", MATRIX, "show", candidate)
    assert code in (ExitCode.USAGE, ExitCode.BAD_INPUT) and said


@pytest.mark.parametrize(
    "arguments",
    (
        *(["aply"], ["plan"], ["plan", "candidate-U2", "--pairs", "-1"], ["plan", "candidate-U2", "--pairs", "9" * 9]),
        *(["apply"], ["matrix", "--bogus"], ["complete", "tcsh"], ["report", "--runs"], ["apply", "a", "b", "c"]),
    ),
)
def test_a_wrong_command_line(say: Say, arguments: list[str]) -> None:
    assert say(*arguments)[0] == ExitCode.USAGE


def spoilt(place: Path) -> dict[str, Path]:
    """Things that are no inventory, no matrix and no runs directory, each in its own way."""
    for folder in ("empty", "row/U2.yml", "holds/lab", "piped/group_vars", "looped/group_vars"):
        (place / folder).mkdir(parents=True)
    (place / "garbage").write_bytes(bytes(range(256)) * 20)
    (place / "broken.yml").write_text("all: [unclosed")
    (place / "loop").symlink_to("loop")
    for name in ("piped", "looped"):
        (place / name / "hosts.yml").write_text("all: {}")
    os.mkfifo(place / "pipe")
    os.mkfifo(place / "piped/group_vars/all")
    (place / "looped/group_vars/again").symlink_to("../group_vars")
    with (place / "huge.yml").open("wb") as sink:
        sink.truncate(2**33)
    return {path.name: path for path in place.iterdir()} | {"nothing": place / "nothing", "zero": Path("/dev/zero")}


@pytest.mark.parametrize(
    "name", ["empty", "holds", "piped", "broken.yml", "loop", "pipe", "huge.yml", "nothing", "zero"]
)
@pytest.mark.parametrize("command", [("plan", "candidate-U2"), ("status",)], ids=["plan", "status"])
def test_what_is_no_inventory_is_refused_before_ansible_sees_it(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], name: str
) -> None:
    if command == ("status",) and name == "broken.yml":
        pytest.skip("Ansible alone reads it there")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("Ansible was started"))
    code, said = say(*command, "-i", str(spoilt(tmp_path)[name]))
    assert code == ExitCode.BAD_INPUT and name in said


def test_a_directory_that_holds_an_inventory_further_down_is_none(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ansible would read, and with another configuration run, whatever lies below it."""
    monkeypatch.chdir(ROOT)
    for place in ("", ".", "inventory"):
        code, said = say("status", "-i", place)
        assert code == ExitCode.BAD_INPUT and "no inventory" in said


def test_nothing_in_an_inventory_is_run(tmp_path: Path) -> None:
    place = tmp_path / "inventory"
    shutil.copytree(ROOT / "inventory/lab", place)
    program = place / "run.sh"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\necho '{{}}'\n")
    program.chmod(0o755)
    ours = [PROGRAM, "plan", "candidate-U2", "--matrix", MATRIX, "-i", place]
    theirs = [PROGRAM.with_name("ansible-inventory"), "-i", place, "--list"]
    for command, cwd in ((ours, tmp_path), (theirs, ROOT), (theirs, ROOT / "playbooks")):
        subprocess.run(command, cwd=cwd, capture_output=True, check=False)
        assert not (tmp_path / "ran").exists(), command


@pytest.mark.parametrize("name", ["garbage", "empty", "row", "loop", "pipe", "nothing", "zero"])
def test_what_is_no_matrix(say: Say, tmp_path: Path, name: str) -> None:
    code, said = say("matrix", "--matrix", str(spoilt(tmp_path)[name]))
    assert code == ExitCode.BAD_INPUT and name in said


@pytest.mark.parametrize("name", ["garbage", "empty", "loop", "pipe", "nothing"])
@pytest.mark.parametrize("run", ["latest", "nope", "../..", "a" * 5000, "\udcff", "/dev/zero"])
def test_what_is_no_run(say: Say, tmp_path: Path, name: str, run: str) -> None:
    assert say("report", run, "--runs", str(spoilt(tmp_path)[name]))[0] == ExitCode.BAD_INPUT


def shell(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", script.replace("k3deploy", f"'{PROGRAM}'")],
        env={**os.environ, "NO_COLOR": "1", "K3DEPLOY_MATRIX": MATRIX, **environment},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=60,
    )


NARROW = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    ("script", "environment", "code"),
    [
        ("k3deploy matrix >&-", {}, 0),
        ("k3deploy matrix show U99 2>&-", {}, 3),
        ("k3deploy matrix show U9 >&- 2>&-", {}, 0),
        ("set -o pipefail; k3deploy matrix show U9 --json | head -c 1", {}, None),
        ("k3deploy matrix > /dev/full", {}, 1),
        ("k3deploy --help > /dev/full", {}, 1),
        ("k3deploy matrix show U9", {"PYTHONIOENCODING": "ascii"}, 0),
        ("k3deploy matrix show \N{SNOWMAN}", NARROW, 3),
        ("k3deploy plan candidate-U2 -i /nonexistent", {"K3DEPLOY_STATE": "/proc/x"}, 3),
        ("k3deploy status -i inventory/lab", {"K3DEPLOY_STATE": "/proc/x"}, 1),
        ("env -i k3deploy matrix --matrix inventory/matrix show U9", {}, 0),
        ('d=$(mktemp -d); cd "$d"; rmdir "$d"; k3deploy matrix', {}, 1),
    ],
)
def test_streams_locales_and_environments_as_they_should_not_be(
    script: str, environment: dict[str, str], code: int | None
) -> None:
    done = shell(f"cd '{ROOT}'; {script}", **environment)
    said = done.stdout + done.stderr
    assert "Traceback" not in said and "internal error" not in said and "Exception ignored" not in said, said
    assert code is None or done.returncode == code, said


def test_ansible_gets_a_locale_that_it_starts_in() -> None:
    done = shell(f"cd '{ROOT}'; k3deploy plan candidate-U2 -i /dev/null; k3deploy status -i tests", **NARROW)
    assert "locale" not in done.stdout + done.stderr


def test_a_user_without_a_name_owns_runs_under_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 65533")

    monkeypatch.setattr(getpass, "getuser", nameless)
    assert store._user() == str(os.getuid())


def test_a_full_disk_ends_the_record_and_not_the_run(tmp_path: Path) -> None:
    (tmp_path / "events.ndjson").symlink_to("/dev/full")
    with (tmp_path / "said").open("w") as sink, Progress(sink, tmp_path / "events.ndjson") as progress:
        progress.phase("close", "production comes back")
        progress.note("production is back")
    said = (tmp_path / "said").read_text()
    assert "is written no further: No space left on device" in said and "production is back" in said


def test_a_playbook_without_room_for_its_files_is_a_failure_that_the_caller_can_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ansible_runner

    def full(**_: object) -> None:
        raise OSError(28, "No space left on device", "/x")

    monkeypatch.setattr(ansible_runner, "run", full)
    (tmp_path / "hosts.yml").write_text("all: {}")
    result = run_playbook("status", [tmp_path / "hosts.yml"], {})
    assert not result.ok and "No space left on device: /x" in result.failures[0].message


def test_the_users_own_state_directory_is_closed_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("K3DEPLOY_STATE")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "k3deploy").mkdir(mode=0o755)
    assert state_dir().stat().st_mode & 0o777 == 0o700
