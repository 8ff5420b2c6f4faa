"""The story of apply with real ansible-runner: production comes back whatever happens, and the exit code tells."""

from __future__ import annotations

import json
import os
import pty
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3deploy import cli, runner
from k3deploy.commands import apply, judging
from k3deploy.errors import ExitCode, InterruptedRun, K3Error, LockedError, NotRestoredError, PreflightError
from k3deploy.store import Run, Store

PLAN = {"candidate": "candidate-U2", "blocks": [{"index": 0, "arm": "baseline"}, {"index": 1, "arm": "U2@2048"}]}
PRODUCTION = """
from ansible.module_utils.basic import AnsibleModule
module = AnsibleModule(argument_spec={"state": {}, "file": {"type": "path"}})
with open(module.params["file"], "w") as stream:
    stream.write(module.params["state"])
back = module.params["state"] == "serving"
module.exit_json(changed=True, done=True, production={"answers": True, "as_recorded": True} if back else {})
"""


class Project:
    """Playbooks on one local host; ``state`` holds what production does: serving or drained."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.playbooks = root / "playbooks"
        (self.playbooks / "library").mkdir(parents=True)
        (self.playbooks / "library" / "production.py").write_text(PRODUCTION)
        self.inventory = root / "hosts.yml"
        self.inventory.write_text(
            "all:\n  hosts:\n    rank0:\n      ansible_connection: local\n"
            "      ansible_python_interpreter: '{{ ansible_playbook_python }}'\n"
        )
        self.state = root / "production"
        self.state.write_text("serving")
        self.write("rollback", [("Rollback | production back", self.set("serving"))])

    def set(self, state: str) -> str:
        return f"production: {{state: {state}, file: {self.state}}}"

    def write(self, name: str, plays: list[tuple[str, str]]) -> None:
        (self.playbooks / f"{name}.yml").write_text(
            "".join(
                f"- name: {title}\n  hosts: all\n  gather_facts: false\n  tasks:\n    - {task}\n"
                for title, task in plays
            )
        )

    def run(self) -> Run:
        return Store(self.root / "runs").create(
            "candidate-U2", PLAN, {"all": {}}, cluster="lab", inventory=self.inventory, tool={}, options={}
        )


RECORD = "ansible.builtin.copy: {content: '{}', dest: '{{ k3_run_dir }}/blocks/000.json', mode: '0600'}"
LONG = "ansible.builtin.command: sleep 51.7"
FAIL = "ansible.builtin.fail: {msg: no space left}"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setenv("K3DEPLOY_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("ANSIBLE_HOME", str(tmp_path / "ansible-home"))
    monkeypatch.delenv("ANSIBLE_CONFIG", raising=False)
    made = Project(tmp_path)
    monkeypatch.setattr(runner, "find_playbook", lambda name, _: made.playbooks / f"{name}.yml")
    return made


@pytest.fixture(autouse=True)
def verdict(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The judge's word, without a judge."""
    word: dict[str, Any] = {"code": ExitCode.REJECT}

    def conclude(run: Run) -> judging.Outcome:
        return judging.Outcome({"outcome": "REJECT"}, "REJECT: slower", run.path / "report.html", word["code"])

    monkeypatch.setattr(judging, "conclude", conclude)
    return word


def when(condition: Callable[[], bool], *numbers: int, pause: float = 1.5) -> threading.Thread:
    """Send signals to this process, the first when the condition holds."""

    def send() -> None:
        deadline = time.monotonic() + 30
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.05)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(pause)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def running(text: str) -> bool:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if text in (entry / "cmdline").read_text(errors="replace").replace("\0", " "):
                    return True
            except OSError:
                continue
    return False


def test_a_run_to_the_end_gives_the_verdict_s_exit_code_and_records_what_it_cost(
    project: Project, capfd: pytest.CaptureFixture[str]
) -> None:
    project.write("apply", [("Preflight | look", 'ansible.builtin.command: "true"'), ("Window | measure", RECORD)])
    run = project.run()
    assert apply.carry_out(run, project.inventory, PLAN) == ExitCode.REJECT
    captured = capfd.readouterr()
    assert "REJECT: slower" in captured.out and "report.html" in captured.out
    assert "preflight: look" in captured.err
    records = [json.loads(line) for line in run.events.read_text().splitlines()]
    (end,) = [record for record in records if record["event"] == "playbook_end"]
    assert (end["playbook"], end["tasks"], end["round_trips"]) == ("apply", 2, 2)
    assert [record["phase"] for record in records if record["event"] == "phase_start"] == [
        "preflight",
        "window",
        "judge",
    ]
    assert (run.path / "logs" / "ansible-apply.log").exists()


