"""Files with anything in them: whatever they say, reading them ends in data or in named problems.

Each test takes a good document, breaks it in one or two places, and reads it as the command line would.
"""

from __future__ import annotations

import copy
import json
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_bench import bench
from test_inventory import CLUSTER, HOSTS

from k3deploy import patches, plan, runner
from k3deploy.errors import K3Error
from k3deploy.facts import Block, assemble, parse_head_log, parse_worker_log, read_model
from k3deploy.inventory.reading import Files, Reader
from k3deploy.judge import judge
from k3deploy.matrix import Matrix
from k3deploy.memory import Rank as ForecastRank
from k3deploy.memory import forecast
from k3deploy.model_facts import model_facts_from_mapping, read_model_facts
from k3deploy.progress import Progress
from k3deploy.report.text import render_markdown, render_text
from k3deploy.report.view import make_view
from k3deploy.store import Store

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "collections"))

from ansible_collections.k3.deploy.plugins.module_utils import host  # noqa: E402

RUN = ROOT / "tests/fixtures/run-small"
FEW = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))

ODD_TEXT = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        (
            *(
                "",
                " ",
                "-x",
                "--",
                "../..",
                "{{ 7 * 7 }}",
                "{% raw %}",
                "%n",
                "$(id)",
                "a\nb",
                "a\0b",
                "\ud800",
                "1e999",
                "NaN",
            ),
            *(
                "http://",
                "http://[::1",
                "http://h:99999",
                "http://h:x",
                "0.0.0.0",
                "candidate-U2",
                "~nobody/x",
                "0" * 5000,
            ),
        )
    ),
)
LEAF = st.one_of(
    ODD_TEXT,
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.sampled_from([[], {}, [[]], {"": None}, [None], {"a": {"b": []}}, 0, -1, 2**31, 2**63, 1e308]),
)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of everything inside ``value``."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*at, key)
        yield from places(item, (*at, key))


def broken(document: Any, keep: int = 0) -> st.SearchStrategy[Any]:
    """``document`` with one to three of its parts replaced, taken away, or joined by something unknown.

    The first ``keep`` levels stay as they are: who writes them is not who writes the rest.
    """

    @st.composite
    def build(draw: Callable[[Any], Any]) -> Any:
        value = copy.deepcopy(document)
        for _ in range(draw(st.integers(1, 3))):
            found = [path for path in places(value) if len(path) > keep]
            if not found:
                break
            path = draw(st.sampled_from(found))
            parent = value
            for key in path[:-1]:
                parent = parent[key]
            match draw(st.sampled_from(["replace", "replace", "remove", "add"])):
                case "replace":
                    parent[path[-1]] = copy.deepcopy(draw(LEAF))
                case "remove":
                    del parent[path[-1]]
                case "add" if isinstance(parent, dict):
                    parent[draw(ODD_TEXT)] = copy.deepcopy(draw(LEAF))
                case _:
                    parent.append(copy.deepcopy(draw(LEAF))) if isinstance(parent, list) else None
        return value

    return build()


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def listing() -> dict[str, Any]:
    """What ansible-inventory says of the small inventory of test_inventory."""
    ranks = HOSTS["all"]["children"]["ranks"]["children"]
    hosts = {name: values for group in ranks.values() for name, values in group["hosts"].items()}
    extra = {"k3_devices": ["char-nvidia"], "k3_settings": {"environment": {"A": "1"}}, "k3_user_groups": ["video"]}
    return {
        "_meta": {"hostvars": {name: {**CLUSTER, **extra, **values} for name, values in hosts.items()}},
        "all": {"children": ["ranks", "builder"]},
        "ranks": {"children": ["head", "workers"]},
        "head": {"hosts": ["h"]},
        "workers": {"hosts": ["w1", "w2"]},
        "builder": {"hosts": ["h"]},
    }


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    return Matrix.load(ROOT / "inventory/matrix")


@FEW
@given(broken(listing()["_meta"]["hostvars"], keep=1))
def test_inventory_variables(matrix: Matrix, hostvars: Any) -> None:
    said = {**listing(), "_meta": {"hostvars": hostvars}}
    with folder() as place:
        try:
            cluster = Reader(place, said, Files(place), []).cluster()
            made = plan.make_plan(matrix, cluster, "candidate-U9")
        except K3Error as error:
            assert str(error)
            return
        words = [word for arm in made.arms for rank in arm.processes.values() if rank.head for word in rank.head.argv]
        assert all(character >= " " for word in words for character in word)


@FEW
@given(st.sampled_from(["U2", "U5", "U8", "next", "baseline"]), st.data())
def test_matrix_files(name: str, data: st.DataObject) -> None:
    good = yaml.safe_load((ROOT / f"inventory/matrix/{name}.yml").read_text())
    with folder() as place:
        for path in (ROOT / "inventory/matrix").glob("*.yml"):
            shutil.copy(path, place)
        text = yaml.safe_dump(data.draw(broken(good)), allow_unicode=True)
        (place / f"{name}.yml").write_text(text, errors="surrogatepass")
        try:
            loaded = Matrix.load(place)
            for row in loaded.rows:
                loaded.explain(row)
        except K3Error as error:
            assert str(error)


