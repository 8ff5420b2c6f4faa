#!/usr/bin/python
"""k3.deploy.production: take the window over production's head, drain it, and bring it back with proof."""

from __future__ import annotations

DOCUMENTATION = r"""
module: production
short_description: Take the maintenance window, drain production, or bring it back
description:
  - Runs on the head. Production's files are never written; its head unit is only stopped and started.
  - With O(state=held), takes the window (one file, for one holder at a time), or extends the one that O(run_id) holds already. Records a
    prompt's tokens while production still runs.
  - With O(state=extended), moves the end of an open window of the same O(owner).
  - With O(state=drained), waits for running requests, stops production, and waits until its memory is back; inside the window.
  - With O(state=judged), says what closing may do for O(run_id), or refuses an O(owner) that is not the holder; changes nothing.
  - With O(state=serving), stops this rank's candidate, starts the head if it does not run, waits until it answers, compares the recorded
    prompt's tokens, and releases the window.
options:
  state:
    description: What is wanted.
    type: str
    choices: [held, extended, drained, judged, serving]
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
    description: Name of the holder whose window is taken over, or closed.
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
  probe_prompt:
    description: The prompt whose greedy continuation is recorded and compared.
    type: str
    default: "The quick brown fox"
  probe_tokens:
    description: Number of tokens of the continuation.
    type: int
    default: 16
  drain_timeout:
    description: Seconds to wait for running requests.
    type: int
    default: 300
  stop_timeout:
    description: Seconds that production's unit may take to stop.
    type: int
    default: 120
  freed_mib:
    description: Memory that must come back when production's head stops. Without it, what its processes hold is taken.
    type: int
  memory_slack_mib:
    description: How much less may come back, since other processes come and go.
    type: int
    default: 1024
  memory_timeout:
    description: Seconds within which it must be back.
    type: int
    default: 120
  start_timeout:
    description: Seconds within which production must answer again.
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
- name: Take the window for four hours
  k3.deploy.production:
    state: held
    run_id: "{{ k3_run_id }}"
    owner: alice@desk
    head_unit: llama-production.service
    head_url: http://10.0.0.1:8080

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
  description: What was recorded (the window) or proven.
  type: dict
  returned: when done
"""

import time

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.k3.deploy.plugins.module_utils import holders, host
from ansible_collections.k3.deploy.plugins.module_utils import production as window_of

# Taking one's own window again moves its end, unless it would be the same but for the time that a playbook takes.
SAME_END_S = 60


def holds(window, params):
    """Whether the window is this run's, or the hand work of the same owner."""
    if window.get("damaged"):
        return False
    by_hand = window.get("kind") == params["kind"] == "hand" and window.get("owner") == params["owner"]
    return by_hand or window.get("run_id") == params["run_id"]


