"""From facts to a verdict: a pure function of the plan and of what was measured.

``judge(plan, facts)`` gives each arm, and the candidate as a whole, one of four outcomes:

INVALID       a validity check failed: what was measured is not what was planned, so no number counts.
REJECT        harm: clearly slower, a rank below its memory floor, output that changed where it must not.
ACCEPT        every gate passed with enough pairs of server starts.
INCONCLUSIVE  everything else, with what it would take to know.

A ratio is always "how much better": above 1 the arm is faster (or answers sooner) than the baseline of its own pair.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from k3deploy import stats, yamlfile
from k3deploy.errors import InputError, Problem
from k3deploy.facts import Block, Cell, Facts, Sample, State, Unit

Outcome = Literal["ACCEPT", "REJECT", "INCONCLUSIVE", "INVALID"]
Metric = Literal["speed", "ttft"]

SUPERIOR = 1.02  # a gain below 2 % is not worth a change
NOT_INFERIOR = 0.99


# --- the plan, as far as a verdict needs it --------------------------------------------------------------------------


class _View(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Gate(_View):
    cells: list[str] = Field(default_factory=list)
    state: State = "cold"
    metric: Metric = "speed"
    suite: str | None = None
    observation: str | None = None
    require: Literal["faster", "not_slower", "identical", "at_most", "at_least", "equals", "not_higher"]
    limit: float | bool | None = None
    why: str = ""


class _Process(_View):
    argv: list[str]
    environment: dict[str, str] = Field(default_factory=dict)
    listen: str | None = None


class _RankProcesses(_View):
    worker: _Process | None = None
    head: _Process | None = None
    guard_mib: int | None = None


class _Arm(_View):
    name: str
    slug: str
    build_key: str
    processes: dict[str, _RankProcesses] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)


class _Known(_View):
    row: str = ""
    text: str
    contradicts: bool = False
    seen: str = ""


class _PlannedBlock(_View):
    index: int
    pair: int
    arm: str


class _Transport(_View):
    require: Literal["tcp", "rdma"] = "tcp"


class _Plan(_View):
    candidate: str
    arms: list[_Arm] = Field(min_length=2)
    gates: dict[str, _Gate]
    findings: list[_Known] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    blocks: list[_PlannedBlock] = Field(default_factory=list)
    transport: _Transport = Field(default_factory=_Transport)


# --- the verdict -----------------------------------------------------------------------------------------------------


class _Said(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Check(_Said):
    """One validity check of one arm: passed or not, and everything that speaks against it."""

    name: str
    passed: bool
    problems: list[str] = Field(default_factory=list)


class Comparison(_Said):
    """One cell of the arm against the baseline's: means over the blocks of complete pairs, and their ratio.

    unit: ``t/s`` (more is better) or ``ms`` (less is better). low, high: the 95 % interval of the ratio.
    """

    cell: str
    state: State
    metric: Metric
    unit: Literal["t/s", "ms"]
    baseline: float | None
    arm: float | None
    ratio: float | None
    low: float | None = None
    high: float | None = None
    pairs: int = 0
    spread: float | None = None
    p_value: float | None = None
    pairs_needed: int | None = None
    baseline_samples: int = 0
    arm_samples: int = 0
    invalid_samples: int = 0


class GateResult(_Said):
    """A gate with its numbers. ``implied`` gates hold for every row: the memory floor, warm speed, unchanged text."""

    name: str
    require: str
    outcome: Literal["pass", "fail", "open"]
    reason: str
    implied: bool = False
    comparisons: list[Comparison] = Field(default_factory=list)
    limit: float | bool | None = None
    observed: float | bool | None = None


class RankMemory(_Said):
    """The lowest MemAvailable of one rank over all blocks of the arm, against its floor; MiB."""

    rank: str
    min_available_mib: int | None
    load_min_mib: int | None
    run_min_mib: int | None
    baseline_min_mib: int | None
    guard_mib: int | None


class Seen(_Said):
    """Something a reader must know beside the numbers. ``contradicts``: it speaks against the row's hypothesis."""

    source: str
    text: str
    contradicts: bool = False


