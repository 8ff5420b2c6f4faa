"""Filters that carry values exactly into unit files: no word splitting, no specifier, no variable expansion."""

from __future__ import annotations

import json
import re

from ansible.errors import AnsibleFilterError

from ansible_collections.k3.deploy.plugins.module_utils import masking

# Control characters, and what systemd, Python or an editor would take for the end of a line.
_UNSAFE = {chr(code) for code in (*range(32), *range(127, 160), 0x2028, 0x2029)}
_PLAIN = re.compile(r"[A-Za-z0-9/_.+,:@=*-]+")


def _checked(value):
    """The value as text; control characters cannot be carried safely and are refused."""
    text = str(value)
    bad = sorted({f"U+{ord(char):04X}" for char in text if char in _UNSAFE})
    if bad:
        raise AnsibleFilterError(f"{json.dumps(text)} holds control characters ({', '.join(bad)})")
    return text


def systemd_quote(value):
    """One word of an ExecStart= line: quoted, with systemd's own escapes for backslash, quote, % and $."""
    text = _checked(value)
    for old, new in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        text = text.replace(old, new)
    return f'"{text}"'


def unit_word(value, path=False):
    """A word that stands bare in a unit file or in its name (an account, an arm, a list of CPUs; a path or device): plain characters or refused."""
    text = str(value)
    parts = text.split("/")
    if not _PLAIN.fullmatch(text) or text.startswith("-") or ".." in parts or (len(parts) > 1 and not path):
        raise AnsibleFilterError(f"{json.dumps(text)} cannot stand bare in a unit: letters, digits and _ . + , : @ = * - only")
    return text


def systemd_exec(argv):
    """A whole ExecStart= command line from an argument vector."""
    return " ".join(systemd_quote(word) for word in argv)


def environment_file(mapping):
    """The text of an EnvironmentFile=: one NAME="value" a line, sorted, escaped as systemd unescapes it."""
    lines = []
    for name, value in sorted(dict(mapping).items()):
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(name)):
            raise AnsibleFilterError(f"{json.dumps(str(name))} is not a name of an environment variable")
        if masking.is_secret_name(name):
            raise AnsibleFilterError(f"{name} holds a secret by its name: what is set for a candidate is recorded, keep it in a file on the rank")
        text = _checked(value)
        for char in ("\\", '"', "$", "`"):
            text = text.replace(char, "\\" + char)
        lines.append(f'{name}="{text}"\n')
    return "".join(lines)


class FilterModule:
    """Registers the filters."""

    def filters(self):
        return {"systemd_quote": systemd_quote, "systemd_exec": systemd_exec, "unit_word": unit_word, "environment_file": environment_file}
