"""What a candidate's kernels do by themselves: what to run on a rank's GPU, and what was seen.

It is kept by cluster, build and switches, so that every later verdict of the same program rests on it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from k3deploy import patches
from k3deploy.errors import ExitCode, K3Error
from k3deploy.facts import Verified
from k3deploy.paths import write_json

FOLDER = "verification"
CASES = "tests-k3-ops"  # the patch set with the cases
DEVICE = "CUDA0"


class NothingToVerify(K3Error):
    """The candidate has no kernels that cases reach, or no program that they can be built into."""

    exit_code = ExitCode.BAD_INPUT


@dataclass(frozen=True, slots=True)
class Work:
    """One arm's: the build key and spec of test-backend-ops, and what is run with it."""

    arm: str
    build_key: str
    build_spec: dict[str, Any]
    request: dict[str, Any]


def works(plan: Mapping[str, Any]) -> list[Work]:
    """What to run for each arm of ``plan`` (JSON data) but the baseline; raises ``NothingToVerify`` saying why not."""
    return [_work(plan, arm) for arm in plan["arms"][1:]]


def write(runs: Path, plan: Mapping[str, Any], arm: str, seen: Verified) -> Path:
    """Keep it below the directory of runs; it replaces what was seen before of the same program and switches."""
    planned = next(one for one in plan["arms"] if one["name"] == arm)
    identity = _identity(plan, planned)
    path = _path(runs, identity)
    write_json(path, {**identity, "arm": arm, "seen": seen.model_dump(mode="json")})
    return path


def find(runs: Path, plan: Mapping[str, Any]) -> dict[str, Verified]:
    """What was seen of the plan's arms, by name; what cannot be read is not there."""
    found = {}
    for arm in plan["arms"][1:]:
        identity = _identity(plan, arm)
        try:
            data = json.loads(_path(runs, identity).read_text(encoding="utf-8"))
            if all(data[key] == value for key, value in identity.items()):
                found[arm["name"]] = Verified.model_validate(data["seen"])
        except (OSError, ValueError, KeyError, TypeError, ValidationError):
            continue
    return found


def switches(plan: Mapping[str, Any], arm: Mapping[str, Any]) -> dict[str, str]:
    """The environment that the arm's workers have and the baseline's do not have so."""
    before = _environment(plan["arms"][0])
    return {key: value for key, value in _environment(arm).items() if before.get(key) != value}


def _environment(arm: Mapping[str, Any]) -> dict[str, str]:
    merged: dict[str, str] = {}
    for processes in arm.get("processes", {}).values():
        for process in (processes.get("head"), processes.get("worker")):
            merged |= (process or {}).get("environment") or {}
    return merged


def _work(plan: Mapping[str, Any], arm: Mapping[str, Any]) -> Work:
    name = f"candidate-{arm['name']}"
    spec = plan["builds"][arm["build_key"]]
    sets = [one.manifest for one in patches.select(spec["patch_sets"])] if spec["patch_sets"] else []
    reached = [manifest for manifest in sets if manifest.verify is not None]
    given = switches(plan, arm)
    if not reached:
        has = (
            f"its patch sets ({', '.join(spec['patch_sets'])}) name"
            if sets
            else "it is built without a patch set that names"
        )
        known = ", ".join(
            sorted(
                {
                    str(one.manifest.row)
                    for one in patches.available().values()
                    if one.manifest.verify and one.manifest.row
                }
            )
        )
        raise NothingToVerify(f"{name}: {has} no cases of test-backend-ops", remedy=f"rows with cases: {known}")
    if not given:
        raise NothingToVerify(f"{name} has no switch in the environment: its kernels cannot be compared in one program")
    if spec["source"]["kind"] == "prebuilt":
        raise NothingToVerify(f"{name} is a prebuilt program: test-backend-ops cannot be built beside it")
    wanted = [*spec["patch_sets"], *([] if CASES in spec["patch_sets"] else [CASES])]
    build = {
        **spec,
        "name": f"{arm['slug']}-cases",
        "patch_sets": wanted,
        "targets": ["test-backend-ops"],
        "cmake": {**spec["cmake"], "LLAMA_BUILD_TESTS": "ON"},
        "markers": [],
    }
    content = [arm["build_key"], patches.hashes(wanted)]
    cases = [manifest.verify.model_dump() for manifest in reached if manifest.verify is not None]
    request = {
        "device": DEVICE,
        "environment": given,
        "markers": [marker for manifest in reached for marker in manifest.markers],
        "test": [case for one in cases for case in one["test"]],
        "perf": [case for one in cases for case in one["perf"]],
    }
    return Work(arm["name"], _digest(content), build, request)


def _identity(plan: Mapping[str, Any], arm: Mapping[str, Any]) -> dict[str, Any]:
    return {"cluster": plan["cluster"], "build_key": arm["build_key"], "switches": switches(plan, arm)}


def _path(runs: Path, identity: Mapping[str, Any]) -> Path:
    return runs / FOLDER / f"{_digest(identity)}.json"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
