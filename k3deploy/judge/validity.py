"""What makes a measurement count: the planned arms ran, complete, as planned, from one build and one harness.

A block that fails one of its own checks is *void*: measured again, kept with its reasons, and never dropped for the
numbers in it, which no check looks at. What only several blocks together can show is checked over the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import PurePosixPath

from k3deploy.facts import Block, Unit, VoidBlock
from k3deploy.judge.evidence import Evidence
from k3deploy.judge.health import health_problems
from k3deploy.judge.planned import PlannedArm, PlannedProcess, PlanView
from k3deploy.judge.transport import transport_problems
from k3deploy.judge.verdict import Check
from k3deploy.log_lines import MARKERS

_ACTIVE_MARKERS = {f"{name}_active" for name in MARKERS}
BlockCheck = Callable[[PlanView, PlannedArm, Block], Sequence[str]]
ADJACENT_S = 1800.0  # so far apart may two blocks of a pair lie, beside the blocks that the plan puts between them


def checks(evidence: Evidence) -> list[Check]:
    """Every check, over the blocks of the arm and of the baseline: a broken baseline spoils the arm too."""
    found: dict[str, list[str]] = {name: [] for name in BLOCK_CHECKS}
    for block in evidence.both:
        for name, problems in block_problems(evidence.plan, evidence.planned(block), block).items():
            found[name] += problems
    if not evidence.pairs and not any(found.values()):
        measured, planned = len(evidence.both), len(evidence.plan.blocks)
        found["blocks"].append(
            f"no pair of a baseline block and a block of {evidence.arm.name} is complete: "
            f"{measured} of {planned} planned blocks are measured "
            "(k3deploy apply --resume continues a run that was cut short)"
        )
    if lost := _lost(evidence):
        found["blocks"].insert(0, f"block {lost.index} ({lost.arm}) does not count: {lost.void}")
    found["harness"] = _harness_problems(evidence.both)
    found["one build"] = _build_differences(evidence)
    found["one transport"] = _transport_differences(evidence)
    found["adjacent"] = list(stale_blocks(evidence.both, len(evidence.plan.arms)).values())
    return [_check(name, problems) for name, problems in found.items()]


def block_problems(plan: PlanView, arm: PlannedArm, block: Block) -> dict[str, Sequence[str]]:
    """What makes ``block`` of ``arm`` void, by check; empty for a block that counts."""
    found = {name: check(plan, arm, block) for name, check in BLOCK_CHECKS.items()}
    return {name: problems for name, problems in found.items() if problems}


def _lost(evidence: Evidence) -> VoidBlock | None:
    """The block that did not count whose reason a reader wants first: of an arm that is given up, or without a pair."""
    if evidence.given_up is not None or evidence.pairs:
        return evidence.given_up
    return max(evidence.void, key=lambda void: void.ended or "", default=None)


def stale_blocks(blocks: Sequence[Block], arms: int) -> dict[int, str]:
    """Blocks whose pair is not adjacent any more, by index: the other half was measured much later."""
    found = {}
    rounds: dict[int, list[Block]] = {}
    for block in blocks:
        rounds.setdefault(block.pair, []).append(block)
    for pair, members in rounds.items():
        newest = max(_moment(block.started) for block in members)
        for block in members:
            if block.ended is None:
                continue
            length = _moment(block.ended) - _moment(block.started)
            apart = newest - _moment(block.ended)
            if apart > ADJACENT_S + 2 * arms * length:
                hours = apart / 3600
                found[block.index] = f"block {block.index} ({block.arm}) ended {hours:.1f} h before pair {pair} went on"
    return found


def _check(name: str, problems: Iterable[str]) -> Check:
    listed = list(dict.fromkeys(problems))
    return Check(name=name, passed=not listed, problems=listed)


def _measured_problems(_plan: PlanView, _arm: PlannedArm, block: Block) -> list[str]:
    fatal = "; ".join(f"{entry.meaning} ({entry.line})" for entry in block.observations.fatal[:2])
    if block.bench is None:
        cut = "the run was stopped or killed in it" if block.ended is None else "no result of the harness"
        why = block.error or fatal or cut
        return [f"block {block.index} ({block.arm}) was not measured: {why}"]
    if block.bench.error:
        lead = f"block {block.index} ({block.arm}) was not measured to its end: {block.bench.error}"
        return [lead + (f"; {fatal}" if fatal else "")]
    return []


def _harness_problems(blocks: Sequence[Block]) -> list[str]:
    hashes = {block.bench.harness_sha256 or "unknown" for block in blocks if block.bench}
    if len(hashes) > 1 or "unknown" in hashes:
        return [f"the blocks were not measured by one known harness: {', '.join(sorted(h[:12] for h in hashes))}"]
    return []


def _sample_problems(plan: PlanView, arm: PlannedArm, block: Block) -> list[str]:
    """Every judged cell needs a sample that counts: those of the gates, and all cold and warm ones."""
    if block.bench is None or block.bench.error:
        return []  # said already
    wanted = {(name, gate.state) for gate in plan.gates_of(arm).values() for name in gate.cells}
    wanted |= {(cell.cell, cell.state) for cell in block.bench.cells if cell.state != "cached"}
    problems = []
    for name, state in sorted(wanted):
        cell = block.cell(name, state)
        if cell is None:
            problems.append(f"block {block.index} ({block.arm}): {name} {state} was not measured")
        elif misplaced := cell.misplaced():
            counts = f"prompt_n {misplaced[0].prompt_n}, cache_n {misplaced[0].cache_n}"
            problems.append(f"block {block.index} ({block.arm}): {name} {state} holds a sample with {counts}")
        elif not cell.valid():
            reasons = "; ".join(dict.fromkeys(sample.why for sample in cell.samples)) or "no samples"
            problems.append(f"block {block.index} ({block.arm}): {name} {state} has no valid sample: {reasons}")
    return problems


def _foreign_problems(_plan: PlanView, _arm: PlannedArm, block: Block) -> list[str]:
    """Another client's request takes time from ours, also between two samples."""
    if block.bench is None:
        return []
    unwatched = ["nothing showed whether others sent requests"] if block.bench.foreign_check == "none" else []
    return [f"block {block.index} ({block.arm}): {text}" for text in [*block.bench.foreign, *unwatched]]


