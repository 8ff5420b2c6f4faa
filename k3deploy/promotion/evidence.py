"""The five gates of the runbook: is there recorded evidence for each?

A gate's *outcome* is the verdict's business; here it is asked whether the run holds what an outcome would rest on, for
the arm and for the baseline. A verdict that never looked is no evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from k3deploy import parity
from k3deploy.facts import Block, Facts

SUITES = ("short", "natural", "long-prefix")
PREFILLS = ("pp256", "pp512", "pp1024")
DECODE = "tg100"


@dataclass(frozen=True, slots=True)
class GateRecord:
    """One gate: ``recorded`` with what is there, or not with what is missing."""

    name: str
    title: str
    recorded: bool
    detail: str


@dataclass(frozen=True, slots=True)
class _Run:
    """The measured blocks of the arm to promote and of the baseline."""

    run_id: str
    baseline: Sequence[Block]
    arm: Sequence[Block]

    @property
    def sides(self) -> tuple[tuple[str, Sequence[Block]], ...]:
        return ("the baseline", self.baseline), (self.arm[0].arm if self.arm else "the arm", self.arm)


def runbook_gates(facts: Facts, baseline: str, arm: str) -> list[GateRecord]:
    """The runbook's gates in its order, for ``arm`` against ``baseline`` (both names of arms)."""
    run = _Run(facts.run_id, facts.of(baseline), facts.of(arm))
    found = []
    for name, title, look in _GATES:
        detail, missing = look(run)
        found.append(GateRecord(name, title, not missing, "; ".join(missing) or detail))
    return found


def _window(run: _Run) -> tuple[str, list[str]]:
    missing = []
    for _side, blocks in run.sides:
        for block in blocks:
            windows = [getattr(rank.state, "window", None) or {} for rank in block.ranks.values() if rank.state]
            if not any(run.run_id in (window.get("run_id"), window.get("guest")) for window in windows):
                missing.append(f"block {block.index} does not show that it ran inside this run's window")
    if not run.arm or not run.baseline:
        missing.append("no block is recorded")
    return f"all {len(run.baseline) + len(run.arm)} blocks ran inside this run's window", missing


def _exact(run: _Run) -> tuple[str, list[str]]:
    answers, missing = _answers(run)
    for side, answer in answers.items():
        positions = answer.positions
        if positions is None or positions.error or not positions.positions:
            missing.append(f"the 256-token test of {side} is not recorded{_why(positions)}")
        if answer.state is None or answer.state.error:
            missing.append(f"the recurrent state of {side} is not recorded{_why(answer.state)}")
    if len(answers) < 2 or missing:
        return "", missing
    baseline, arm = answers.values()
    difference = parity.output_difference(baseline, arm)
    if difference is None:
        return "", ["the 256-token tests of the two arms do not have the same prompt"]
    words = f"largest difference of a log-probability {difference.max_error:.3g} over {difference.positions} positions"
    return f"{words}; answers and states are kept in the blocks", []


def _suites(run: _Run) -> tuple[str, list[str]]:
    answers, missing = _answers(run)
    for side, answer in answers.items():
        texts = answer.suites.texts if answer.suites else {}
        missing += [f"the suite {name} of {side} is not recorded" for name in SUITES if not texts.get(name)]
    if len(answers) < 2 or missing:
        return "", missing
    baseline, arm = answers.values()
    counts = {name: parity.divergences(baseline, arm, name)[1] for name in SUITES}
    missing += [f"the texts of the suite {name} do not have the same prompts" for name in SUITES if not counts[name]]
    return f"greedy texts compared: {', '.join(f'{name} {count}' for name, count in counts.items())}", missing


def _speed(run: _Run) -> tuple[str, list[str]]:
    missing = []
    for side, blocks in run.sides:
        for name in (*PREFILLS, DECODE):
            cells = [block.cell(name, "cold") for block in blocks]
            if not any(cell is not None and cell.valid() for cell in cells):
                missing.append(f"{name} cold of {side} is not measured")
    return f"raw {', '.join(PREFILLS)} and {DECODE}, uncached, in both arms", missing


def _reuse(run: _Run) -> tuple[str, list[str]]:
    answers, missing = _answers(run)
    for side, answer in answers.items():
        for what, part, there in (
            ("continuation in chunks", answer.continuation, bool(answer.continuation and answer.continuation.chunks)),
            ("reset and reuse of the state", answer.reuse, bool(answer.reuse and answer.reuse.again)),
        ):
            if part is None or part.error or not there:
                missing.append(f"{what} of {side} is not recorded{_why(part)}")
    return "chunks, other prompts, an erased slot and a broken request, in both arms", missing


def _answers(run: _Run) -> tuple[dict[str, parity.Parity], list[str]]:
    """Each side's answers to the parity questions, and what is missing of them."""
    found, missing = {}, []
    for side, blocks in run.sides:
        asked = [block.bench.parity for block in blocks if block.bench and block.bench.parity.asked]
        if asked:
            found[side] = asked[0]
        else:
            missing.append(f"{side} was not asked the parity questions")
    return found, missing


def _why(part: object) -> str:
    error = getattr(part, "error", "")
    return f" ({error})" if error else ""


_GATES: tuple[tuple[str, str, Callable[[_Run], tuple[str, list[str]]]], ...] = (
    ("exclusive_window", "1 exclusive maintenance window", _window),
    ("exact_output_and_state", "2 256-token exact output and state", _exact),
    ("held_out_suites", "3 greedy continuations of the held-out suites", _suites),
    ("prefill_and_decode", "4 raw uncached prefill and decode", _speed),
    ("continuation_and_reuse", "5 continuation in chunks, reset and reuse of the state", _reuse),
)
