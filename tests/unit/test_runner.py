"""runner.py against real ansible-runner, on localhost without ssh."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3deploy import paths, runner
from k3deploy.errors import K3Error
from k3deploy.progress import Progress
from k3deploy.runner import RunResult, run_playbook


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory of the test's own, and Ansible's files away from the user's home."""
    monkeypatch.setenv("K3DEPLOY_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("ANSIBLE_HOME", str(tmp_path / "ansible-home"))
    monkeypatch.delenv("ANSIBLE_CONFIG", raising=False)
    return tmp_path / "state"


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    path = tmp_path / "hosts.yml"
    path.write_text(
        "all:\n  hosts:\n"
        "    rank0: {ansible_connection: local, ansible_python_interpreter: '{{ ansible_playbook_python }}'}\n"
        "    rank1: {ansible_connection: local, ansible_python_interpreter: '{{ ansible_playbook_python }}'}\n"
    )
    return path


class Play:
    """Writes a playbook of one play and runs it."""

    def __init__(self, folder: Path, inventory: Path) -> None:
        self.folder = folder / "playbooks"
        self.folder.mkdir()
        self.inventory = inventory
        self.events: list[dict[str, Any]] = []

    def __call__(self, tasks: str, extra: dict[str, Any] | None = None, **options: Any) -> RunResult:
        body = "".join(f"    {line}\n" for line in tasks.strip("\n").splitlines())
        playbook = self.folder / "play.yml"
        playbook.write_text(f"- name: Preflight | try\n  hosts: all\n  gather_facts: false\n  tasks:\n{body}")
        options.setdefault("on_event", self.events.append)
        return run_playbook(playbook, [options.pop("inventory", self.inventory)], extra or {}, **options)


@pytest.fixture
def play(tmp_path: Path, inventory: Path) -> Play:
    return Play(tmp_path, inventory)


def test_extra_variables_are_data_and_never_templates(play: Play) -> None:
    """A reason that somebody gives on the command line must not be evaluated on the controller."""
    reasons = ["{{ lookup('pipe', 'id') }}", "{% raw %}", "{# x #}", "100 % $HOME 'q' \"q\""]
    result = play(
        "- name: Say\n  ansible.builtin.debug: {msg: '{{ reasons + [inner.text] }}'}\n",
        {"reasons": reasons, "inner": {"text": "{{ 7 * 7 }}"}},
    )
    said = [event["event_data"]["res"]["msg"] for event in play.events if event["event"] == "runner_on_ok"]
    assert result.ok and said == [[*reasons, "{{ 7 * 7 }}"]] * 2


def test_success_counts_tasks_and_exchanges_and_delivers_events_in_order(play: Play) -> None:
    result = play(
        """
- name: Touch nothing
  ansible.builtin.command: "true"
- name: Say
  ansible.builtin.debug: {msg: hello}
"""
    )
    assert result.ok and result.status == "successful"
    assert result.task_count == 2
    assert result.round_trips == 2, "two hosts ran the command; debug stays on the controller"
    assert result.stats["ok"] == {"rank0": 2, "rank1": 2}
    assert not result.handler_errors
    counters = [event["counter"] for event in play.events]
    assert counters == sorted(counters)


def test_loop_items_are_counted_one_by_one(play: Play) -> None:
    result = play(
        """
- name: Three
  ansible.builtin.command: "true"
  loop: [1, 2, 3]
""",
        limit="rank0",
    )
    assert (result.task_count, result.round_trips) == (1, 3)


def test_failure_names_host_task_and_the_command_s_own_words(play: Play) -> None:
    result = play(
        """
- name: Break on one rank
  ansible.builtin.command: sh -c "echo no space left >&2; exit 3"
  when: inventory_hostname == "rank1"
"""
    )
    assert (result.status, result.rc) == ("failed", 2)
    (failure,) = result.failures
    assert (failure.host, failure.task) == ("rank1", "Break on one rank")
    assert "no space left" in failure.message
    assert failure.phase == "Preflight | try"


def test_every_problem_of_a_result_is_kept(play: Play) -> None:
    result = play(
        """
- name: Items
  ansible.builtin.fail: {msg: "bad {{ item }}"}
  loop: [memory, disk]
""",
        limit="rank0",
    )
    assert [f.message for f in result.failures] == ["bad memory; bad disk"]


def test_a_list_of_problems_is_shown_line_by_line(play: Play) -> None:
    result = play(
        """
- name: Judge
  ansible.builtin.assert: {that: false, fail_msg: [no memory, no disk]}
""",
        limit="rank0",
    )
    assert [failure.message for failure in result.failures] == ["no memory\nno disk"]


def test_ignored_failures_are_not_failures(play: Play) -> None:
    result = play(
        """
- name: May fail
  ansible.builtin.command: "false"
  ignore_errors: true
"""
    )
    assert result.ok and not result.failures


def test_unreachable_is_told_apart_from_failed(play: Play, tmp_path: Path) -> None:
    inventory = tmp_path / "far.yml"
    inventory.write_text("all:\n  hosts:\n    far: {ansible_host: 127.0.0.1, ansible_port: 1}\n")
    result = play('- name: Reach\n  ansible.builtin.command: "true"\n', inventory=inventory)
    assert result.status == "failed" and result.rc == 4
    assert [failure.host for failure in result.unreachable] == ["far"]
    assert "no ssh server listens on port 1" in result.unreachable[0].message
    assert not result.failures


def test_a_playbook_that_does_not_parse_is_reported_with_ansible_s_words(play: Play) -> None:
    result = play("- name: Bad\n  no.such.module:\n")
    assert result.status == "failed"
    assert "no.such.module" in result.failures[0].message


def test_extra_variables_arrive_and_never_stand_on_a_command_line(play: Play, tmp_path: Path) -> None:
    result = play(
        """
- name: Show command lines
  ansible.builtin.shell: "cat /proc/[0-9]*/cmdline | tr '\\\\0' ' ' > {{ target }}; test '{{ word }}' = hunter22"
  args: {executable: /bin/bash}
  environment: {IGNORED: "1"}
  ignore_errors: false
""",
        {"target": str(tmp_path / "cmdlines"), "word": "hunter22"},
        limit="rank0",
    )
    assert result.ok, result.failures
    lines = (tmp_path / "cmdlines").read_text()
    assert "ansible-playbook" in lines
    command = next(part for part in lines.split("/bin/ansible-playbook")[1:])
    assert "hunter22" not in command.split("play.yml")[0]


def test_the_working_directory_is_private_and_gone_afterwards(play: Play, state: Path) -> None:
    seen: list[int] = []

    def look(_: dict[str, Any]) -> None:
        seen.extend(stat.S_IMODE(path.stat().st_mode) for path in (state / "ansible").iterdir())

    play('- name: Run\n  ansible.builtin.command: "true"\n', on_event=look)
    assert set(seen) == {0o700}
    assert not list((state / "ansible").iterdir())


def test_a_killed_controller_s_directory_is_removed_by_the_next_run(play: Play, state: Path) -> None:
    paths.state_dir()
    stale = state / "ansible" / "4194304-dead"  # above the largest pid
    stale.mkdir(parents=True)
    (stale / "extravars").write_text("secret")
    play('- name: Run\n  ansible.builtin.command: "true"\n')
    assert not stale.exists()


def test_host_keys_are_checked_and_the_project_s_configuration_is_used(play: Play, tmp_path: Path) -> None:
    (play.folder / "ansible.cfg").write_text("[defaults]\nany_errors_fatal = True\n")
    out = tmp_path / "environment"
    play(f"- name: Look\n  ansible.builtin.shell: env > {out}\n", limit="rank0")
    lines = out.read_text().splitlines()
    assert "ANSIBLE_HOST_KEY_CHECKING=True" in lines
    assert f"ANSIBLE_CONFIG={play.folder / 'ansible.cfg'}" in lines


def test_the_kept_log_is_private_and_has_no_secrets(play: Play, tmp_path: Path) -> None:
    result = play(
        "- name: Leak\n  ansible.builtin.debug: {var: api_token}\n",
        {"api_token": "s3cret-value"},
        artifacts_dir=tmp_path / "logs",
    )
    assert result.log == tmp_path / "logs" / "ansible-play.log"
    text = result.log.read_text()
    assert "Leak" in text and "s3cret-value" not in text
    assert stat.S_IMODE(result.log.stat().st_mode) == 0o600


def test_check_mode_changes_nothing(play: Play, tmp_path: Path) -> None:
    target = tmp_path / "made"
    result = play(
        f"- name: Make\n  ansible.builtin.copy: {{content: x, dest: {target}, mode: '0600'}}\n",
        check=True,
        diff=True,
        artifacts_dir=tmp_path,
        limit="rank0",
    )
    assert result.ok and not target.exists()
    assert result.log is not None and "+x" in result.log.read_text()


def test_cancel_ends_the_playbook_and_leaves_no_process_behind(play: Play) -> None:
    asked = threading.Event()

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "runner_on_start":
            asked.set()

    started = time.monotonic()
    result = play("- name: Long\n  ansible.builtin.command: sleep 47.11\n", on_event=on_event, cancel=asked.is_set)
    assert result.status == "canceled"
    assert time.monotonic() - started < 15
    assert not [line for line in _command_lines() if "sleep\0" + "47.11" in line]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_ansible_that_somebody_kills_is_a_failure_and_leaves_no_process_behind(play: Play, number: int) -> None:
    """Not an internal error: the caller must come to the point where production is brought back."""

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "runner_on_start":
            for entry in Path("/proc").iterdir():
                with contextlib.suppress(OSError):
                    words = (entry / "cmdline").read_bytes()
                    if entry.name.isdigit() and b"ansible-playbook" in words and str(play.folder).encode() in words:
                        os.kill(int(entry.name), number)

    result = play("- name: Long\n  ansible.builtin.command: sleep 50.11\n", on_event=on_event)
    assert result.status == "failed" and result.rc != 0
    assert "killed by a signal" in str(result.failures[0])
    assert not [line for line in _command_lines() if "sleep\0" + "50.11" in line]


def test_timeout_is_told_apart_from_cancel(play: Play) -> None:
    result = play("- name: Long\n  ansible.builtin.command: sleep 48.11\n", timeout_s=3)
    assert result.status == "timeout"
    assert not [line for line in _command_lines() if "sleep\0" + "48.11" in line]


def test_a_fault_in_the_event_handler_does_not_end_the_run(play: Play) -> None:
    def broken(_: dict[str, Any]) -> None:
        raise ValueError("display")

    result = play('- name: Run\n  ansible.builtin.command: "true"\n', on_event=broken)
    assert result.ok
    assert "ValueError: display" in result.handler_errors


def test_a_slow_event_handler_does_not_hold_the_playbook_up(play: Play) -> None:
    playbook_ended = threading.Event()
    waited: list[bool] = []
    original = runner._Tally.__exit__

    def note_the_end(self: Any, *args: object) -> None:
        playbook_ended.set()
        original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner._Tally, "__exit__", note_the_end)
        result = play(
            '- name: Run\n  ansible.builtin.command: "true"\n',
            on_event=lambda _: waited.append(playbook_ended.wait(60)),
        )
    assert result.ok
    assert waited[0], "the first event was still being handled when the playbook ended"


