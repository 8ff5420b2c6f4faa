"""Patch sets: what they change is what their manifests say, and a tree that differs is refused by file and hunk."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from k3deploy import cli, patches
from k3deploy.errors import InputError

NAMES = patches.list_names()
BEFORE = "".join(f"line {number}\n" for number in range(1, 41))
AFTER = BEFORE.replace("line 3\n", "line three\n").replace("line 30\n", "line thirty\n")
PATCH = """--- a/src/one.c
+++ b/src/one.c
@@ -2,3 +2,3 @@ first
 line 2
-line 3
+line three
 line 4
@@ -29,3 +29,3 @@ second
 line 29
-line 30
+line thirty
 line 31
--- /dev/null
+++ b/src/new.c
@@ -0,0 +1 @@
+new
"""


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def manifest(name: str = "small", files: str | None = None, **keys: str) -> str:
    files = files or (
        f'[{{path: src/one.c, before: "{sha(BEFORE)}", after: "{sha(AFTER)}"}},'
        f' {{path: src/new.c, before: null, after: "{sha(chr(10).join(["new", ""]))}"}}]'
    )
    head = {"what": "a change", "licence": "MIT", "backend": "any", **keys}
    lines = [f"name: {name}", "upstream: {project: llama.cpp, build: b1}", "patches: [0001-x.patch]", f"files: {files}"]
    return "\n".join([*lines, *(f"{key}: {value}" for key, value in head.items())]) + "\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    directory = tmp_path / "sets"
    (directory / "small").mkdir(parents=True)
    (directory / "small" / "manifest.yml").write_text(manifest())
    (directory / "small" / "0001-x.patch").write_text(PATCH)
    return directory


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tree" / "src").mkdir(parents=True)
    (tmp_path / "tree" / "src" / "one.c").write_text(BEFORE)
    return tmp_path / "tree"


def states(root: Path, tree: Path) -> dict[str, tuple[str, list[str]]]:
    (one,) = patches.select(["small"], root)
    return {entry.path: (entry.state, entry.details) for entry in patches.check(one, tree)}


def test_a_set_changes_exactly_what_its_manifest_says(root: Path, tree: Path) -> None:
    other = tree / "src" / "other.c"
    other.write_text("untouched\n")
    (tree / "src" / "one.c").chmod(0o755)
    assert states(root, tree) == {"src/one.c": ("ready", []), "src/new.c": ("ready", [])}
    patches.apply(patches.select(["small"], root), tree)
    assert (tree / "src" / "one.c").read_text() == AFTER
    assert (tree / "src" / "new.c").read_text() == "new\n"
    assert other.read_text() == "untouched\n"
    assert (tree / "src" / "one.c").stat().st_mode & 0o777 == 0o755
    assert sorted(path.name for path in (tree / "src").iterdir()) == ["new.c", "one.c", "other.c"]
    assert {state for state, _ in states(root, tree).values()} == {"applied"}


def test_a_tree_whose_file_differs_is_refused_with_file_and_hunk_and_left_alone(root: Path, tree: Path) -> None:
    wrong = BEFORE.replace("line 30\n", "something else\n")
    (tree / "src" / "one.c").write_text(wrong)
    state, details = states(root, tree)["src/one.c"]
    assert state == "refused"
    assert details == ["hunk 2 (@@ -29,3 +29,3 @@)"]
    with pytest.raises(
        patches.PatchSetError, match=r"src/one.c: hunk 2 \(@@ -29,3 \+29,3 @@\) of small does not apply"
    ):
        patches.apply(patches.select(["small"], root), tree)
    assert (tree / "src" / "one.c").read_text() == wrong
    assert not (tree / "src" / "new.c").exists()


def test_surroundings_that_differ_are_not_guessed_over(root: Path, tree: Path) -> None:
    (tree / "src" / "one.c").write_text(BEFORE.replace("line 29\n", "line 29 changed\n"))
    assert states(root, tree)["src/one.c"] == ("refused", ["hunk 2 (@@ -29,3 +29,3 @@)"])


def test_a_newer_file_in_which_every_hunk_still_applies_is_told_apart_but_not_changed(root: Path, tree: Path) -> None:
    newer = "a new first line\n" + BEFORE
    (tree / "src" / "one.c").write_text(newer)
    assert states(root, tree)["src/one.c"] == ("moved", [])
    with pytest.raises(patches.PatchSetError, match=r"src/one.c: not the file that small was made for"):
        patches.apply(patches.select(["small"], root), tree)
    assert (tree / "src" / "one.c").read_text() == newer


def test_a_tree_without_the_file_is_refused_with_all_its_hunks(root: Path, tree: Path) -> None:
    (tree / "src" / "one.c").unlink()
    assert states(root, tree)["src/one.c"] == (
        "refused",
        ["hunk 1 (@@ -2,3 +2,3 @@)", "hunk 2 (@@ -29,3 +29,3 @@)"],
    )


def test_a_set_is_not_applied_twice(root: Path, tree: Path) -> None:
    chosen = patches.select(["small"], root)
    patches.apply(chosen, tree)
    with pytest.raises(patches.PatchSetError, match="small is already in this tree"):
        patches.apply(chosen, tree)


def test_a_patch_that_does_not_do_what_the_manifest_says_changes_nothing(root: Path, tree: Path) -> None:
    text = (root / "small" / "0001-x.patch").read_text()
    (root / "small" / "0001-x.patch").write_text(text.replace("+line thirty", "+line 3O"))
    with pytest.raises(patches.PatchSetError, match=r"src/one.c: small leaves sha256 .* its manifest says"):
        patches.apply(patches.select(["small"], root), tree)
    assert (tree / "src" / "one.c").read_text() == BEFORE


def test_a_file_shared_by_hard_links_is_changed_in_the_copy_alone(root: Path, tree: Path, tmp_path: Path) -> None:
    os.link(tree / "src" / "one.c", tmp_path / "original.c")
    patches.apply(patches.select(["small"], root), tree)
    assert (tmp_path / "original.c").read_text() == BEFORE


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (manifest(name="other"), "is not that of its directory"),
        (manifest(files=f'[{{path: src/one.c, before: null, after: "{"a" * 64}"}}]'), "src/new.c, which is not listed"),
        (manifest().replace("src/new.c", "src/never.c"), "src/never.c is listed, but no patch changes it"),
        (manifest().replace("src/new.c", "../new.c"), "src/one.c|pattern"),
        (manifest().replace("0001-x.patch", "0002-y.patch"), "0002-y.patch cannot be read"),
        (manifest(backend="vulkan"), "backend"),
        (manifest(surprise="x"), "surprise"),
    ],
)
def test_a_wrong_manifest_is_told_with_its_place(root: Path, text: str, said: str) -> None:
    (root / "small" / "manifest.yml").write_text(text)
    with pytest.raises(InputError, match=said) as caught:
        patches.load(root / "small")
    assert all(problem.line for problem in caught.value.problems)


def test_an_unknown_name_is_refused_with_the_nearest(root: Path) -> None:
    with pytest.raises(patches.PatchSetError, match="no patch set 'smal'; did you mean 'small'"):
        patches.select(["smal"], root)


def test_two_sets_that_change_one_file_from_the_same_state_do_not_go_together(root: Path) -> None:
    shutil.copytree(root / "small", root / "twin")
    (root / "twin" / "manifest.yml").write_text(manifest(name="twin"))
    with pytest.raises(patches.PatchSetError, match=r"twin does not go with small: both change src/one.c"):
        patches.select(["small", "twin"], root)


def test_the_command_tells_a_tree_that_fits_from_one_that_does_not(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.run(["patch", "check", str(tmp_path), "u8-rpc-timing"]) == 3
    assert "u8-rpc-timing: does not fit" in capsys.readouterr().out
    assert cli.run(["patch", "list", "--json"]) == 0
    assert {entry["name"] for entry in json.loads(capsys.readouterr().out)} == set(NAMES)


# -- the builder ----------------------------------------------------------------------------------------------------


def build_program(monkeypatch: pytest.MonkeyPatch) -> Any:
    files = patches.find_directory().parent
    monkeypatch.syspath_prepend(str(files))
    spec = importlib.util.spec_from_file_location("k3_build", files / "k3_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_builder_patches_a_copy_and_ends_with_file_and_hunk_when_the_tree_differs(
    root: Path, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = build_program(monkeypatch)
    (tree / "CMakeLists.txt").write_text("")
    data = [one.as_data() for one in patches.select(["small"], root)]
    spec = {"root": str(tmp_path), "source": {"kind": "tree", "path": str(tree)}, "patches": data}
    build = program.Build(spec, None)
    (tmp_path / "work").mkdir()
    copy = build.fetch(tmp_path / "work")
    build.patch(copy)
    assert (copy / "src" / "one.c").read_text() == AFTER
    assert (tree / "src" / "one.c").read_text() == BEFORE
    with pytest.raises(program.BuildError, match=r"small does not fit .*src/one.c: small is already in this tree"):
        build.patch(copy)


def test_the_builder_demands_the_markers_of_the_sets_and_of_the_options_that_are_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = build_program(monkeypatch)
    sets = [one.as_data() for one in patches.select(["u5-rdma-chunk", "u8-rpc-timing"])]
    spec: dict[str, Any] = {"root": "/", "markers": ["OWN"], "patches": sets, "cmake": {}}
    assert program.Build(spec, None).markers() == ["OWN", "K3_RPC_TIMING"]
    spec["cmake"] = {"GGML_RPC_RDMA_RX_DEPTH": "63"}
    assert program.Build(spec, None).markers() == ["OWN", "K3_RDMA_RING chunk=", "K3_RPC_TIMING"]


def test_the_roles_filter_gives_what_the_package_reads() -> None:
    pytest.importorskip("ansible")
    path = patches.find_directory().parents[3] / "plugins" / "filter" / "patch_sets.py"
    spec = importlib.util.spec_from_file_location("patch_sets_filter", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for given, read in zip(
        module.patch_sets(NAMES, patches.find_directory()), patches.available().values(), strict=True
    ):
        wanted = read.as_data()
        assert {key: given[key] for key in ("name", "files", "patches")} == {
            key: wanted[key] for key in ("name", "files", "patches")
        }
        assert given.get("markers", []) == wanted["markers"]
    with pytest.raises(Exception, match="no patch set 'nothing'"):
        module.patch_sets(["nothing"], patches.find_directory())