def _process_problems(_plan: PlanView, arm: PlannedArm, block: Block) -> list[str]:
    problems = []
    for rank, planned in sorted(arm.processes.items()):
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
            if not unit.exe_sha256:
                problems.append(f"{where}: the hash of its program was not recorded")
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


def _build_problems(_plan: PlanView, arm: PlannedArm, block: Block) -> list[str]:
    """Every rank runs the planned build, and the same file of it."""
    problems = []
    builds, hashes = _builds_of(block)
    for build_id, ranks in sorted(builds.items()):
        if not build_id.startswith(arm.build_key):
            shown, where = build_id or "an unknown build", ", ".join(ranks)
            problems.append(f"{arm.name} ran {shown} on {where}, planned was {arm.build_key}")
    for program, by_hash in sorted(hashes.items()):
        if len(by_hash) > 1:
            shown = "; ".join(f"{digest[:12]} on {', '.join(ranks)}" for digest, ranks in by_hash.items())
            problems.append(f"{arm.name}: {program} is not the same file on every rank: {shown}")
    return problems


def _build_differences(evidence: Evidence) -> list[str]:
    """One build and one file of each program, over all blocks of an arm."""
    problems = []
    for arm, blocks in ((evidence.baseline, evidence.baseline_blocks), (evidence.arm, evidence.blocks)):
        ids: set[str] = set()
        files: dict[str, set[str]] = {}
        for block in blocks:
            builds, hashes = _builds_of(block)
            ids |= builds.keys()
            for program, by_hash in hashes.items():
                files.setdefault(program, set()).update(by_hash)
        if len(ids) > 1:
            problems.append(f"{arm.name} ran more than one build: {', '.join(sorted(ids))}")
        for program, found in sorted(files.items()):
            if len(found) > 1:
                shown = ", ".join(sorted(digest[:12] for digest in found))
                problems.append(f"{arm.name}: {program} is not the same file in every block: {shown}")
    return problems


