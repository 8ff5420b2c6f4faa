#!/usr/bin/python
"""k3.deploy.file_set: many small files and links on a rank in one round trip."""

from __future__ import annotations

DOCUMENTATION = r"""
module: file_set
short_description: Write a set of small files, directories and links in one round trip
description:
  - Brings files, directories and symbolic links to the wanted content, mode and owner, each atomically.
  - An action plugin of the same name renders C(template) entries on the controller first.
options:
  files:
    description: The wanted entries, in order.
    type: list
    elements: dict
    required: true
    suboptions:
      path:
        description: Absolute path on the rank.
        type: path
        required: true
      content:
        description: Text of a regular file.
        type: str
      template:
        description: Name of a template (in the role's C(templates/)) that gives the content.
        type: str
      file:
        description: Name of a file (in the role's C(files/)) that gives the content.
        type: str
      vars:
        description: Extra variables of the template.
        type: dict
      link:
        description: Target of a symbolic link, as it is to be written.
        type: str
      previous:
        description: Path of a second link that gets the link's old target before the link is changed.
        type: path
      absent:
        description: The file or link is not to be there.
        type: bool
        default: false
      directory:
        description: The entry is a directory.
        type: bool
        default: false
      mode:
        description: Mode as an octal string; C(0644) for files and C(0755) for directories when left out.
        type: str
      owner:
        description: Owner and group by name; left alone when not given.
        type: str
  daemon_reload:
    description: Let systemd read its units again when an entry under C(/etc/systemd) changed.
    type: bool
    default: true
author: [the k3deploy project (@k3deploy)]
attributes:
  check_mode:
    support: full
    description: Reports what would change.
  diff_mode:
    support: full
    description: Shows every file's old and new content.
"""

EXAMPLES = r"""
- name: Install the worker's unit
  k3.deploy.file_set:
    files:
      - path: /etc/systemd/system/k3-candidate-worker@.service
        template: worker.service.j2
"""

RETURN = r"""
changed_paths:
  description: Paths that were (or in check mode would be) changed.
  type: list
  elements: str
  returned: always
undo:
  description: Entries that give the changed links their old targets back.
  type: list
  elements: dict
  returned: always
"""

import grp
import os
import pwd
import stat

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.k3.deploy.plugins.module_utils import host


def owner_ids(name):
    """(uid, gid) of an owner by name, or None when it does not exist yet (check mode on a clean rank)."""
    try:
        return pwd.getpwnam(name).pw_uid, grp.getgrnam(name).gr_gid
    except KeyError:
        return None


def current(path):
    """(kind, content or link target, mode, (uid, gid)) of what is at a path; kind is None when nothing is."""
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        return None, "", 0, None
    mode, ids = stat.S_IMODE(info.st_mode), (info.st_uid, info.st_gid)
    if stat.S_ISLNK(info.st_mode):
        return "link", os.readlink(path), mode, ids
    if stat.S_ISDIR(info.st_mode):
        return "directory", "", mode, ids
    with open(path, "rb") as raw:
        return "file", raw.read().decode("utf-8", "replace"), mode, ids


def wanted(entry):
    """(kind, content or link target, mode) that an entry asks for; kind is None where nothing is to be."""
    if entry.get("absent"):
        return None, "", None
    if entry.get("link") is not None:
        return "link", entry["link"], None
    if entry.get("directory"):
        return "directory", "", int(entry.get("mode") or "0755", 8)
    return "file", entry.get("content") or "", int(entry.get("mode") or "0644", 8)


def replace_link(path, target):
    """Point a link at a new target in one step, so that there is never a moment without it."""
    temporary = "%s.k3-%d" % (path, os.getpid())
    os.makedirs(os.path.dirname(path), exist_ok=True)
    os.symlink(target, temporary)
    os.replace(temporary, path)


def apply_entry(entry, have, kind, content, mode):
    """Make it so. Content is atomic; mode and owner follow."""
    path = entry["path"]
    if kind is None:
        os.unlink(path)
        return
    if kind == "link":
        if entry.get("previous") and have[0] == "link":
            # Recorded before, so that an interruption between the two never loses what ran.
            replace_link(entry["previous"], have[1])
        replace_link(path, content)
        return
    if kind == "directory":
        os.makedirs(path, exist_ok=True)
        os.chmod(path, mode)
    else:
        host.write_atomic(path, content.encode("utf-8"), mode)
    ids = owner_ids(entry["owner"]) if entry.get("owner") else None
    if ids:
        os.chown(path, *ids)


def difference(entry, have, want):
    """A diff entry for --diff, or None when nothing is to be done."""
    have_kind, have_content, have_mode, have_ids = have
    kind, content, mode = want
    ids = owner_ids(entry["owner"]) if entry.get("owner") and kind != "link" else None
    wrong_owner = bool(entry.get("owner")) and kind != "link" and have_ids != ids
    if (have_kind, have_content) == (kind, content) and (mode is None or have_mode == mode) and not wrong_owner:
        return None
    return {
        "before_header": entry["path"],
        "after_header": entry["path"],
        "before": have_content if have_kind else "",
        "after": content if kind != "directory" else f"directory, mode {mode:04o}\n",
    }


def main():
    module = AnsibleModule(
        argument_spec={
            "files": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {
                    "path": {"type": "path", "required": True},
                    "content": {"type": "str"},
                    "template": {"type": "str"},
                    "file": {"type": "str"},
                    "vars": {"type": "dict"},
                    "link": {"type": "str"},
                    "previous": {"type": "path"},
                    "absent": {"type": "bool", "default": False},
                    "directory": {"type": "bool", "default": False},
                    "mode": {"type": "str"},
                    "owner": {"type": "str"},
                },
            },
            "daemon_reload": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
        no_log=True,  # what is given here belongs in no journal
    )
    diffs, changed, undo = [], [], []
    try:
        for entry in module.params["files"]:
            have, want = current(entry["path"]), wanted(entry)
            found = difference(entry, have, want)
            if found is None:
                continue
            if have[0] == "directory" and want[0] != "directory":
                module.fail_json(msg="{} is a directory, a {} is wanted there".format(entry["path"], want[0]))
            diffs.append(found)
            changed.append(entry["path"])
            if not module.check_mode:
                apply_entry(entry, have, *want)
            if want[0] == "link":
                undo.append({"path": entry["path"], "link": have[1]} if have[0] == "link" else {"path": entry["path"], "absent": True})
    except OSError as error:
        module.fail_json(msg=f"cannot write: {error}", changed_paths=changed, undo=undo)
    systemd = any(path.startswith("/etc/systemd/") for path in changed)
    if systemd and module.params["daemon_reload"] and not module.check_mode:
        rc, _out, err = host.run(["systemctl", "daemon-reload"], timeout=60)
        if rc != 0:
            module.fail_json(msg=f"systemctl daemon-reload failed: {err.strip()}", changed_paths=changed)
    module.exit_json(changed=bool(changed), changed_paths=changed, undo=undo, diff=diffs)


if __name__ == "__main__":
    main()
