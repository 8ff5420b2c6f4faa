#!/usr/bin/python
"""k3.deploy.job: long work as a named transient systemd unit that outlives the connection, with progress."""

from __future__ import annotations

DOCUMENTATION = r"""
module: job
short_description: Run long work on a rank as a transient unit and wait for it in slices
description:
  - Starts C(argv) with C(systemd-run) under a fixed unit name, or attaches to it when it is running already, and waits at most O(slice) seconds.
  - A lost connection or a killed controller leaves the job running under its name, so that it can be found, attached to or stopped.
options:
  name:
    description: Name of the unit, without C(.service).
    type: str
    required: true
  argv:
    description: Program and arguments.
    type: list
    elements: str
    required: true
  input:
    description: Document that is written as JSON to O(input_path) before a new start.
    type: dict
  input_path:
    description: Where O(input) goes.
    type: path
  check_argv:
    description:
      - Program and arguments for check mode. Reads O(input) as JSON on its standard input and says as JSON on its standard output what the job's
        result would be, without changing anything.
      - Without it, or where it fails (on a clean rank it is not installed yet), check mode says that the job would run.
    type: list
    elements: str
    default: []
  token:
    description:
      - Identity of this piece of work. A job that has ended is attached to only with its own token; anybody else's result is not this one's.
    type: str
    default: ""
  result:
    description: JSON file that the job writes when it ends. Removed before a new start.
    type: path
    required: true
  progress:
    description: JSON file that the job keeps up to date.
    type: path
  log:
    description: File that gets the job's standard output and error.
    type: path
    required: true
  phase:
    description: Name of the phase in progress reports.
    type: str
    default: work
  user:
    description: User to run as; root when not given.
    type: str
  environment:
    description: Environment of the job.
    type: dict
    default: {}
  properties:
    description: systemd properties of the transient unit, such as C(MemoryMax=2G).
    type: list
    elements: str
    default: []
  deadline:
    description: Seconds after which systemd ends the job.
    type: int
    default: 3600
  slice:
    description: Seconds after which one call returns.
    type: int
    default: 15
author: [the k3deploy project (@k3deploy)]
attributes:
  check_mode:
    support: full
    description: Says whether the job would change anything, where O(check_argv) can tell; otherwise that it would run.
"""

EXAMPLES = r"""
- name: Measure
  k3.deploy.job:
    name: k3-candidate-bench
    argv: [python3, /opt/k3deploy/libexec/k3_bench.py, --request, /opt/k3deploy/state/bench.json]
    result: /opt/k3deploy/state/bench-result.json
    log: /opt/k3deploy/state/bench.log
  register: bench
  until: bench.finished
  retries: 100
  delay: 0
"""

RETURN = r"""
finished:
  description: Whether the job has ended.
  type: bool
  returned: always
result:
  description: Content of the result file.
  type: dict
  returned: when finished
"""

import json
import os
import time

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.k3.deploy.plugins.module_utils import host


def start(module, unit):
    """Start the transient unit afresh."""
    params = module.params
    for path in (params["result"], params["progress"]):
        if path and os.path.exists(path):
            os.unlink(path)
    for path in (params["result"], params["log"]):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    if params["input_path"]:
        host.write_atomic(params["input_path"], json.dumps(params["input"] or {}).encode())
    host.run(["systemctl", "reset-failed", unit])
    properties = [
        "RuntimeMaxSec=%d" % params["deadline"],
        "StandardOutput=truncate:" + params["log"],
        # Not a second opening of the file: the two would write over each other's lines.
        "StandardError=inherit",
        *params["properties"],
    ]
    if params["user"]:
        properties.append("User=" + params["user"])
    argv = ["systemd-run", "--quiet", "--unit", unit, *("--property=" + item for item in properties)]
    # Names alone: a value on the command line would be everybody's to read. systemd replaces $NAME in words, so a $ is doubled.
    environment = {name: str(value) for name, value in params["environment"].items()}
    argv += ["--setenv=" + name for name in sorted(environment)]
    words = [word.replace("$", "$$") for word in params["argv"]]
    rc, _out, err = host.run([*argv, "--", *words], timeout=60, environment=environment)
    if rc != 0:
        module.fail_json(msg=f"systemd-run {unit} failed: {err.strip()}")