def plan_and_block() -> dict[str, Any]:
    return {
        "plan": json.loads((RUN / "plan.json").read_text()),
        "block": json.loads((RUN / "blocks/001.json").read_text()),
    }


@FEW
@given(broken(plan_and_block(), keep=1))
def test_what_a_run_recorded(documents: Any) -> None:
    with folder() as place:
        run = place / "run"
        shutil.copytree(RUN, run)
        (run / "plan.json").write_text(json.dumps(documents.get("plan")))
        (run / "blocks/001.json").write_text(json.dumps(documents.get("block")))
        try:
            facts = assemble(run)
            verdict = judge(documents.get("plan"), facts)
            render_text(verdict, width=80, color=False)
            make_view(run, documents["plan"], facts, verdict)
            render_markdown(documents["plan"], facts, verdict, run)
        except K3Error as error:
            assert str(error)


ABOUT = {
    "candidate": "candidate-U2",
    "created": "2026-11-30T10:00:00+00:00",
    "digest": "ab" * 32,
    "cluster": "lab",
    "inventory": "/x",
    "tool": {},
    "options": {"pairs": None},
    "owner": "me",
    "reason": "",
}


@FEW
@given(broken({"run": ABOUT, "verdict": {"outcome": "ACCEPT"}}))
def test_what_a_run_directory_says_of_itself(documents: Any) -> None:
    with folder() as place:
        run = place / "20261130T142200-candidate-U2-ab12cd"
        run.mkdir()
        (run / "run.json").write_text(json.dumps(documents.get("run")))
        (run / "verdict.json").write_text(json.dumps(documents.get("verdict")))
        try:
            json.dumps([one.summary() for one in Store(place).runs()])
            Store(place).load("ab12cd").plan()
        except K3Error as error:
            assert str(error)


EVENT = {
    "event": "runner_on_ok",
    "event_data": {
        "host": "rank0",
        "task": "Measure | cells, block 0 (baseline)",
        "play": "Window | drain",
        "name": "Window | drain",
        "res": {"k3_progress": {"phase": "measure", "message": "pp2048", "done": 1, "total": 9}, "msg": ["x"]},
    },
}
KINDS = ["playbook_on_play_start", "playbook_on_task_start", "runner_on_start", "runner_on_ok", "runner_on_failed"]


@FEW
@given(st.lists(st.tuples(st.sampled_from(KINDS), broken(EVENT, keep=2)), max_size=4))
def test_events(events: list[tuple[str, Any]]) -> None:
    with folder() as place, (place / "said").open("w", encoding="utf-8", errors="replace") as sink:
        with Progress(sink, place / "events.ndjson", blocks=["baseline"]) as progress:
            for kind, event in events:
                progress.event({**event, "event": kind})
                assert str(runner._failure(event["event_data"]))
        for line in (place / "events.ndjson").read_text().splitlines():
            json.loads(line)


FACTS = yaml.safe_load((ROOT / "inventory/gb10/group_vars/all/k3.yml").read_text())["k3_model"]["facts"]


@FEW
@given(broken(FACTS))
def test_written_facts_of_a_model(facts: Any) -> None:
    ranks = [ForecastRank(name, 2**37) for name in ("a", "b")]
    try:
        forecast(model_facts_from_mapping(facts), {"ctx_size": 4096, "parallel": 1}, ranks)
    except K3Error as error:
        assert str(error)


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    import numpy
    from gguf import GGUFWriter

    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    writer = GGUFWriter(path, "kimi-k3")
    writer.add_block_count(2)
    writer.add_embedding_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv([0, 1])
    writer.add_context_length(64)
    writer.add_uint32("kimi-k3.kda.head_dim", 16)
    writer.add_token_list(["a", "b", "c"])
    for layer in range(2):
        writer.add_tensor(f"blk.{layer}.x.weight", numpy.zeros((4, 4), dtype=numpy.float32))
    writer.add_tensor("token_embd.weight", numpy.zeros((3, 32), dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_a_whole_model_is_read(gguf_bytes: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes)
    assert read_model_facts(path).n_layer == 2


@FEW
@given(
    st.integers(0, 10**6),
    st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from([0, 1, 8, 0x7F, 0x80, 0xFF])), max_size=3),
    st.booleans(),
)
def test_models_cut_off_or_damaged(gguf_bytes: bytes, end: int, changes: list[tuple[int, int]], cut: bool) -> None:
    data = bytearray(gguf_bytes[: end % len(gguf_bytes)] if cut else gguf_bytes)
    for place, value in changes:
        if data:
            data[place % min(len(data), 600)] = value
    with folder() as where:
        path = where / "m.gguf"
        path.write_bytes(bytes(data))
        try:
            forecast(read_model_facts(path), {"ctx_size": 64, "parallel": 1}, [ForecastRank("a", 2**30)])
        except K3Error as error:
            assert str(error)


