"""What was measured of one arm and of the baseline, beside what was planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from k3deploy.facts import Block, Facts, State, Verified, VoidBlock
from k3deploy.judge.planned import PlannedArm, PlannedGate, PlanView

MAX_REPEATS = 2  # how often one block is measured again, and how often it may break
TextKey = tuple[str, str, int]


@dataclass(frozen=True)
class Evidence:
    """One arm against the baseline. ``pairs``: (baseline block, arm block), both measured to the end.

    verified: what its kernels did on a GPU by themselves, where that was tried. void: blocks of both that do not count;
    given_up: the last break of an arm that broke too often to be tried again.
    """

    plan: PlanView
    arm: PlannedArm
    baseline: PlannedArm
    blocks: list[Block]
    baseline_blocks: list[Block]
    pairs: list[tuple[Block, Block]]
    verified: Verified | None = None
    void: list[VoidBlock] = field(default_factory=list)
    given_up: VoidBlock | None = None

    @classmethod
    def of(cls, plan: PlanView, arm: PlannedArm, facts: Facts) -> Evidence:
        baseline = plan.arms[0]
        blocks, baseline_blocks = facts.of(arm.name), facts.of(baseline.name)
        pairs = _complete_pairs(blocks, baseline_blocks)
        # Where nothing at all is measured, what broke first of any arm is why there is nothing of this one.
        void = [void for void in facts.void if not facts.blocks or void.arm in (arm.name, baseline.name)]
        verified, lost = facts.verified.get(arm.name), given_up(arm.name, facts)
        return cls(plan, arm, baseline, blocks, baseline_blocks, pairs, verified, void, lost)

    @property
    def gates(self) -> dict[str, PlannedGate]:
        """What the arm is judged by."""
        return self.plan.gates_of(self.arm)

    @property
    def both(self) -> list[Block]:
        """The baseline's blocks, then the arm's."""
        return [*self.baseline_blocks, *self.blocks]

    def planned(self, block: Block) -> PlannedArm:
        return self.baseline if block.arm == self.baseline.name else self.arm

    def texts(self) -> tuple[list[str], int, list[str]]:
        """(texts that differ between arm and baseline, texts compared, texts that differ within the baseline)."""
        before, after = _texts_of(self.baseline_blocks), _texts_of(self.blocks)
        common = sorted(before.keys() & after.keys())
        unstable = [key for key in common if len(before[key]) > 1]
        differing = [key for key in common if before[key] != after[key]]
        return [_text_name(key) for key in differing], len(common), [_text_name(key) for key in unstable]


def unstable_texts(blocks: Sequence[Block]) -> list[str] | None:
    """The texts that differ between the starts of one arm; ``None``: no text was given by two starts."""
    starts = [one for one in (_texts_of([block]) for block in blocks) if one]
    if len(starts) < 2:
        return None
    return [_text_name(key) for key, texts in sorted(_texts_of(blocks).items()) if len(texts) > 1]


def given_up(arm: str, facts: Facts) -> VoidBlock | None:
    """The last break of an arm of which one block broke as often as it may; ``None`` for an arm that is still tried."""
    measured = {block.index for block in facts.blocks}
    broken = [void for void in facts.void if void.arm == arm and void.broken and void.index not in measured]
    indexes = [void.index for void in broken]
    lost = [void for void in broken if indexes.count(void.index) >= MAX_REPEATS]
    return max(lost, key=lambda void: void.ended or "", default=None)


def observed(blocks: Sequence[Block], key: str) -> list[float | bool]:
    """The values of an observation over the blocks that know it."""
    found: list[float | bool] = []
    for block in blocks:
        value = getattr(block.observations, key, None)
        if isinstance(value, bool | int | float):
            found.append(value)
    return found


def reused_tokens(blocks: Sequence[Block]) -> int:
    """How many tokens of the shifted prefix came from the cache, at most."""
    probes = [block.bench.probes.get("shifted_prefix") or {} for block in blocks if block.bench]
    return max((int(probe.get("cache_n") or 0) for probe in probes), default=0)


def cell_names(blocks: Sequence[Block]) -> list[tuple[str, State]]:
    names = [(cell.cell, cell.state) for block in blocks if block.bench for cell in block.bench.cells]
    return list(dict.fromkeys(names))


def _complete_pairs(arm: Sequence[Block], baseline: Sequence[Block]) -> list[tuple[Block, Block]]:
    """(baseline block, arm block) of each pair in which both were measured to the end."""
    by_pair = {block.pair: block for block in baseline if block.bench and not block.bench.error}
    return [
        (by_pair[block.pair], block) for block in arm if block.bench and not block.bench.error and block.pair in by_pair
    ]


def _texts_of(blocks: Sequence[Block]) -> dict[TextKey, set[str]]:
    """The texts of each prompt. Cached samples stay out: a cache hit may change a text for benign reasons."""
    texts: dict[TextKey, set[str]] = {}
    for block in blocks:
        for cell in block.bench.cells if block.bench else []:
            for sample in cell.valid():
                if cell.state != "cached" and sample.tokens_sha256:
                    texts.setdefault((cell.cell, cell.state, sample.repeat), set()).add(sample.tokens_sha256)
    return texts


def _text_name(key: TextKey) -> str:
    return f"{key[0]} {key[1]} repeat {key[2]}"
