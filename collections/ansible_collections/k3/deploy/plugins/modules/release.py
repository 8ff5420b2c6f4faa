#!/usr/bin/python
"""k3.deploy.release: a build as a release directory on a rank, whole and verified or not there at all."""

from __future__ import annotations

DOCUMENTATION = r"""
module: release
short_description: Install a build as a release on a rank
description:
  - With O(state=query), says which files of a build the rank lacks or holds with another hash.
  - With O(state=present), assembles C(releases/<build-id>) from files that the rank has already (by hash, from any release) and from O(archive),
    verifies every hash, and renames the directory into place. Nothing is visible under the final name before it is whole.
  - With both, fails where a program in C(bin/) cannot run on this rank, because it is for another processor or lacks a library.
options:
  state:
    description: What is wanted.
    type: str
    choices: [query, present]
    default: query
  root:
    description: Directory under which everything of k3deploy lives on the rank.
    type: path
    default: /opt/k3deploy
  manifest:
    description: The build's manifest; its C(build_id) names the release and its C(files) maps relative paths to C({sha256, mode}).
    type: dict
    required: true
  archive:
    description: A tar file on the rank with the files that it lacked. Removed after use.
    type: path
author: [the k3deploy project (@k3deploy)]
attributes:
  check_mode:
    support: full
    description: Reports what would be installed.
"""

EXAMPLES = r"""
- name: Ask which files are missing
  k3.deploy.release:
    manifest: "{{ manifest }}"
  register: query
"""

RETURN = r"""
missing:
  description: Relative paths that the rank has nowhere with the wanted hash.
  type: list
  elements: str
  returned: always
"""

import json
import os
import re
import shutil
import sys
import tarfile
import tempfile

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.k3.deploy.plugins.module_utils import host


def safe(relative):
    """Whether a manifest's or an archive's path stays inside the release, and is one line that no program takes for an option."""
    parts = relative.split("/")
    return relative.isprintable() and not any(part in ("", "..") or part.startswith("-") for part in parts)


def held(releases, wanted):
    """{sha256: path} of the wanted hashes that are on this rank already, in any release."""
    found = {}
    for build in os.listdir(releases) if os.path.isdir(releases) else []:
        manifest = host.read_json(os.path.join(releases, build, "manifest.json")) or {}
        for relative, item in (manifest.get("files") or {}).items():
            path = os.path.join(releases, build, relative)
            digest = item.get("sha256")
            # The manifest only says where to look: the hash is taken from the file itself.
            if digest in wanted and digest not in found and host.sha256_file(path) == digest:
                found[digest] = path
    return found


def intact(folder, files):
    """Whether a release directory holds exactly what the manifest says: a library too many would be loaded like the others."""
    present = {os.path.relpath(os.path.join(place, name), folder) for place, _folders, names in os.walk(folder) for name in names}
    return present == {*files, "manifest.json"} and all(
        host.sha256_file(os.path.join(folder, relative)) == item["sha256"] for relative, item in files.items()
    )


def machine(path):
    """The processor that an ELF file is for, by its number; None for anything else."""
    with open(path, "rb") as raw:
        head = raw.read(20)
    return int.from_bytes(head[18:20], "little") if head[:4] == b"\x7fELF" else None


def unfit(folder, files):
    """Why programs of a release cannot run on this rank: sentences. Better said now than in a window, with production down."""
    problems, own = [], machine(sys.executable)
    for relative in sorted(name for name in files if name.startswith("bin/")):
        path = os.path.join(folder, relative)
        made_for = machine(path)
        if made_for not in (None, own):
            problems.append(f"{relative} is for another processor (ELF machine {made_for}, this rank's is {own})")
        elif made_for is not None:
            _rc, out, _err = host.run(["ldd", path], environment={"LD_LIBRARY_PATH": os.path.join(folder, "lib")})
            lost = sorted(set(re.findall(r"^\s*(\S+) => not found", out, re.MULTILINE)))
            problems += ["{} needs {}, which this rank does not have".format(relative, ", ".join(lost))] if lost else []
    return problems


