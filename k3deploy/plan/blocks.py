"""What is measured, how and in which order: the blocks, and the request to the harness."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Literal

from k3deploy.inventory import Model
from k3deploy.matrix import Candidate
from k3deploy.plan.model import Bench, Block, Cell, PlanError, PlannedArm

SEED = 7
REPEATS = 2
DEADLINE_S = 1800  # for the cells of one block
COLD = ("pp256", "pp512", "pp1024", "pp2048", "pp4096", "tg100")
WARM = ("pp2048", "pp4096")
CACHED = ("pp2048", "pp4096")
DECODE_PROMPT = 16
DEPTH = re.compile(r"(pp|tg)[1-9][0-9]*@d[1-9][0-9]*$")
# What a row lists as evidence -> the harness' probe that yields it.
PROBES = {"shifted_prefix": "shifted_prefix", "graphs_reused": "graphs", "idle_pause": "idle"}


def rounds(arms: int, pairs: int, seed: int) -> list[list[int]]:
    """The arms (as numbers, 0 is the baseline) of each round in the order in which they run: random, and balanced.

    Rounds are drawn in twos, a random order and its reverse. So after every second round each two arms have been in
    either order equally often, and over a run each arm is first equally often, up to one.
    """
    source = random.Random(seed)
    first = [0] * arms
    order: list[list[int]] = []
    while len(order) < pairs:
        drawn = source.sample(range(arms), arms)
        drawn.sort(key=lambda arm: first[arm])
        # Whoever was first least often is first of one of the two, and the next such of the other.
        one = [drawn[0], *source.sample(drawn[2:], arms - 2), drawn[1]]
        two = [one, one[::-1]]
        if len(order) + 2 <= pairs:
            source.shuffle(two)
        for entry in two[: pairs - len(order)]:
            first[entry[0]] += 1
            order.append(entry)
    return order


def order_blocks(arms: Sequence[PlannedArm], pairs: int, seed: int) -> list[Block]:
    """One block an arm and round, the blocks of a round beside each other."""
    order = [
        (pair, arms[number]) for pair, one_round in enumerate(rounds(len(arms), pairs, seed)) for number in one_round
    ]
    return [Block(index=index, pair=pair, arm=arm.name, slug=arm.slug) for index, (pair, arm) in enumerate(order)]


def bench_request(
    candidate: Candidate, model: Model, arms: Sequence[PlannedArm], only: Sequence[str] | None, repeats: int
) -> Bench:
    wanted: list[tuple[str, Literal["cold", "warm", "cached"]]] = [
        *((name, "cold") for name in COLD),
        *((name, "warm") for name in WARM),
        *((name, "cached") for name in CACHED),
    ]
    # A depth is measured where it is asked for: its prefix alone can take longer than all other cells.
    wanted += [(name, "cached") for name in only or () if DEPTH.match(name)]
    for gate in candidate.gates.values():
        wanted += [(name, gate.state) for name in gate.cells if (name, gate.state) not in wanted]
    if only is not None:
        names = [name for name, _ in wanted]
        if unknown := [name for name in only if name not in names]:
            known = ", ".join(dict.fromkeys(names))
            raise PlanError(f"no cell {unknown[0]!r} (cells: {known}; at a depth: tg100@d32768)")
        needed = {name: gate for gate, check in candidate.gates.items() for name in check.cells}
        if missing := [name for name in needed if name not in only]:
            raise PlanError(f"the gate {needed[missing[0]]} judges {missing[0]}: measure it too")
        wanted = [(name, state) for name, state in wanted if name in only]
    cells = [_cell(name, state) for name, state in wanted]
    context = min(arm.settings.get("ctx_size", 0) // arm.settings.get("parallel", 1) for arm in arms)
    for cell in cells:
        if context and cell.n_prompt + cell.n_predict > context:
            raise PlanError(f"{cell.cell} does not fit into a context of {context} tokens a slot")
    evidence = evidence_of(candidate)
    return Bench(
        deadline_s=DEADLINE_S,
        seed=SEED,
        vocab=model.vocab,
        warmup=arms[0].warmup,
        repeats=repeats,
        cells=cells,
        probes=[probe for name, probe in PROBES.items() if name in evidence],
    )


def evidence_of(candidate: Candidate) -> list[str]:
    return list(dict.fromkeys(name for row in candidate.rows for name in row.evidence))


def _cell(name: str, state: Literal["cold", "warm", "cached"]) -> Cell:
    """``pp2048``, ``tg100``, or one of them after so many tokens that are there already: ``tg100@d32768``."""
    work, _, depth = name.partition("@d")
    size = int(work[2:])
    prompt, predict = (size, 1) if work.startswith("pp") else (DECODE_PROMPT, size)
    if not depth:
        return Cell(cell=name, state=state, n_prompt=prompt, n_predict=predict)
    return Cell(cell=name, state=state, n_prompt=int(depth) + prompt, n_predict=predict, n_cached=int(depth))
