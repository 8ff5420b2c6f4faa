"""Apply a patch set to a source tree, or say which file and which hunk stands against it. Standard library only.

Used on the builder by `k3_build.py` and on the controller by `k3deploy patch`: what the one says is what the other does.
A patch set here is its manifest as a dictionary, with the text of its patches:
`{"name": …, "files": [{"path": …, "before": sha256 | None, "after": sha256}], "patches": [{"name": …, "text": …}]}`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

HUNK = re.compile(r"^Hunk #(\d+) (FAILED|succeeded|ignored) at (\d+)")
FILE = re.compile(r"^(?:patching|checking) file '?(.+?)'?$")
LOST = re.compile(r"^can't find file to patch")


class PatchError(Exception):
    """A patch set does not fit a tree; `lines` name each file and hunk."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("; ".join(lines))
        self.lines = lines


def sha256_of(path: Path) -> str | None:
    """The file's sha256, or None where there is no file."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def states(patch_set: dict, tree: Path) -> list[dict]:
    """What each file of the set is in this tree: `{path, state, details}`.

    `ready`: as the set expects it. `applied`: the set is already in. `moved`: another content, in which every hunk still
    finds its place. `refused`: a hunk does not; `details` say which.
    """
    found = []
    for item in patch_set["files"]:
        now = sha256_of(tree / item["path"])
        state = "ready" if now == item["before"] else "applied" if now == item["after"] else "moved"
        found.append({"path": item["path"], "state": state, "details": []})
    if any(entry["state"] == "moved" for entry in found):
        with tempfile.TemporaryDirectory() as place:
            failed = _patch(patch_set, tree, Path(place))
        for entry in found:
            if entry["state"] == "moved" and failed.get(entry["path"]):
                entry.update(state="refused", details=failed[entry["path"]])
    return found


def apply(patch_set: dict, tree: Path) -> None:
    """Change the tree, all of the set or nothing: every file is what the manifest says before, and after."""
    wrong = [line for entry in states(patch_set, tree) for line in explain(patch_set, entry)]
    if wrong:
        raise PatchError(wrong)
    with tempfile.TemporaryDirectory() as place:
        failed = _patch(patch_set, tree, Path(place))
        wrong = [f"{path}: {detail}" for path, details in failed.items() for detail in details]
        wrong += [
            f"{item['path']}: {patch_set['name']} leaves sha256 {sha256_of(Path(place, item['path']))}, its manifest says {item['after']}"
            for item in patch_set["files"]
            if not wrong and sha256_of(Path(place, item["path"])) != item["after"]
        ]
        if wrong:
            raise PatchError(wrong)
        for item in patch_set["files"]:
            target = tree / item["path"]
            target.parent.mkdir(parents=True, exist_ok=True)
            # A new file, not new content in the old one: a tree may share its files with another by hard links.
            fresh = target.with_name(target.name + ".k3-new")
            shutil.copyfile(Path(place, item["path"]), fresh)
            if target.exists():
                shutil.copymode(target, fresh)
            fresh.replace(target)


def explain(patch_set: dict, entry: dict) -> list[str]:
    """Why a file keeps its set from being applied: nothing when it does not."""
    name, path = patch_set["name"], entry["path"]
    if entry["state"] == "refused":
        return [f"{path}: {detail} of {name} does not apply" for detail in entry["details"]]
    if entry["state"] == "applied":
        return [f"{path}: {name} is already in this tree"]
    if entry["state"] == "moved":
        return [f"{path}: not the file that {name} was made for, although every hunk still applies to it"]
    return []


def _patch(patch_set: dict, tree: Path, place: Path) -> dict[str, list[str]]:
    """Copy the set's files to `place` and patch them there: `{path: hunks that fail}`, empty when all is well."""
    for item in patch_set["files"]:
        target = place / item["path"]
        target.parent.mkdir(parents=True, exist_ok=True)
        if (tree / item["path"]).is_file():
            shutil.copyfile(tree / item["path"], target)
    failed: dict[str, list[str]] = {}
    for patch in patch_set["patches"]:
        # No fuzz: a hunk whose surroundings differ is another place of the program.
        argv = ["patch", "-p1", "--forward", "--batch", "--fuzz=0", "--reject-file=-", "--directory", str(place)]
        try:
            done = subprocess.run(
                argv,
                input=patch["text"],
                capture_output=True,
                text=True,
                check=False,
                errors="replace",
                env={**os.environ, "LC_ALL": "C"},
            )
        except FileNotFoundError:
            raise PatchError(["the program `patch` is not there: install it"]) from None
        for path, details in _failures(patch["text"], done.stdout).items():
            failed.setdefault(path, []).extend(details)
        if done.returncode != 0 and not failed:
            raise PatchError([f"{patch['name']}: {line}" for line in (done.stdout + done.stderr).splitlines()[-3:]])
    return failed


def _failures(text: str, output: str) -> dict[str, list[str]]:
    """`{path: ["hunk 2 (@@ -57,4 +57,4 @@)"]}` from what patch printed about the diff `text`."""
    headers = hunks(text)
    order = list(headers)
    failed: dict[str, list[str]] = {}
    path = ""
    for line in output.splitlines():
        if match := FILE.match(line):
            path = match[1]
        elif LOST.match(line):
            # The files are named in the diff's order; a lost one is the one after the last that was found.
            path = order[order.index(path) + 1] if path in order else order[0]
            failed[path] = [f"hunk {number} ({header})" for number, header in enumerate(headers[path], 1)]
        elif (match := HUNK.match(line)) and match[2] != "succeeded":
            number = int(match[1])
            known = headers.get(path, [])
            header = known[number - 1] if number <= len(known) else f"line {match[3]}"
            failed.setdefault(path, []).append(f"hunk {number} ({header})")
    return failed


def hunks(text: str) -> dict[str, list[str]]:
    """The hunk headers of a unified diff by the path that they change."""
    found: dict[str, list[str]] = {}
    path = ""
    for line in text.splitlines():
        if line.startswith("+++ "):
            path = line[4:].split("\t")[0].removeprefix("b/")
            found[path] = []
        elif line.startswith("@@ ") and path:
            found[path].append(line.split(" @@")[0] + " @@")
    return found
