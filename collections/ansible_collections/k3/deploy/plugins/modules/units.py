#!/usr/bin/python
"""k3.deploy.units: start candidate units and wait until they serve, or stop them and say what was left."""

from __future__ import annotations

DOCUMENTATION = r"""
module: units
short_description: Start units and wait until they serve, or stop them
description:
  - With O(state=started), starts the unit if it does not run and waits until it listens or answers. Returns after O(slice) seconds at the
    latest with RV(ready=false), so that the caller's C(until) loop can show progress; the unit's own deadline is O(deadline).
  - With O(state=stopped), stops everything that matches O(patterns), kills what ignores SIGTERM, and returns the logs, of long ones what is counted.
options:
  state:
    description: What is wanted.
    type: str
    choices: [started, stopped]
    required: true
  name:
    description: The unit to start.
    type: str
  window:
    description:
      - "The maintenance window in which alone the unit is started: C(root), C(run_id), and C(unit), production's head, which must be down."
      - Looked at and acted upon under the window's own lock, so that nothing starts in a window that is just closing.
    type: dict
    default: {}
  patterns:
    description: systemd globs of the units to stop.
    type: list
    elements: str
    default: ["k3-candidate*"]
  listen:
    description: C(address:port) on which a process of the unit must listen. Read from the kernel, never by connecting.
    type: str
  http:
    description: URL that must answer 200.
    type: str
  log:
    description: The unit's log file, for progress and for the reason of a failure.
    type: path
  slice:
    description: Seconds after which one call returns.
    type: int
    default: 15
  deadline:
    description: Seconds after the unit's start within which it must be ready.
    type: int
    default: 300
  stop_timeout:
    description: Seconds to wait for units to stop before they are killed.
    type: int
    default: 20
  logs:
    description: Log files that are returned when stopping, by name; of a long one its start, its end and the lines that are counted.
    type: dict
    default: {}
  memory:
    description: The guard's series of this arm's memory, returned when stopping.
    type: path
  guard:
    description: The guard's record of when it stopped a candidate, returned when stopping if it is of this start of the arm.
    type: path
author: [the k3deploy project (@k3deploy)]
attributes:
  check_mode:
    support: full
    description: Reports what would be started or stopped.
"""

EXAMPLES = r"""
- name: Start the worker
  k3.deploy.units:
    state: started
    name: k3-candidate-worker@baseline.service
    listen: 10.0.0.2:50053
  register: worker
  until: worker.ready
  retries: 20
  delay: 0
"""

RETURN = r"""
ready:
  description: Whether the unit serves.
  type: bool
  returned: when state is started
waited_s:
  description: Seconds since the unit was started.
  type: float
  returned: when state is started
stopped:
  description: Units that were running and are stopped now.
  type: list
  returned: when state is stopped
killed:
  description: Units that had to be killed.
  type: list
  returned: when state is stopped
k3_logs:
  description: The log files that were asked for, as C(log_excerpt.pack) carries them.
  type: dict
  returned: when state is stopped
time:
  description: When it was stopped, in seconds since the epoch by the rank's clock.
  type: float
  returned: when state is stopped
memory:
  description: "Rows of seconds since the epoch, then in MiB MemAvailable, MemFree, CmaFree and Cached, then the memory pressure (some, full)."
  type: list
  returned: when state is stopped
guard:
  description: What made the guard stop this start of the arm, when and what it saw; null when it did not.
  type: dict
  returned: when state is stopped
"""

import contextlib
import re
import time

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.k3.deploy.plugins.module_utils import host, log_excerpt
from ansible_collections.k3.deploy.plugins.module_utils import production as window_of


def last_progress(log):
    """The line of a head's log that says most about how far its load is."""
    lines = [line.strip() for line in host.tail(log, 8192).splitlines() if line.strip(" .\n")] if log else []
    wanted = [line for line in lines if re.search(r"load_tensors|loaded meta|warming up|RPC|layer|fit", line)]
    return (wanted or lines or ["starting"])[-1][:160]


