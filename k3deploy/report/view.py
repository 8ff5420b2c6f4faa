"""What a report shows, as plain data: pure functions of plan, facts and verdict, without any mark-up."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3deploy.facts import Block, Facts, Unit
from k3deploy.judge import ArmVerdict, Comparison, Verdict
from k3deploy.report import words


@dataclass(frozen=True, slots=True)
class BlockRow:
    """One server start in the order of time."""

    index: int
    pair: int
    arm: str
    started: str
    load: str
    page_cache: str
    samples: str
    graphs_reused: str
    pipeline: str
    problem: str


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """One process as it ran, in one block."""

    block: int
    arm: str
    rank: str
    unit: str
    build: str
    exe_sha256: str
    argv: list[str]
    environment: list[str]
    pid: str


@dataclass(frozen=True, slots=True)
class DifferenceRow:
    """One setting that the arm has otherwise than the baseline."""

    key: str
    baseline: str
    arm: str


@dataclass(frozen=True, slots=True)
class InvalidSample:
    """A request that does not count."""

    block: int
    arm: str
    cell: str
    why: str


@dataclass(frozen=True, slots=True)
class View:
    """Everything that page and Markdown show beside the verdict itself."""

    verdict: Verdict
    rows: list[Mapping[str, Any]]
    cluster: str
    states: list[str]
    differences: dict[str, list[DifferenceRow]]
    blocks: list[BlockRow]
    invalid: list[InvalidSample]
    processes: list[ProcessRow]
    provenance: list[tuple[str, str]]
    reproduce: list[str]
    findings: list[tuple[str, str, bool]] = field(default_factory=list)


def make_view(run_dir: Path, plan: Mapping[str, Any], facts: Facts, verdict: Verdict) -> View:
    """Collect what the reports show. ``run.json`` of the run directory is used if it is there."""
    about = _about(run_dir)
    return View(
        verdict=verdict,
        rows=list(plan.get("rows") or []),
        cluster=str(plan.get("cluster") or ""),
        states=[state for state in words.STATE_WORDS if any(_of_state(arm, state) for arm in verdict.arms)],
        differences=_plan_differences(plan),
        blocks=[_block_row(block) for block in facts.blocks],
        invalid=[
            InvalidSample(block.index, block.arm, f"{cell.cell} {cell.state}", sample.why)
            for block in facts.blocks
            for cell in (block.bench.cells if block.bench else [])
            for sample in cell.samples
            if not sample.valid
        ],
        processes=_processes(facts.blocks),
        provenance=_provenance(plan, facts, about),
        reproduce=_reproduce(run_dir, plan, about),
        findings=_findings(verdict),
    )


def _of_state(arm: ArmVerdict, state: str) -> list[Comparison]:
    return [cell for cell in arm.cells if cell.state == state]


def _about(run_dir: Path) -> dict[str, Any]:
    try:
        value = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _plan_differences(plan: Mapping[str, Any]) -> dict[str, list[DifferenceRow]]:
    return {
        str(arm.get("name")): [
            DifferenceRow(str(entry.get("key")), words.plain(entry.get("baseline")), words.plain(entry.get("arm")))
            for entry in arm.get("differences") or []
        ]
        for arm in (plan.get("arms") or [])[1:]
    }


def _block_row(block: Block) -> BlockRow:
    samples = [sample for cell in (block.bench.cells if block.bench else []) for sample in cell.samples]
    valid = sum(sample.valid for sample in samples)
    observed = block.observations
    pipeline = words.plain(observed.pipeline_parallel)
    if observed.n_copies is not None:
        pipeline += f", {observed.n_copies} copies"
    return BlockRow(
        index=block.index,
        pair=block.pair,
        arm=block.arm,
        started=block.started,
        load=words.MISSING if block.load_seconds is None else f"{block.load_seconds:.1f} s",
        page_cache=words.share(block.page_cached),
        samples=f"{valid} of {len(samples)} valid",
        graphs_reused=words.plain(observed.graphs_reused),
        pipeline=pipeline,
        problem=block.error or (block.bench.error if block.bench else None) or "",
    )


def _processes(blocks: Sequence[Block]) -> list[ProcessRow]:
    """The processes of each arm's first block; of later blocks only those that ran otherwise."""
    rows: list[ProcessRow] = []
    shown: set[tuple[Any, ...]] = set()
    for block in blocks:
        for rank, name, unit in block.units():
            if not name.endswith(f"@{block.slug}.service"):
                continue
            key = (block.arm, rank, name, unit.build_id, unit.exe_sha256, *unit.argv, *_environment(unit))
            if key not in shown:
                shown.add(key)
                rows.append(
                    ProcessRow(
                        block=block.index,
                        arm=block.arm,
                        rank=rank,
                        unit=name,
                        build=unit.build_id or words.MISSING,
                        exe_sha256=unit.exe_sha256 or words.MISSING,
                        argv=list(unit.argv),
                        environment=_environment(unit),
                        pid=words.plain(unit.pid),
                    )
                )
    return rows


