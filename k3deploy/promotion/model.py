"""A promotion's data: ``plan.json`` of its directory, and what is read of a rank before it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from k3deploy.promotion.evidence import GateRecord


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class UnitNow(BaseModel):
    """A unit of production as it is: its text with all drop-ins, k3deploy's own drop-in apart, and its process."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    text: str = ""
    dropin: str | None = None
    argv: list[str] = Field(default_factory=list)
    environment: dict[str, str] = Field(default_factory=dict)


class RankNow(BaseModel):
    """What ``k3.deploy.promotion`` reads of a rank. ``files`` are sha256 of the release that is to be promoted."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    files: dict[str, str | None] = Field(default_factory=dict)
    units: dict[str, UnitNow] = Field(default_factory=dict)
    record: dict[str, Any] | None = None


class ProductionUnit(_Data):
    """One unit of production as it would run: the argument vector, the environment, and the drop-in that says so.

    ``previous``: the text of k3deploy's drop-in that this one replaces; ``None`` where there is none.
    """

    unit: str
    kind: Literal["worker", "head"]
    argv: list[str]
    environment: dict[str, str]
    dropin: str
    previous: str | None = None
    argv_now: list[str] = Field(default_factory=list)
    environment_now: dict[str, str] = Field(default_factory=dict)
    text_now: str = ""


class Promotion(_Data):
    """Everything that an operator needs to change production, as data. ``ranks``: the units by rank.

    ``files``: the release's programs and libraries with their sha256, as they were measured.
    """

    id: str
    action: Literal["promote", "demote"]
    cluster: str
    inventory: str
    owner: str
    created: str
    candidate: str
    arm: str
    run_id: str
    build_id: str
    production_root: str
    managed: bool
    files: dict[str, str] = Field(default_factory=dict)
    gates: list[GateRecord] = Field(default_factory=list)
    reason: str = ""
    ranks: dict[str, list[ProductionUnit]]
    notes: list[str] = Field(default_factory=list)
