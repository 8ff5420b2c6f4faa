"""Patch sets: named changes to the upstream source, each with a manifest that says what it is for and proves it.

They lie in the collection's build role, which applies them on the builder; the code that does so is used here too, so
that ``k3deploy patch check`` and a build cannot disagree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from k3deploy import yamlfile
from k3deploy.errors import InputError, K3Error

BUILD_FILES = Path("collections/ansible_collections/k3/deploy/roles/build/files")
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
RelativePath = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*$")]


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PatchSetError(K3Error):
    """A patch set is unknown, does not go with another, or does not fit a tree."""

    exit_code = InputError.exit_code


class Upstream(_Data):
    """The source that a set was made for."""

    project: str
    build: str


class ChangedFile(_Data):
    """One file that a set changes; ``before`` is null for a file that it adds."""

    path: RelativePath
    before: Sha256 | None
    after: Sha256


class Option(_Data):
    """A switch that a set adds. ``marker``: what the built libraries contain when a build sets it."""

    name: Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")]
    kind: Literal["cmake", "environment"]
    default: str
    what: str
    marker: str | None = None


class Cases(_Data):
    """Cases of test-backend-ops: an operator, and a regular expression over a case's description."""

    op: Annotated[str, Field(pattern=r"^[A-Z0-9_]+$")]
    params: str


class Verify(_Data):
    """How a set's kernels are reached with test-backend-ops: cases with a verdict, and cases that are timed."""

    test: list[Cases] = Field(min_length=1)
    perf: list[Cases] = Field(min_length=1)


class Manifest(_Data):
    """``manifest.yml`` of a patch set. ``patches`` are applied in the order given."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")]
    row: str | None = Field(default=None, description="the row of the matrix that it is for")
    what: str
    upstream: Upstream
    licence: str
    backend: Literal["any", "cuda"] = Field(description="cuda: it has an effect in CUDA builds only")
    patches: list[Annotated[str, Field(pattern=r"^\d{4}-[A-Za-z0-9._-]+\.patch$")]] = Field(min_length=1)
    files: list[ChangedFile] = Field(min_length=1)
    options: list[Option] = Field(default_factory=list)
    markers: list[str] = Field(default_factory=list, description="what the built libraries always contain")
    verify: Verify | None = Field(default=None, description="what `k3deploy verify` runs")


class PatchSet(_Data):
    """A manifest with the text of its patches."""

    manifest: Manifest
    directory: Path
    texts: dict[str, str]

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def sha256(self) -> str:
        """Over what changes the source: the patches in their order, by content."""
        digest = hashlib.sha256()
        for name, text in self.texts.items():
            digest.update(f"{name}\0{len(text.encode())}\0{text}".encode())
        return digest.hexdigest()

    def as_data(self) -> dict[str, Any]:
        """What the builder is given."""
        patches = [{"name": name, "text": text} for name, text in self.texts.items()]
        return self.manifest.model_dump(mode="json") | {"patches": patches}


def find_directory() -> Path:
    """The build role's ``files/patches``: in the checkout of this package, or above the working directory."""
    for start in (Path(__file__).resolve().parent, Path.cwd()):
        for folder in (start, *start.parents):
            if (folder / BUILD_FILES / "patches").is_dir():
                return folder / BUILD_FILES / "patches"
    raise K3Error(
        f"{BUILD_FILES}/patches was not found above {Path.cwd()}",
        remedy="run k3deploy inside a checkout of the project",
    )