def test_retries_are_events_and_exchanges(play: Play, tmp_path: Path) -> None:
    marker = tmp_path / "tries"
    result = play(
        f"""
- name: Until
  ansible.builtin.shell: echo x >> {marker}; test $(wc -l < {marker}) -ge 3
  register: tried
  until: tried.rc == 0
  retries: 5
  delay: 0
""",
        limit="rank0",
    )
    assert result.ok
    assert len([event for event in play.events if event["event"] == "runner_retry"]) == 2
    assert result.round_trips == 3


def test_progress_reported_by_a_retried_module_reaches_the_display(play: Play, tmp_path: Path) -> None:
    (play.folder / "library").mkdir()
    (play.folder / "library" / "wait.py").write_text(
        "import os\nfrom ansible.module_utils.basic import AnsibleModule\n"
        f"path = {str(tmp_path / 'tries')!r}\n"
        "tries = os.path.getsize(path) if os.path.exists(path) else 0\n"
        "open(path, 'a').write('x')\n"
        "AnsibleModule(argument_spec={}).exit_json(done=tries == 2,\n"
        "    k3_progress={'phase': 'load', 'message': 'layers', 'done': tries, 'total': 2})\n"
    )
    events = tmp_path / "events.ndjson"
    with Progress(io.StringIO(), events) as progress:
        result = play(
            """
- name: Start | head of baseline (block 0)
  wait:
  register: waited
  until: waited.done
  retries: 5
  delay: 0
""",
            limit="rank0",
            on_event=progress.event,
        )
    assert result.ok
    records = [json.loads(line) for line in events.read_text().splitlines()]
    reported = [record for record in records if record["event"] == "progress"]
    assert [(record["phase"], record["done"]) for record in reported] == [("block 1/1", done) for done in (0, 1, 2)]


