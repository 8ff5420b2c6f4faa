"""The schema of a matrix: a row, its gates and guards, and the baseline, as people write them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from k3deploy.settings import EnvironmentName, Settings, render

ROW_ID = r"^[A-Za-z][A-Za-z0-9]*$"
PREFIX = "candidate-"
BASELINE = "baseline"
Text = Annotated[str, Field(min_length=1)]
RowId = Annotated[str, Field(pattern=ROW_ID)]
CellName = Annotated[str, Field(pattern=r"^(pp|tg)[1-9][0-9]*(@d[1-9][0-9]*)?$")]
State = Literal["cold", "warm", "cached"]


class _Data(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Finding(_Data):
    """Something known that a reader of the hypothesis should know too."""

    text: Text
    contradicts: bool = Field(default=False, description="the hypothesis as written does not hold")
    seen: Literal["measured", "source", "arithmetic"] = "source"


class Gate(_Data):
    """One check judged after measuring. Exactly one of ``cells``, ``suite`` and ``observation`` says what is looked at.

    ``cells``: speed (tokens per second by the server's own timings) or time to first token of these workload points.
    ``suite``: greedy output of candidate and baseline on a prompt suite. ``observation``: a named fact of the run.
    """

    cells: list[CellName] = Field(default_factory=list)
    state: State = "cold"
    metric: Literal["speed", "ttft"] = "speed"
    suite: Text | None = None
    observation: Text | None = None
    require: Literal["faster", "not_slower", "identical", "at_most", "at_least", "equals", "not_higher"]
    limit: int | float | bool | None = None
    why: str = ""

    @model_validator(mode="after")
    def _one_subject(self) -> Gate:
        subjects = [name for name in ("cells", "suite", "observation") if getattr(self, name)]
        if len(subjects) != 1:
            raise ValueError("needs exactly one of cells, suite, observation")
        allowed = {
            "cells": {"faster", "not_slower"},
            "suite": {"identical"},
            "observation": {"at_most", "at_least", "equals", "not_higher"},
        }[subjects[0]]
        if self.require not in allowed:
            raise ValueError(
                f"a gate on {subjects[0]} requires one of {', '.join(sorted(allowed))}, not {self.require}"
            )
        if self.state != "cached" and any("@" in cell for cell in self.cells):
            raise ValueError("a cell at a depth (tg100@d32768) follows what is there already: it needs state: cached")
        if (self.limit is not None) != (self.require in {"at_most", "at_least", "equals"}):
            raise ValueError("limit goes with at_most, at_least and equals, and only with them")
        return self


class Guards(_Data):
    """Limits watched all the time on the ranks, or checked before anything starts."""

    rank_available_mib: Annotated[int, Field(ge=1)] | None = None
    memlock_mib_per_connection: Annotated[int, Field(ge=1)] | None = None


class BuildChange(_Data):
    """What a row needs built: a build that the cluster names, and the source changes that make it."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    patch_sets: list[Text] = Field(default_factory=list)
    cmake: dict[Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")], Text] = Field(
        default_factory=dict, description="settings of the configure line that the patch sets add"
    )
    needs: Text = Field(description="what that build must contain, in words")


class Row(_Data):
    """One entry of the matrix: a difference from the baseline with its hypothesis, guards and gates."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, populate_by_name=False)

    id: RowId
    title: Text
    hypothesis: Text
    guard: Text
    rejection: Text
    kind: Literal["runtime", "build", "transport", "profile"]
    set_: Settings = Field(alias="set", default_factory=Settings)
    sweep: dict[str, list[Any]] = Field(default_factory=dict)
    against: Settings = Field(
        default_factory=Settings, description="what the baseline of this comparison has otherwise than production"
    )
    harness: Settings = Field(default_factory=Settings)
    build: BuildChange | None = None
    combines: list[Text] = Field(default_factory=list)
    mixes_with: list[RowId] = Field(default_factory=list)
    alone: Text | None = None
    guards: Guards = Field(default_factory=Guards)
    gates: dict[str, Gate] = Field(min_length=1)
    evidence: list[Text] = Field(default_factory=list)
    findings: list[Finding] = Field(default_factory=list)

    @field_validator("sweep")
    @classmethod
    def _check_sweep(cls, sweep: dict[str, list[Any]]) -> dict[str, list[Any]]:
        lengths = {len(values) for values in sweep.values()}
        if sweep and (len(lengths) != 1 or 0 in lengths):
            raise ValueError("every swept key needs the same number of values, at least one: they go side by side")
        return sweep

    @model_validator(mode="after")
    def _check(self) -> Row:
        if twice := sorted(self.set_.model_fields_set & self.sweep.keys()):
            raise ValueError(f"{', '.join(twice)}: both set and swept")
        if self.alone and self.mixes_with:
            raise ValueError("a row that stands alone cannot list rows in mixes_with")
        if self.kind == "build" and self.build is None:
            raise ValueError("a row of kind build needs the key build")
        return self

    def points(self) -> list[tuple[str, dict[str, Any]]]:
        """The row's arms as ``(value, settings)``; value is empty when the row is no sweep."""
        fixed = self.set_.values()
        if not self.sweep:
            return [("", fixed)]
        keys = list(self.sweep)
        return [
            (_point_name(values[0]), {**fixed, **dict(zip(keys, values, strict=True))})
            for values in zip(*self.sweep.values(), strict=True)
        ]


class Baseline(_Data):
    """The configuration that production runs, and how every arm is measured."""

    title: Text
    observed: dict[str, str | int | bool] = Field(default_factory=dict)
    settings: Settings
    harness: Settings = Field(default_factory=Settings)
    markers: dict[EnvironmentName, Text] = Field(
        default_factory=dict, description="an environment switch -> the string that a build must contain to obey it"
    )
    findings: list[Finding] = Field(default_factory=list)


def _point_name(value: Any) -> str:
    """What names an arm of a sweep: the value; of a map with one entry (a variable of the environment) that entry's."""
    if isinstance(value, dict) and len(value) == 1:
        (value,) = value.values()
    return render(value)
