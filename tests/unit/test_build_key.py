"""The build key: the same inputs are the same build, and anything that is compiled changes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3deploy.build_key import build_key
from k3deploy.inventory import BuildSpec

SPEC: dict[str, Any] = {
    "source": {"kind": "archive", "path": "/srv/src/a.tar.gz", "sha256": "a" * 64, "subdir": "llama.cpp"},
    "patch_sets": ["one", "two"],
    "backend": "cuda",
    "cmake": {"GGML_RPC": "ON", "GGML_CUDA": "ON"},
    "cuda": {"nvcc": "/usr/local/cuda-13.0/bin/nvcc", "architectures": "121a-real"},
    "targets": ["ggml-rpc-server", "llama-server"],
}


PATCH = """--- a/{name}.c
+++ b/{name}.c
@@ -1 +1 @@
-one
+{text}
"""


def write_set(root: Path, name: str, text: str = "other") -> None:
    """A patch set whose only change makes one file say ``text``."""
    directory = root / name
    directory.mkdir(exist_ok=True)
    (directory / "0001-change.patch").write_text(PATCH.format(name=name, text=text))
    (directory / "manifest.yml").write_text(
        f"""
name: {name}
what: a change
upstream: {{project: llama.cpp, build: b1}}
licence: MIT
backend: any
patches: [0001-change.patch]
files: [{{path: {name}.c, before: "{"a" * 64}", after: "{"b" * 64}"}}]
"""
    )


@pytest.fixture(autouse=True, scope="module")
def patch_sets(tmp_path_factory: pytest.TempPathFactory) -> None:
    global PATCH_SETS
    PATCH_SETS = tmp_path_factory.mktemp("patches")
    for name in ("one", "two"):
        write_set(PATCH_SETS, name)


PATCH_SETS = Path()


def key(**changes: object) -> str:
    return build_key(BuildSpec.model_validate({**SPEC, **changes}), PATCH_SETS)


def test_the_content_of_a_patch_set_changes_the_key_and_its_description_does_not(tmp_path: Path) -> None:
    spec = BuildSpec.model_validate({**SPEC, "patch_sets": ["one"]})
    write_set(tmp_path, "one")
    before = build_key(spec, tmp_path)
    manifest = tmp_path / "one" / "manifest.yml"
    manifest.write_text(manifest.read_text().replace("a change", "the same change, said better"))
    assert build_key(spec, tmp_path) == before
    write_set(tmp_path, "one", "something else")
    assert build_key(spec, tmp_path) != before


def test_a_key_is_sixteen_hexadecimal_digits() -> None:
    assert len(key()) == 16
    int(key(), 16)


@pytest.mark.parametrize(
    "changes",
    [
        {"jobs": 3},
        {"markers": ["X"]},
        {"mla_kv_types": "free"},
        {"source": {**SPEC["source"], "path": "/elsewhere/b.tar.gz"}},
        {"source": {**SPEC["source"], "url": "https://example.org/a.tar.gz"}},
        {"targets": ["llama-server", "ggml-rpc-server"]},
        {"cmake": {"GGML_CUDA": "ON", "GGML_RPC": "ON"}},
    ],
)
def test_what_is_not_compiled_does_not_change_the_key(changes: dict[str, object]) -> None:
    assert key(**changes) == key()


@pytest.mark.parametrize(
    "changes",
    [
        {"source": {**SPEC["source"], "sha256": "b" * 64}},
        {"source": {**SPEC["source"], "subdir": "other"}},
        {"source": {"kind": "tree", "path": "/srv/src"}},
        {"source": {"kind": "prebuilt", "path": "/srv/src"}},
        {"source": {"kind": "git", "url": "https://example.org/a.git", "ref": "b11434"}},
        {"patch_sets": ["one"]},
        {"patch_sets": ["two", "one"]},
        {"cmake": {"GGML_RPC": "ON", "GGML_CUDA": "OFF"}},
        {"cmake": {"GGML_RPC": "ON"}},
        {"cuda": {**SPEC["cuda"], "architectures": "120a-real"}},
        {"cuda": {**SPEC["cuda"], "flashkda_dir": "/srv/flashkda"}},
        {"backend": "cpu", "cuda": None},
        {"targets": ["ggml-rpc-server", "llama-server", "llama-bench"]},
    ],
)
def test_what_is_compiled_changes_the_key(changes: dict[str, object]) -> None:
    assert key(**changes) != key()


FLAGS = st.dictionaries(st.from_regex(r"[A-Z_]{1,8}", fullmatch=True), st.sampled_from(["ON", "OFF", "x"]), max_size=4)


@given(FLAGS, FLAGS)
def test_keys_are_equal_exactly_when_the_flags_are(one: dict[str, str], other: dict[str, str]) -> None:
    assert (key(cmake=one, patch_sets=[]) == key(cmake=other, patch_sets=[])) == (one == other)
