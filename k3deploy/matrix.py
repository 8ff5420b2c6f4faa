"""What to try, as data: the baseline, the rows, and how rows are composed into arms.

``Matrix.load(directory)`` reads ``baseline.yml`` and one file per row; every mistake in any of them is reported
at once with file and line. ``Matrix.resolve("candidate-U2+U6")`` turns a candidate's name into its arms, or
says why that cannot be.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from k3deploy.errors import InputError, K3Error, Problem
from k3deploy.settings import EnvironmentName, Settings, merge, render
from k3deploy.yamlfile import Document, load, parse, problems, suggest

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


@dataclass(frozen=True, slots=True)
class Arm:
    """One concrete difference from the baseline."""

    name: str
    settings: dict[str, Any]
    value: str = ""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate's name made concrete on the matrix, before any cluster is looked at."""

    name: str
    rows: tuple[Row, ...]
    arms: tuple[Arm, ...]
    gates: dict[str, Gate]
    guards: Guards
    harness: dict[str, Any]
    build: BuildChange | None
    against: dict[str, Any] = field(default_factory=dict)
    findings: tuple[tuple[str, Finding], ...] = field(default=())


class CandidateError(K3Error):
    """A candidate that does not exist or cannot be composed."""

    exit_code = InputError.exit_code