class ArmVerdict(_Said):
    """One arm of the candidate."""

    arm: str
    slug: str
    outcome: Outcome
    reasons: list[str]
    pairs: int
    checks: list[Check]
    gates: list[GateResult]
    cells: list[Comparison]
    memory: list[RankMemory]
    findings: list[Seen]


class Verdict(_Said):
    """The candidate's verdict: that of its best arm."""

    candidate: str
    run_id: str
    outcome: Outcome
    reason: str
    best_arm: str | None
    pairs: int
    arms: list[ArmVerdict]
    findings: list[Seen]


# --- judging ---------------------------------------------------------------------------------------------------------


def judge(plan: Mapping[str, Any], facts: Facts) -> Verdict:
    """Judge every arm of ``plan`` (the content of ``plan.json``) by ``facts``.

    Raises ``InputError`` when the plan lacks what a verdict needs.
    """
    try:
        view = _Plan.model_validate(dict(plan))
    except ValidationError as error:
        problems = yamlfile.problems(_Plan, error, lambda _keys, message: Problem("plan.json", 0, message))
        raise InputError(problems) from None
    arms = [_ArmJudge(view, arm, facts).verdict() for arm in view.arms[1:]]
    outcome, best = _overall(arms)
    return Verdict(
        candidate=view.candidate,
        run_id=facts.run_id,
        outcome=outcome,
        reason=_overall_reason(outcome, best, arms),
        best_arm=best.arm if best is not None and outcome == "ACCEPT" else None,
        pairs=min(arm.pairs for arm in arms),
        arms=arms,
        findings=_general_findings(view, facts),
    )


def _overall(arms: Sequence[ArmVerdict]) -> tuple[Outcome, ArmVerdict | None]:
    """One arm that passes is enough; a candidate is rejected only when every arm that counts is."""
    for outcome in ("ACCEPT", "INCONCLUSIVE"):
        chosen = [arm for arm in arms if arm.outcome == outcome]
        if chosen:
            return chosen[0].outcome, max(chosen, key=_gain)
    if any(arm.outcome == "REJECT" for arm in arms):
        if all(arm.outcome == "REJECT" for arm in arms):
            return "REJECT", arms[0]
        return "INCONCLUSIVE", None
    return "INVALID", arms[0]


def _gain(arm: ArmVerdict) -> float:
    ratios = [
        comparison.ratio
        for gate in arm.gates
        if gate.require == "faster"
        for comparison in gate.comparisons
        if comparison.ratio is not None
    ]
    return min(ratios, default=0.0)


def _overall_reason(outcome: Outcome, best: ArmVerdict | None, arms: Sequence[ArmVerdict]) -> str:
    if best is None:
        return "; ".join(f"{arm.arm} {arm.outcome}: {arm.reasons[0]}" for arm in arms)
    if outcome in ("REJECT", "INVALID") and len(arms) > 1:
        return "; ".join(f"{arm.arm}: {arm.reasons[0]}" for arm in arms)
    same = all(arm.reasons[0] == best.reasons[0] for arm in arms)
    lead = "" if same else f"{best.arm}: "
    return lead + best.reasons[0]


