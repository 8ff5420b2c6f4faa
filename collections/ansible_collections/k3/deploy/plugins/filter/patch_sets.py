"""Read patch sets from the build role's files: what the builder is given beside a build's settings."""

from __future__ import annotations

from pathlib import Path

import yaml
from ansible.errors import AnsibleFilterError

DOCUMENTATION = r"""
name: patch_sets
short_description: The named patch sets with the text of their patches
description: Turns names of patch sets into their manifests, each with its patches' text, in the order given.
positional: _input, directory
options:
  _input:
    description: Names of patch sets.
    type: list
    elements: str
    required: true
  directory:
    description: Directory that holds one directory for each set.
    type: path
    required: true
author: the k3deploy project (@k3deploy)
"""

RETURN = r"""
_value:
  description: One dictionary a set, the keys of its C(manifest.yml) with C(patches) as a list of C(name) and C(text).
  type: list
  elements: dict
"""


def patch_sets(names, directory):
    """One dictionary a set; an unknown name is an error that lists what there is."""
    found = []
    for name in names:
        place = Path(str(directory), str(name))
        if not (place / "manifest.yml").is_file():
            known = ", ".join(sorted(path.parent.name for path in Path(str(directory)).glob("*/manifest.yml")))
            raise AnsibleFilterError(f"no patch set {str(name)!r} (there is: {known or 'none'})")
        manifest = yaml.safe_load((place / "manifest.yml").read_text(encoding="utf-8"))
        manifest["patches"] = [{"name": patch, "text": (place / patch).read_text(encoding="utf-8")} for patch in manifest["patches"]]
        found.append(manifest)
    return found


class FilterModule:
    """Filters of this file."""

    def filters(self):
        return {"patch_sets": patch_sets}