class Matrix:
    """The baseline and the rows of one directory."""

    def __init__(
        self, directory: Path, baseline: Baseline, rows: dict[str, Row], documents: dict[str, Document]
    ) -> None:
        self.directory = directory
        self.baseline = baseline
        self.rows = rows
        self._documents = documents

    @classmethod
    def load(cls, directory: Path) -> Matrix:
        """Read every ``*.yml`` of ``directory``; raises ``InputError`` with the problems of all files."""
        found: list[Problem] = []
        baseline: Baseline | None = None
        rows: dict[str, Row] = {}
        documents: dict[str, Document] = {}
        files = sorted([*directory.glob("*.yml"), *directory.glob("*.yaml")], key=_natural)
        if not directory.is_dir():
            raise InputError([Problem(directory, 0, "is not a directory (of baseline.yml and a file per row)")])
        if directory / "baseline.yml" not in files:
            found.append(Problem(directory, 0, "has no baseline.yml: every row is a difference from it"))
        for file in files:
            try:
                document = load(file)
                if file.stem == BASELINE:
                    baseline = parse(Baseline, document)
                    continue
                row = parse(Row, document)
            except InputError as error:
                found += error.problems
                continue
            found += _sweep_problems(row, document)
            if row.id in rows:
                first = documents[row.id].path.name
                found.append(document.problem(["id"], f"duplicate row id {row.id!r}: also in {first}"))
                continue
            if row.id.lower() == BASELINE:
                found.append(document.problem(["id"], "'baseline' is the baseline's own name"))
                continue
            rows[row.id] = row
            documents[row.id] = document
        if baseline is not None:
            matrix = cls(directory, baseline, rows, documents)
            found += matrix._relations(complete=not found)
            if not found:
                return matrix
        raise InputError(found)

    def explain(self, row_id: str) -> str:
        """A row as text: what it tries, what guards it, and what is known that speaks against it."""
        row = self.rows[row_id]
        lines = [f"{row.id}  {row.title}  ({row.kind})", "", f"  Hypothesis: {row.hypothesis}"]
        lines += [f"  Guard:      {row.guard}", f"  Rejected:   {row.rejection}", ""]
        lines += [f"  {arm.name}: {_settings_text(arm.settings)}" for arm in self.resolve(f"{PREFIX}{row_id}").arms]
        if row.against.values():
            lines.append(f"  Compared with the baseline with {_settings_text(row.against.values())}")
        if row.alone:
            lines.append(f"  Stands alone: {row.alone}")
        elif row.mixes_with:
            lines.append(f"  Mixes with: {', '.join(row.mixes_with)}")
        if row.findings:
            lines += ["", "  Known:"]
            lines += [
                f"  - {'against the hypothesis: ' if note.contradicts else ''}{note.text}" for note in row.findings
            ]
        return "\n".join(lines)

    def resolve(self, candidate: str) -> Candidate:
        """``candidate-U2``, ``candidate-U2@3072``, ``candidate-U2+U6``, ``candidate-next`` -> arms.

        Raises ``CandidateError``: unknown row or value, rows that do not mix, rows that set one key differently.
        """
        if not candidate.startswith(PREFIX) or candidate == PREFIX:
            known = ", ".join(f"{PREFIX}{row_id}" for row_id in self.rows)
            raise CandidateError(f"{candidate!r} is no candidate: say {PREFIX}<row>", remedy=f"Known: {known}")
        parts = [self._part(text) for text in candidate.removeprefix(PREFIX).split("+")]
        rows = [row for row, _ in parts]
        ids = [row.id for row in rows]
        if len(set(ids)) != len(ids):
            twice = next(row_id for row_id in ids if ids.count(row_id) > 1)
            raise CandidateError(f"{candidate}: {twice} is named twice")
        self._check_mix(rows)
        arms = [
            self._combine(choice) for choice in itertools.product(*[self._arms_of(row, value) for row, value in parts])
        ]
        return Candidate(
            name=candidate,
            rows=tuple(rows),
            arms=tuple(arms),
            gates=_merged_gates(rows),
            guards=_strictest(rows),
            harness=merge(*(row.harness.values() for row in rows)),
            build=self._build_of(rows),
            against=merge(*(row.against.values() for row in rows)),
            findings=tuple((row.id, note) for row in self._with_parts(rows) for note in row.findings),
        )

    def _part(self, text: str) -> tuple[Row, str]:
        row_id, at, value = text.partition("@")
        row = self.rows.get(row_id)
        if row is None:
            known = ", ".join(self.rows)
            raise CandidateError(f"no row {row_id!r} in {self.directory}{suggest(row_id, self.rows)} (rows: {known})")
        values = [point for point, _ in row.points()]
        if at and value not in values:
            valid = ", ".join(filter(None, values)) or "none: the row is no sweep"
            raise CandidateError(f"row {row_id} has no value {value!r} (values: {valid})")
        return row, value

    def _arms_of(self, row: Row, value: str) -> list[Arm]:
        """A row's arms; those that ``combines`` names are filled in below the row's own settings."""
        inherited: list[Arm] = []
        if row.combines:
            parts = [self._part(text) for text in row.combines]
            choices = itertools.product(*[self._arms_of(part, chosen) for part, chosen in parts])
            inherited = [self._combine(choice) for choice in choices]
        arms = []
        for point, settings in row.points():
            if value and point != value:
                continue
            below = inherited[0].settings if inherited else {}
            arms.append(Arm(f"{row.id}@{point}" if point else row.id, {**below, **settings}, point))
        return arms

    def _combine(self, arms: Sequence[Arm]) -> Arm:
        if len(arms) == 1:
            return arms[0]
        settings: dict[str, Any] = {}
        owner: dict[str, str] = {}
        for arm in arms:
            for key, value in arm.settings.items():
                flat = (
                    {f"environment.{name}": item for name, item in value.items()}
                    if key == "environment" and value
                    else {}
                )
                for name, item in (flat or {key: value}).items():
                    previous = owner.get(name)
                    if previous is not None and _lookup(settings, name) != item:
                        raise CandidateError(
                            f"impossible composition: {previous} sets {name} to {render(_lookup(settings, name))}, "
                            f"{arm.name} sets it to {render(item)}",
                            remedy="Try the rows one at a time.",
                        )
                    owner[name] = arm.name
                settings = {**merge(settings, {key: value}), **({key: None} if value is None else {})}
        return Arm("+".join(arm.name for arm in arms), settings)

    def _check_mix(self, rows: Sequence[Row]) -> None:
        if len(rows) < 2:
            return
        for row in rows:
            if row.alone:
                others = "+".join(other.id for other in rows if other is not row)
                raise CandidateError(
                    f"{row.id} is not mixed with {others}: {row.alone}",
                    remedy=f"Measure it by itself: {PREFIX}{row.id}",
                )
        for one, other in itertools.combinations(rows, 2):
            if other.id not in one.mixes_with and one.id not in other.mixes_with:
                raise CandidateError(
                    f"{one.id} does not mix with {other.id} (it mixes with: {', '.join(one.mixes_with) or 'nothing'})",
                    remedy="A row says in mixes_with what it may be composed with.",
                )

    def _with_parts(self, rows: Sequence[Row]) -> list[Row]:
        """The rows and, after each, those that it combines."""
        out: list[Row] = []
        for row in rows:
            out.append(row)
            out += self._with_parts([self._part(text)[0] for text in row.combines])
        return out

    def _build_of(self, rows: Sequence[Row]) -> BuildChange | None:
        builds = [(row.id, row.build) for row in self._with_parts(rows) if row.build is not None]
        if len({build.name for _, build in builds}) > 1:
            named = ", ".join(f"{row_id} needs {build.name}" for row_id, build in builds)
            raise CandidateError(f"impossible composition: one arm has one build, but {named}")
        return builds[0][1] if builds else None

    def _relations(self, *, complete: bool) -> list[Problem]:
        """References between rows. ``complete`` is false when some file could not be read: its rows are unknown."""
        found: list[Problem] = []
        for row_id, row in self.rows.items():
            document = self._documents[row_id]
            for index, other in enumerate(row.mixes_with):
                keys: list[str | int] = ["mixes_with", index]
                if other == row_id:
                    found.append(document.problem(keys, f"{row_id} lists itself in mixes_with"))
                elif other not in self.rows:
                    if complete:
                        found.append(document.problem(keys, f"mixes_with: no row {other!r}{suggest(other, self.rows)}"))
                elif self.rows[other].alone:
                    found.append(document.problem(keys, f"mixes_with: {other} stands alone: {self.rows[other].alone}"))
            found += self._combines_problems(row, document) if complete else []
        return found

    def _combines_problems(self, row: Row, document: Document) -> list[Problem]:
        if not row.combines:
            return []
        if row.id in {part.partition("@")[0] for part in row.combines}:
            return [document.problem(["combines"], f"{row.id} combines itself")]
        try:
            parts = [self._part(text) for text in row.combines]
            if nested := [part.id for part, _ in parts if part.combines]:
                return [document.problem(["combines"], f"{nested[0]} combines rows itself: name those rows")]
            self._check_mix([part for part, _ in parts])
            arms = [self._arms_of(part, value) for part, value in parts]
            for (part, _), choices in zip(parts, arms, strict=True):
                if len(choices) != 1:
                    values = ", ".join(f"{part.id}@{arm.value}" for arm in choices)
                    return [document.problem(["combines"], f"{part.id} is a sweep: choose one of {values}")]
            below = self._combine([choices[0] for choices in arms])
        except CandidateError as error:
            return [document.problem(["combines"], str(error))]
        return [
            document.problem(
                ["set", key], f"{key}: {render(value)} here, but the combined rows set {render(below.settings[key])}"
            )
            for key, value in row.set_.values().items()
            if key in below.settings and below.settings[key] != value
        ]


