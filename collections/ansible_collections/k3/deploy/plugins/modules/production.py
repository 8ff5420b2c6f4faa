#!/usr/bin/python
"""k3.deploy.production: drain production's head inside a window, and bring it back with proof."""

from __future__ import annotations

DOCUMENTATION = r"""
module: production
short_description: Drain production or bring it back
description:
  - Runs on the head. Production's files are never written; its head unit is only stopped and started.
  - With O(state=drained), waits for running requests, stops production, and waits until its memory is back; inside the window that
    M(k3.deploy.window) took.
  - With O(state=serving), stops this rank's candidate, starts the head if it does not run, waits until it answers, compares the recorded
    prompt's tokens, and releases the window.
options:
  state:
    description: What is wanted.
    type: str
    choices: [drained, serving]
    required: true
  root:
    description: Directory under which everything of k3deploy lives on the rank.
    type: path
    default: /opt/k3deploy
  run_id:
    description: The run, or the hand work, that drains.
    type: str
    default: ""
  kind:
    description: A window for C(hand) work takes in the runs of its owner, and outlives them.
    type: str
    choices: [run, hand]
    default: run
  owner:
    description: Who drains.
    type: str
    default: ""
  head_unit:
    description: systemd unit of production's head.
    type: str
    required: true
  head_url:
    description: Base URL of production's head.
    type: str
    required: true
  api_key_file:
    description: File on this rank with the API key of production's head, where it wants one. The key itself goes nowhere.
    type: path
  drain_timeout:
    description: Seconds to wait for running requests.
    type: int
    default: 300
  stop_timeout:
    description: Seconds that production's unit may take to stop.
    type: int
    default: 120
  memory_timeout:
    description: Seconds within which its memory must be back.
    type: int
    default: 120
  start_timeout:
    description: Seconds within which production must answer again, where no window says it.
    type: int
    default: 1200
  slice:
    description: Seconds after which one call returns.
    type: int
    default: 15
author: [the k3deploy project (@k3deploy)]
attributes:
  check_mode:
    support: full
    description: Reports what would be stopped or started.
"""

EXAMPLES = r"""
- name: Drain production
  k3.deploy.production:
    state: drained
    run_id: "{{ k3_run_id }}"
    head_unit: llama-production.service
    head_url: http://10.0.0.1:8080
"""

RETURN = r"""
done:
  description: Whether the wanted state is reached; false asks the caller to call again.
  type: bool
  returned: always
production:
  description: The window, or what was proven.
  type: dict
  returned: when done
"""

import time

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.k3.deploy.plugins.module_utils import holders, host
from ansible_collections.k3.deploy.plugins.module_utils import production as window_of