@pytest.mark.parametrize("code", [ExitCode.REJECT, ExitCode.OK, ExitCode.INCONCLUSIVE, ExitCode.INVALID])
def test_of_a_run_that_broke_only_a_rejection_stands(
    project: Project, capfd: pytest.CaptureFixture[str], verdict: dict[str, Any], code: ExitCode
) -> None:
    project.write("apply", [("Window | measure", RECORD), ("Measure | break", FAIL)])
    verdict["code"] = code
    if code == ExitCode.REJECT:
        assert apply.carry_out(project.run(), project.inventory, PLAN) == ExitCode.REJECT
        assert "the run ended early: " in capfd.readouterr().err
    else:
        with pytest.raises(K3Error, match="no space left"):
            apply.carry_out(project.run(), project.inventory, PLAN)


VOID = {"index": 0, "pair": 0, "arm": "baseline", "void": "rank1: TCP, not RDMA", "broken": True}
UNPROVEN = {**VOID, "transport": {"require": "rdma", "transport": "TCP", "connections": [], "problems": ["rank1"]}}


def void(record: dict[str, Any], name: str = "000-1") -> str:
    """A task that records a block that does not count."""
    text = json.dumps(record)
    making = "d = pathlib.Path('{{ k3_run_dir }}/void'); d.mkdir(exist_ok=True)"
    program = f"import pathlib; {making}; (d / '{name}.json').write_text({text!r})"
    return f"ansible.builtin.command: {json.dumps({'argv': ['python3', '-c', program]})}"


def test_a_run_whose_transport_is_not_proven_is_invalid(
    project: Project, capfd: pytest.CaptureFixture[str], verdict: dict[str, Any]
) -> None:
    drained, back = ("Window | drain", project.set("drained")), ("Close | back", project.set("serving"))
    project.write("apply", [drained, ("Measure | record", void(UNPROVEN)), back, ("Measure | say", FAIL)])
    verdict["code"] = ExitCode.INVALID
    assert apply.carry_out(project.run(), project.inventory, PLAN) == ExitCode.INVALID
    assert project.state.read_text() == "serving"
    assert "the run ended early: " in capfd.readouterr().err


@pytest.mark.parametrize(
    "broken",
    [
        [("Measure | record", void(VOID)), ("Measure | say", FAIL)],
        [("Measure | record", void(UNPROVEN)), ("Measure | also", void(VOID, "001-1")), ("Measure | say", FAIL)],
        [("Measure | record", void(UNPROVEN)), ("Close | back", f"name: Close | back\n      {FAIL}")],
        [("Measure | say", FAIL)],
    ],
    ids=["a block that broke", "another that broke too", "a close that failed", "nothing recorded"],
)
def test_of_a_run_that_broke_for_another_reason_the_failure_is_the_word(
    project: Project, verdict: dict[str, Any], broken: list[tuple[str, str]]
) -> None:
    project.write("apply", [("Window | drain", project.set("drained")), *broken])
    verdict["code"] = ExitCode.INVALID
    with pytest.raises(K3Error, match="no space left") as caught:
        apply.carry_out(project.run(), project.inventory, PLAN)
    assert caught.value.exit_code is ExitCode.FAILED
    assert project.state.read_text() == "serving"


def test_a_proof_that_failed_in_an_earlier_go_explains_nothing_of_this_one(
    project: Project, verdict: dict[str, Any]
) -> None:
    run = project.run()
    (run.path / "void").mkdir()
    (run.path / "void/000-1.json").write_text(json.dumps(UNPROVEN))
    project.write("apply", [("Window | break", FAIL)])
    verdict["code"] = ExitCode.INVALID
    with pytest.raises(K3Error, match="no space left"):
        apply.carry_out(run, project.inventory, PLAN)