class Starter:
    """One unit on its way to serving."""

    def __init__(self, module):
        self.module, self.params = module, module.params
        self.name = module.params["name"]

    def shown(self):
        return host.show_units([self.name])[self.name]

    def start_if_needed(self):
        """Start the unit unless it runs; True when this call started it."""
        shown = self.shown()
        if shown.get("LoadState") == "not-found":
            if self.module.check_mode:
                return True
            self.module.fail_json(msg=f"{self.name} is not installed on this rank")
        if shown.get("ActiveState") in host.LIVE:
            return False
        if self.module.check_mode:
            return True
        host.run(["systemctl", "reset-failed", self.name])
        wanted = self.params["window"]
        with window_of.locked(wanted["root"]) if wanted else contextlib.nullcontext():
            why = self.outside(wanted)
            if why:
                self.module.fail_json(msg=f"{self.name} was not started: {why}")
            rc, _out, err = host.run(["systemctl", "start", self.name], timeout=60)
        if rc != 0:
            guard = host.show_units(host.GUARD_UNITS)
            unguarded = [name for name, value in guard.items() if value.get("ActiveState") != "active"]
            why = "; {} does not run: arm it first, what is not guarded does not start".format(", ".join(unguarded)) if unguarded else ""
            self.fail(f"systemctl start said: {err.strip()}{why}")
        return True

    @staticmethod
    def outside(wanted):
        """Why this is not the time to start; empty when it is."""
        if not wanted:
            return ""
        live = window_of.Head(wanted["unit"], "").live()
        return window_of.outside_words(window_of.read_window(wanted["root"]), wanted["run_id"], live, time.time())

    def ready(self, shown):
        """Whether the unit serves now."""
        if self.params["listen"]:
            address, _colon, port = self.params["listen"].rpartition(":")
            there = [item for item in host.listeners() if item["port"] == int(port) and item["address"] == address.strip("[]")]
            if not any(host.unit_of(item["pid"]) == self.name for item in there):
                return False
        if self.params["http"]:
            return host.http_json(self.params["http"], timeout=3)[0] == 200
        return shown.get("ActiveState") == "active"

    def fail(self, why):
        self.module.fail_json(
            msg=f"{self.name} did not come up: {why}",
            log_tail=host.tail(self.params["log"], 4096) if self.params["log"] else "",
            k3_logs={"head" if "head" in self.name else "worker": log_excerpt.pack(log_excerpt.excerpt(self.params["log"] or ""))},
        )

    def run(self):
        changed = self.start_if_needed()
        if self.module.check_mode:
            self.module.exit_json(changed=changed, ready=True, waited_s=0.0)
        end = time.monotonic() + self.params["slice"]
        while True:
            shown = self.shown()
            waited = host.seconds_active(shown)
            if shown.get("ActiveState") not in host.LIVE:
                # An rpc server exits 0 when its port is taken or its host is bad: inactive is a failure too.
                self.fail("it ended with {}, exit status {}".format(shown.get("Result"), shown.get("ExecMainStatus")))
            if self.ready(shown):
                self.module.exit_json(changed=changed, ready=True, waited_s=waited)
            if waited > self.params["deadline"]:
                self.fail("not ready within its deadline of {} s".format(self.params["deadline"]))
            if time.monotonic() > end:
                progress = {"phase": "start", "message": last_progress(self.params["log"]), "done": int(waited)}
                progress["total"] = self.params["deadline"]
                self.module.exit_json(changed=changed, ready=False, waited_s=waited, k3_progress=progress)
            time.sleep(0.2)


def memory_series(path):
    """The guard's lines as rows: time, MemAvailable, MemFree, CmaFree, Cached, pressure (some, full)."""
    rows = [line.split() for line in host.tail(path, 1 << 20).splitlines()] if path else []
    return [[float(row[0]), *map(int, row[1:5]), float(row[5]), float(row[6])] for row in rows if len(row) == 7]


def tripped(path, series):
    """The guard's record, if it is of the start that the series is of: the guard begins that anew at each start."""
    record = host.read_json(path) if path else None
    return record if record and series and record.get("at", 0) >= series[0][0] - 1 else None


def stop(module):
    """Stop what runs; then SIGKILL what did not listen to SIGTERM."""
    series = memory_series(module.params["memory"])
    records = {
        "k3_logs": {name: log_excerpt.pack(log_excerpt.excerpt(path)) for name, path in module.params["logs"].items()},
        "memory": series,
        "guard": tripped(module.params["guard"], series),
        "time": time.time(),
    }
    done = host.stop_units(module.params["patterns"], module.params["stop_timeout"], dry=module.check_mode)
    if done["left"]:
        module.fail_json(msg=host.left_words(done["left"]), **done)
    module.exit_json(changed=bool(done["stopped"]), stopped=done["stopped"], killed=done["killed"], **records)


def main():
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["started", "stopped"], "required": True},
            "name": {"type": "str"},
            "window": {"type": "dict", "default": {}},
            "patterns": {"type": "list", "elements": "str", "default": ["k3-candidate*"]},
            "listen": {"type": "str"},
            "http": {"type": "str"},
            "log": {"type": "path"},
            "slice": {"type": "int", "default": 15},
            "deadline": {"type": "int", "default": 300},
            "stop_timeout": {"type": "int", "default": 20},
            "logs": {"type": "dict", "default": {}},
            "memory": {"type": "path"},
            "guard": {"type": "path"},
        },
        required_if=[("state", "started", ["name"])],
        supports_check_mode=True,
    )
    try:
        if module.params["state"] == "stopped":
            stop(module)
        else:
            Starter(module).run()
    except OSError as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