def _environment(unit: Unit) -> list[str]:
    return [f"{key}={value}" for key, value in sorted(unit.environment.items())]


# What goes between ranks goes over RPC's own transport: NCCL would join the GPUs of one process only.
_NCCL = {True: "found at build, llama.cpp's RPC path does not use it", False: "not found at build"}


def _provenance(plan: Mapping[str, Any], facts: Facts, about: Mapping[str, Any]) -> list[tuple[str, str]]:
    model = plan.get("model") or {}
    rows = [
        ("run", facts.run_id),
        ("digest of plan and tool", str(about.get("digest", words.MISSING))),
        ("owner", str(about.get("owner", words.MISSING))),
        ("model", f"{model.get('name', words.MISSING)} ({model.get('path', words.MISSING)})"),
        ("model sha256", str(model.get("sha256") or "not verified")),
    ]
    rows += [(f"tool {key}", words.plain(value)) for key, value in sorted((about.get("tool") or {}).items())]
    for label, values in (
        ("harness sha256", [block.bench.harness_sha256 for block in facts.blocks if block.bench]),
        ("server build", [block.bench.props.get("build_info") for block in facts.blocks if block.bench]),
        ("foreign requests seen by", [block.bench.foreign_check for block in facts.blocks if block.bench]),
    ):
        rows.append((label, ", ".join(dict.fromkeys(words.plain(value) for value in values)) or words.MISSING))
    rows += _nccl(facts)
    systems: dict[str, list[str]] = {}
    for block in facts.blocks:
        for rank, record in sorted(block.ranks.items()):
            if record.state is not None:
                state = record.state
                text = ", ".join(part for part in (state.os, state.kernel, state.arch) if part)
                if text and rank not in systems.setdefault(text, []):
                    systems[text].append(rank)
    rows += [(", ".join(ranks), text) for text, ranks in systems.items()]
    return rows


def _nccl(facts: Facts) -> list[tuple[str, str]]:
    """Whether the builds that ran were made with NCCL, in one line; none where no manifest says."""
    arms: dict[str, list[str]] = {}
    for block in facts.blocks:
        for record in block.ranks.values():
            found = record.state.nccl.get(block.slug) if record.state else None
            if found is not None and block.arm not in arms.setdefault(_NCCL[found], []):
                arms[_NCCL[found]].append(block.arm)
    if len(arms) > 1:
        return [("NCCL", "; ".join(f"{text} ({', '.join(names)})" for text, names in arms.items()))]
    return [("NCCL", text) for text in arms]


def _reproduce(run_dir: Path, plan: Mapping[str, Any], about: Mapping[str, Any]) -> list[str]:
    """The two ways to have the same run again: through the tool, and by Ansible alone with the run's own layer."""
    inventory = str(plan.get("inventory") or about.get("inventory") or "INVENTORY")
    options = about.get("options") or {}
    given = {key: value for key, value in options.items() if value not in (None, "", [])}
    extra = [word for key, value in given.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    return [
        shlex.join(["k3deploy", "apply", str(plan.get("candidate")), "--inventory", inventory, *extra]),
        shlex.join(["ansible-playbook", "-i", inventory, "-i", f"{run_dir}/inventory", "playbooks/apply.yml"]),
    ]


def _findings(verdict: Verdict) -> list[tuple[str, str, bool]]:
    """(source, text, contradicts the hypothesis): what was measured first, then what was known before."""
    found: dict[tuple[str, str], bool] = {}
    for arm in verdict.arms:
        lead = f"{arm.arm}, " if len(verdict.arms) > 1 else ""
        for seen in arm.findings:
            found.setdefault((f"{lead}{seen.source}", seen.text), seen.contradicts)
    for seen in verdict.findings:
        found.setdefault((seen.source, seen.text), seen.contradicts)
    return [(source, text, contradicts) for (source, text), contradicts in found.items()]