def begun(params, mark, active):
    """Whether an earlier call began this work: it runs, or it has ended and nobody took its result yet.

    A mark alone is not enough: who stops a job (a rollback) leaves the mark behind, and nothing to attach to.
    """
    if active in ("active", "activating", "deactivating"):
        return True
    try:
        with open(mark, encoding="utf-8") as stream:
            ours = stream.read() == params["token"]
    except FileNotFoundError:
        return False
    return ours and (active == "failed" or os.path.exists(params["result"]))


def dry_run(params):
    """The job's result as its own check foresees it; empty where that cannot be told."""
    if not params["check_argv"]:
        return {}
    # As long as reading everything that the job depends on may take.
    rc, out, _err = host.run(params["check_argv"], timeout=600, stdin=json.dumps(params["input"] or {}))
    try:
        return json.loads(out) if rc == 0 else {}
    except ValueError:
        return {}


def main():
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "argv": {"type": "list", "elements": "str", "required": True},
            "input": {"type": "dict"},
            "input_path": {"type": "path"},
            "check_argv": {"type": "list", "elements": "str", "default": []},
            "token": {"type": "str", "default": "", "no_log": False},
            "result": {"type": "path", "required": True},
            "progress": {"type": "path"},
            "log": {"type": "path", "required": True},
            "phase": {"type": "str", "default": "work"},
            "user": {"type": "str"},
            "environment": {"type": "dict", "default": {}},
            "properties": {"type": "list", "elements": "str", "default": []},
            "deadline": {"type": "int", "default": 3600},
            "slice": {"type": "int", "default": 15},
        },
        supports_check_mode=True,
        no_log=True,  # what is given here belongs in no journal
    )
    params = module.params
    if module.check_mode:
        foreseen = dry_run(params)
        module.exit_json(changed=foreseen.get("changed", True), finished=True, result=foreseen)
    unit = params["name"] + ".service"
    # The mark outlives one call of an `until` loop: the first call starts the job, the later ones attach to it.
    mark = params["result"] + ".running"
    try:
        if not begun(params, mark, host.show_units([unit])[unit].get("ActiveState")):
            start(module, unit)
            host.write_atomic(mark, params["token"].encode())
        end = time.monotonic() + params["slice"]
        while time.monotonic() < end:
            if host.show_units([unit])[unit].get("ActiveState") not in ("active", "activating", "deactivating"):
                if os.path.exists(mark):
                    os.unlink(mark)
                finish(module, unit)
            time.sleep(0.3)
    except OSError as error:
        module.fail_json(msg=str(error))
    progress = host.read_json(params["progress"]) if params["progress"] else None
    seen = dict({"message": "", "done": 0, "total": 0}, **(progress or {}), phase=params["phase"])
    module.exit_json(changed=True, finished=False, k3_progress=seen)


def finish(module, unit):
    """The job has ended: hand its result over, or say why there is none."""
    result = host.read_json(module.params["result"])
    shown = host.show_units([unit])[unit]
    host.run(["systemctl", "reset-failed", unit])
    if result is None:
        module.fail_json(
            msg="{} ended without a result ({}, exit status {})".format(unit, shown.get("Result"), shown.get("ExecMainStatus")),
            log_tail=host.tail(module.params["log"], 4096),
        )
    if result.get("error"):
        module.fail_json(
            msg="{}: {}".format(module.params["name"], result["error"]),
            result=result,
            log_tail=host.tail(module.params["log"], 4096),
        )
    module.exit_json(changed=result.get("changed", True), finished=True, result=result)


if __name__ == "__main__":
    main()