def load(directory: Path) -> PatchSet:
    """Read one set. Raises InputError with every problem: the manifest's, missing files, paths that do not agree."""
    path = directory / "manifest.yml"
    document = yamlfile.load(path)
    manifest = yamlfile.parse(Manifest, document)
    found = []
    if manifest.name != directory.name:
        found.append(document.problem(["name"], f"name {manifest.name!r} is not that of its directory"))
    texts = {}
    for number, name in enumerate(manifest.patches):
        try:
            texts[name] = (directory / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            found.append(document.problem(["patches", number], f"{name} cannot be read: {error}"))
    if not found:
        changed = {path for text in texts.values() for path in _engine(directory).hunks(text)}
        listed = {item.path for item in manifest.files}
        for missing in sorted(changed - listed):
            found.append(document.problem(["files"], f"the patches change {missing}, which is not listed"))
        for extra in sorted(listed - changed):
            found.append(document.problem(["files"], f"{extra} is listed, but no patch changes it"))
    if found:
        raise InputError(found)
    return PatchSet(manifest=manifest, directory=directory, texts=texts)


def list_names(directory: Path | None = None) -> list[str]:
    """The names of all patch sets, sorted."""
    return sorted(path.parent.name for path in (directory or find_directory()).glob("*/manifest.yml"))


def available(directory: Path | None = None) -> dict[str, PatchSet]:
    """Every patch set by name."""
    root = directory or find_directory()
    return {name: load(root / name) for name in list_names(root)}


def select(names: Sequence[str], directory: Path | None = None) -> list[PatchSet]:
    """The named sets in the order given, which is the order of application.

    Raises PatchSetError for an unknown name, and where a set expects a file otherwise than an earlier set leaves it.
    """
    if not names:
        return []
    root = directory or find_directory()
    known = list_names(root)
    for name in names:
        if name not in known:
            hint = yamlfile.suggest(name, known)
            raise PatchSetError(f"no patch set {name!r}{hint} (there is: {', '.join(known) or 'none'})")
    chosen = [load(root / name) for name in names]
    left: dict[str, tuple[str, str]] = {}
    for one in chosen:
        for item in one.manifest.files:
            if item.path in left and left[item.path][1] != item.before:
                raise PatchSetError(
                    f"{one.name} does not go with {left[item.path][0]}: both change {item.path}",
                    remedy="build them apart, one row each",
                )
            left[item.path] = (one.name, item.after)
    return chosen


def hashes(names: Sequence[str], directory: Path | None = None) -> list[list[str]]:
    """``[[name, sha256 of the content]]`` in the order of application: what a build key is made from."""
    return [[one.name, one.sha256] for one in select(names, directory)]


class FileState(_Data):
    """One file of a set in a tree: see ``k3_patch.states``."""

    path: str
    state: Literal["ready", "applied", "moved", "refused"]
    details: list[str]


def check(one: PatchSet, tree: Path) -> list[FileState]:
    """How the set's files stand in ``tree``, which is not changed."""
    engine = _engine(one.directory)
    return [FileState.model_validate(entry) for entry in _ask(engine, "states", one.as_data(), _tree(tree))]


def apply(sets: Sequence[PatchSet], tree: Path) -> None:
    """Apply the sets in order; each wholly or not at all. Raises PatchSetError naming each file and hunk."""
    for one in sets:
        _ask(_engine(one.directory), "apply", one.as_data(), _tree(tree))


def _tree(tree: Path) -> Path:
    if not tree.is_dir():
        raise PatchSetError(f"{tree} is not a directory", remedy="give the directory of an unpacked source")
    return tree


def _ask(engine: ModuleType, function: str, data: Mapping[str, Any], tree: Path) -> Any:
    try:
        return getattr(engine, function)(data, tree)
    except engine.PatchError as error:
        raise PatchSetError("\n".join(error.lines)) from None


def _engine(directory: Path) -> ModuleType:
    """``k3_patch.py`` of the build role: a file that travels to the builder, not a module of this package."""
    import importlib.util

    place = next((folder for folder in directory.resolve().parents if (folder / "k3_patch.py").is_file()), None)
    path = (place or find_directory().parent) / "k3_patch.py"
    spec = importlib.util.spec_from_file_location("k3_patch", path)
    if spec is None or spec.loader is None:
        raise K3Error(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
