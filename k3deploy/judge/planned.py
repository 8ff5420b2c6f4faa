"""The plan, as far as a verdict needs it, and the shape of what its report reads beside that."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from k3deploy import stats
from k3deploy.facts import State
from k3deploy.judge.rule import DELTA, Rule
from k3deploy.judge.verdict import Metric


class _View(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class PlannedGate(_View):
    cells: list[str] = Field(default_factory=list)
    state: State = "cold"
    metric: Metric = "speed"
    suite: str | None = None
    observation: str | None = None
    require: Literal["faster", "not_slower", "identical", "at_most", "at_least", "equals", "not_higher"]
    limit: float | bool | None = None
    why: str = ""


class PlannedProcess(_View):
    argv: list[str]
    environment: dict[str, str] = Field(default_factory=dict)


class PlannedRank(_View):
    worker: PlannedProcess | None = None
    head: PlannedProcess | None = None
    guard_mib: int | None = None


class ArmTransport(_View):
    rdma: Literal["auto", "pinned", "off"] = "auto"
    require: Literal["tcp", "rdma"] = "tcp"


class PlannedArm(_View):
    name: str
    slug: str
    build_key: str
    transport: ArmTransport | None = None
    processes: dict[str, PlannedRank] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)
    candidate: str = ""
    gates: dict[str, PlannedGate] | None = None
    differences: list[dict[str, Any]] = Field(default_factory=list)


class Known(_View):
    row: str = ""
    text: str
    contradicts: bool = False


class Transport(_View):
    require: Literal["tcp", "rdma"] = "tcp"


class PlannedRule(_View):
    """What an ACCEPT takes, fixed before anything was measured."""

    delta: float = DELTA
    looks: list[int] = Field(default_factory=list)
    no_accept: str = ""
    fixed: bool = False


class PlanView(_View):
    """``arms[0]`` is the baseline."""

    candidate: str
    rows: list[dict[str, Any]] = Field(default_factory=list)
    model: dict[str, Any] | None = None
    arms: list[PlannedArm] = Field(min_length=2)
    gates: dict[str, PlannedGate]
    findings: list[Known] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    blocks: list[dict[str, Any]] = Field(default_factory=list)
    transport: Transport = Field(default_factory=Transport)
    rule: PlannedRule = Field(default_factory=PlannedRule)

    def gates_of(self, arm: PlannedArm) -> dict[str, PlannedGate]:
        """What ``arm`` is judged by: its own gates where it has some (in a campaign); the baseline: what any is."""
        if arm.gates is not None:
            return arm.gates
        others = [one for one in self.arms[1:] if one.gates] if arm.name == self.arms[0].name else []
        return {
            **self.gates,
            **{f"{one.name} {name}": gate for one in others for name, gate in (one.gates or {}).items()},
        }

    def rule_for(self, pairs: int, alpha: float = stats.ALPHA) -> Rule:
        """The rule of a run with ``pairs`` pairs so far. A plan without looks is looked at once: at its end."""
        looks = tuple(self.rule.looks) or (max(pairs, 1),)
        return Rule(looks, self.rule.delta, alpha)
