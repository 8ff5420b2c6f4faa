"""k3deploy window, and what rollback says is left: words and exit codes, with real ansible-runner on one local host."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from k3deploy import cli, runner
from k3deploy.commands import window
from k3deploy.commands.options import DurationType
from k3deploy.commands.rollback import Restoration, cluster_name
from k3deploy.errors import ExitCode
from k3deploy.runner import HostFailure, RunResult

HELD: dict[str, Any] = {
    **{"run_id": "r1", "owner": "ann@east", "reason": "ubatch", "kind": "run", "opened": 0, "deadline": 7200},
    **{"left_s": 3600, "head_unit": "head.service"},
}


class Playbooks:
    """Playbooks whose head says one thing."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "playbooks"
        (self.folder / "library").mkdir(parents=True)
        self.inventory = root / "hosts.yml"
        self.inventory.write_text(
            "all:\n  hosts:\n    rank0:\n      ansible_connection: local\n"
            "      ansible_python_interpreter: '{{ ansible_playbook_python }}'\n"
        )

    def say(self, name: str, failed: bool = False, **said: Any) -> None:
        """A playbook of one task, whose module says ``said`` and keeps the variables that it was given."""
        end = "fail_json" if failed else "exit_json"
        (self.folder / "library" / f"{name}_says.py").write_text(
            "import json\nfrom ansible.module_utils.basic import AnsibleModule\n"
            "module = AnsibleModule(argument_spec={'given': {'type': 'dict'}})\n"
            f"open({str(self.folder / name)!r}, 'w').write(json.dumps(module.params['given']))\n"
            f"module.{end}(**json.loads({json.dumps(said)!r}))\n"
        )
        given = ", ".join(
            f"{key}: \"{{{{ {key} | default('') }}}}\""
            for key in ("k3_run_owner", "k3_run_reason", "k3_run_deadline_s", "k3_window_force", "k3_run_id")
        )
        (self.folder / f"{name}.yml").write_text(
            "- name: Window | act\n  hosts: all\n  gather_facts: false\n  tasks:\n"
            f"    - {name}_says: {{given: {{{given}}}}}\n"
        )

    def given(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / name).read_text())
        return found


@pytest.fixture
def playbooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Playbooks:
    monkeypatch.setenv("K3DEPLOY_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("K3DEPLOY_OWNER", "bob@west")
    monkeypatch.setenv("ANSIBLE_HOME", str(tmp_path / "ansible-home"))
    monkeypatch.delenv("ANSIBLE_CONFIG", raising=False)
    made = Playbooks(tmp_path)
    monkeypatch.setattr(runner, "find_playbook", lambda name, _: made.folder / f"{name}.yml")
    return made


def run(playbooks: Playbooks, *arguments: str) -> int:
    return cli.run(["window", *arguments, "-i", str(playbooks.inventory)])


# --- words ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "closed"),
        (HELD, "held by ann@east for run r1 (ubatch)"),
        (HELD, "until 1970-01-01 02:00:00 UTC (1 h 00 min left)"),
        ({**HELD, "kind": "hand"}, "for work by hand"),
        ({**HELD, "left_s": -300}, "STALE, its end passed 5 min 00 s ago\n  k3deploy rollback"),
        ({**HELD, "closing": 5}, "on its way back"),
        ({**HELD, "guest": "r2"}, "run r2 works in it"),
        ({"damaged": True}, "cannot be read; k3deploy rollback"),
    ],
)
def test_a_window_is_told_with_what_its_reader_can_do(found: dict[str, Any] | None, words: str) -> None:
    assert words in window.words(found)


@pytest.mark.parametrize(
    ("text", "seconds"), [("45s", 45), ("90m", 5400), ("4h", 14400), ("1h30m", 5400), ("2d", 172800)]
)
def test_a_length_of_time_is_written_as_people_write_it(text: str, seconds: int) -> None:
    assert DurationType().convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "4", "4 hours", "-1h", "h", "1s", "15d", "9" * 30 + "d"])
def test_no_length_of_time_is_refused_with_how_to_write_it(text: str) -> None:
    with pytest.raises(click.BadParameter, match="write it like 90m, 4h or 1h30m"):
        DurationType().convert(text, None, None)


# --- commands -------------------------------------------------------------------------------------------------------


def test_open_says_who_why_and_for_how_long(playbooks: Playbooks, capfd: pytest.CaptureFixture[str]) -> None:
    playbooks.say("window_open", done=True, deadline_left_s=5400, production={**HELD, "left_s": None})
    assert run(playbooks, "open", "--deadline", "90m", "--reason", "new cable", "--yes") == 0
    assert playbooks.given("window_open") == {
        **{"k3_run_owner": "bob@west", "k3_run_reason": "new cable", "k3_run_deadline_s": 5400},
        **{"k3_window_force": "", "k3_run_id": ""},
    }
    assert "(1 h 30 min left)" in capfd.readouterr().out


