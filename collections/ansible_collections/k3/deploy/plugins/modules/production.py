#!/usr/bin/python
"""k3.deploy.production: drain production's head inside a window, and bring it back with proof."""

from __future__ import annotations

DOCUMENTATION = r"""
module: production
short_description: Drain production or bring it back
description:
  - Runs on the head. Production's files are never written; its head unit is only stopped and started.
  - With O(state=drained), takes the window (one file, created exclusively), records a prompt's tokens, waits for running requests, stops it.
  - With O(state=serving), starts the head if it does not run, waits until it answers, compares the recorded prompt's tokens, and releases the window.
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
    description: The run that takes the window.
    type: str
    default: ""
  owner:
    description: Who takes the window.
    type: str
    default: ""
  reason:
    description: Why.
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
  description: What was recorded or proven.
  type: dict
  returned: when done
"""

import json
import os
import time

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.k3.deploy.plugins.module_utils import host

LIVE = ("active", "activating", "reloading")


class Production:
    """Production's head and the window that is taken over it."""

    def __init__(self, module):
        self.module, self.params = module, module.params
        self.unit, self.url = module.params["head_unit"], module.params["head_url"].rstrip("/")
        state = os.path.join(module.params["root"], "state")
        self.window_path = os.path.join(state, "window.json")
        self.last_path = os.path.join(state, "window-last.json")
        self.end = time.monotonic() + module.params["slice"]

    def shown(self):
        return host.show_units([self.unit])[self.unit]

    def again(self, message, done, total):
        """Not there yet: return so that the caller can show progress and call again."""
        progress = {"phase": "window", "message": message, "done": int(done), "total": int(total)}
        self.module.exit_json(changed=True, done=False, k3_progress=progress)

    def probe(self):
        """Greedy tokens of the recorded prompt; None with the reason when production does not answer."""
        payload = {
            "prompt": self.params["probe_prompt"],
            "n_predict": self.params["probe_tokens"],
            "temperature": 0,
            "cache_prompt": False,
            "return_tokens": True,
        }
        status, body = host.http_json(self.url + "/completion", payload, timeout=max(30, self.params["slice"]))
        if status != 200 or not isinstance(body, dict):
            return None, f"{status}: {str(body)[:200]}"
        return body.get("tokens") or body.get("content"), ""

    def busy_slots(self):
        """Number of requests in flight; None when production does not say."""
        status, body = host.http_json(self.url + "/slots", timeout=5)
        if status == 200 and isinstance(body, list):
            return sum(1 for slot in body if slot.get("is_processing"))
        return None

    # -- drained ------------------------------------------------------------------------------------------------

    def take_window(self):
        """The window, new or ours already. Exclusive creation decides between two operators."""
        window = host.read_json(self.window_path)
        if window and window.get("run_id") != self.params["run_id"]:
            self.module.fail_json(
                msg="LOCKED: the maintenance window is held by {} for run {} since {} ({})".format(
                    window.get("owner"),
                    window.get("run_id"),
                    time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(window.get("opened") or 0)),
                    window.get("reason") or "no reason given",
                ),
                window=window,
            )
        if window:
            return window
        shown = self.shown()
        if shown.get("LoadState") == "not-found":
            self.module.fail_json(msg=f"production's unit {self.unit} does not exist on this rank")
        active = shown.get("ActiveState") in LIVE
        tokens, why = self.probe() if active else (None, "was not running")
        if active and tokens is None:
            self.module.fail_json(msg=f"production runs but does not answer ({why}): not drained")
        window = {
            "run_id": self.params["run_id"],
            "owner": self.params["owner"],
            "reason": self.params["reason"],
            "opened": time.time(),
            "unit": self.unit,
            "was_active": active,
            "probe_prompt": self.params["probe_prompt"],
            "probe_tokens": self.params["probe_tokens"],
            "tokens": tokens,
            "mem_available_mib": host.meminfo().get("MemAvailable"),
        }
        self.create_window(window)
        return window

    def create_window(self, window):
        """Write the whole file under another name, then link it: the link fails when somebody was faster."""
        temporary = "%s.%d" % (self.window_path, os.getpid())
        host.write_atomic(temporary, json.dumps(window).encode())
        try:
            os.link(temporary, self.window_path)
        except FileExistsError:
            self.module.fail_json(msg="LOCKED: another run took the maintenance window just now")
        finally:
            os.unlink(temporary)

    def drain(self):
        shown = self.shown()
        if self.module.check_mode:
            self.module.exit_json(changed=shown.get("ActiveState") in LIVE, done=True, production={})
        window = self.take_window()
        opened = window["opened"]
        while self.shown().get("ActiveState") in LIVE:
            busy = self.busy_slots()
            if not busy:
                break
            waited = time.time() - opened
            if waited > self.params["drain_timeout"]:
                self.module.fail_json(msg="production still serves %d request(s) after %d s: not stopped" % (busy, waited))
            if time.monotonic() > self.end:
                self.again("waiting for %d running request(s)" % busy, waited, self.params["drain_timeout"])
            time.sleep(0.5)
        changed = self.shown().get("ActiveState") in LIVE
        rc, _out, err = host.run(["systemctl", "stop", self.unit], timeout=120)
        if rc != 0 or self.shown().get("ActiveState") in LIVE:
            self.module.fail_json(msg=f"production's {self.unit} did not stop: {err.strip()}")
        self.module.exit_json(changed=changed, done=True, production=window)

    # -- serving ------------------------------------------------------------------------------------------------

    def release_window(self, window, proof):
        """Keep the last window as a record and free the place for the next one."""
        record = dict(window, closed=time.time(), proof=proof)
        host.write_atomic(self.last_path, json.dumps(record).encode())
        os.unlink(self.window_path)

    def serve(self):
        window = host.read_json(self.window_path)
        shown = self.shown()
        if shown.get("LoadState") == "not-found":
            if window:
                self.module.fail_json(msg=f"production's unit {self.unit} is gone: bring it back by hand")
            self.module.exit_json(changed=False, done=True, production={"note": "no production unit on this rank"})
        if window and not window.get("was_active") and shown.get("ActiveState") not in LIVE:
            if not self.module.check_mode:
                self.release_window(window, {"note": "production did not run before"})
            self.module.exit_json(changed=True, done=True, production={"note": "production did not run before"})
        changed = shown.get("ActiveState") not in LIVE
        if self.module.check_mode:
            self.module.exit_json(changed=changed or bool(window), done=True, production={})
        if changed:
            host.run(["systemctl", "reset-failed", self.unit])
            rc, _out, err = host.run(["systemctl", "start", self.unit], timeout=120)
            if rc != 0:
                self.module.fail_json(msg=f"production's {self.unit} does not start: {err.strip()}")
        self.wait_until_it_answers()
        proof = self.prove(window)
        if window:
            self.release_window(window, proof)
        self.module.exit_json(changed=changed or bool(window), done=True, production=proof)

    def wait_until_it_answers(self):
        while host.http_json(self.url + "/health", timeout=3)[0] != 200:
            shown = self.shown()
            if shown.get("ActiveState") == "failed":
                self.module.fail_json(msg=f"production's {self.unit} failed: see its journal on this rank")
            waited = self.seconds_running(shown)
            if waited > self.params["start_timeout"]:
                self.module.fail_json(msg="production does not answer %d s after its start" % waited)
            if time.monotonic() > self.end:
                self.again("waiting for production to answer", waited, self.params["start_timeout"])
            time.sleep(0.3)

    def seconds_running(self, shown):
        rc, out, _err = host.run(["date", "+%s", "-d", shown.get("ActiveEnterTimestamp") or "now"])
        return max(0.0, time.time() - float(out)) if rc == 0 else 0.0

    def prove(self, window):
        """The recorded prompt must give the recorded tokens."""
        tokens, why = self.probe()
        if tokens is None:
            self.module.fail_json(msg=f"production answers /health but not a prompt: {why}")
        expected = (window or {}).get("tokens")
        if expected is not None and tokens != expected:
            self.module.fail_json(msg="production answers, but not as recorded before the window", tokens=tokens, recorded=expected)
        return {"answers": True, "as_recorded": None if expected is None else True, "tokens": tokens}


def main():
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["drained", "serving"], "required": True},
            "root": {"type": "path", "default": "/opt/k3deploy"},
            "run_id": {"type": "str", "default": ""},
            "owner": {"type": "str", "default": ""},
            "reason": {"type": "str", "default": ""},
            "head_unit": {"type": "str", "required": True},
            "head_url": {"type": "str", "required": True},
            "probe_prompt": {"type": "str", "default": "The quick brown fox"},
            "probe_tokens": {"type": "int", "default": 16, "no_log": False},
            "drain_timeout": {"type": "int", "default": 300},
            "start_timeout": {"type": "int", "default": 1200},
            "slice": {"type": "int", "default": 15},
        },
        supports_check_mode=True,
    )
    production = Production(module)
    try:
        if module.params["state"] == "drained":
            production.drain()
        else:
            production.serve()
    except OSError as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
