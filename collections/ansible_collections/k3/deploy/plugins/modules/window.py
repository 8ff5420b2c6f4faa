#!/usr/bin/python
"""k3.deploy.window: take the maintenance window over production, move its end, and say who may close it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: window
short_description: The maintenance window over production's head
description:
  - Runs on the head. The window is one file for one holder at a time; it survives reboots, and holds all that is needed to bring production back.
  - With O(state=held), takes it, or the one that the run or the owner's hand work holds already. Records a prompt's tokens and the memory of
    production while that still runs.
  - With O(state=extended), moves the end of an open window of the same O(owner).
  - With O(state=judged), says what closing may do for O(run_id), or refuses an O(owner) that is not the holder; changes nothing.
options:
  state:
    description: What is wanted.
    type: str
    choices: [held, extended, judged]
    required: true
  root:
    description: Directory under which everything of k3deploy lives on the rank.
    type: path
    default: /opt/k3deploy
  run_id:
    description: The run, or the hand work, that takes the window.
    type: str
    default: ""
  kind:
    description: A window for C(hand) work takes in the runs of its owner, and outlives them.
    type: str
    choices: [run, hand]
    default: run
  owner:
    description: Who takes the window.
    type: str
    default: ""
  reason:
    description: Why.
    type: str
    default: ""
  deadline_s:
    description: Seconds from now until the window ends by itself.
    type: int
    default: 14400
  ranks:
    description: The ranks that take part and where they are reached, for whoever closes the window with another inventory.
    type: dict
    default: {}
  force:
    description: Name of the holder whose window is taken over, extended or closed.
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
  probe_prompt:
    description: The prompt whose greedy continuation is recorded and compared.
    type: str
    default: "The quick brown fox"
  probe_tokens:
    description: Number of tokens of the continuation.
    type: int
    default: 16
  start_timeout:
    description: Seconds within which production must answer again, kept for whoever brings it back.
    type: int
    default: 1200
  freed_mib:
    description: Memory that must come back when production's head stops. Without it, what its processes hold is taken.
    type: int
  memory_slack_mib:
    description: How much less may come back, since other processes come and go.
    type: int
    default: 1024
author: [the k3deploy project (@k3deploy)]
attributes:
  check_mode:
    support: full
    description: Reports what would be taken or refused.
"""

EXAMPLES = r"""
- name: Take the window for four hours
  k3.deploy.window:
    state: held
    run_id: "{{ k3_run_id }}"
    owner: alice@desk
    head_unit: llama-production.service
    head_url: http://10.0.0.1:8080
"""

RETURN = r"""
done:
  description: Always true; what is wanted is had in one call.
  type: bool
  returned: always
deadline_left_s:
  description: Seconds until the window ends, by this rank's clock.
  type: int
  returned: when state is held or extended
stop:
  description: Whether what runs of a candidate may be stopped.
  type: bool
  returned: when state is judged
close:
  description: Whether the window may be closed.
  type: bool
  returned: when state is judged
production:
  description: The window; when judged, a note on one that stays open.
  type: dict
  returned: always
"""

import contextlib
import time

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.k3.deploy.plugins.module_utils import holders
from ansible_collections.k3.deploy.plugins.module_utils import production as window_of