class _ArmJudge:
    """One arm against the baseline."""

    def __init__(self, plan: _Plan, arm: _Arm, facts: Facts) -> None:
        self.plan = plan
        self.arm = arm
        self.baseline = plan.arms[0]
        self.blocks = facts.of(arm.name)
        self.baseline_blocks = facts.of(self.baseline.name)
        self.pairs = _complete_pairs(self.blocks, self.baseline_blocks)

    def verdict(self) -> ArmVerdict:
        checks = self._checks()
        gates = [self._gate(name, gate) for name, gate in self.plan.gates.items()]
        gates += [*self._warm_gate(), *self._memory_gate(), *self._prefix_gate()]
        outcome, reasons = self._outcome(checks, gates)
        return ArmVerdict(
            arm=self.arm.name,
            slug=self.arm.slug,
            outcome=outcome,
            reasons=reasons,
            pairs=len(self.pairs),
            checks=checks,
            gates=gates,
            cells=self._all_cells(),
            memory=self._memory(),
            findings=self._findings(),
        )

    def _outcome(self, checks: Sequence[Check], gates: Sequence[GateResult]) -> tuple[Outcome, list[str]]:
        # A rank below its floor is harm whatever else went wrong: it is why the measurement may have ended early.
        floor = [gate for gate in gates if gate.name == MEMORY_GATE and gate.outcome == "fail"]
        failed_checks = [check for check in checks if not check.passed]
        if failed_checks and not floor:
            return "INVALID", [f"{check.name}: {problem}" for check in failed_checks for problem in check.problems]
        failed = floor or [gate for gate in gates if gate.outcome == "fail"]
        if failed:
            return "REJECT", [f"{gate.name}: {gate.reason}" for gate in failed]
        still_open = [gate for gate in gates if gate.outcome == "open"]
        if not still_open:
            return "ACCEPT", [f"{gate.name}: {gate.reason}" for gate in gates]
        return "INCONCLUSIVE", [
            self._what_it_takes(still_open),
            *(f"{gate.name}: {gate.reason}" for gate in still_open),
        ]

    def _what_it_takes(self, still_open: Sequence[GateResult]) -> str:
        """Why nothing can be said yet, and how many pairs would change that."""
        speeds = [comparison for gate in still_open for comparison in gate.comparisons]
        if not speeds:
            return f"not measured: {', '.join(gate.name for gate in still_open)}"
        known = [comparison.pairs_needed for comparison in speeds]
        if len(self.pairs) == 1:
            return (
                "one server start per arm says nothing about restart spread; "
                f"it takes at least {stats.MIN_PAIRS} pairs, this was 1"
            )
        if any(number is None for number in known):
            return f"{len(self.pairs)} pairs: at this difference and this spread no affordable number of pairs decides"
        needed = max(number for number in known if number is not None)
        return f"{len(self.pairs)} pairs are too few: at the spread seen it takes about {needed}"

    # --- validity ---

    def _checks(self) -> list[Check]:
        both = [*self.baseline_blocks, *self.blocks]
        return [
            _check("blocks", self._missing_blocks()),
            _check("harness", _harness_problems(both)),
            _check("samples", self._sample_problems(both)),
            _check("as planned", [problem for block in both for problem in self._process_problems(block)]),
            _check("build", self._build_problems()),
            _check("memory known", [problem for block in both for problem in _memory_problems(block, self._of(block))]),
            _check("transport", self._transport_problems(both)),
        ]

    def _of(self, block: Block) -> _Arm:
        return self.baseline if block.arm == self.baseline.name else self.arm

    def _missing_blocks(self) -> list[str]:
        problems = []
        for block in [*self.baseline_blocks, *self.blocks]:
            fatal = "; ".join(f"{entry.meaning} ({entry.line})" for entry in block.observations.fatal[:2])
            if block.bench is None:
                why = block.error or fatal or "no result of the harness"
                problems.append(f"block {block.index} ({block.arm}) was not measured: {why}")
            elif block.bench.error:
                lead = f"block {block.index} ({block.arm}) was not measured to its end: {block.bench.error}"
                problems.append(lead + (f"; {fatal}" if fatal else ""))
        if not self.pairs and not problems:
            problems.append(f"no pair of a baseline block and a block of {self.arm.name} is complete")
        return problems

    def _sample_problems(self, blocks: Sequence[Block]) -> list[str]:
        """A gate needs samples that count in every block; an unjudged cell may lack them."""
        wanted = {(name, gate.state) for gate in self.plan.gates.values() for name in gate.cells}
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

    def _process_problems(self, block: Block) -> list[str]:
        problems = []
        for rank, planned in sorted(self._of(block).processes.items()):
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

    def _build_problems(self) -> list[str]:
        problems = []
        for arm, blocks in ((self.baseline, self.baseline_blocks), (self.arm, self.blocks)):
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

    def _transport_problems(self, blocks: Sequence[Block]) -> list[str]:
        if self.plan.transport.require == "tcp":
            return []
        return [
            f"block {block.index} ({block.arm}): the logs do not prove RDMA on every connection"
            for block in blocks
            if block.observations.rdma_activated is not True
        ]

    # --- gates ---

    def _gate(self, name: str, gate: _Gate) -> GateResult:
        if gate.cells:
            return self._speed_gate(name, gate)
        if gate.suite:
            return self._identity_gate(name, gate)
        return self._observation_gate(name, gate)

    def _speed_gate(self, name: str, gate: _Gate, *, implied: bool = False) -> GateResult:
        threshold = SUPERIOR if gate.require == "faster" else NOT_INFERIOR
        comparisons = [self._compare(cell, gate.state, gate.metric, threshold) for cell in gate.cells]
        judged = [(comparison, *self._judge_speed(comparison, gate.require)) for comparison in comparisons]
        outcomes = [outcome for _, outcome, _ in judged]
        outcome: Literal["pass", "fail", "open"] = (
            "fail" if "fail" in outcomes else "open" if "open" in outcomes or not outcomes else "pass"
        )
        telling = [text for _, result, text in judged if result == outcome] or ["no cell to judge"]
        return GateResult(
            name=name,
            require=gate.require,
            outcome=outcome,
            reason="; ".join(telling),
            implied=implied,
            comparisons=comparisons,
        )

    def _judge_speed(self, found: Comparison, require: str) -> tuple[Literal["pass", "fail", "open"], str]:
        what = f"{found.cell} {found.state}" + (" time to first token" if found.metric == "ttft" else "")
        if found.ratio is None:
            return "open", f"{what} was not measured in both arms"
        change = f"{what} {_percent(found.ratio)}"
        if found.low is None or found.high is None:
            # However large: the spread between two starts of one arm is not known from one start.
            return "open", f"{change} in one pair"
        interval = f"{change} (95 % interval {_percent(found.low)} to {_percent(found.high)}, {found.pairs} pairs)"
        if found.high < NOT_INFERIOR:
            return "fail", f"{interval}: slower"
        if found.pairs < stats.MIN_PAIRS:
            return "open", interval
        if require == "faster":
            if found.low > SUPERIOR:
                return "pass", interval
            if found.high < SUPERIOR:
                return "fail", f"{interval}: no gain of {_percent(SUPERIOR)} is left to hope for"
            return "open", interval
        return ("pass", interval) if found.low > NOT_INFERIOR else ("open", interval)

    def _identity_gate(self, name: str, gate: _Gate) -> GateResult:
        """Greedy output on equal prompts. What was not run as a suite is judged by the texts of the cells."""
        differing, compared, unstable = self._texts()
        if differing and not unstable:
            text = f"greedy output differs in {len(differing)} of {compared} texts, first in {differing[0]}"
            return GateResult(name=name, require=gate.require, outcome="fail", reason=text, observed=False)
        if unstable:
            text = f"the baseline's own output differs between its starts ({unstable[0]}): identity cannot be judged"
        else:
            text = (
                f"the suite {gate.suite} was not run; the {compared} texts of the measured cells are identical"
                if compared
                else f"the suite {gate.suite} was not run, and no text could be compared"
            )
        return GateResult(name=name, require=gate.require, outcome="open", reason=text)

    def _texts(self) -> tuple[list[str], int, list[str]]:
        """(texts that differ between arm and baseline, texts compared, texts that differ within the baseline)."""
        before, after = _texts_of(self.baseline_blocks), _texts_of(self.blocks)
        common = sorted(before.keys() & after.keys())
        unstable = [key for key in common if len(before[key]) > 1]
        differing = [key for key in common if before[key] != after[key]]
        return [_text_name(key) for key in differing], len(common), [_text_name(key) for key in unstable]

    def _observation_gate(self, name: str, gate: _Gate) -> GateResult:
        key = str(gate.observation)
        observed = _observed(self.blocks, key)
        if not observed:
            text = f"nothing in the logs and probes speaks of {key}"
            return GateResult(name=name, require=gate.require, outcome="open", reason=text, limit=gate.limit)
        why = f" ({gate.why})" if gate.why else ""
        limit = gate.limit
        if gate.require == "equals":
            worst = next((value for value in observed if value != limit), observed[0])
            passed, wanted = worst == limit, f"must be {_shown(limit)}"
        elif gate.require == "at_least":
            worst = min(observed)
            passed, wanted = worst >= float(limit or 0), f"must be at least {_shown(limit)}"
        elif gate.require == "at_most":
            worst = max(observed)
            passed, wanted = worst <= float(limit or 0), f"must be at most {_shown(limit)}"
        else:
            baseline = _observed(self.baseline_blocks, key)
            if not baseline:
                text = f"{key} of the baseline is not known"
                return GateResult(name=name, require=gate.require, outcome="open", reason=text)
            worst, limit = max(observed), max(baseline)
            passed, wanted = worst <= limit, f"must not be above the baseline's {_shown(limit)}"
        return GateResult(
            name=name,
            require=gate.require,
            outcome="pass" if passed else "fail",
            reason=f"{key} is {_shown(worst)}, {wanted}" + ("" if passed else why),
            limit=limit,
            observed=worst,
        )

    def _warm_gate(self) -> list[GateResult]:
        """Nobody may pay for a faster cold prompt with slower warm ones, whatever the row judges."""
        judged = {cell for gate in self.plan.gates.values() if gate.state == "warm" for cell in gate.cells}
        warm = [name for name, state in _cell_names(self.blocks) if state == "warm" and name not in judged]
        if not warm:
            return []
        gate = _Gate(cells=warm, state="warm", require="not_slower")
        return [self._speed_gate("warm", gate, implied=True)]

    def _memory_gate(self) -> list[GateResult]:
        known = [rank for rank in self._memory() if rank.min_available_mib is not None and rank.guard_mib]
        if not known:
            return []
        tightest = min(known, key=lambda rank: (rank.min_available_mib or 0) - (rank.guard_mib or 0))
        available, guard = tightest.min_available_mib or 0, tightest.guard_mib or 0
        text = f"{tightest.rank} had {available} MiB available at its lowest, the floor is {guard} MiB"
        return [
            GateResult(
                name=MEMORY_GATE,
                require="at_least",
                outcome="fail" if available < guard else "pass",
                reason=text,
                implied=True,
                limit=guard,
                observed=available,
            )
        ]

    def _prefix_gate(self) -> list[GateResult]:
        """Reuse of a moved prefix that changes the text is harm, if the baseline does not do the same."""
        own = _observed(self.blocks, "prefix_reuse_identical")
        if not own or False in _observed(self.baseline_blocks, "prefix_reuse_identical"):
            return []
        identical = all(own)
        return [
            GateResult(
                name="prefix_reuse_text",
                require="identical",
                outcome="pass" if identical else "fail",
                reason=(
                    "a prompt whose beginning was dropped gives the same text as from nothing"
                    if identical
                    else "a prompt whose beginning was dropped gives another text than the same prompt from nothing: "
                    f"the server reused {_reused(self.blocks)} tokens with the state of what was dropped "
                    f"(the baseline: {_reused(self.baseline_blocks)})"
                ),
                implied=True,
                observed=identical,
            )
        ]

    # --- numbers ---

    def _compare(self, name: str, state: State, metric: Metric, threshold: float = SUPERIOR) -> Comparison:
        before: list[float] = []
        after: list[float] = []
        for one, other in self.pairs:
            low = stats.median_log(_samples(one.cell(name, state), metric))
            high = stats.median_log(_samples(other.cell(name, state), metric))
            if low is not None and high is not None:
                before.append(low)
                after.append(high)
        found = stats.estimate([high - low for low, high in zip(before, after, strict=True)])
        cells = {
            side: [cell for block in blocks if (cell := block.cell(name, state)) is not None]
            for side, blocks in (("baseline", self.baseline_blocks), ("arm", self.blocks))
        }
        return Comparison(
            cell=name,
            state=state,
            metric=metric,
            unit="ms" if metric == "ttft" else "t/s",
            baseline=_typical(before, metric),
            arm=_typical(after, metric),
            ratio=found.ratio if found else None,
            low=found.low if found else None,
            high=found.high if found else None,
            pairs=found.pairs if found else 0,
            spread=found.spread if found else None,
            p_value=found.p_value if found else None,
            pairs_needed=stats.pairs_needed(found, threshold) if found else None,
            baseline_samples=sum(len(cell.valid()) for cell in cells["baseline"]),
            arm_samples=sum(len(cell.valid()) for cell in cells["arm"]),
            invalid_samples=sum(len(cell.samples) - len(cell.valid()) for side in cells.values() for cell in side),
        )

    def _all_cells(self) -> list[Comparison]:
        """Every cell that was measured: its speed, and for prompts the time to the first token as well."""
        rows = []
        for name, state in _cell_names([*self.baseline_blocks, *self.blocks]):
            rows.append(self._compare(name, state, "speed"))
            if not name.startswith("tg"):
                rows.append(self._compare(name, state, "ttft"))
        return rows

    def _memory(self) -> list[RankMemory]:
        ranks = dict.fromkeys([*self.arm.processes, *(rank for block in self.blocks for rank in block.ranks)])
        return [
            RankMemory(
                rank=rank,
                min_available_mib=_lowest(self.blocks, rank, "min_available_mib"),
                load_min_mib=_lowest(self.blocks, rank, "load_min_mib"),
                run_min_mib=_lowest(self.blocks, rank, "run_min_mib"),
                baseline_min_mib=_lowest(self.baseline_blocks, rank, "min_available_mib"),
                guard_mib=self.arm.processes[rank].guard_mib if rank in self.arm.processes else None,
            )
            for rank in ranks
        ]

    def _findings(self) -> list[Seen]:
        found = [Seen(source="plan", text=note) for note in self.arm.notes]
        found += _cache_reuse_findings(self.blocks, self.baseline_blocks)
        found += self._pipeline_findings()
        differing, compared, unstable = self._texts()
        if unstable:
            found.append(Seen(source="measured", text=f"the baseline's own text changes between starts: {unstable[0]}"))
        elif differing:
            text = f"greedy output differs from the baseline's in {len(differing)} of {compared} texts: {differing[0]}"
            found.append(Seen(source="measured", text=text))
        elif compared:
            text = f"greedy output is identical to the baseline's in all {compared} texts of the cells"
            found.append(Seen(source="measured", text=text))
        for block in self.blocks:
            if block.bench and block.bench.foreign_check == "none":
                text = "the server shows neither metrics nor slots: requests of others would not have been seen"
                found.append(Seen(source="measured", text=text))
                break
        return found

    def _pipeline_findings(self) -> list[Seen]:
        own = _observed(self.blocks, "pipeline_parallel")
        baseline = _observed(self.baseline_blocks, "pipeline_parallel")
        if not own or not baseline or own[-1] == baseline[-1]:
            return []
        text = (
            "the head pipelines microbatches over the ranks, the baseline does not"
            if own[-1]
            else "the head does not pipeline microbatches over the ranks, the baseline does"
        )
        return [Seen(source="measured", text=text, contradicts=not own[-1])]


