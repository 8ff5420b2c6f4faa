"""What a reader must know beside the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from k3deploy.facts import Block, Facts
from k3deploy.judge.evidence import Evidence, observed
from k3deploy.judge.health import health_findings
from k3deploy.judge.memory import memory_findings
from k3deploy.judge.planned import PlanView
from k3deploy.judge.profile import profile_findings
from k3deploy.judge.transport import transport_findings
from k3deploy.judge.verdict import Seen
from k3deploy.log_lines import MARKERS

_COLD_SHARE = 0.5  # of the model's file in the page cache; below it most of a load comes from disk


def arm_findings(evidence: Evidence) -> list[Seen]:
    found = [Seen(source="plan", text=note) for note in evidence.arm.notes]
    found += _cache_reuse_findings(evidence.blocks, evidence.baseline_blocks)
    found += _pipeline_findings(evidence)
    found += microbatch_findings(evidence)
    differing, compared, unstable = evidence.texts()
    if unstable:
        found.append(Seen(source="measured", text=f"the baseline's own text changes between starts: {unstable[0]}"))
    elif differing:
        text = f"greedy output differs from the baseline's in {len(differing)} of {compared} texts: {differing[0]}"
        found.append(Seen(source="measured", text=text))
    elif compared:
        text = f"greedy output is identical to the baseline's in all {compared} texts of the cells"
        found.append(Seen(source="measured", text=text))
    found += _truncated_findings(evidence.both) + _fallback_findings(evidence.both)
    found += memory_findings(evidence) + profile_findings(evidence)
    return found + transport_findings(evidence.both) + health_findings(evidence.both)


def _pipeline_findings(evidence: Evidence) -> list[Seen]:
    own = observed(evidence.blocks, "pipeline_parallel")
    baseline = observed(evidence.baseline_blocks, "pipeline_parallel")
    if not own or not baseline or own[-1] == baseline[-1]:
        return []
    text = (
        "the head pipelines microbatches over the ranks, the baseline does not"
        if own[-1]
        else "the head does not pipeline microbatches over the ranks, the baseline does"
    )
    return [Seen(source="measured", text=text, contradicts=not own[-1])]


def _fallback_findings(blocks: Sequence[Block]) -> list[Seen]:
    """Kernels that were switched on and never ran on a rank: what was measured there is the existing ones."""
    where: dict[str, set[str]] = {}
    for block in blocks:
        for rank, said in block.observations.rank_markers.items():
            for kernel in MARKERS:
                if said.get(f"{kernel}_fallback") and not said.get(f"{kernel}_active"):
                    where.setdefault(f"{kernel} is switched on and always fell back on {rank}", set()).add(block.arm)
    return [Seen(source="measured", text=f"{text} ({', '.join(sorted(arms))})") for text, arms in where.items()]


def _truncated_findings(blocks: Sequence[Block]) -> list[Seen]:
    """Logs that had more lines to count than travel: what rests on them is only part of the truth."""
    return [
        Seen(
            source="measured",
            text=f"the logs of block {block.index} ({block.arm}) are longer than what is kept of them; "
            f"only a part is known of {', '.join(block.observations.truncated)}",
        )
        for block in blocks
        if block.observations.truncated
    ]


def _cache_reuse_findings(blocks: Sequence[Block], baseline: Sequence[Block]) -> list[Seen]:
    effective = observed(blocks, "prefix_reuse_effective")
    if not effective or not observed(blocks, "cache_reuse_disabled"):
        return []
    if not effective[-1]:
        text = (
            "cache_reuse has no effect: of a prompt whose beginning was dropped, the server took nothing from its cache"
        )
        return [Seen(source="measured", text=text, contradicts=True)]
    if False in observed(blocks, "prefix_reuse_identical"):
        text = (
            "cache_reuse takes effect and changes the output: after a moved prefix the text differs from that of the "
            "same prompt evaluated from nothing; a recurrent state cannot forget what was dropped"
        )
        same = False in observed(baseline, "prefix_reuse_identical")
        return [
            Seen(source="measured", text=text + (" (the baseline does the same)" if same else ""), contradicts=True)
        ]
    return [Seen(source="measured", text="cache_reuse takes effect on a moved prefix and the text stays the same")]


def microbatch_findings(evidence: Evidence) -> list[Seen]:
    """In which pieces prompts went through the model, where that differs from the baseline or from what is planned."""
    if not evidence.blocks or not evidence.baseline_blocks:
        return []
    own, baseline = evidence.blocks[-1], evidence.baseline_blocks[-1]
    parts = []
    for cell in own.bench.cells if own.bench else []:
        before = baseline.cell(cell.cell, cell.state)
        sizes, others = own.microbatches(cell), baseline.microbatches(before) if before else None
        if sizes and others and sizes != others:
            parts.append(f"{cell.cell} {cell.state} {_plus(sizes)} (baseline {_plus(others)})")
    return [Seen(source="measured", text=f"microbatches as sent: {'; '.join(parts)}")] if parts else []


def _plus(sizes: Sequence[int]) -> str:
    return "+".join(map(str, sizes)) if len(sizes) <= 4 else f"{'+'.join(map(str, sizes[:3]))}+… ({len(sizes)} in all)"


def _page_cache_findings(blocks: Sequence[Block]) -> list[Seen]:
    """Loads from disk and loads from memory take different times, and must not be compared."""
    known = [(block, share) for block in blocks if (share := block.page_cached) is not None]
    starts = {share < _COLD_SHARE for _, share in known}
    if len(starts) < 2:
        return []
    cold = ", ".join(str(block.index) for block, share in known if share < _COLD_SHARE)
    text = f"block {cold} started page-cache-cold (the model's file was not in the page cache), the others did not"
    return [Seen(source="measured", text=text)]


def _production_findings(blocks: Sequence[Block]) -> list[Seen]:
    """Nothing here writes production's files: when one changes, somebody works on production in the window."""
    first: dict[tuple[str, str], tuple[int, str | None]] = {}
    found: dict[tuple[str, str], str] = {}
    for block in blocks:
        for rank, record in block.ranks.items():
            production = record.state.production if record.state else None
            files = production.files if production else {}
            for path, digest in files.items():
                index, before = first.setdefault((rank, path), (block.index, digest))
                if digest != before:
                    text = f"production's {path} on {rank} changed between block {index} and block {block.index}"
                    found.setdefault((rank, path), text)
    return [Seen(source="measured", text=text) for text in found.values()]


def general_findings(plan: PlanView, facts: Facts) -> list[Seen]:
    found = [Seen(source=known.row, text=known.text, contradicts=known.contradicts) for known in plan.findings]
    found += [Seen(source="plan", text=note) for note in [*plan.notes, *plan.arms[0].notes]]
    found += [
        Seen(source="measured", text=f"block {void.index} ({void.arm}) was void: {void.void}") for void in facts.void
    ]
    planned = len(plan.blocks)
    if planned and len(facts.blocks) < planned:
        text = f"{len(facts.blocks)} of {planned} planned blocks are recorded"
        found.append(Seen(source="measured", text=text))
    found += _page_cache_findings(facts.blocks)
    found += _production_findings(facts.blocks)
    for earlier, later in pairwise(facts.blocks):
        if earlier.ended and later.started and later.started < earlier.ended:
            text = f"blocks {earlier.index} and {later.index} overlap in time"
            found.append(Seen(source="measured", text=text))
    return found
