"""Reading a matrix, and composing its rows into candidates: every mistake at once, with file and line."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from k3deploy.errors import InputError, K3Error, Problem
from k3deploy.matrix.schema import BASELINE, PREFIX, Baseline, BuildChange, Finding, Gate, Guards, Row
from k3deploy.settings import Settings, merge, render
from k3deploy.yamlfile import Document, load, parse, problems, suggest


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
            known = [f"{PREFIX}{row_id}" for row_id in self.rows]
            hint = suggest(PREFIX + candidate.removeprefix(PREFIX), known) or f": say {PREFIX}<row>"
            raise CandidateError(f"{candidate!r} is no candidate{hint}", remedy=f"Known: {', '.join(known)}")
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