def test_a_missing_inventory_is_an_error_for_people(play: Play, tmp_path: Path) -> None:
    with pytest.raises(K3Error, match="no such inventory"):
        play('- name: Run\n  ansible.builtin.command: "true"\n', inventory=tmp_path / "nowhere")


def test_a_playbook_is_found_above_the_inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project" / "playbooks").mkdir(parents=True)
    (tmp_path / "project" / "inventory" / "mine").mkdir(parents=True)
    only_here = tmp_path / "project" / "playbooks" / "only-here.yml"
    only_here.write_text("[]")
    monkeypatch.chdir(tmp_path)
    assert paths.find_playbook("only-here", [tmp_path / "project" / "inventory" / "mine"]) == only_here
    with pytest.raises(K3Error, match="not found"):
        paths.find_playbook("only-here", [])


def _command_lines() -> list[str]:
    lines = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != str(os.getpid()):
            try:
                lines.append((entry / "cmdline").read_text(errors="replace"))
            except OSError:
                continue
    return lines


def test_killing_the_controller_ends_its_ansible_at_once(play: Play, tmp_path: Path) -> None:
    """An orphan that went on would start the next block while someone else brings production back."""
    playbook, following = play.folder / "long.yml", tmp_path / "following"
    playbook.write_text(
        "- hosts: rank0\n  gather_facts: false\n  tasks:\n"
        "    - {name: Long, ansible.builtin.command: sleep 49.11}\n"
        f"    - {{name: Following, ansible.builtin.file: {{path: {following}, state: touch, mode: '0600'}}}}\n"
    )
    code = (
        "from pathlib import Path; from k3deploy.runner import run_playbook; "
        f"run_playbook({str(playbook)!r}, [Path({str(play.inventory)!r})], {{}})"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as controller:
        _wait(lambda: any("sleep\0" + "49.11" in line for line in _command_lines()))
        controller.kill()
    _wait(lambda: not any("long.yml" in line or "sleep\0" + "49.11" in line for line in _command_lines()))
    assert not following.exists()


def _wait(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)
