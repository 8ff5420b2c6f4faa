#!/usr/bin/python
"""k3.deploy.promotion: production's units as they are, changed by one drop-in each, and changed back."""

from __future__ import annotations

DOCUMENTATION = r"""
module: promotion
short_description: Read production's units, promote a judged release to them, or demote it
description:
  - A promotion is a copy of the judged release under O(production_root) and one drop-in for each unit; the units' own files are never written.
  - What was there before is recorded in C(<root>/state/promotion.json) before anything is changed, so that it can be put back.
  - Starts, stops and restarts nothing, and asks no window: the playbook does.
options:
  state:
    description: What is wanted.
    type: str
    choices: [read, promoted, demoted]
    required: true
  root:
    description: Directory under which everything of k3deploy lives on the rank.
    type: path
    default: /opt/k3deploy
  units:
    description: Production's units on this rank, with the text of the drop-in that each gets; an empty text for none.
    type: dict
    required: true
  about:
    description: The promotion's C(id), C(candidate), C(arm), C(run_id), C(build_id), C(files) and C(production_root).
    type: dict
    default: {}
  undo:
    description: With O(state=demoted), the id of the only promotion that may be undone; where another is current, nothing is changed.
    type: str
author: [the k3deploy project (@k3deploy)]
attributes:
  check_mode:
    support: full
    description: Verifies the release and reports what would change.
  diff_mode:
    support: full
    description: Shows every drop-in's old and new text.
"""

EXAMPLES = r"""
- name: Read production's unit
  k3.deploy.promotion:
    state: read
    units: {llama-server.service: ""}
    about: {build_id: b3f0c1d2e3f40516-0a1b2c3d, files: {bin/llama-server: ""}}
"""

RETURN = r"""
rank:
  description: >-
    C(files) (sha256 of the release's programs, null when missing), C(units) (by name their C(active) state, C(text), C(dropin), C(argv) and
    C(environment)), C(record) (what is promoted now and what was before) and C(window) (the open window, on the head).
  type: dict
  returned: when state is read
"""

import json
import os
import shutil
import tempfile
import time

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.k3.deploy.plugins.module_utils import host, masking
from ansible_collections.k3.deploy.plugins.module_utils import production as window_of

UNITS = "/etc/systemd/system"
DROPIN = "50-k3deploy.conf"
KEPT = 20  # entries of the history


def dropin_path(unit):
    """Where k3deploy's drop-in of a unit lies."""
    return os.path.join(UNITS, unit + ".d", DROPIN)


def read_file(path):
    """A text file's content; None when there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as text:
            return text.read()
    except FileNotFoundError:
        return None


def hashes(folder, files):
    """{path: sha256 or None} of a release's files."""
    return {path: host.sha256_file(os.path.join(folder, path)) for path in files}


def unit_now(name, shown):
    """A unit as systemd has it, and its process, without secrets."""
    _rc, text, _err = host.run(["systemctl", "cat", "--no-pager", "--", name])
    pid = int(shown.get("MainPID") or 0)
    process = host.process(pid) if pid else None
    state = {
        "active": shown.get("ActiveState"),
        "text": text,
        "argv": (process or {}).get("argv") or [],
        "environment": (process or {}).get("environment") or {},
    }
    return {**masking.mask(state), "dropin": read_file(dropin_path(name))}


