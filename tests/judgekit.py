"""A recorded run that tests bend: its plan, its blocks, and what the judge says of them."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from k3deploy.facts import Facts, assemble
from k3deploy.judge import ArmVerdict, GateResult, Verdict, judge

RUN = Path(__file__).parent / "fixtures/run-small"
PLAN: dict[str, Any] = json.loads((RUN / "plan.json").read_text())
RECORDED = assemble(RUN).model_dump(mode="json")
BASELINE, ARM = "baseline", "U2@2048"
PARITY: dict[str, Any] = {
    "suites": {"texts": {"short": [{"id": "a", "prompt_sha256": "0", "tokens": [1, 2]}]}},
    "continuation": {"whole": [1], "chunks": {"256": {"tokens": [1], "cache_n": 256}}},
    "reuse": {name: [1] for name in ("first", "other", "again", "after_erase", "after_cancel")},
}
Gain = float | Callable[[int], float]


def plan_of(arm: str = ARM, **changes: Any) -> dict[str, Any]:
    """The recorded plan with one arm only."""
    plan = copy.deepcopy(PLAN)
    plan["arms"] = [entry for entry in plan["arms"] if entry["name"] in (BASELINE, arm)]
    plan["blocks"] = []
    return {**plan, **changes}


def block_of(arm: str, pair: int, speed: float = 1.0) -> dict[str, Any]:
    """The recorded block of ``arm`` with steady times: every cell runs at ``speed`` times a fixed pace."""
    block = copy.deepcopy(next(entry for entry in RECORDED["blocks"] if entry["arm"] == arm))
    for cell in block["bench"]["cells"]:
        for sample in cell["samples"]:
            jitter = 1 + 0.001 * sample["repeat"]
            sample["prompt_ms"] = cell["n_prompt"] * jitter / speed
            sample["predicted_ms"] = cell["n_predict"] * 10 * jitter / speed
            sample["ttft_ms"] = (cell["n_prompt"] + 1) * jitter / speed
    block["bench"]["parity"] = copy.deepcopy(PARITY)
    moment = datetime(2026, 11, 30, tzinfo=UTC) + timedelta(minutes=2 * pair + (arm != BASELINE))
    times = {"started": moment.isoformat(), "ended": (moment + timedelta(seconds=50)).isoformat()}
    return {**block, **times, "pair": pair, "index": 2 * pair + (arm != BASELINE)}


def facts_of(pairs: int, gain: Gain = 1.0, spread: float = 0.002) -> dict[str, Any]:
    """``pairs`` pairs; the arm is ``gain`` times as fast, each start has its own luck of about ``spread``."""
    luck = random.Random(5)
    blocks = []
    for pair in range(pairs):
        blocks.append(block_of(BASELINE, pair, 1 + luck.gauss(0, spread)))
        blocks.append(block_of(ARM, pair, (gain(pair) if callable(gain) else gain) * (1 + luck.gauss(0, spread))))
    return {**copy.deepcopy(RECORDED), "blocks": blocks}


def verdict_of(facts: dict[str, Any], plan: dict[str, Any] | None = None) -> Verdict:
    return judge(plan or plan_of(), Facts.model_validate(facts))


def arm_of(facts: dict[str, Any], plan: dict[str, Any] | None = None) -> ArmVerdict:
    return verdict_of(facts, plan).arms[0]


def gate_of(arm: ArmVerdict, name: str) -> GateResult:
    return next(gate for gate in arm.gates if gate.name == name)


def head_unit(block: dict[str, Any]) -> dict[str, Any]:
    units = block["ranks"]["rank0"]["state"]["units"]
    return next(unit for name, unit in units.items() if "-head@" in name)


def spoil_samples(block: dict[str, Any]) -> None:
    for sample in block["bench"]["cells"][0]["samples"]:
        sample.update(valid=False, why="prefix hit: cache_n is 60, not 0")