def test_json_output_is_nothing_but_json(project: Project, capfd: pytest.CaptureFixture[str]) -> None:
    project.write("apply", [("Window | measure", RECORD)])
    run = project.run()
    apply.carry_out(run, project.inventory, PLAN, as_json=True)
    said = json.loads(capfd.readouterr().out)
    assert (said["run"], said["verdict"]) == (run.id, {"outcome": "REJECT"})


def test_a_failed_preflight_says_so_and_leaves_production_alone(project: Project) -> None:
    project.write("rollback", [("Rollback | must not run", project.set("touched"))])
    project.write("apply", [("Preflight | look", FAIL)])
    with pytest.raises(PreflightError, match=r"rank0: .*no space left"):
        apply.carry_out(project.run(), project.inventory, PLAN)
    assert project.state.read_text() == "serving"


def test_a_failure_inside_the_window_brings_production_back(
    project: Project, capfd: pytest.CaptureFixture[str]
) -> None:
    project.write("apply", [("Window | drain", project.set("drained")), ("Window | break", FAIL)])
    with pytest.raises(K3Error, match=r"window failed\n  rank0: .*no space left") as caught:
        apply.carry_out(project.run(), project.inventory, PLAN)
    assert caught.value.exit_code is ExitCode.FAILED
    assert project.state.read_text() == "serving"
    assert "answers as recorded" in capfd.readouterr().err


@pytest.mark.parametrize(("failed", "again"), [("Measure | block 1", False), ("Close | stop the candidate", True)])
def test_a_playbook_that_brought_production_back_itself_is_believed_unless_its_own_close_failed(
    project: Project, capfd: pytest.CaptureFixture[str], failed: str, again: bool
) -> None:
    project.write("apply", [("Window | drain", project.set("drained")), ("Close | back", project.set("serving"))])
    with (project.playbooks / "apply.yml").open("a") as play:
        play.write(f"    - name: {failed}\n      {FAIL}\n")
    with pytest.raises(K3Error, match="no space left"):
        apply.carry_out(project.run(), project.inventory, PLAN)
    said = capfd.readouterr().err
    assert ("bringing production back" in said) is again
    assert "production is back: it answers as recorded before the window" in said


def test_production_that_does_not_come_back_is_loud(project: Project) -> None:
    project.write("apply", [("Window | drain", project.set("drained")), ("Window | break", FAIL)])
    project.write("rollback", [("Rollback | back", "ansible.builtin.fail: {msg: does not answer}")])
    with pytest.raises(NotRestoredError, match="PRODUCTION IS NOT PROVEN") as caught:
        apply.carry_out(project.run(), project.inventory, PLAN)
    assert caught.value.exit_code == 20
    assert "does not answer" in str(caught.value) and "k3deploy rollback" in caught.value.remedy


