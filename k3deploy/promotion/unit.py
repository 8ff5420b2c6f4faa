"""A process of production as the text of a systemd drop-in: every value exactly, or refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from k3deploy.errors import K3Error

# Control characters, and what systemd or an editor would take for the end of a line.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
HEADER = "# Written by k3deploy"


def dropin(
    promotion_id: str,
    argv: Sequence[str],
    environment: Mapping[str, str],
    memlock_bytes: int = 0,
    cpu_affinity: str = "",
) -> str:
    """The drop-in that makes a unit run ``argv`` with exactly ``environment``, whatever the unit itself says."""
    lines = [f"{HEADER} for {promotion_id}; without this file the unit is as it was before.", "[Service]"]
    lines += ["EnvironmentFile=", "Environment="]
    lines += [f"Environment={_word(f'{name}={value}')}" for name, value in sorted(environment.items())]
    lines += ["ExecStart=", "ExecStart=" + " ".join(_word(word).replace("$", "$$") for word in argv)]
    lines.append(f"LimitMEMLOCK={memlock_bytes or 'infinity'}")
    if cpu_affinity:
        lines += ["CPUAffinity=", f"CPUAffinity={cpu_affinity}"]
    return "\n".join(lines) + "\n"


def _word(text: str) -> str:
    """One word, quoted as systemd reads it in every setting; ``$`` has a meaning in ExecStart= alone."""
    if _UNSAFE.search(text):
        raise K3Error(f"{json.dumps(text)} holds control characters and cannot stand in a unit")
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%") + '"'