class Promotion:
    """One call on one rank."""

    def __init__(self, module):
        self.module, self.params, self.about = module, module.params, module.params["about"]
        self.record_path = os.path.join(module.params["root"], "state", "promotion.json")
        self.record = host.read_json(self.record_path)
        for unit in module.params["units"]:
            if "/" in unit or not unit.endswith(".service"):
                module.fail_json(msg=f"{unit!r} is not the name of a service")

    def release(self):
        build_id = self.about.get("build_id") or ""
        if "/" in build_id or build_id.startswith("."):
            self.module.fail_json(msg=f"{build_id!r} is not a build id")
        return os.path.join(self.params["root"], "releases", build_id)

    def read(self):
        names = list(self.params["units"])
        shown = host.show_units(names)
        units = {name: unit_now(name, value) for name, value in shown.items() if value.get("LoadState") != "not-found"}
        files = hashes(self.release(), self.about.get("files") or {})
        self.module.exit_json(
            changed=False, rank={"files": files, "units": units, "record": self.record, "window": window_of.read_window(self.params["root"])}
        )

    # -- changing -----------------------------------------------------------------------------------------------

    def promote(self):
        files, folder = self.about["files"], self.release()
        wrong = [path for path, digest in hashes(folder, files).items() if digest != files[path]]
        if wrong or not files:
            self.module.fail_json(msg="the release {} is not the one that was judged: {}".format(folder, ", ".join(wrong) or "no hashes given"))
        copied = self.copy_release(folder, os.path.join(self.about["production_root"], self.about["build_id"]))
        self.change(self.params["units"], copied)

    def demote(self):
        current = (self.record or {}).get("current") or {}
        if self.params["undo"] not in (None, current.get("id")):
            self.module.exit_json(changed=False, diff=[])
        before = current.get("previous") or {}
        self.change({name: before.get(name) or "" for name in self.params["units"]}, False)

    def copy_release(self, source, target):
        """Production's own copy: what it runs does not depend on k3deploy's directory. True when it was made."""
        with open(os.path.join(source, "manifest.json"), encoding="utf-8") as text:
            files = json.load(text)["files"]
        if all(host.sha256_file(os.path.join(target, path)) == item["sha256"] for path, item in files.items()):
            return False
        if self.module.check_mode:
            return True
        os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
        fresh = tempfile.mkdtemp(dir=os.path.dirname(target), prefix="." + os.path.basename(target) + "-")
        try:
            os.chmod(fresh, 0o755)
            shutil.copytree(source, fresh, symlinks=True, dirs_exist_ok=True)
            if os.path.isdir(target):
                os.rename(target, fresh + "-damaged")
            os.rename(fresh, target)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
            shutil.rmtree(fresh + "-damaged", ignore_errors=True)
        return True

    def change(self, wanted, changed):
        """Bring the drop-ins to the wanted texts; what was there is recorded first."""
        before = {name: read_file(dropin_path(name)) or "" for name in wanted}
        different = {name: text for name, text in wanted.items() if text != before[name]}
        diff = [
            {"before": before[name], "after": text, "before_header": dropin_path(name), "after_header": dropin_path(name)}
            for name, text in different.items()
        ]
        if different and not self.module.check_mode:
            self.remember(before)
            for name, text in different.items():
                self.write(dropin_path(name), text)
            rc, _out, err = host.run(["systemctl", "daemon-reload"], timeout=60)
            if rc != 0:
                self.module.fail_json(msg=f"systemd does not read its units again: {err.strip()}")
        self.module.exit_json(changed=bool(different) or changed, diff=diff)

    def write(self, path, text):
        if text:
            host.write_atomic(path, text.encode())
            return
        if os.path.exists(path):
            os.unlink(path)
        if os.path.isdir(os.path.dirname(path)) and not os.listdir(os.path.dirname(path)):
            os.rmdir(os.path.dirname(path))

    def remember(self, before):
        """Record what is promoted now and what it replaces; a demotion makes what was replaced current again."""
        old = self.record or {}
        entry = {key: self.about.get(key) for key in ("id", "candidate", "arm", "run_id", "build_id", "owner")}
        entry.update(action=self.params["state"], time=time.time())
        history = ((old.get("history") or []) + [entry])[-KEPT:]
        promoting = self.params["state"] == "promoted"
        current = dict(entry, previous=before, before=old.get("current")) if promoting else (old.get("current") or {}).get("before")
        self.record = {"current": current, "history": history}
        host.write_atomic(self.record_path, json.dumps(self.record, indent=1).encode(), mode=0o600)


def main():
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["read", "promoted", "demoted"], "required": True},
            "root": {"type": "path", "default": "/opt/k3deploy"},
            "units": {"type": "dict", "required": True},
            "about": {"type": "dict", "default": {}},
            "undo": {"type": "str"},
        },
        supports_check_mode=True,
    )
    promotion = Promotion(module)
    try:
        {"read": promotion.read, "promoted": promotion.promote, "demoted": promotion.demote}[module.params["state"]]()
    except (OSError, ValueError, KeyError) as error:
        module.fail_json(msg=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
