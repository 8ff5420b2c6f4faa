"""What makes a measurement count: the planned arms ran, complete, as planned, from one build and one harness."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

from k3deploy.facts import Block, Unit
from k3deploy.judge.evidence import Evidence
from k3deploy.judge.planned import PlannedArm, PlannedProcess
from k3deploy.judge.verdict import Check


def checks(evidence: Evidence) -> list[Check]:
    """Every check, over the blocks of the arm and of the baseline: a broken baseline spoils the arm too."""
    both = evidence.both
    return [
        _check("blocks", _missing_blocks(evidence)),
        _check("harness", _harness_problems(both)),
        _check("samples", _sample_problems(evidence, both)),
        _check("as planned", [problem for block in both for problem in _process_problems(evidence, block)]),
        _check("build", _build_problems(evidence)),
        _check(
            "memory known", [problem for block in both for problem in _memory_problems(block, evidence.planned(block))]
        ),
        _check("transport", _transport_problems(evidence, both)),
    ]


def _check(name: str, problems: Iterable[str]) -> Check:
    listed = list(dict.fromkeys(problems))
    return Check(name=name, passed=not listed, problems=listed)


def _missing_blocks(evidence: Evidence) -> list[str]:
    problems = []
    for block in evidence.both:
        fatal = "; ".join(f"{entry.meaning} ({entry.line})" for entry in block.observations.fatal[:2])
        if block.bench is None:
            why = block.error or fatal or "no result of the harness"
            problems.append(f"block {block.index} ({block.arm}) was not measured: {why}")
        elif block.bench.error:
            lead = f"block {block.index} ({block.arm}) was not measured to its end: {block.bench.error}"
            problems.append(lead + (f"; {fatal}" if fatal else ""))
    if not evidence.pairs and not problems:
        problems.append(f"no pair of a baseline block and a block of {evidence.arm.name} is complete")
    return problems


def _harness_problems(blocks: Sequence[Block]) -> list[str]:
    hashes = {block.bench.harness_sha256 or "unknown" for block in blocks if block.bench}
    if len(hashes) > 1 or "unknown" in hashes:
        return [f"the blocks were not measured by one known harness: {', '.join(sorted(h[:12] for h in hashes))}"]
    return []


def _sample_problems(evidence: Evidence, blocks: Sequence[Block]) -> list[str]:
    """A gate needs samples that count in every block; an unjudged cell may lack them."""
    wanted = {(name, gate.state) for gate in evidence.plan.gates.values() for name in gate.cells}
    problems = []
    for block in blocks:
        if block.bench is None or block.bench.error:
            continue  # said already
        for name, state in sorted(wanted):
            cell = block.cell(name, state)
            if cell is None:
                problems.append(f"block {block.index} ({block.arm}): {name} {state} was not measured")
            elif not cell.valid():
                reasons = "; ".join(dict.fromkeys(sample.why for sample in cell.samples)) or "no samples"
                problems.append(f"block {block.index} ({block.arm}): {name} {state} has no valid sample: {reasons}")
    return problems


def _process_problems(evidence: Evidence, block: Block) -> list[str]:
    problems = []
    for rank, planned in sorted(evidence.planned(block).processes.items()):
        record = block.ranks.get(rank)
        for kind, process in (("worker", planned.worker), ("head", planned.head)):
            if process is None:
                continue
            name = f"k3-candidate-{kind}@{block.slug}.service"
            unit = record.state.units.get(name) if record and record.state else None
            where = f"block {block.index} ({block.arm}), {rank}, {kind}"
            if unit is None:
                problems.append(f"{where}: no state of {name} was recorded")
                continue
            problems += [f"{where}: {problem}" for problem in _differences(process, unit)]
    return problems


def _differences(planned: PlannedProcess, unit: Unit) -> list[str]:
    """How a process as it runs differs from the plan. ``argv[0]`` is compared by its name alone: where a release lies
    is the installation's business, which file it is is checked by hash."""
    problems = []
    if unit.active and unit.active != "active":
        problems.append(f"the unit is {unit.active}, not active")
    if not unit.argv:
        return [*problems, "its command line was not recorded"]
    if PurePosixPath(unit.argv[0]).name != PurePosixPath(planned.argv[0]).name:
        problems.append(f"runs {unit.argv[0]}, planned was {planned.argv[0]}")
    if unit.argv[1:] != planned.argv[1:]:
        problems.append(_argv_difference(planned.argv[1:], unit.argv[1:]))
    for key, value in sorted(planned.environment.items()):
        if unit.environment.get(key) != value:
            shown = f"{key}={unit.environment[key]}" if key in unit.environment else f"no {key}"
            problems.append(f"environment has {shown}, planned was {key}={value}")
    return problems


def _argv_difference(planned: Sequence[str], actual: Sequence[str]) -> str:
    missing = " ".join(word for word in planned if word not in actual)
    extra = " ".join(word for word in actual if word not in planned)
    if not missing and not extra:
        return "the arguments are in another order or repeated otherwise than planned"
    parts = ([f"lacks {missing}"] if missing else []) + ([f"has {extra}"] if extra else [])
    return "the command line " + " and ".join(parts) + ", unlike the plan"


def _build_problems(evidence: Evidence) -> list[str]:
    problems = []
    for arm, blocks in ((evidence.baseline, evidence.baseline_blocks), (evidence.arm, evidence.blocks)):
        ids: dict[str, list[str]] = {}
        hashes: dict[str, dict[str, list[str]]] = {}
        for block in blocks:
            for rank, name, unit in block.units():
                if not name.endswith(f"@{block.slug}.service") or "-memory@" in name:
                    continue
                ids.setdefault(unit.build_id or "", []).append(rank)
                if unit.exe and unit.exe_sha256:
                    program = PurePosixPath(unit.exe).name
                    hashes.setdefault(program, {}).setdefault(unit.exe_sha256, []).append(rank)
        for build_id, ranks in sorted(ids.items()):
            if not build_id.startswith(arm.build_key):
                shown, where = build_id or "an unknown build", ", ".join(sorted(set(ranks)))
                problems.append(f"{arm.name} ran {shown} on {where}, planned was {arm.build_key}")
        if len(ids) > 1:
            problems.append(f"{arm.name} ran more than one build: {', '.join(sorted(ids))}")
        for program, by_hash in sorted(hashes.items()):
            if len(by_hash) > 1:
                shown = "; ".join(f"{digest[:12]} on {', '.join(sorted(set(r)))}" for digest, r in by_hash.items())
                problems.append(f"{arm.name}: {program} is not the same file on every rank: {shown}")
    return problems


def _memory_problems(block: Block, arm: PlannedArm) -> list[str]:
    problems = []
    for rank in sorted(arm.processes):
        record = block.ranks.get(rank)
        memory = record.memory if record else None
        if memory is None or memory.min_available_mib is None or not memory.samples:
            problems.append(f"block {block.index} ({block.arm}): the memory minimum of {rank} is not known")
    return problems


def _transport_problems(evidence: Evidence, blocks: Sequence[Block]) -> list[str]:
    if evidence.plan.transport.require == "tcp":
        return []
    return [
        f"block {block.index} ({block.arm}): the logs do not prove RDMA on every connection"
        for block in blocks
        if block.observations.rdma_activated is not True
    ]
