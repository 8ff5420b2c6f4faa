"""Our prefill and llama-bench's are the same number: same build, same workers, same sizes, within 3 %.

Single requests on a shared machine spread by more than that. So both run before everything else where the system lets
them (real-time priority: one thread at a time computes), both are measured in turn, round by round, and what is asked
is what the rounds' differences show: agreement within 3 %, or a disagreement of more. Where they show neither within
the time that a test may take, the machine is too restless to tell and the test says so; it never fails for that.
"""

from __future__ import annotations

import math
import random
import time
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from llamakit import Llama, Workers, head, llama_bench, measure, workers

from k3deploy import stats
from k3deploy.facts import Cell

SIZES = (512, 2048)
REPEATS = 3
WITHIN = math.log(1.03)
ROUNDS = (4, 16)  # at least, at most
TIME_S = 75.0

Finding = Literal["agree", "disagree", "unclear"]


def judge(differences: list[float]) -> Finding:
    """What paired differences of logarithms show: two one-sided tests at 5 % for agreement, 1 % for disagreement."""
    low, high = stats.interval(np.asarray(differences), 0.90)
    if low > -WITHIN and high < WITHIN:
        return "agree"
    low, high = stats.interval(np.asarray(differences), 0.99)
    return "disagree" if low > WITHIN or high < -WITHIN else "unclear"


@pytest.mark.parametrize(
    ("ratio", "spread", "found"),
    [(1.0, 0.01, "agree"), (1.0, 0.15, "unclear"), (1.1, 0.02, "disagree"), (0.9, 0.02, "disagree")],
)
def test_noise_is_told_from_a_disagreement(ratio: float, spread: float, found: Finding) -> None:
    luck = random.Random(3)
    assert judge([math.log(ratio) + luck.gauss(0, spread) for _ in range(8)]) == found


def ours(llama: Llama, folder: Path, at: Workers) -> dict[int, float]:
    """{prompt size: median of the logarithms of tokens per second}, by the harness."""
    cells = [{"cell": f"pp{size}", "state": "cold", "n_prompt": size, "n_predict": 1} for size in SIZES]
    with head(llama, folder, at, "--metrics", "--ctx-checkpoints", "0") as made:
        result = measure(folder, made, cells=cells, repeats=REPEATS, warmup={"prefill": list(SIZES), "decode": []})
    found = {}
    for cell in map(Cell.model_validate, result["cells"]):
        assert len(cell.valid()) == REPEATS, [sample.why for sample in cell.samples]
        speeds = [speed for sample in cell.valid() if (speed := sample.prefill_per_second)]
        found[cell.n_prompt] = stats.median_log(speeds) or 0.0
    return found


def theirs(llama: Llama, at: Workers) -> dict[int, float]:
    """The same by llama-bench, which warms up with the same sizes."""
    rows = llama_bench(llama, at, "-ub", "512", "-p", ",".join(map(str, SIZES)), "-r", str(REPEATS))
    return {row["n_prompt"]: stats.median_log(row["samples_ts"]) or 0.0 for row in rows}


@pytest.mark.lab
def test_llama_bench_on_the_same_workers_agrees_within_three_percent(with_bench: Llama, tmp_path: Path) -> None:
    differences: dict[int, list[float]] = {size: [] for size in SIZES}
    end = time.monotonic() + TIME_S
    found: dict[int, Finding] = {}
    with workers(tmp_path, with_bench, with_bench) as at:
        for number in range(ROUNDS[1]):
            if number % 2:
                b, a = theirs(with_bench, at), ours(with_bench, tmp_path, at)
            else:
                a, b = ours(with_bench, tmp_path, at), theirs(with_bench, at)
            for size in SIZES:
                differences[size].append(a[size] - b[size])
            if number + 1 >= ROUNDS[0]:
                found = {size: judge(values) for size, values in differences.items()}
                decided = "disagree" in found.values() or "unclear" not in found.values()
                if decided or time.monotonic() > end:
                    break
    shown = {size: [round(100 * math.expm1(value), 1) for value in values] for size, values in differences.items()}
    assert "disagree" not in found.values(), f"prefill by the harness and by llama-bench part by more than 3 %: {shown}"
    if "unclear" in found.values():
        pytest.skip(f"this machine is too restless to tell 3 %: ours against llama-bench, % by round: {shown}")