class Production:
    """One call on the head."""

    def __init__(self, module):
        self.module, self.params = module, module.params
        self.root = module.params["root"]
        self.end = time.monotonic() + module.params["slice"]

    def again(self, message, done, total):
        """Not there yet: return so that the caller can show progress and call again."""
        progress = {"phase": "window", "message": message, "done": int(done), "total": int(total)}
        self.module.exit_json(changed=True, done=False, k3_progress=progress)

    # -- drained ------------------------------------------------------------------------------------------------

    def own(self):
        """The window in which this run works; fails when it was closed or taken over meanwhile."""
        window = window_of.read_window(self.root)
        if not window or window.get("closing"):
            self.module.fail_json(msg="the maintenance window was closed meanwhile: production stays as it is")
        if not window_of.holds(window, self.params) and not window_of.joins(window, self.params["kind"], self.params["owner"]):
            self.module.fail_json(msg="LOCKED: " + window_of.held_words(window, time.time()), window=window)
        return window

    def drain(self):
        head = window_of.Head(self.params["head_unit"], self.params["head_url"], self.params["api_key_file"])
        if self.module.check_mode:
            self.module.exit_json(changed=head.live(), done=True, production={})
        window = self.own()
        since = window.get("draining")
        if since is None and head.live():
            since = time.time()
            with window_of.locked(self.root):
                window_of.write_window(self.root, dict(self.own(), draining=since))
        while head.live():
            busy = head.busy_slots()
            if not busy:
                break
            waited = time.time() - since
            if waited > self.params["drain_timeout"]:
                self.module.fail_json(msg="production still serves %d request(s) after %d s: not stopped" % (busy, waited))
            if time.monotonic() > self.end:
                self.again("waiting for %d running request(s)" % busy, waited, self.params["drain_timeout"])
            time.sleep(0.5)
        with window_of.locked(self.root):
            window = self.own()
            changed = head.live()
            if changed:
                self.stop(head)
                window["memory"].pop("back_mib", None)
                window["stopped"] = time.time()
            window.pop("draining", None)
            window_of.write_window(self.root, window)
        self.module.exit_json(changed=self.memory_is_back(window) or changed, done=True, production=window)

    def stop(self, head):
        pids = holders.unit_pids(head.unit)
        _rc, _out, err = host.run(["systemctl", "stop", head.unit], timeout=self.params["stop_timeout"])
        if not head.live() and head.shown().get("ActiveState") != "deactivating":
            return
        left = {pid: found for pid, found in ((pid, holders.status(pid)) for pid in pids) if found}
        words = ", ".join(
            "pid {} ({}, state {}{})".format(pid, found["name"], found["state"], ", hangs in the kernel" if found["state"] == "D" else "")
            for pid, found in left.items()
        )
        self.module.fail_json(msg=f"production's {head.unit} did not stop: {words or err.strip() or 'systemd is still at it'}")

    def memory_is_back(self, window):
        """Wait until MemAvailable is what it must be without production; True when this call saw it come back."""
        memory = window["memory"]
        if "back_mib" in memory or "stopped" not in window:
            return False  # seen already, or production did not run when the window was opened
        while True:
            available, waited = host.meminfo()["MemAvailable"], time.time() - window["stopped"]
            if available >= memory["level_mib"]:
                break
            words = "MemAvailable is {} MiB, {} MiB are to be had without production".format(available, memory["level_mib"])
            if waited > self.params["memory_timeout"]:
                who = "; ".join(holders.who_holds())
                self.module.fail_json(msg="production is stopped and its memory is not back after %d s: %s. %s" % (waited, words, who), memory=memory)
            if time.monotonic() > self.end:
                self.again(words, waited, self.params["memory_timeout"])
            time.sleep(0.25)
        memory.update(back_mib=available, back_after_s=round(waited, 2))
        with window_of.locked(self.root):
            self.own()
            window_of.write_window(self.root, window)
        return True

    # -- serving ------------------------------------------------------------------------------------------------

    def serve(self):
        back = window_of.Return(self.root, *(self.params[key] for key in ("head_unit", "head_url", "start_timeout", "api_key_file")))
        if self.module.check_mode:
            self.module.exit_json(changed=back.needed(), done=True, production={})
        done = back.begin()
        while done is None:
            waiting = back.waiting()
            if waiting is None:
                done = back.prove()
            elif time.monotonic() > self.end:
                self.again(*waiting, back.start_timeout)
            else:
                time.sleep(0.3)
        self.module.exit_json(changed=back.changed, done=True, production=done)


def main():
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["drained", "serving"], "required": True},
            "root": {"type": "path", "default": "/opt/k3deploy"},
            "run_id": {"type": "str", "default": ""},
            "kind": {"type": "str", "choices": ["run", "hand"], "default": "run"},
            "owner": {"type": "str", "default": ""},
            "head_unit": {"type": "str", "required": True},
            "head_url": {"type": "str", "required": True},
            "api_key_file": {"type": "path", "no_log": False},
            "drain_timeout": {"type": "int", "default": 300},
            "stop_timeout": {"type": "int", "default": 120},
            "memory_timeout": {"type": "int", "default": 120},
            "start_timeout": {"type": "int", "default": 1200},
            "slice": {"type": "int", "default": 15},
        },
        supports_check_mode=True,
    )
    production = Production(module)
    try:
        {"drained": production.drain, "serving": production.serve}[module.params["state"]]()
    except window_of.ProductionError as error:
        module.fail_json(msg=str(error), **error.facts)
    except OSError as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