class Window:
    """One call on the head."""

    def __init__(self, module):
        self.module, self.params = module, module.params
        self.root = module.params["root"]
        self.end = time.monotonic() + module.params["slice"]

    def again(self, message, done, total):
        """Not there yet: return so that the caller can show progress and call again."""
        progress = {"phase": "window", "message": message, "done": int(done), "total": int(total)}
        self.module.exit_json(changed=True, done=False, k3_progress=progress)

    # -- held ---------------------------------------------------------------------------------------------------

    def hold(self):
        """Take the window, extend one's own, join one's own hand work, or take over from a holder whose name was given."""
        if self.module.check_mode:
            self.refuse_others(window_of.read_window(self.root))
            self.module.exit_json(changed=True, done=True, deadline_left_s=self.params["deadline_s"], production={})
        with window_of.locked(self.root):
            before = window_of.read_window(self.root)
            self.refuse_others(before)
            now = time.time()
            window = dict(before or self.recorded())
            if before and self.joins(before):
                window["guest"] = self.params["run_id"]
            else:
                wanted = now + self.params["deadline_s"]
                if abs(wanted - (window.get("deadline") or 0)) > SAME_END_S:
                    window["deadline"] = wanted
                window["ranks"] = self.params["ranks"]
                for key in ("closing", "guest"):
                    window.pop(key, None)
                if not before or not holds(before, self.params):
                    window.update({key: self.params[key] for key in ("run_id", "kind", "owner", "reason")}, opened=now)
            if window != before:
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

    def joins(self, window):
        return window_of.joins(window, self.params["kind"], self.params["owner"])

    def refuse_others(self, window):
        """Fail with who holds the window, unless it is this run's, its owner's hand work, or its holder was named."""
        if not window or holds(window, self.params) or self.joins(window):
            return
        if not self.params["force"] or self.params["force"] != window.get("owner"):
            self.locked_out(window)

    def locked_out(self, window):
        self.module.fail_json(msg="LOCKED: " + window_of.held_words(window, time.time()), window=window)

    def recorded(self):
        """What a new window holds of production, so that it can be brought back with this file alone."""
        head = window_of.Head(self.params["head_unit"], self.params["head_url"])
        if not head.exists():
            self.module.fail_json(msg=f"production's unit {head.unit} does not exist on this rank")
        active = head.live()
        tokens, why = None, ""
        if active:
            tokens, why = head.probe(self.params["probe_prompt"], self.params["probe_tokens"], max(30, self.params["slice"]))
        if active and tokens is None:
            self.module.fail_json(msg=f"production runs but does not answer ({why}): not drained")
        kept = {key: self.params[key] for key in ("head_unit", "head_url", "start_timeout", "probe_prompt", "probe_tokens")}
        freed = (self.params["freed_mib"] if active else 0, self.params["memory_slack_mib"])
        return {**kept, "was_active": active, "tokens": tokens, "memory": holders.expectation(head.unit, *freed)}

    # -- drained ------------------------------------------------------------------------------------------------

    def own(self):
        """The window in which this run works; fails when it was closed or taken over meanwhile."""
        window = window_of.read_window(self.root)
        self.refuse_others(window)
        if not window or window.get("closing"):
            self.module.fail_json(msg="the maintenance window was closed meanwhile: production stays as it is")
        return window

    def drain(self):
        head = window_of.Head(self.params["head_unit"], self.params["head_url"])
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
        if "back_mib" in memory:
            return False
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

    def judge(self):
        """What closing may do: nothing is changed."""
        window = window_of.read_window(self.root)
        stop = close = True
        if not self.params["run_id"]:
            if self.params["owner"] and window and window.get("owner") not in (self.params["owner"], self.params["force"]):
                self.locked_out(window)
        elif window and not window.get("damaged"):
            close = holds(window, self.params)
            stop = close or window.get("guest") == self.params["run_id"]
        kept = {} if close else {"note": "the window of {} stays open, and production as its holder left it".format(window.get("owner"))}
        self.module.exit_json(changed=False, done=True, stop=stop, close=close, production=kept)

    def serve(self):
        back = window_of.Return(self.root, self.params["head_unit"], self.params["head_url"], self.params["start_timeout"])
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
            "state": {"type": "str", "choices": ["held", "extended", "drained", "judged", "serving"], "required": True},
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
            "probe_prompt": {"type": "str", "default": "The quick brown fox"},
            "probe_tokens": {"type": "int", "default": 16, "no_log": False},
            "drain_timeout": {"type": "int", "default": 300},
            "stop_timeout": {"type": "int", "default": 120},
            "freed_mib": {"type": "int"},
            "memory_slack_mib": {"type": "int", "default": 1024},
            "memory_timeout": {"type": "int", "default": 120},
            "start_timeout": {"type": "int", "default": 1200},
            "slice": {"type": "int", "default": 15},
        },
        supports_check_mode=True,
    )
    window = Window(module)
    steps = {"held": window.hold, "extended": window.extend, "drained": window.drain, "judged": window.judge, "serving": window.serve}
    try:
        steps[module.params["state"]]()
    except window_of.ProductionError as error:
        module.fail_json(msg=str(error), **error.facts)
    except OSError as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
