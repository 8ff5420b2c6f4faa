"""Ranks' health during a block: faults make it void, warnings are told.

The rules that tell faults from what healthy hosts show too are the collection's; here their result is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from k3deploy.facts import Block
from k3deploy.judge.verdict import Seen


def health_problems(block: Block) -> list[str]:
    """Why a block is void for its ranks' health; a sentence each. A rank whose health was not read has none."""
    return [f"block {block.index} ({block.arm}), {text}" for text in _of(block, "fault")]


def health_findings(blocks: Sequence[Block]) -> list[Seen]:
    """The warnings of several blocks, each once with the blocks that it stands for."""
    where: dict[str, list[str]] = {}
    for block in blocks:
        for text in _of(block, "warning"):
            where.setdefault(text, []).append(str(block.index))
    return [
        Seen(source="health", text=f"{text} (block {', '.join(indexes)})") for text, indexes in sorted(where.items())
    ]


def _of(block: Block, severity: Literal["fault", "warning"]) -> Iterable[str]:
    for rank, record in sorted(block.ranks.items()):
        for found in record.health.findings if record.health else []:
            if found.severity == severity:
                yield f"{rank}: {found.text}" + (f": {found.remedy}" if found.remedy else "")