def test_open_without_a_terminal_needs_a_yes(playbooks: Playbooks) -> None:
    assert run(playbooks, "open") == 2


LOCKED = "LOCKED: the maintenance window is held by ann@east for run r1 since then until later; wait until then"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), ExitCode.LOCKED, "held by ann@east for run r1 since then until later; wait"),
        (
            ("--force", "ann"),
            ExitCode.USAGE,
            "--force ann is not the holder: the maintenance window is held by ann@east",
        ),
    ],
)
def test_a_stranger_is_told_who_holds_it_and_nothing_is_brought_back(
    playbooks: Playbooks,
    arguments: tuple[str, ...],
    code: ExitCode,
    words: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    playbooks.say("window_open", failed=True, msg=LOCKED)
    assert run(playbooks, "open", "--yes", *arguments) == code
    assert words in capfd.readouterr().err
    assert not (playbooks.folder / "rollback").exists()


def test_a_window_that_does_not_open_leaves_production_back(
    playbooks: Playbooks, capfd: pytest.CaptureFixture[str]
) -> None:
    playbooks.say("window_open", failed=True, msg="production still serves 2 request(s)")
    playbooks.say("rollback", done=True, production={"answers": True})
    assert run(playbooks, "open", "--yes") == 1
    assert "production still serves 2 request(s)" in capfd.readouterr().err
    assert playbooks.given("rollback")["k3_run_id"] == "by-hand", "nobody else's window is closed"


def test_a_window_that_does_not_close_is_loud(playbooks: Playbooks, capfd: pytest.CaptureFixture[str]) -> None:
    playbooks.say("window_close", failed=True, msg="production answers, but not as recorded")
    assert run(playbooks, "close") == ExitCode.NOT_RESTORED
    assert "PRODUCTION IS NOT PROVEN TO BE BACK" in capfd.readouterr().err


HEAD = {"head": {"status": 200}}


@pytest.mark.parametrize(
    ("window", "production", "code", "said"),
    [
        pytest.param({**HELD, "left_s": 60}, HEAD, 0, "held by ann@east", id="held"),
        pytest.param({**HELD, "left_s": -60}, HEAD, 1, "STALE", id="its end has passed"),
        pytest.param(None, HEAD, 0, "maintenance window: closed", id="closed"),
        pytest.param(None, {}, 1, "maintenance window: not known", id="the head was not reached"),
    ],
)
def test_status_says_how_the_window_stands_and_only_what_its_rank_said(
    playbooks: Playbooks,
    capfd: pytest.CaptureFixture[str],
    window: dict[str, Any] | None,
    production: dict[str, Any],
    code: int,
    said: str,
) -> None:
    playbooks.say("status", state={"window": window, "production": production})
    assert run(playbooks, "status") == code
    assert said in capfd.readouterr().out


# --- what a rollback leaves -----------------------------------------------------------------------------------------


def test_production_that_is_back_with_a_rank_left_is_not_the_loud_error() -> None:
    unreached = HostFailure("rank3", "Close | stop the candidate", "no route", "Rollback | stop")
    left = HostFailure(
        "localhost", "Nothing is left", "rank3 was not reached\nrank4 took part", "Rollback | what is left"
    )
    result = RunResult(rc=2, status="failed", failures=[left], unreachable=[unreached])
    error = Restoration(result, {"answers": True, "as_recorded": True}).error(Path("inventory/east"))
    assert error.exit_code is ExitCode.LEFTOVER
    assert str(error).splitlines() == [
        "production is back: it answers as recorded before the window; but this is left:",
        "  rank3 was not reached",
        "  rank4 took part",
    ]
    assert "k3deploy rollback -i inventory/east" in error.remedy
    assert Restoration(result, {}).error(Path("x")).exit_code is ExitCode.NOT_RESTORED


def test_rollback_does_not_wait_for_a_run_that_goes_on_here(
    playbooks: Playbooks, capfd: pytest.CaptureFixture[str]
) -> None:
    playbooks.say("rollback", done=True, production={"answers": True})
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from k3deploy.store import lock\n"
            "with lock(sys.argv[1], 'apply candidate-U2'): print(flush=True); input()",
            cluster_name(playbooks.inventory),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert cli.run(["rollback", "-i", str(playbooks.inventory)]) == 0
        holder.kill()
    said = capfd.readouterr().err
    assert "in use by apply candidate-U2" in said and "production answers" in said