MEMORY_GATE = "memory_floor"


def _check(name: str, problems: Iterable[str]) -> Check:
    listed = list(dict.fromkeys(problems))
    return Check(name=name, passed=not listed, problems=listed)


def _complete_pairs(arm: Sequence[Block], baseline: Sequence[Block]) -> list[tuple[Block, Block]]:
    """(baseline block, arm block) of each pair in which both were measured to the end."""
    by_pair = {block.pair: block for block in baseline if block.bench and not block.bench.error}
    return [
        (by_pair[block.pair], block) for block in arm if block.bench and not block.bench.error and block.pair in by_pair
    ]


def _harness_problems(blocks: Sequence[Block]) -> list[str]:
    hashes = {block.bench.harness_sha256 or "unknown" for block in blocks if block.bench}
    if len(hashes) > 1 or "unknown" in hashes:
        return [f"the blocks were not measured by one known harness: {', '.join(sorted(h[:12] for h in hashes))}"]
    return []


def _differences(planned: _Process, unit: Unit) -> list[str]:
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


def _memory_problems(block: Block, arm: _Arm) -> list[str]:
    problems = []
    for rank in sorted(arm.processes):
        record = block.ranks.get(rank)
        memory = record.memory if record else None
        if memory is None or memory.min_available_mib is None or not memory.samples:
            problems.append(f"block {block.index} ({block.arm}): the memory minimum of {rank} is not known")
    return problems