class Window:
    """One call on the head."""

    def __init__(self, module):
        self.module, self.params = module, module.params
        self.root = module.params["root"]

    def hold(self):
        """Take the window, extend one's own, join one's own hand work, or take over from a holder whose name was given."""
        with window_of.locked(self.root, taking=True) if not self.module.check_mode else contextlib.nullcontext():
            before = window_of.read_window(self.root)
            self.refuse_others(before)
            if self.module.check_mode and not before:
                # Recording production would ask it a prompt.
                self.module.exit_json(changed=True, done=True, deadline_left_s=self.params["deadline_s"], production={})
            now = time.time()
            window = dict(before or self.recorded())
            if before and window_of.joins(before, self.params["kind"], self.params["owner"]):
                window["guest"] = self.params["run_id"]
            else:
                wanted = now + self.params["deadline_s"]
                # One's own window keeps its end where it would be the same but for the time between two calls.
                if abs(wanted - (window.get("deadline") or 0)) > max(60, self.params["deadline_s"] / 50):
                    window["deadline"] = wanted
                window["ranks"] = self.params["ranks"]
                for key in ("closing", "draining", "guest"):
                    window.pop(key, None)
                if not before or not window_of.holds(before, self.params):
                    window.update({key: self.params[key] for key in ("run_id", "kind", "owner", "reason")}, opened=now)
            if window != before and not self.module.check_mode:
                window_of.write_window(self.root, window)
        self.module.exit_json(changed=window != before, done=True, deadline_left_s=int(window["deadline"] - now), production=window)

    def extend(self):
        """Move the end of an open window."""
        with window_of.locked(self.root):
            window = window_of.read_window(self.root)
            if not window:
                self.module.fail_json(msg="no maintenance window is open: there is nothing to extend")
            if window.get("owner") not in (self.params["owner"], self.params["force"]) or window.get("damaged") or window.get("closing"):
                self.locked_out(window)
            now = time.time()
            window["deadline"] = now + self.params["deadline_s"]
            if not self.module.check_mode:
                window_of.write_window(self.root, window)
        self.module.exit_json(changed=True, done=True, deadline_left_s=self.params["deadline_s"], production=window)

    def refuse_others(self, window):
        """Fail with who holds the window, unless this run works in it or its holder was named."""
        mine = not window or window_of.holds(window, self.params) or window_of.joins(window, self.params["kind"], self.params["owner"])
        if not mine and not (self.params["force"] and self.params["force"] == window.get("owner")):
            self.locked_out(window)

    def locked_out(self, window):
        self.module.fail_json(msg="LOCKED: " + window_of.held_words(window, time.time()), window=window)

    def recorded(self):
        """What a new window holds of production, so that it can be brought back with this file alone."""
        head = window_of.Head(self.params["head_unit"], self.params["head_url"], self.params["api_key_file"])
        if not head.exists():
            self.module.fail_json(msg=f"production's unit {head.unit} does not exist on this rank")
        active = head.live()
        tokens, why = None, ""
        if active:
            tokens, why = head.probe(self.params["probe_prompt"], self.params["probe_tokens"], 30)
        if active and tokens is None:
            self.module.fail_json(msg=f"production runs but does not answer ({why}): not drained")
        kept = {key: self.params[key] for key in ("head_unit", "head_url", "api_key_file", "start_timeout", "probe_prompt", "probe_tokens")}
        freed = (self.params["freed_mib"] if active else 0, self.params["memory_slack_mib"])
        return {**kept, "was_active": active, "tokens": tokens, "memory": holders.expectation(head.unit, *freed)}

    def judge(self):
        """What closing may do: nothing is changed."""
        window = window_of.read_window(self.root)
        stop = close = True
        if not self.params["run_id"]:
            if self.params["owner"] and window and window.get("owner") not in (self.params["owner"], self.params["force"]):
                self.locked_out(window)
        elif window and not window.get("damaged"):
            close = window_of.holds(window, self.params)
            stop = close or window.get("guest") == self.params["run_id"]
        kept = {} if close else {"note": "the window of {} stays open, and production as its holder left it".format(window.get("owner"))}
        self.module.exit_json(changed=False, done=True, stop=stop, close=close, production=kept)


def main():
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["held", "extended", "judged"], "required": True},
            "root": {"type": "path", "default": "/opt/k3deploy"},
            "run_id": {"type": "str", "default": ""},
            "kind": {"type": "str", "choices": ["run", "hand"], "default": "run"},
            "owner": {"type": "str", "default": ""},
            "reason": {"type": "str", "default": ""},
            "deadline_s": {"type": "int", "default": 14400},
            "ranks": {"type": "dict", "default": {}},
            "force": {"type": "str", "default": ""},
            "head_unit": {"type": "str", "required": True},
            "head_url": {"type": "str", "required": True},
            "api_key_file": {"type": "path", "no_log": False},
            "probe_prompt": {"type": "str", "default": "The quick brown fox"},
            "probe_tokens": {"type": "int", "default": 16, "no_log": False},
            "start_timeout": {"type": "int", "default": 1200},
            "freed_mib": {"type": "int"},
            "memory_slack_mib": {"type": "int", "default": 1024},
        },
        supports_check_mode=True,
    )
    window = Window(module)
    try:
        {"held": window.hold, "extended": window.extend, "judged": window.judge}[module.params["state"]]()
    except OSError as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