def test_a_length_that_leads_out_of_the_file_is_an_error_at_once(tmp_path: Path) -> None:
    # The key general.tags with an array of 2^62 bytes, as the last that the file has.
    key, many = b"general.tags", 1 << 62
    head = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q", len(key)) + key
    path = tmp_path / "m.gguf"
    path.write_bytes(head + struct.pack("<IIQ", 9, 0, many) + bytes(100))
    with pytest.raises(K3Error, match="it ends before what it says of itself"):
        read_model_facts(path)


@FEW
@given(st.data())
def test_patch_sets(data: st.DataObject) -> None:
    source = patches.find_directory() / "u5-rdma-chunk"
    good = yaml.safe_load((source / "manifest.yml").read_text())
    with folder() as place:
        directory = place / "files/patches/u5-rdma-chunk"
        shutil.copytree(source, directory)
        shutil.copy(source.parents[1] / "k3_patch.py", place / "files")
        text = yaml.safe_dump(data.draw(broken(good)))
        (directory / "manifest.yml").write_text(text, errors="surrogatepass")
        patch = next(directory.glob("*.patch"))
        patch.write_bytes(patch.read_bytes()[data.draw(st.integers(0, 400)) :])
        try:
            patches.check(patches.load(directory), place)
        except K3Error as error:
            assert str(error)


@FEW
@given(st.binary(max_size=200))
def test_any_bytes_as_a_record_an_inventory_file_a_model_or_a_patch_set(data: bytes) -> None:
    with folder() as place:
        path = place / "manifest.yml"
        path.write_bytes(data)
        for read in (lambda: read_model(Block, path), lambda: read_model_facts(path), lambda: patches.load(place)):
            with pytest.raises(K3Error):
                read()


LOGS = sorted((ROOT / "tests/fixtures").rglob("*.log"))
LINES = st.sampled_from([line for path in LOGS for line in path.read_text(errors="replace").splitlines()][:4000])
TIMING = st.builds(
    "K3_RPC_TIMING graph={} compute_us={} set_us={} get_us={}".format, ODD_TEXT, ODD_TEXT, st.integers(), ODD_TEXT
)


@FEW
@given(st.lists(st.one_of(LINES, ODD_TEXT, TIMING), max_size=30), st.integers(0, 300))
def test_logs(lines: list[str], cut: int) -> None:
    text = "\n".join(lines)[cut:]
    parse_head_log(text).model_dump_json()
    parse_worker_log(text, "rank1").model_dump_json()


REQUEST = {
    "url": "http://10.0.0.1:8081",
    "deadline_s": 900,
    "request_timeout_s": 300.5,
    "seed": 7,
    "repeats": 2,
    "vocab": {"first_id": 300, "last_id": 2000, "bos": 1},
    "warmup": {"prefill": [256], "decode": [1]},
    "cells": [
        {"cell": "pp2048", "state": "cold", "n_prompt": 2048, "n_predict": 1},
        {"cell": "pp2048", "state": "cached", "n_prompt": 2048, "n_predict": 1, "n_cached": 1024},
    ],
    "probes": ["shifted_prefix"],
    "head_log": "/x",
}


@FEW
@given(broken(REQUEST))
def test_requests_of_the_harness(request: Any) -> None:
    bench.check_request(REQUEST)
    try:
        bench.check_request(request)
    except bench.RequestError as error:
        assert str(error)
        return
    for cell in request["cells"]:
        assert list(range(cell["n_prompt"])[:2]) == [0, 1] and cell["n_predict"] * request["repeats"] >= 1


SS = """\
LISTEN 0 4096 10.0.0.2:50053 0.0.0.0:* users:(("ggml-rpc-server",pid=71,fd=3))
LISTEN 0 4096 *:22 *:* users:(("sshd",pid=1,fd=3),("systemd",pid=1,fd=4))
LISTEN 0 4096 [::ffff:127.0.0.1]:8080 *:*
"""
SYSTEMCTL = "Id=a.service\nActiveState=active\nMainPID=71\n\nId=b.service\nActiveState=failed\n"


@FEW
@given(st.sampled_from([SS, SYSTEMCTL, ""]), st.lists(st.tuples(st.integers(0, 250), ODD_TEXT), max_size=4))
def test_what_a_rank_s_own_programs_print(text: str, cuts: list[tuple[int, str]]) -> None:
    for place, odd in cuts:
        text = text[:place] + odd + text[place + 3 :]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "run", lambda *_, **__: (0, text, ""))
        json.dumps([host.listeners(), host.units_matching(["x"]), host.show_units(["a", "b"]), host.exposures(["a"])])
