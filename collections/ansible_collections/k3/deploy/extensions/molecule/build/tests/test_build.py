"""Builds: complete manifests, relocatable programs, sources left as they were, nothing half-made."""

from __future__ import annotations

import json
from typing import Any

import pytest
from testinfra.host import Host

BUILDS = "/opt/k3deploy/builds"
SOURCE = "/var/tmp/k3-molecule"
TREE, ARCHIVE, PREBUILT = "7472656500000000", "6172636869766500", "7072656275696c74"


@pytest.fixture(scope="module")
def manifests(rank0: Host) -> dict[str, dict[str, Any]]:
    """{build id: manifest}"""
    names = rank0.check_output(f"ls -A {BUILDS}").split()
    return {name: json.loads(rank0.check_output(f"cat {BUILDS}/{name}/manifest.json")) for name in names}


def of(manifests: dict[str, dict[str, Any]], key: str) -> list[dict[str, Any]]:
    return [manifest for manifest in manifests.values() if manifest["build_key"] == key]


def test_every_build_is_whole_and_the_refused_ones_left_nothing(rank0: Host, manifests: dict[str, dict[str, Any]]) -> None:
    # Two of the tree: before and after its edit.
    assert sorted(manifest["build_key"] for manifest in manifests.values()) == sorted([TREE, TREE, ARCHIVE, PREBUILT])
    for name, manifest in manifests.items():
        assert manifest["build_id"] == name
        lines = "".join(f"{item['sha256']}  {BUILDS}/{name}/{path}\n" for path, item in manifest["files"].items())
        rank0.check_output(f"sha256sum --check --strict --quiet <<'EOF'\n{lines}EOF")
        present = rank0.check_output(f"cd {BUILDS}/{name} && find . -type f -printf '%P\\n'").splitlines()
        assert sorted(present) == sorted([*manifest["files"], "manifest.json"])


def test_the_manifest_says_where_a_build_comes_from(rank0: Host, manifests: dict[str, dict[str, Any]]) -> None:
    (made,) = of(manifests, ARCHIVE)
    pinned = rank0.check_output(f"sha256sum {SOURCE}/demo.tar.gz").split()[0]
    assert made["source"] == {"kind": "archive", "identity": pinned}
    assert {"cc", "cxx", "cmake"} == set(made["toolchain"])
    assert rank0.check_output("cmake --version").splitlines()[0] == made["toolchain"]["cmake"]
    assert made["cmake_cache"]["CMAKE_BUILD_TYPE"] == "Release"
    assert set(made["files"]) == {"bin/llama-server", "bin/ggml-rpc-server", "lib/libggml-demo.so.0"}
    assert made["files"]["bin/llama-server"]["mode"] == "0755"
    assert made["version"] == {"llama-server": "version: 1 (demo)", "ggml-rpc-server": "Usage: ggml-rpc-server, K3_FLASHKDA_ACTIVE"}
    assert {"--ctx-size", "--cache-ram"} <= set(made["server_flags"])
    (real,) = of(manifests, PREBUILT)
    assert {"--cache-reuse", "--ctx-checkpoints", "--ubatch-size", "--rpc"} <= set(real["server_flags"])
    assert "lib/libggml-rpc.so.0" in real["files"]


def test_a_marker_is_reported_with_the_files_that_hold_it(manifests: dict[str, dict[str, Any]]) -> None:
    found = [made["markers"] for made in of(manifests, TREE)]
    active = {"K3_FLASHKDA_ACTIVE": ["lib/libggml-demo.so.0"], "K3_FLASHKDA_FALLBACK": [], "RDMA activated": []}
    edited = {"K3_FLASHKDA_ACTIVE": [], "K3_FLASHKDA_FALLBACK": ["lib/libggml-demo.so.0"], "RDMA activated": []}
    assert active in found and edited in found


def test_a_changed_input_is_another_build_of_the_same_key(manifests: dict[str, dict[str, Any]]) -> None:
    before, after = of(manifests, TREE)
    assert before["source"]["identity"] != after["source"]["identity"]
    assert before["build_id"].split("-")[0] == after["build_id"].split("-")[0]


def test_programs_find_their_libraries_wherever_a_release_lies(rank0: Host, manifests: dict[str, dict[str, Any]]) -> None:
    for name in manifests:
        rank0.check_output(f"rm -rf /run/elsewhere && cp -r {BUILDS}/{name} /run/elsewhere")
        said = rank0.check_output("ldd /run/elsewhere/bin/llama-server | grep -v -e /lib/x86_64 -e /lib/aarch64 || true")
        own = [line.split()[2] for line in said.splitlines() if "ggml" in line]
        assert own and all(path.startswith("/run/elsewhere/") for path in own)


def test_the_operators_tree_is_read_only_read(rank0: Host) -> None:
    present = rank0.check_output(f"find {SOURCE}/tree -printf '%P '").split()
    assert sorted(present) == ["CMakeLists.txt", "demo.c", "server.c", "worker.c"]