def _lookup(settings: dict[str, Any], name: str) -> Any:
    if name.startswith("environment."):
        return (settings.get("environment") or {}).get(name.removeprefix("environment."))
    return settings.get(name)


def _point_name(value: Any) -> str:
    """What names an arm of a sweep: the value; of a map with one entry (a variable of the environment) that entry's."""
    if isinstance(value, dict) and len(value) == 1:
        (value,) = value.values()
    return render(value)


def _sweep_problems(row: Row, document: Document) -> list[Problem]:
    """Each swept value must be a valid setting; names are checked like those in ``set``."""
    found: list[Problem] = []
    for key, values in row.sweep.items():
        if key not in Settings.model_fields:
            message = f"sweep: unknown key {key!r}{suggest(key, Settings.model_fields)}"
            found.append(document.problem(["sweep", key], message))
            continue
        for index, value in enumerate(values):
            try:
                Settings.model_validate({key: value})
            except ValidationError as error:
                details = problems(Settings, error, document.problem)
                found += [document.problem(["sweep", key, index], f"sweep: {detail.message}") for detail in details]
    if not found and row.sweep:
        names = [point for point, _ in row.points()]
        if len(set(names)) != len(names):
            found.append(document.problem(["sweep"], "the first swept key has a value twice: values name the arms"))
    return found


def _merged_gates(rows: Sequence[Row]) -> dict[str, Gate]:
    """The union of the rows' gates; the same name with different contents is kept apart by the row's id."""
    gates: dict[str, Gate] = {}
    for row in rows:
        for name, gate in row.gates.items():
            if gates.get(name, gate) == gate:
                gates[name] = gate
            else:
                gates[f"{name} ({row.id})"] = gate
    return gates


def _strictest(rows: Sequence[Row]) -> Guards:
    floors = [row.guards.rank_available_mib for row in rows if row.guards.rank_available_mib is not None]
    locks = [row.guards.memlock_mib_per_connection for row in rows if row.guards.memlock_mib_per_connection is not None]
    return Guards(rank_available_mib=max(floors, default=None), memlock_mib_per_connection=min(locks, default=None))


def _settings_text(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key}={render(value)}" for key, value in settings.items()) or "no setting changes"


def _natural(path: Path) -> list[tuple[int, int | str]]:
    """U2 before U10."""
    parts: list[tuple[int, int | str]] = []
    for text in re.split(r"(\d+)", path.stem):
        parts.append((0, int(text)) if text.isdigit() else (1, text))
    return parts
