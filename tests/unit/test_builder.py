"""The build program on the builder, with sources that nobody would write on purpose."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

FILES = Path(__file__).parents[2] / "collections/ansible_collections/k3/deploy/roles/build/files"
sys.path.insert(0, str(Path(__file__).parents[2] / "collections"))

from ansible_collections.k3.deploy.plugins.modules import release  # noqa: E402


@pytest.fixture(scope="module")
def build() -> ModuleType:
    with pytest.MonkeyPatch.context() as path:
        path.syspath_prepend(str(FILES))
        spec = importlib.util.spec_from_file_location("k3_build", FILES / "k3_build.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def test_a_tree_of_odd_names_has_an_identity_that_every_name_is_part_of(build: ModuleType, tmp_path: Path) -> None:
    seen = set()
    for name in (b"plain", b"two\nlines", b"\xff\xfe", b"-x", b"$(id)", "gr\u00fcn".encode(), b"a b"):
        (tmp_path / os.fsdecode(name)).write_text("x")
        seen.add(build.hash_tree(tmp_path))
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "up").symlink_to("..")
    os.mkfifo(tmp_path / "pipe")
    assert len(seen) == 7 and build.hash_tree(tmp_path) in seen


def test_what_is_copied_of_a_tree_to_be_patched_is_what_its_identity_covers(build: ModuleType, tmp_path: Path) -> None:
    tree, copy = tmp_path / "tree", tmp_path / "copy"
    source = ["CMakeLists.txt", "common/build-info.cpp.in", "build.sh", "src/builder.cpp", "cmake/build"]
    product = ["build/CMakeCache.txt", "build-cuda/bin/llama-server", "tools/build/x.o", ".git/HEAD"]
    for name in source:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(name)
    before = build.hash_tree(tree)
    for name in product:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(name)
    shutil.copytree(tree, copy, ignore=build.products)
    assert sorted(str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()) == sorted(source)
    assert build.hash_tree(tree) == build.hash_tree(copy) == before


@pytest.mark.parametrize("damage", ["garbage", "cut off", "absent", "directory"])
def test_a_source_that_cannot_be_unpacked_is_an_error_of_the_build(tmp_path: Path, damage: str) -> None:
    archive = tmp_path / "source.tar.gz"
    if damage == "garbage":
        archive.write_bytes(b"no archive")
    elif damage == "cut off":
        subprocess.run(["tar", "--create", "--gzip", "--file", archive, "--directory", FILES, "."], check=True)
        archive.write_bytes(archive.read_bytes()[:200])
    elif damage == "directory":
        archive.mkdir()
    known = subprocess.run(["sha256sum", archive], capture_output=True, text=True, check=False).stdout.split()
    spec = {
        **{"root": str(tmp_path), "key": "ab" * 8, "backend": "cpu", "targets": ["llama-server"]},
        "cmake": {"CMAKE_C_COMPILER": "/usr/bin/env", "CMAKE_CXX_COMPILER": "/usr/bin/env"},
        "source": {"kind": "archive", "path": str(archive), "sha256": (known or ["0"])[0]},
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    (tmp_path / "builds").mkdir()
    arguments = [f"--{name}={tmp_path / name}.json" for name in ("spec", "result", "progress")]
    done = subprocess.run(
        [sys.executable, FILES / "k3_build.py", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert json.loads((tmp_path / "result.json").read_text())["error"]


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "../x", "lib/../../x", "lib//x", "lib/a\nb", "-x", "lib/-x", "lib/\x1b[2J"]
)
def test_a_name_that_is_more_than_a_file_of_the_release_is_refused(name: str) -> None:
    assert not release.safe(name)


def test_names_of_real_files_are_taken() -> None:
    assert all(release.safe(name) for name in ("bin/llama-server", "lib/libggml-rpc.so.0", "lib/gr\u00fcn b.so"))


def test_a_program_that_cannot_run_on_the_rank_is_named_before_a_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    own = Path(sys.executable).read_bytes()[:64]
    contents = {"script": b"#!/bin/sh\n", "own": own, "foreign": own[:18] + b"\xf3\x00" + own[20:], "lame": own}
    for name, content in contents.items():
        (tmp_path / "bin" / name).write_bytes(content)

    def ldd(argv: list[str], environment: dict[str, str]) -> tuple[int, str, str]:
        assert environment == {"LD_LIBRARY_PATH": f"{tmp_path}/lib"}
        lost = "\tlibgone.so.1 => not found\n" * 2 if argv[1].endswith("lame") else ""
        return 0, "\tlibc.so.6 => /lib/libc.so.6 (0x7f)\n" + lost, ""

    monkeypatch.setattr(release.host, "run", ldd)
    foreign, lame = release.unfit(str(tmp_path), {f"bin/{name}": {} for name in contents})
    assert foreign.startswith("bin/foreign is for another processor (ELF machine 243, this rank's is ")
    assert lame == "bin/lame needs libgone.so.1, which this rank does not have"


def test_an_install_that_cannot_even_begin_says_so_and_leaves_no_archive(tmp_path: Path) -> None:
    class Failed(Exception):
        pass

    def fail_json(msg: str) -> None:
        raise Failed(msg)

    module = SimpleNamespace(params={"archive": str(tmp_path / "x.tar")}, fail_json=fail_json)

    (tmp_path / "x.tar").touch()
    (tmp_path / "releases").touch()  # no directory can be made in it, as on a file system that is read-only
    with pytest.raises(Failed, match=r"release a-1 was not installed: \[Errno"):
        release.install(module, str(tmp_path / "releases"), {"build_id": "a-1", "files": {}}, {})
    assert not (tmp_path / "x.tar").exists()
