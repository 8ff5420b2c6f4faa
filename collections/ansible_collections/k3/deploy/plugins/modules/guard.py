#!/usr/bin/python
"""k3.deploy.guard: arm a rank's own guard for a window, or disarm it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: guard
short_description: Arm or disarm the guard of a rank
description:
  - With O(state=armed), writes C(<root>/state/guard.json), and enables and starts C(k3-candidate-guard.service), which then stops the candidate
    at the memory floor, as an orphan or at the deadline without anybody's help, also after a reboot. A guard that runs takes new values in
    without a restart.
  - With O(state=disarmed), stops and disables it and removes C(guard.json). What it recorded stays.
options:
  state:
    description: What is wanted.
    type: str
    choices: [armed, disarmed]
    required: true
  root:
    description: Directory under which everything of k3deploy lives on the rank.
    type: path
    default: /opt/k3deploy
  run_id:
    description: The run, or whatever else names the window.
    type: str
    default: ""
  seconds_left:
    description: Seconds until the window ends; the rank's own clock counts them.
    type: int
    default: 14400
  floor_mib:
    description: Floor of MemAvailable where O(floors) does not say otherwise.
    type: int
    default: 1536
  floors:
    description: Floor of MemAvailable by arm (its slug). None keeps the floors that are armed, so that moving a window's end moves nothing else.
    type: dict
    default: {}
  free_floor_mib:
    description: Floor of MemFree less CmaFree, which is what a GPU driver on unified memory can have; 0 only records it.
    type: int
    default: 0
  warn_mib:
    description: MemAvailable below which it warns.
    type: int
    default: 4096
  orphan_s:
    description: Seconds after which a worker that lost its head is stopped.
    type: int
    default: 20
  is_head:
    description: Whether this rank is the head, which brings production back at the deadline.
    type: bool
    default: false
  production:
    description: The inventory's description of production, for the head.
    type: dict
    default: {}
  meminfo:
    description: File that memory is read from.
    type: path
    default: /proc/meminfo
author: [the k3deploy project (@k3deploy)]
attributes:
  check_mode:
    support: full
    description: Reports whether something would change.
"""

EXAMPLES = r"""
- name: Guard this rank for two hours
  k3.deploy.guard:
    state: armed
    run_id: "{{ k3_run_id }}"
    seconds_left: 7200
"""

RETURN = r"""
guard:
  description: What is armed, as C(guard.json) has it; empty when disarmed.
  type: dict
  returned: always
"""

import json
import os
import time

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.k3.deploy.plugins.module_utils import host

UNIT = host.GUARD_UNITS[0]
KEPT = ("run_id", "floor_mib", "floors", "free_floor_mib", "warn_mib", "orphan_s", "is_head", "production", "meminfo")


def boot_id():
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as text:
        return text.read().strip()


def wanted(params, now, up):
    """guard.json: the deadline by the wall clock, and by the time since boot, which no change of the clock moves."""
    seconds = params["seconds_left"]
    config = {key: params[key] for key in KEPT}
    return dict(config, deadline=now + seconds, seconds=seconds, boot_id=boot_id(), deadline_uptime=up + seconds)


def same(have, want):
    """Whether what is armed will do: all alike, and the deadline within a hundredth of the window, at most half a minute."""
    if not have or {key: have.get(key) for key in KEPT} != {key: want[key] for key in KEPT}:
        return False
    return abs(have.get("deadline", 0) - want["deadline"]) <= min(30.0, want["seconds"] / 100)


def systemctl(module, *arguments):
    rc, _out, err = host.run(["systemctl", *arguments], timeout=60)
    if rc != 0:
        module.fail_json(msg="systemctl {} failed: {}".format(" ".join(arguments), err.strip()))


def enabled():
    return host.run(["systemctl", "is-enabled", UNIT])[1].strip() == "enabled"


def arm(module, path):
    have = host.read_json(path)
    want = wanted(module.params, time.time(), time.clock_gettime(time.CLOCK_BOOTTIME))
    want["floors"] = want["floors"] or (have or {}).get("floors", {})
    shown = host.show_units([UNIT])[UNIT]
    fresh = same(have, want)
    runs = shown.get("ActiveState") == "active"
    changed = not (fresh and runs and enabled())
    guard = have if fresh else want
    if module.check_mode or not changed:
        module.exit_json(changed=changed, guard=guard)
    if shown.get("LoadState") == "not-found":
        module.fail_json(msg=f"{UNIT} is not installed on this rank")
    if not fresh:
        host.write_atomic(path, json.dumps(want).encode(), 0o600)
    systemctl(module, "enable", UNIT)
    host.run(["systemctl", "reset-failed", UNIT])
    systemctl(module, "start", UNIT)
    module.exit_json(changed=True, guard=guard)


def disarm(module, path):
    shown = host.show_units([UNIT])[UNIT]
    there = shown.get("LoadState") != "not-found"
    changed = os.path.exists(path) or (there and (shown.get("ActiveState") not in ("inactive", "failed") or enabled()))
    if module.check_mode or not changed:
        module.exit_json(changed=changed, guard={})
    if there:
        systemctl(module, "disable", "--now", UNIT)
        host.run(["systemctl", "reset-failed", UNIT])
    if os.path.exists(path):
        os.unlink(path)
    module.exit_json(changed=True, guard={})


def main():
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["armed", "disarmed"], "required": True},
            "root": {"type": "path", "default": "/opt/k3deploy"},
            "run_id": {"type": "str", "default": ""},
            "seconds_left": {"type": "int", "default": 14400},
            "floor_mib": {"type": "int", "default": 1536},
            "floors": {"type": "dict", "default": {}},
            "free_floor_mib": {"type": "int", "default": 0},
            "warn_mib": {"type": "int", "default": 4096},
            "orphan_s": {"type": "int", "default": 20},
            "is_head": {"type": "bool", "default": False},
            "production": {"type": "dict", "default": {}},
            "meminfo": {"type": "path", "default": "/proc/meminfo"},
        },
        supports_check_mode=True,
    )
    path = os.path.join(module.params["root"], "state", "guard.json")
    try:
        if module.params["state"] == "armed":
            arm(module, path)
        else:
            disarm(module, path)
    except OSError as error:
        module.fail_json(msg=f"the guard of this rank: {error}")


if __name__ == "__main__":
    main()