def _cell_names(blocks: Sequence[Block]) -> list[tuple[str, State]]:
    names = [(cell.cell, cell.state) for block in blocks if block.bench for cell in block.bench.cells]
    return list(dict.fromkeys(names))


def _value(cell: Cell, sample: Sample, metric: Metric) -> float | None:
    if metric == "ttft":
        return sample.ttft_ms
    return sample.decode_per_second if cell.decodes else sample.prefill_per_second


def _samples(cell: Cell | None, metric: Metric) -> list[float]:
    """The cell's valid values such that more is better: tokens per second, or one over the time to first token."""
    values = [_value(cell, sample, metric) for sample in cell.valid()] if cell else []
    known = [value for value in values if value is not None and value > 0]
    return [1.0 / value for value in known] if metric == "ttft" else known


def _typical(block_values: Sequence[float], metric: Metric) -> float | None:
    """What the blocks' values stand for, in the metric's own unit; two of them have exactly the estimate's ratio."""
    if not block_values:
        return None
    mean = math.exp(math.fsum(block_values) / len(block_values))
    return 1.0 / mean if metric == "ttft" else mean


TextKey = tuple[str, str, int]


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


def _observed(blocks: Sequence[Block], key: str) -> list[float | bool]:
    """The values of an observation over the blocks that know it."""
    found: list[float | bool] = []
    for block in blocks:
        value = getattr(block.observations, key, None)
        if isinstance(value, bool | int | float):
            found.append(value)
    return found


