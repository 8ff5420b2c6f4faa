"""From a judged run and production as it is to what production would run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from urllib.parse import urlsplit

from k3deploy.facts import Facts
from k3deploy.inventory import Cluster
from k3deploy.plan.model import Plan, PlannedArm, Process
from k3deploy.promotion.evidence import GateRecord
from k3deploy.promotion.model import ProductionUnit, Promotion, RankNow, UnitNow
from k3deploy.promotion.unit import dropin

DEFAULT_ROOT = "/opt/k3-production"
# Flags of the head that only measuring needs.
_MEASURING = frozenset(("--slot-save-path",))


def build_ids(facts: Facts, arm: PlannedArm) -> set[str]:
    """Every build id that ran as ``arm``."""
    return {
        unit.build_id or ""
        for block in facts.of(arm.name)
        for _rank, name, unit in block.units()
        if _is_process(name, arm)
    }


def programs(facts: Facts, arm: PlannedArm) -> dict[str, str]:
    """The programs that were measured, as ``{bin/name: sha256}``."""
    found = {}
    for block in facts.of(arm.name):
        for _rank, name, unit in block.units():
            if _is_process(name, arm) and unit.exe and unit.exe_sha256:
                found["bin/" + unit.exe.rpartition("/")[2]] = unit.exe_sha256
    return found


def _is_process(name: str, arm: PlannedArm) -> bool:
    return name in (f"k3-candidate-worker@{arm.slug}.service", f"k3-candidate-head@{arm.slug}.service")


def promotion(
    cluster: Cluster,
    plan: Plan,
    facts: Facts,
    arm: PlannedArm,
    gates: Sequence[GateRecord],
    ranks: Mapping[str, RankNow],
    *,
    run_id: str,
    owner: str,
    reason: str,
) -> Promotion:
    """What production would run after promoting ``arm``; ``ranks`` is production as it is now."""
    now = datetime.now(UTC)
    (build_id,) = build_ids(facts, arm)
    identity = _identity(now, plan.candidate, run_id, build_id)
    root = cluster.production.root or DEFAULT_ROOT
    units: dict[str, list[ProductionUnit]] = {}
    for rank, processes in arm.processes.items():
        units[rank] = [
            _unit(cluster, kind, unit, process, f"{root}/{build_id}", ranks[rank].units.get(unit, UnitNow()), identity)
            for kind, unit, process in (
                ("worker", cluster.production.worker_unit, processes.worker),
                ("head", cluster.production.head_unit, processes.head),
            )
            if process is not None
        ]
    return Promotion(
        id=identity,
        action="promote",
        cluster=cluster.name,
        inventory=cluster.inventory,
        owner=owner,
        created=now.isoformat(timespec="seconds"),
        candidate=plan.candidate,
        arm=arm.name,
        run_id=run_id,
        build_id=build_id,
        production_root=root,
        managed=cluster.production.managed,
        files=programs(facts, arm),
        gates=list(gates),
        reason=reason,
        ranks=units,
        notes=_notes(arm, units),
    )


def _identity(now: datetime, candidate: str, *parts: str) -> str:
    digest = hashlib.sha256(json.dumps([candidate, *parts, now.isoformat()]).encode()).hexdigest()
    return f"{now:%Y%m%dT%H%M%S}-{candidate.replace('@', '-')}-{digest[:6]}"


def _unit(
    cluster: Cluster, kind: str, unit: str, process: Process, place: str, now: UnitNow, identity: str
) -> ProductionUnit:
    port = urlsplit(cluster.production.head_url).port or 8080 if kind == "head" else cluster.production.worker_port
    argv = [f"{place}/{process.argv[0]}", *_arguments(process.argv[1:], now.argv, str(port), cluster)]
    environment = {"LD_LIBRARY_PATH": f"{place}/lib", **process.environment}
    return ProductionUnit(
        unit=unit,
        kind="head" if kind == "head" else "worker",
        argv=argv,
        environment=environment,
        dropin=dropin(identity, argv, environment, process.memlock_bytes, process.cpu_affinity),
        previous=now.dropin,
        argv_now=now.argv,
        environment_now=now.environment,
        text_now=now.text,
    )


def _arguments(measured: Sequence[str], now: Sequence[str], port: str, cluster: Cluster) -> list[str]:
    """The measured arguments at production's own address and ports, without what only measuring needs."""
    arguments: list[str] = []
    words = iter(measured)
    for word in words:
        if word in _MEASURING:
            next(words, None)
            continue
        arguments.append(word)
        if word == "--host":
            host = next(words, "")
            arguments.append(_value(now, "--host") or host)
        elif word == "--port":
            next(words, None)
            arguments.append(_value(now, "--port") or port)
        elif word == "--rpc":
            endpoints = next(words, "").split(",")
            hosts = [endpoint.rpartition(":")[0] for endpoint in endpoints]
            arguments.append(",".join(f"{host}:{cluster.production.worker_port}" for host in hosts))
    return arguments


