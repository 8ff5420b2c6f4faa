"""Decisions of the collection's modules that do not need a rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "collections"))

from ansible_collections.k3.deploy.plugins.module_utils import host
from ansible_collections.k3.deploy.plugins.modules import job, rank_state


def test_of_an_environment_only_llama_cpp_s_part_and_what_was_asked_for_is_read() -> None:
    given = {"GGML_X": "1", "SECRET": "s", "ASKED": "two  words = 2"}
    program = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=given) as child:
        assert child.stdout is not None
        child.stdout.readline()  # it is a program of its own by now
        seen = host.process(child.pid, ["ASKED", "ABSENT"])
        child.kill()
    assert seen["environment"] == {"GGML_X": "1", "ASKED": "two  words = 2"}


@pytest.mark.parametrize(
    ("active", "mark", "result", "attached"),
    [
        ("active", None, False, True),  # it runs, whoever began it
        ("inactive", None, True, False),  # a result without a mark was taken already
        ("inactive", "a:1", True, True),  # it has ended, and nobody took its result
        ("failed", "a:1", False, True),  # it has failed, and nobody heard of it
        ("inactive", "a:1", False, False),  # it was stopped: nothing is left to attach to
        ("inactive", "a:0", True, False),  # another one's result
        ("failed", "a:0", False, False),  # another one's failure
    ],
)
def test_a_job_is_attached_to_only_where_it_is_this_work(
    tmp_path: Path, active: str, mark: str | None, result: bool, attached: bool
) -> None:
    params = {"token": "a:1", "result": str(tmp_path / "result.json")}
    if mark is not None:
        (tmp_path / "mark").write_text(mark)
    if result:
        (tmp_path / "result.json").write_text("{}")
    assert job.begun(params, str(tmp_path / "mark"), active) is attached


def test_whether_nccl_was_found_is_what_the_manifests_of_releases_say(tmp_path: Path) -> None:
    for build, manifest in (("a-1", {"nccl": {"found": True}}), ("b-1", {"nccl": None}), ("c-1", [])):
        (tmp_path / "releases" / build).mkdir(parents=True)
        (tmp_path / "releases" / build / "manifest.json").write_text(json.dumps(manifest))
    installed = {"baseline": "a-1", "U2-2048": "a-1", "U9": "b-1", "U4": "c-1", "U5": "gone", "U6": None}
    assert rank_state.nccl_found(str(tmp_path), installed) == {"baseline": True, "U2-2048": True}
