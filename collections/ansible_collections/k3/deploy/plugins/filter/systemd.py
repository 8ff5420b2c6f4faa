"""Filters that carry values exactly into unit files: no word splitting, no specifier, no variable expansion."""

from __future__ import annotations

import json

from ansible.errors import AnsibleFilterError

_UNSAFE = {chr(code) for code in (*range(32), 127)}


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


def systemd_exec(argv):
    """A whole ExecStart= command line from an argument vector."""
    return " ".join(systemd_quote(word) for word in argv)


def environment_file(mapping):
    """The text of an EnvironmentFile=: one NAME="value" a line, sorted, escaped as systemd unescapes it."""
    lines = []
    for name, value in sorted(dict(mapping).items()):
        if not str(name).replace("_", "a").isalnum() or str(name)[0].isdigit():
            raise AnsibleFilterError(f"{json.dumps(str(name))} is not a name of an environment variable")
        text = _checked(value)
        for char in ("\\", '"', "$", "`"):
            text = text.replace(char, "\\" + char)
        lines.append(f'{name}="{text}"\n')
    return "".join(lines)


class FilterModule:
    """Registers the filters."""

    def filters(self):
        return {"systemd_quote": systemd_quote, "systemd_exec": systemd_exec, "environment_file": environment_file}