def test_another_run_s_window_is_left_alone(project: Project) -> None:
    project.write("rollback", [("Rollback | must not run", project.set("touched"))])
    project.write("apply", [("Window | drain", "ansible.builtin.fail: {msg: 'LOCKED: held by ann@east for run 7'}")])
    with pytest.raises(LockedError, match="held by ann@east for run 7"):
        apply.carry_out(project.run(), project.inventory, PLAN)
    assert project.state.read_text() == "serving"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_work_and_brings_production_back(
    project: Project, number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    project.write(
        "apply", [("Window | drain", project.set("drained")), ("Measure | one", RECORD), ("Measure | two", LONG)]
    )
    run = project.run()
    sender = when(lambda: running("sleep 51.7"), number)
    with pytest.raises(InterruptedRun) as caught:
        apply.carry_out(run, project.inventory, PLAN)
    sender.join()
    assert project.state.read_text() == "serving"
    assert not running("sleep 51.7")
    assert f"--resume {run.id}" in caught.value.remedy
    captured = capfd.readouterr()
    assert "REJECT" in captured.out, "what was measured is judged"
    assert "production is brought back" in captured.err


def test_a_closed_terminal_stops_the_work_and_brings_production_back(project: Project) -> None:
    project.write(
        "apply", [("Window | drain", project.set("drained")), ("Measure | one", RECORD), ("Measure | two", LONG)]
    )
    run = project.run()
    pid, terminal = pty.fork()
    if pid == 0:
        code = 99
        try:
            code = apply.carry_out(run, project.inventory, PLAN)
        except K3Error as error:
            code = int(error.exit_code)
        finally:
            os._exit(code)
    deadline = time.monotonic() + 30
    while not running("sleep 51.7") and time.monotonic() < deadline:
        time.sleep(0.05)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == ExitCode.INTERRUPTED
    assert project.state.read_text() == "serving"
    assert not running("sleep 51.7")
    assert "production is back" in run.events.read_text()


def test_one_more_ctrl_c_while_production_comes_back_only_warns_and_another_gives_up(
    project: Project, capfd: pytest.CaptureFixture[str]
) -> None:
    project.write("apply", [("Window | drain", project.set("drained")), ("Window | break", FAIL)])
    project.write("rollback", [("Rollback | slow", LONG)])
    sender = when(lambda: running("sleep 51.7"), signal.SIGINT, signal.SIGINT)
    with pytest.raises(NotRestoredError):
        apply.carry_out(project.run(), project.inventory, PLAN)
    sender.join()
    assert "to be finished by: k3deploy rollback" in capfd.readouterr().err


def test_signals_mean_again_what_they_meant_before(project: Project) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    project.write("apply", [("Window | measure", RECORD)])
    apply.carry_out(project.run(), project.inventory, PLAN)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_the_command_rollback_brings_production_back_and_says_so(
    project: Project, capfd: pytest.CaptureFixture[str]
) -> None:
    project.state.write_text("drained")
    assert cli.run(["rollback", "-i", str(project.inventory), "--json"]) == 0
    said = json.loads(capfd.readouterr().out)
    assert said["restored"] is True and said["production"]["as_recorded"] is True
    assert project.state.read_text() == "serving"
    project.write("rollback", [("Rollback | back", "ansible.builtin.fail: {msg: does not answer}")])
    assert cli.run(["rollback", "-i", str(project.inventory)]) == 20
    assert "PRODUCTION IS NOT PROVEN TO BE BACK" in capfd.readouterr().err


def test_status_tells_ranks_production_and_window(project: Project, capfd: pytest.CaptureFixture[str]) -> None:
    state = {
        "mem": {"MemAvailable": 900, "MemTotal": 1000},
        "units": {"k3-candidate-head@U2-2048.service": {"active": "active", "build_id": "abc-12"}},
        "releases": ["abc-12"],
        "production": {"units": {"k3-head.service": {"active": "inactive"}}, "head": {"status": 0}},
        "window": None,
    }
    (project.playbooks / "library" / "rank_state.py").write_text(
        "import json\nfrom ansible.module_utils.basic import AnsibleModule\n"
        f"AnsibleModule(argument_spec={{}}).exit_json(state=json.loads({json.dumps(state)!r}))\n"
    )
    project.write("status", [("Status | read", "rank_state:")])
    assert cli.run(["status", "-i", str(project.inventory), "--json"]) == 1, "drained and no window"
    said = json.loads(capfd.readouterr().out)
    assert said["production"] == {"answers": False, "units": {"rank0": {"k3-head.service": "inactive"}}}
    assert said["ranks"]["rank0"]["mem"]["MemAvailable"] == 900
    assert cli.run(["status", "-i", str(project.inventory)]) == 1
    out = capfd.readouterr().out
    for words in ("900 of 1000 MiB", "k3-candidate-head@U2-2048.service active abc-12", "does not answer", "closed"):
        assert words in out


def test_a_rollback_that_reached_no_head_proves_nothing() -> None:
    from k3deploy.commands.rollback import Restoration
    from k3deploy.runner import RunResult

    ended_well = RunResult(
        rc=0,
        status="successful",
        failures=[],
        unreachable=[],
        stats={},
        task_count=0,
        round_trips=0,
        log=None,
        handler_errors=[],
    )
    restoration = Restoration(ended_well)
    assert not restoration.ok
    assert "no head was reached" in restoration.problems[0]
    assert Restoration(ended_well, {"answers": True}).ok
