"""k3.deploy.next_block: which block of a run is measured next. No round trip to a rank."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

ADVICE_TIMEOUT_S = 300


def first_without_record(run_dir, blocks):
    """The first planned block that has no record: what is next where nobody judges the records."""
    for block in blocks:
        if not (Path(run_dir) / "blocks" / f"{int(block['index']):03d}.json").is_file():
            return block
    return None


def ask(advisor, run_dir):
    """The advisor's answer; raises AnsibleActionFail with its own words."""
    argv = [*(str(word) for word in advisor), str(run_dir)]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=ADVICE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise AnsibleActionFail(f"k3_run_advisor does not answer: {error}") from error
    if done.returncode != 0:
        raise AnsibleActionFail(f"k3_run_advisor: {done.stderr.strip() or 'no word'} (exit status {done.returncode})")
    try:
        answer = json.loads(done.stdout)
        return {"block": answer["block"], "why": str(answer["why"])}
    except (ValueError, KeyError, TypeError) as error:
        raise AnsibleActionFail(f"k3_run_advisor said no JSON object with block and why: {done.stdout[:200]!r}") from error


class ActionModule(ActionBase):
    """Arguments: run_dir, blocks, advisor (argv, may be empty)."""

    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        arguments = self._task.args
        if arguments.get("advisor"):
            answer = ask(arguments["advisor"], arguments["run_dir"])
        else:
            block = first_without_record(arguments["run_dir"], arguments["blocks"])
            answer = {"block": block, "why": "" if block else "every planned block is recorded"}
        if answer["why"]:
            result["k3_progress"] = {"phase": "measure", "message": answer["why"], "done": 0, "total": 0}
        return {**result, "changed": False, **answer}
