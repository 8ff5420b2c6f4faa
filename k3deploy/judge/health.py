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
    return [f"block {block.index} ({block.arm}), {rank}: {text}" for rank, text in _of(block, "fault")]


def health_findings(blocks: Sequence[Block]) -> list[Seen]:
    """The warnings of several blocks, each once with the ranks and the blocks that it stands for."""
    where: dict[str, tuple[set[str], set[int]]] = {}
    for block in blocks:
        for rank, text in _of(block, "warning"):
            ranks, indexes = where.setdefault(text, (set(), set()))
            ranks.add(rank)
            indexes.add(block.index)
    return [
        Seen(source="health", text=f"{', '.join(sorted(ranks))}: {text} (block {', '.join(map(str, sorted(indexes)))})")
        for text, (ranks, indexes) in sorted(where.items())
    ]


def _of(block: Block, severity: Literal["fault", "warning"]) -> Iterable[tuple[str, str]]:
    """(rank, what and what to do) of each finding of that severity."""
    for rank, record in sorted(block.ranks.items()):
        for found in record.health.findings if record.health else []:
            if found.severity == severity:
                yield rank, found.text + (f": {found.remedy}" if found.remedy else "")
