"""Which log lines are read for facts, as the controller uses them.

The patterns are one file of the collection, because a rank chooses by them what it sends of a log that is too long.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from k3deploy.secrets import collection_file

_HOME: Any = collection_file("plugins/module_utils/log_lines.py")
MARKERS: Sequence[str] = _HOME.MARKERS
PATTERNS: Mapping[str, re.Pattern[str]] = {name: re.compile(kind.pattern) for name, kind in _HOME.KINDS.items()}
# (pattern, what it means) of each line that ends a server, in the order of the alternatives of PATTERNS["fatal"].
FATAL: Sequence[tuple[str, str]] = [(pattern, meaning) for pattern, _, meaning in _HOME.FATAL]


def lost(text: str) -> list[str]:
    """The observations that a log cannot give any more: of lines that they rest on, some were left out."""
    kinds = _HOME.lost_kinds(text)
    return list(dict.fromkeys(name for kind in kinds for name in _HOME.KINDS[kind].feeds))


def has(text: str, kind: str) -> bool:
    """Whether a text can hold a line of this kind at all: much faster to ask than a pattern of many alternatives."""
    return any(word in text for word in _HOME.KINDS[kind].words)
