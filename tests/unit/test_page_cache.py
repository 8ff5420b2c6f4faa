"""How much of a file is in memory: asked of the kernel, without reading the file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "collections"))

from ansible_collections.k3.deploy.plugins.module_utils import page_cache

from k3deploy.facts import Block

MIB = 1 << 20


def test_what_was_just_written_is_in_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"x" * (3 * MIB + 5))
    found = page_cache.state(str(path))
    assert found["error"] is None and found["bytes"] == 3 * MIB + 5
    assert found["resident_bytes"] == 3 * MIB + 5


def test_what_the_kernel_let_go_of_is_not(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"x" * (4 * MIB))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 2 * MIB, os.POSIX_FADV_DONTNEED)
    resident = page_cache.state(str(path))["resident_bytes"]
    # A file system in memory keeps everything whatever it is told.
    assert resident in (2 * MIB, 4 * MIB)


def test_a_split_model_is_all_its_parts(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"m-{number:05d}-of-00002.gguf").write_bytes(b"x" * MIB)
    assert page_cache.state(str(tmp_path / "m-00001-of-00002.gguf"))["bytes"] == 2 * MIB


def test_a_file_that_is_not_there_is_unknown_and_no_error(tmp_path: Path) -> None:
    found = page_cache.state(str(tmp_path / "none"))
    assert found["resident_bytes"] is None and "No such file" in found["error"]


def test_a_block_says_which_share_was_cached_before_its_load() -> None:
    def block(page: object) -> Block:
        ranks = {"rank0": {"health": {"before": {"page_cache": page}}}, "rank1": {}}
        return Block.model_validate(
            {"index": 0, "pair": 0, "arm": "baseline", "slug": "b", "started": "2026-11-30T10:00:00Z", "ranks": ranks}
        )

    assert block({"bytes": 200, "resident_bytes": 50}).page_cached == 0.25
    assert block({"bytes": 200, "resident_bytes": None}).page_cached is None
    assert block(None).page_cached is None
