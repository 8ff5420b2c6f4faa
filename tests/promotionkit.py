"""A run that may be promoted, made up: everything that gates and build check ask for, and nothing measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k3deploy.plan.model import Plan, PlannedArm
from k3deploy.promotion.evidence import DECODE, PREFILLS, SUITES
from k3deploy.store import Run, Store

RUN_ID = "20261130T120000-candidate-U2-0a1b2c"
HASHES = {"llama-server": "a" * 64, "ggml-rpc-server": "b" * 64}
TOOLCHAIN = "00112233"


def answers() -> dict[str, Any]:
    text = {"id": "t", "prompt_sha256": "p", "tokens": [1, 2]}
    return {
        "positions": {"prompt_sha256": "p", "positions": [{"position": 7, "top": {"5": -0.1}}]},
        "state": {"prompt_sha256": "p", "tokens": 256},
        "suites": {"texts": {name: [text] for name in SUITES}},
        "continuation": {"whole": [1], "chunks": {"256": {"tokens": [1]}}},
        "reuse": {"first": [1], "other": [2], "again": [1], "after_erase": [1], "after_cancel": [1]},
    }


def block(index: int, arm: PlannedArm, hashes: Mapping[str, str], toolchain: str, run_id: str) -> dict[str, Any]:
    """A block with everything that the gates ask for."""
    ranks: dict[str, Any] = {}
    for rank, processes in arm.processes.items():
        units = {}
        for kind, process in (("worker", processes.worker), ("head", processes.head)):
            if process is not None:
                program = process.argv[0].rpartition("/")[2]
                units[f"k3-candidate-{kind}@{arm.slug}.service"] = {
                    "active": "active",
                    "exe": f"/opt/k3deploy/releases/x/bin/{program}",
                    "exe_sha256": hashes[program],
                    "build_id": f"{arm.build_key}-{toolchain}",
                }
        window = {"run_id": run_id} if processes.head is not None else None
        ranks[rank] = {"state": {"host": rank, "units": units, "window": window}}
    sample = {"valid": True, "prompt_n": 8, "prompt_ms": 1.0}
    cells = [
        {"cell": name, "state": "cold", "n_prompt": 8, "n_predict": 1, "samples": [sample]}
        for name in (*PREFILLS, DECODE)
    ]
    return {
        **{"index": index, "pair": 0, "arm": arm.name, "slug": arm.slug, "started": "2026-11-30T12:00:00+00:00"},
        "bench": {"cells": cells, "parity": answers(), "harness_sha256": "h"},
        "ranks": ranks,
    }


def records(
    plan: Plan, hashes: Mapping[str, str] = HASHES, toolchain: str = TOOLCHAIN, run_id: str = RUN_ID
) -> list[dict[str, Any]]:
    """A block of the baseline and one of the arm."""
    return [block(index, arm, hashes, toolchain, run_id) for index, arm in enumerate((plan.baseline, plan.arms[1]))]


def accepted_run(root: Path, plan: Plan, inventory: Path, hashes: Mapping[str, str], toolchain: str) -> Run:
    """A run directory of ``plan``'s candidate with an ACCEPT of its first arm and all evidence for it."""
    about: dict[str, Any] = {"tool": {}, "options": {}, "reason": ""}
    mapping = plan.model_dump(mode="json")
    run = Store(root).create(plan.candidate, mapping, {}, cluster=plan.cluster, inventory=inventory, **about)
    for record in records(plan, hashes, toolchain, run.id):
        (run.path / "blocks" / f"{record['index']:03d}.json").write_text(json.dumps(record))
    verdict = {"outcome": "ACCEPT", "reason": "made up", "best_arm": plan.arms[1].name}
    (run.path / "verdict.json").write_text(json.dumps(verdict))
    return run
