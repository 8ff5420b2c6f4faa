"""Verdicts on real servers: equal ones are not accepted, a slower one is rejected, a faster one accepted, as is true.

A block is what it is in a run: one start of a head, measured by the harness. The judge gets them as a run's facts.
"""

from __future__ import annotations

import copy
import json
import math
import statistics
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from llamakit import Llama, head, llama_bench, measure, workers

from k3deploy import stats
from k3deploy.facts import Facts, assemble
from k3deploy.judge import Verdict, judge

RUN = Path(__file__).parents[1] / "fixtures/run-small"
BASELINE, ARM = "baseline", "U2@2048"
PAIRS = 6
# Two starts of the same, and one whose microbatches are so small that it takes far longer.
STARTS = {"one": 512, "again": 512, "small": 8}
CELLS = [{"cell": "pp512", "state": "cold", "n_prompt": 512, "n_predict": 1}]
PARITY = {
    "suites": {"n_predict": 4, "texts": {"short": [{"id": "count", "prompt": "One, two, three, four,"}]}},
    "continuation": {"n_prompt": 128, "chunks": [64], "n_predict": 4},
    "reuse": {"n_prompt": 64, "n_predict": 4},
}

pytestmark = pytest.mark.lab


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of the harness by start, in order; and the speed of small microbatches by llama-bench, as a ratio."""

    blocks: dict[str, list[dict[str, Any]]]
    direct: float


@pytest.fixture(scope="module")
def measured(with_bench: Llama, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    if not with_bench.front:
        pytest.skip("this machine lets no program run before the others: what is true cannot be known in a minute")
    folder = tmp_path_factory.mktemp("verdicts")
    blocks: dict[str, list[dict[str, Any]]] = {name: [] for name in STARTS}
    ratios = []
    with workers(folder, with_bench, with_bench) as at:
        for number in range(PAIRS):
            for name in list(STARTS)[:: 1 if number % 2 else -1]:
                flags = ["--metrics", "--ctx-checkpoints", "0", "--slot-save-path", str(folder)]
                asked = {"parity": PARITY} if number == 0 else {}
                flags += ["-ub", str(STARTS[name])]
                with head(with_bench, folder, at, *flags) as made:
                    warmup = {"prefill": [512], "decode": []}
                    result = measure(folder, made, cells=CELLS, repeats=3, warmup=warmup, **asked)
                assert result["error"] is None
                blocks[name].append(result)
            rows = llama_bench(with_bench, at, "-ub", f"{STARTS['one']},{STARTS['small']}", "-p", "512", "-r", "2")
            speeds = {row["n_ubatch"]: stats.median_log(row["samples_ts"]) or 0.0 for row in rows}
            ratios.append(speeds[STARTS["small"]] - speeds[STARTS["one"]])
    return Measured(blocks, math.exp(statistics.median(ratios)))


def verdict_of(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> Verdict:
    """What the judge says of an arm with these results."""
    plan = json.loads((RUN / "plan.json").read_text())
    plan["arms"] = [arm for arm in plan["arms"] if arm["name"] in (BASELINE, ARM)]
    gate = {**plan["gates"]["cold_prefill"], "cells": ["pp512"]}
    plan |= {"blocks": [], "gates": {"cold_prefill": gate}, "rule": {"delta": 0.05, "looks": [PAIRS]}}
    recorded = assemble(RUN).model_dump(mode="json")
    kept = {block["arm"]: block for block in recorded["blocks"]}
    blocks = []
    for pair in range(PAIRS):
        for place, (arm, results) in enumerate(((BASELINE, before), (ARM, after))):
            moment = datetime(2026, 11, 30, tzinfo=UTC) + timedelta(minutes=2 * pair + place)
            times = {"started": moment.isoformat(), "ended": (moment + timedelta(seconds=50)).isoformat()}
            block = {**copy.deepcopy(kept[arm]), **times, "pair": pair, "index": 2 * pair + place}
            blocks.append({**block, "bench": results[pair]})
    return judge(plan, Facts.model_validate({**recorded, "blocks": blocks}))


def holds(verdict: Verdict, ratio: float) -> bool:
    """Whether the interval of the primary cell holds ``ratio``, up to the 3 % within which llama-bench agrees."""
    (gate,) = (gate for gate in verdict.arms[0].gates if gate.name == "cold_prefill")
    low, high = gate.comparisons[0].low, gate.comparisons[0].high
    return low is not None and high is not None and low / 1.03 < ratio < high * 1.03


def test_the_same_again_is_not_accepted(measured: Measured) -> None:
    found = verdict_of(measured.blocks["one"], measured.blocks["again"])
    assert found.outcome in ("REJECT", "INCONCLUSIVE"), found.reason
    assert holds(found, 1.0)


def test_a_slower_one_is_rejected_with_the_effect_that_llama_bench_sees(measured: Measured) -> None:
    found = verdict_of(measured.blocks["one"], measured.blocks["small"])
    assert found.outcome == "REJECT" and found.reason.startswith("cold_prefill"), found.reason
    assert holds(found, measured.direct)


def test_a_faster_one_is_accepted_with_the_effect_that_llama_bench_sees(measured: Measured) -> None:
    found = verdict_of(measured.blocks["small"], measured.blocks["one"])
    assert found.outcome == "ACCEPT", found.reason
    assert holds(found, 1 / measured.direct)