def assemble(module, folder, files, have):
    """Fill a fresh directory: links to files the rank has, the rest from the archive."""
    for relative, item in files.items():
        target = os.path.join(folder, relative)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if item["sha256"] in have:
            os.link(have[item["sha256"]], target)
    if module.params["archive"]:
        with tarfile.open(module.params["archive"]) as archive:
            for member in archive:
                if not member.isfile() or not safe(member.name) or member.name not in files:
                    continue
                target = os.path.join(folder, member.name)
                if os.path.exists(target):
                    continue
                with archive.extractfile(member) as source, open(target, "wb") as sink:
                    shutil.copyfileobj(source, sink)
    for relative, item in files.items():
        target = os.path.join(folder, relative)
        digest = host.sha256_file(target)
        if digest != item["sha256"]:
            raise OSError("{}: {} after the transfer, its manifest says {}".format(relative, digest, item["sha256"]))
        os.chmod(target, int(item.get("mode", "0644"), 8))
    problems = unfit(folder, files)
    if problems:
        raise OSError("; ".join(problems))


def install(module, releases, manifest, have):
    """Build the release beside its place and rename it there."""
    final = os.path.join(releases, manifest["build_id"])
    folder = None
    try:
        os.makedirs(releases, exist_ok=True)
        for leftover in os.listdir(releases):
            if leftover.startswith("." + manifest["build_id"]):
                shutil.rmtree(os.path.join(releases, leftover))
        folder = tempfile.mkdtemp(dir=releases, prefix="." + manifest["build_id"] + "-")
        os.chmod(folder, 0o755)
        assemble(module, folder, manifest["files"], have)
        host.write_atomic(os.path.join(folder, "manifest.json"), json.dumps(manifest, indent=1).encode())
        if os.path.isdir(final):
            # A damaged release of the same name: out of the way first, since a directory is not replaced by rename.
            shutil.move(final, folder + "-damaged")
        os.rename(folder, final)
        shutil.rmtree(folder + "-damaged", ignore_errors=True)
    except (OSError, tarfile.TarError) as error:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        module.fail_json(msg="release {} was not installed: {}".format(manifest["build_id"], error))
    finally:
        if module.params["archive"] and os.path.exists(module.params["archive"]):
            os.unlink(module.params["archive"])


def main():
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["query", "present"], "default": "query"},
            "root": {"type": "path", "default": "/opt/k3deploy"},
            "manifest": {"type": "dict", "required": True},
            "archive": {"type": "path"},
        },
        supports_check_mode=True,
    )
    manifest = module.params["manifest"]
    files, build_id = manifest.get("files") or {}, manifest.get("build_id") or ""
    if not build_id or "/" in build_id or build_id.startswith(".") or not all(safe(name) for name in files):
        module.fail_json(msg="the manifest names no valid build id, or a path outside the release")
    releases = os.path.join(module.params["root"], "releases")
    final = os.path.join(releases, build_id)
    if os.path.isdir(final) and intact(final, files):
        problems = unfit(final, files)
        if problems:
            module.fail_json(msg="release {} cannot run: {}".format(build_id, "; ".join(problems)))
        module.exit_json(changed=False, missing=[], present=True)
    have = held(releases, {item["sha256"] for item in files.values()})
    missing = sorted(name for name, item in files.items() if item["sha256"] not in have)
    if module.params["state"] == "query" or module.check_mode:
        module.exit_json(changed=module.params["state"] == "present", missing=missing, present=False)
    if missing and not module.params["archive"]:
        module.fail_json(msg="no archive given for %d missing files" % len(missing), missing=missing)
    install(module, releases, manifest, have)
    module.exit_json(changed=True, missing=[], present=True)


if __name__ == "__main__":
    main()