def _builds_of(block: Block) -> tuple[dict[str, list[str]], dict[str, dict[str, list[str]]]]:
    """(build id -> ranks, program -> sha256 -> ranks) of the arm's own units."""
    ids: dict[str, list[str]] = {}
    hashes: dict[str, dict[str, list[str]]] = {}
    for rank, name, unit in block.units():
        if not name.endswith(f"@{block.slug}.service") or "-memory@" in name:
            continue
        ids.setdefault(unit.build_id or "", []).append(rank)
        if unit.exe and unit.exe_sha256:
            program = PurePosixPath(unit.exe).name
            hashes.setdefault(program, {}).setdefault(unit.exe_sha256, []).append(rank)
    return ids, hashes


def _transport_differences(evidence: Evidence) -> list[str]:
    """Arms that are to have the same transport had it: one on RDMA against one on TCP compares two links."""
    arms = (evidence.baseline, evidence.arm)
    if len({arm.transport.rdma if arm.transport else "auto" for arm in arms}) > 1:
        return []
    found: dict[str, list[str]] = {}
    for block in evidence.both:
        if block.transport and block.transport.connections:
            found.setdefault(block.transport.transport, []).append(f"{block.index} ({block.arm})")
    if len(found) < 2:
        return []
    return ["the blocks had different transports: " + "; ".join(f"{of} in {', '.join(b)}" for of, b in found.items())]


def _kernel_problems(plan: PlanView, arm: PlannedArm, block: Block) -> list[str]:
    """Where a row claims a kernel (a gate on its marker), every rank that holds layers says that it ran."""
    claims = {str(gate.observation) for gate in plan.gates_of(arm).values()} & _ACTIVE_MARKERS
    if arm.name == plan.arms[0].name or block.bench is None:
        return []
    observed, lead = block.observations, f"block {block.index} ({block.arm})"
    holders = {rank for rank, found in block.allocation.items() if found.allocated_mib.get("model")}
    problems = []
    for active in sorted(claims - set(observed.truncated)):
        kernel = active.removesuffix("_active")
        for rank in sorted(holders | observed.rank_markers.keys()):
            said = observed.rank_markers.get(rank, {})
            fallen = said.get(f"{kernel}_fallback", 0)
            if said.get(active) or not (fallen or rank in holders):
                continue
            how = f"fell back {fallen} times and never ran" if fallen else "never ran, and its log does not say why"
            problems.append(f"{lead}: {kernel} {how} on {rank}")
    return problems


def _memory_problems(_plan: PlanView, arm: PlannedArm, block: Block) -> list[str]:
    problems = []
    for rank in sorted(arm.processes):
        record = block.ranks.get(rank)
        memory = record.memory if record else None
        if memory is None or memory.min_available_mib is None or not memory.samples:
            problems.append(f"block {block.index} ({block.arm}): the memory minimum of {rank} is not known")
    return problems


def below_floor(arm: PlannedArm, block: Block) -> list[str]:
    """The ranks on which ``block`` of ``arm`` crossed the memory floor, a sentence each."""
    problems = []
    for rank, planned in sorted(arm.processes.items()):
        memory = block.ranks[rank].memory if rank in block.ranks else None
        lowest = memory.min_available_mib if memory else None
        if lowest is not None and planned.guard_mib and lowest < planned.guard_mib:
            text = f"{rank} had {lowest} MiB available at its lowest, the floor is {planned.guard_mib} MiB"
            problems.append(f"block {block.index} ({block.arm}): {text}")
    return problems


def _floor_problems(plan: PlanView, arm: PlannedArm, block: Block) -> list[str]:
    """The baseline below the floor spoils its block; a candidate there is harm, which a gate says."""
    return below_floor(arm, block) if arm.name == plan.arms[0].name else []


def _health_problems(_plan: PlanView, _arm: PlannedArm, block: Block) -> list[str]:
    return health_problems(block)


def _moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


# A check a line, in the order in which a reader wants to be told.
BLOCK_CHECKS: Mapping[str, BlockCheck] = {
    "blocks": _measured_problems,
    "alone": _foreign_problems,
    "samples": _sample_problems,
    "as planned": _process_problems,
    "build": _build_problems,
    "kernel": _kernel_problems,
    "memory known": _memory_problems,
    "floor": _floor_problems,
    "transport": transport_problems,
    "health": _health_problems,
}