def _lowest(blocks: Sequence[Block], rank: str, field: str) -> int | None:
    memories = [block.ranks[rank].memory for block in blocks if rank in block.ranks]
    values = [getattr(memory, field) for memory in memories if memory is not None]
    return min((value for value in values if value is not None), default=None)


def _cache_reuse_findings(blocks: Sequence[Block], baseline: Sequence[Block]) -> list[Seen]:
    effective = _observed(blocks, "prefix_reuse_effective")
    if not effective or not _observed(blocks, "cache_reuse_disabled"):
        return []
    if not effective[-1]:
        text = (
            "cache_reuse has no effect: of a prompt whose beginning was dropped, the server took nothing from its cache"
        )
        return [Seen(source="measured", text=text, contradicts=True)]
    if False in _observed(blocks, "prefix_reuse_identical"):
        text = (
            "cache_reuse takes effect and changes the output: after a moved prefix the text differs from that of the "
            "same prompt evaluated from nothing; a recurrent state cannot forget what was dropped"
        )
        same = False in _observed(baseline, "prefix_reuse_identical")
        return [
            Seen(source="measured", text=text + (" (the baseline does the same)" if same else ""), contradicts=True)
        ]
    return [Seen(source="measured", text="cache_reuse takes effect on a moved prefix and the text stays the same")]


def _reused(blocks: Sequence[Block]) -> int:
    """How many tokens of the shifted prefix came from the cache, at most."""
    probes = [block.bench.probes.get("shifted_prefix") or {} for block in blocks if block.bench]
    return max((int(probe.get("cache_n") or 0) for probe in probes), default=0)


def _general_findings(plan: _Plan, facts: Facts) -> list[Seen]:
    found = [Seen(source=known.row, text=known.text, contradicts=known.contradicts) for known in plan.findings]
    found += [Seen(source="plan", text=note) for note in [*plan.notes, *plan.arms[0].notes]]
    planned = len(plan.blocks)
    if planned and len(facts.blocks) < planned:
        text = f"{len(facts.blocks)} of {planned} planned blocks are recorded"
        found.append(Seen(source="measured", text=text))
    for earlier, later in pairwise(facts.blocks):
        if earlier.ended and later.started and later.started < earlier.ended:
            text = f"blocks {earlier.index} and {later.index} overlap in time"
            found.append(Seen(source="measured", text=text))
    return found


def _percent(ratio: float) -> str:
    return f"{(ratio - 1) * 100:+.1f} %"


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, int | float) else str(value)
