"""What a run measures next: the planned blocks in their order, void ones again, and nothing once the verdict stands.

A pure function of the plan and of what is recorded, asked before every block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from k3deploy.facts import Block, Facts
from k3deploy.judge.evidence import MAX_REPEATS, given_up
from k3deploy.judge.outcome import judge
from k3deploy.judge.planned import PlanView
from k3deploy.judge.transport import broken_transfers
from k3deploy.judge.validity import below_floor, block_problems, stale_blocks

FINAL = frozenset(("ACCEPT", "REJECT"))


@dataclass(frozen=True, slots=True)
class Step:
    """``block``: the planned block (as in the plan) to measure now, or ``None`` and ``why`` the run is over.

    void: recorded blocks to put aside first, by index, with the reason.
    """

    block: dict[str, Any] | None
    why: str
    void: dict[int, str] = field(default_factory=dict)


def spares(blocks: int) -> int:
    """How many blocks a run of so many may measure again in all: void blocks without end are a finding, not a run."""
    return max(MAX_REPEATS, blocks // 4)


def next_step(
    plan: Mapping[str, Any], facts: Facts, *, now: float = 0.0, until: float | None = None, block_s: float = 0.0
) -> Step:
    """now, until: seconds since the epoch; no round begins that would not end before ``until``. block_s: seconds that
    a block takes as far as earlier runs tell; this run's own blocks are the better witness."""
    view = PlanView.model_validate(dict(plan))
    problems = _problems(view, facts)
    tries = Counter(void.index for void in facts.void)
    # Blocks that broke end a run each, and an arm that breaks is given up: they take nothing of what is spare.
    again = sum(not void.broken for void in facts.void)
    void: dict[int, str] = {}
    for index, reason in problems.items():
        if tries[index] >= MAX_REPEATS or again + len(void) >= spares(len(view.blocks)):
            return Step(None, f"block {index} is void and was measured again often enough: {reason}", void)
        void[index] = reason
    kept = [block for block in facts.blocks if block.index not in void]
    have = {block.index for block in kept}
    left = [block for block in view.blocks if block["index"] not in have]
    if not left:
        return Step(None, "every planned block is measured")
    lost = {arm.name: last.void for arm in view.arms if (last := given_up(arm.name, facts)) is not None}
    baseline = view.arms[0].name
    if baseline in lost:
        return Step(None, _lost_words({baseline: lost[baseline]}), void)
    final: set[str] = set()
    if kept and not view.rule.fixed:
        verdict = judge(plan, facts.model_copy(update={"blocks": kept}))
        final = {arm.arm for arm in verdict.arms if arm.outcome in FINAL}
        if len(final) == len(verdict.arms):
            return Step(None, f"{verdict.outcome} after {verdict.pairs} pairs: {verdict.reason}", void)
    if final | lost.keys() >= {arm.name for arm in view.arms[1:]}:
        return Step(None, _lost_words(lost), void)  # blocks of the baseline alone would say nothing
    open_blocks = [block for block in left if block["arm"] not in final | lost.keys()]
    if not open_blocks:
        return Step(None, "every block of an arm that is not decided yet is measured", void)
    block = open_blocks[0]
    begins_a_round = block["pair"] not in {one.pair for one in kept}
    if until is not None and begins_a_round and now + (_length(kept) or block_s) * len(view.arms) > until:
        return Step(None, f"--max-hours: another round of {len(view.arms)} blocks would not end in time", void)
    return Step(block, "; ".join(void.values()), void)


def _lost_words(lost: Mapping[str, str]) -> str:
    return "; ".join(f"{arm} broke {MAX_REPEATS} times and is given up: {reason}" for arm, reason in lost.items())


def _problems(view: PlanView, facts: Facts) -> dict[int, str]:
    """Why recorded blocks are void, by index. An arm that fell below the floor, or whose transfers broke where that
    is what it is judged by, is not void: it is harm."""
    arms = {arm.name: arm for arm in view.arms}
    found: dict[int, str] = {}
    for block in facts.blocks:
        arm = arms[block.arm]
        problems = block_problems(view, arm, block)
        harm = arm is not view.arms[0] and (below_floor(arm, block) or broken_transfers(view, arm, block))
        if problems and not harm:
            found[block.index] = "; ".join(text for texts in problems.values() for text in texts[:2])
    stale = stale_blocks(facts.blocks, len(view.arms))
    return found | {index: text for index, text in stale.items() if index not in found}


def _length(blocks: list[Block]) -> float:
    """Mean seconds from one block's start to its end."""
    took = [
        (datetime.fromisoformat(block.ended) - datetime.fromisoformat(block.started)).total_seconds()
        for block in blocks
        if block.ended
    ]
    return sum(took) / len(took) if took else 0.0