def _value(argv: Sequence[str], flag: str) -> str | None:
    return next((argv[place + 1] for place, word in enumerate(argv[:-1]) if word == flag), None)


def flags_of(argv: Sequence[str]) -> list[str]:
    """An argument vector as one line a flag, with its value beside it."""
    lines: list[str] = []
    for word in argv:
        if lines and not word.startswith("--") and lines[-1].startswith("--") and " " not in lines[-1]:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _notes(arm: PlannedArm, units: Mapping[str, Sequence[ProductionUnit]]) -> list[str]:
    notes = list(arm.notes)
    for rank, of_rank in units.items():
        for unit in of_rank:
            named = {line.split(" ")[0] for line in flags_of(unit.argv[1:])}
            lost = [
                line for line in flags_of(unit.argv_now[1:]) if line.split(" ")[0] not in named and line.startswith("-")
            ]
            if lost:
                notes.append(
                    f"{rank}, {unit.unit}: only production's unit has {', '.join(lost)}: they end with the promotion, "
                    "because they were not measured. What production needs belongs in k3_settings, and then in a run"
                )
    if any(unit.environment_now.get("GGML_RDMA_DEV") for of_rank in units.values() for unit in of_rank):
        notes.append("production pins its RDMA device in its environment; the plan leaves the device to the address")
    return notes


def demotion(cluster: Cluster, ranks: Mapping[str, RankNow], *, owner: str, reason: str) -> Promotion:
    """Production back to what it was before the promotion that the ranks record (or that was applied by hand)."""
    now = datetime.now(UTC)
    record = next((state.record for state in ranks.values() if state.record), None) or {}
    current = record.get("current") or {}
    candidate = str(current.get("candidate") or "candidate-by-hand")
    before = {rank: ((state.record or {}).get("current") or {}).get("previous") or {} for rank, state in ranks.items()}
    units = {
        rank: [
            ProductionUnit(
                unit=name,
                kind="head" if name == cluster.production.head_unit else "worker",
                argv=[],
                environment={},
                dropin=before[rank].get(name) or "",
                previous=unit.dropin,
                argv_now=unit.argv,
                environment_now=unit.environment,
                text_now=unit.text,
            )
            for name, unit in state.units.items()
        ]
        for rank, state in sorted(ranks.items())
    }
    return Promotion(
        id=_identity(now, candidate, "demote"),
        action="demote",
        cluster=cluster.name,
        inventory=cluster.inventory,
        owner=owner,
        created=now.isoformat(timespec="seconds"),
        candidate=candidate,
        arm=str(current.get("arm") or ""),
        run_id=str(current.get("run_id") or ""),
        build_id=str(current.get("build_id") or ""),
        production_root=cluster.production.root or DEFAULT_ROOT,
        managed=cluster.production.managed,
        reason=reason,
        ranks=units,
    )
