"""The rank's own guard: what makes it stop a candidate, what it leaves behind, how it ends the window by itself."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "collections"))

from ansible_collections.k3.deploy.plugins.filter.guard import (
    block_broken,
    block_failures,
    guard_trips,
    transfer_breaks,
)
from ansible_collections.k3.deploy.plugins.modules import guard as module
from ansible_collections.k3.deploy.plugins.modules import units

COLLECTION = Path(__file__).parents[2] / "collections/ansible_collections/k3/deploy"
DAEMON = COLLECTION / "roles/guard/files/k3_guard.py"
WORKER = "system-k3\\x2dcandidate\\x2dworker.slice/k3-candidate-worker@U2-2048.service"


def daemon() -> ModuleType:
    spec = importlib.util.spec_from_file_location("k3_guard", DAEMON)
    assert spec and spec.loader
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


guard: Any = daemon()


def meminfo(available: int, free: int = 9000, cma: int = 0) -> str:
    rows = {"MemTotal": 99999, "MemFree": free, "MemAvailable": available, "Buffers": 1, "Cached": 77, "SwapCached": 5}
    rows |= {"CmaFree": cma} if cma else {}
    return "".join(f"{name}:{size * 1024:>15} kB\n" for name, size in rows.items())


class Rank:
    """A rank's state directory, its control groups as files, and a systemctl that only notes what it was asked."""

    def __init__(self, root: Path) -> None:
        self.root, self.state, self.groups = root, root / "state", root / "cgroup"
        self.said = root / "systemctl.log"
        self.memory = root / "meminfo"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.state.mkdir()
        self.groups.mkdir()
        self.memory.write_text(meminfo(50000))

    def unit(self, path: str = WORKER, command: tuple[str, ...] = ("sleep", "60")) -> subprocess.Popen[bytes]:
        """A running unit; its control group forgets the process when it has ended, as the kernel's does."""
        process = subprocess.Popen(command)
        self.processes.append(process)
        folder = self.groups / path
        folder.mkdir(parents=True)
        (folder / "cgroup.procs").write_text(f"{process.pid}\n")
        return process

    def arm(self, **more: Any) -> None:
        config = {
            "run_id": "r1",
            "floor_mib": 1536,
            "meminfo": str(self.memory),
            "seconds": 600,
            "boot_id": guard.boot_id(),
            "deadline": time.time() + 600,
            "deadline_uptime": guard.uptime() + 600,
            **more,
        }
        (self.state / "guard.json").write_text(json.dumps(config))

    def watch(self) -> Any:
        return guard.Guard(str(self.root), Groups(self.groups))

    def record(self, name: str = "guard-tripped") -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.state / f"{name}.json").read_text())
        return found


class Groups(guard.Units):  # type: ignore[misc]
    """Control groups as files: a process that ended leaves them."""

    @staticmethod
    def alive(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    place = Rank(tmp_path)
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "systemctl").write_text(f'#!/bin/sh\necho "$@" >> {place.said}\n')
    (tools / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    real = guard.Units.pids
    monkeypatch.setattr(guard.Units, "pids", staticmethod(lambda path: [p for p in real(path) if Groups.alive(p)]))
    yield place
    for process in place.processes:
        process.kill()
        process.wait()


def ended(process: subprocess.Popen[bytes]) -> int:
    return process.wait(timeout=5)


# -- the floor --------------------------------------------------------------------------------------------------------


def test_below_the_floor_the_candidate_is_stopped_at_the_first_look_and_the_record_says_why(rank: Rank) -> None:
    worker = rank.unit()
    rank.arm()
    watching = rank.watch()
    assert watching.step(0.0) and worker.poll() is None
    rank.memory.write_text(meminfo(1490, free=900, cma=600))
    assert watching.step(0.2)
    assert ended(worker) == -signal.SIGTERM
    record = rank.record()
    assert record["what"] == "memory" and record["arm"] == "U2-2048" and record["floor_mib"] == 1536
    assert (record["available_mib"], record["free_mib"], record["cma_free_mib"], record["cached_mib"]) == (
        1490,
        900,
        600,
        77,
    )
    assert record["stopped"] == ["k3-candidate-worker@U2-2048.service"] and record["killed"] == []
    assert record["top"] and {"pid", "name", "rss_mib"} == set(record["top"][0])
    assert "stop --no-block k3-candidate-worker@U2-2048.service" in waited(rank.said)


def waited(path: Path) -> str:
    end = time.monotonic() + 5
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.02)
    return path.read_text()


def test_at_the_floor_nothing_happens(rank: Rank) -> None:
    worker = rank.unit()
    rank.arm()
    rank.memory.write_text(meminfo(1536))
    assert rank.watch().step(0.0)
    assert worker.poll() is None and not (rank.state / "guard-tripped.json").exists()


def test_the_arms_own_floor_goes_before_the_general_one(rank: Rank) -> None:
    worker = rank.unit()
    rank.arm(floors={"U2-2048": 4096})
    rank.memory.write_text(meminfo(4000))
    rank.watch().step(0.0)
    ended(worker)
    assert rank.record()["floor_mib"] == 4096


def test_what_ignores_sigterm_is_killed_within_two_seconds(rank: Rank) -> None:
    worker = rank.unit(
        command=(
            sys.executable,
            "-c",
            "import signal,time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(60)",
        )
    )
    time.sleep(0.5)
    rank.arm()
    rank.memory.write_text(meminfo(10))
    began = time.monotonic()
    rank.watch().step(0.0)
    assert ended(worker) == -signal.SIGKILL and time.monotonic() - began < 2
    assert rank.record()["killed"] == ["k3-candidate-worker@U2-2048.service"]


def test_why_it_stopped_can_be_read_while_the_candidate_still_ends_and_from_its_first_second(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.unit()
    rank.arm()
    rank.memory.write_text(meminfo(10))
    seen: list[object] = []

    def look(_units: object) -> list[str]:
        series = units.memory_series(str(rank.state / "memory" / "U2-2048.tsv"))
        seen.append(units.tripped(str(rank.state / "guard-tripped.json"), series))
        return []

    monkeypatch.setattr(guard.Guard, "outlive", staticmethod(look))
    rank.watch().step(0.0)
    (record,) = seen
    assert isinstance(record, dict) and record["available_mib"] == 10


def test_memory_that_a_driver_cannot_have_counts_where_a_floor_is_set_for_it(rank: Rank) -> None:
    worker = rank.unit()
    rank.arm(free_floor_mib=1024)
    watching = rank.watch()
    rank.memory.write_text(meminfo(20000, free=9000, cma=7000))
    watching.step(0.0)
    assert worker.poll() is None
    rank.memory.write_text(meminfo(20000, free=9216, cma=8704))
    watching.step(0.2)
    ended(worker)
    assert rank.record()["what"] == "free" and "512 MiB" in rank.record()["text"]


def test_memory_that_cannot_be_read_counts_as_a_crossed_floor_after_two_seconds(rank: Rank) -> None:
    worker = rank.unit()
    rank.arm()
    watching = rank.watch()
    watching.step(0.0)
    rank.memory.unlink()
    watching.step(1.0)
    watching.step(2.9)
    assert worker.poll() is None
    watching.step(3.2)
    ended(worker)
    assert rank.record()["what"] == "blind"


def test_production_and_other_services_are_never_touched(rank: Rank) -> None:
    others = [
        rank.unit(path) for path in ("llama-rpc-worker.service", "k3-candidate-guard.service", "k3-build-x.service")
    ]
    rank.arm()
    rank.memory.write_text(meminfo(10))
    watching = rank.watch()
    watching.step(0.0)
    watching.step(2.0)
    assert [process.poll() for process in others] == [None] * 3 and not rank.said.exists()


def test_a_new_start_of_the_same_arm_is_guarded_again(rank: Rank) -> None:
    first = rank.unit()
    rank.arm()
    rank.memory.write_text(meminfo(1000))
    watching = rank.watch()
    watching.step(0.0)
    ended(first)
    shutil.rmtree(rank.groups / WORKER)
    watching.step(1.5)
    second = rank.unit()
    watching.step(3.0)
    ended(second)


def test_new_values_are_taken_in_while_it_runs_and_no_file_ends_it(rank: Rank) -> None:
    worker = rank.unit()
    rank.arm()
    watching = rank.watch()
    rank.memory.write_text(meminfo(3000))
    watching.step(0.0)
    assert worker.poll() is None
    rank.arm(floor_mib=4096)
    watching.step(1.1)
    ended(worker)
    (rank.state / "guard.json").unlink()
    assert watching.step(2.2) is False


def test_half_a_file_changes_nothing(rank: Rank) -> None:
    rank.arm()
    watching = rank.watch()
    watching.step(0.0)
    (rank.state / "guard.json").write_text('{"floor_')
    assert watching.step(1.1) and watching.config["floor_mib"] == 1536


# -- the series -------------------------------------------------------------------------------------------------------


def rows(path: Path) -> list[list[float]]:
    return [[float(word) for word in line.split()] for line in path.read_text().splitlines()]


def test_the_series_is_what_a_stopped_block_reads_and_begins_anew_with_each_start(rank: Rank) -> None:
    rank.unit()
    rank.arm()
    (rank.state / "memory").mkdir()
    path = rank.state / "memory" / "U2-2048.tsv"
    path.write_text("1.0 5 5 0 5 0 0\n")
    watching = rank.watch()
    watching.step(0.0)
    rank.memory.write_text(meminfo(40000, free=3000, cma=100))
    watching.step(0.2)
    watching.end_arm()
    series = units.memory_series(str(path))
    assert [row[1:5] for row in series] == [[40000, 3000, 100, 77]]
    assert abs(series[0][0] - time.time()) < 60
    own = {"at": time.time(), "what": "memory"}
    for record, found in ((own, own), ({**own, "at": series[0][0] - 100}, None)):
        (rank.state / "guard-tripped.json").write_text(json.dumps(record))
        assert units.tripped(str(rank.state / "guard-tripped.json"), series) == found


@given(st.lists(st.integers(1, 99999), min_size=1, max_size=400), st.integers(2, 20))
def test_a_series_is_bounded_and_never_loses_its_least_value(values: list[int], limit: int) -> None:
    import tempfile

    before, guard.MAX_ROWS = guard.MAX_ROWS, limit
    try:
        with tempfile.TemporaryDirectory() as place:
            series = guard.Series(f"{place}/memory/x.tsv")
            start = time.time()
            for number, value in enumerate(values):
                series.add(start + number * 0.7, (value, 5, 0, 5), (0.0, 0.0))
            series.close()
            found = rows(Path(place, "memory/x.tsv"))
    finally:
        guard.MAX_ROWS = before
    assert len(found) <= limit
    least = min(found, key=lambda row: row[1])
    assert least[1] == min(values)
    assert abs(least[0] - start - values.index(min(values)) * 0.7) < 0.01 or values.count(min(values)) > 1


def test_a_new_least_value_is_on_disk_within_a_second_however_coarse_the_lines_are(tmp_path: Path) -> None:
    series = guard.Series(str(tmp_path / "x.tsv"))
    series.step, start = 64.0, series.flushed
    series.add(start + 1, (900, 5, 0, 5), (0.0, 0.0))
    series.add(start + 2.1, (800, 5, 0, 5), (0.0, 0.0))
    assert rows(tmp_path / "x.tsv")[-1][1] == 800


# -- the orphan -------------------------------------------------------------------------------------------------------

SERVE = """\
import socket
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
while True:
    client, _ = server.accept()
    client.recv(1)
    client.close()
"""


def serving(rank: Rank) -> tuple[subprocess.Popen[bytes], int]:
    """A worker that listens, and its port."""
    read, write = os.pipe()
    process = subprocess.Popen((sys.executable, "-c", SERVE), stdout=write)
    os.close(write)
    rank.processes.append(process)
    with os.fdopen(read) as said:
        port = int(said.readline())
    folder = rank.groups / WORKER
    folder.mkdir(parents=True)
    (folder / "cgroup.procs").write_text(f"{process.pid}\n")
    return process, port


def test_a_worker_that_lost_its_head_is_stopped_after_the_time_for_it_and_not_before(rank: Rank) -> None:
    worker, port = serving(rank)
    rank.arm(orphan_s=20)
    watching = rank.watch()
    watching.step(0.0)
    watching.step(100.0)
    assert worker.poll() is None, "a worker that never had a head waits for one"
    with socket.create_connection(("127.0.0.1", port)):
        time.sleep(0.1)
        watching.step(200.0)
        watching.step(300.0)
    time.sleep(0.2)
    watching.step(301.1)
    watching.step(320.0)
    assert worker.poll() is None
    watching.step(321.2)
    ended(worker)
    assert rank.record()["what"] == "orphan"


def test_a_head_that_lived_for_less_than_a_second_leaves_an_orphan_too(rank: Rank) -> None:
    worker, port = serving(rank)
    rank.arm(orphan_s=20)
    watching = rank.watch()
    watching.step(0.0)
    with socket.create_connection(("127.0.0.1", port)):
        time.sleep(0.1)
        watching.step(0.4)
    time.sleep(0.2)
    watching.step(1.2)
    watching.step(21.4)
    ended(worker)
    assert rank.record()["what"] == "orphan"


def test_a_head_that_comes_back_in_time_saves_its_worker(rank: Rank) -> None:
    worker, port = serving(rank)
    rank.arm(orphan_s=20)
    watching = rank.watch()
    with socket.create_connection(("127.0.0.1", port)):
        time.sleep(0.1)
        watching.step(0.0)
    time.sleep(0.2)
    watching.step(2.0)
    with socket.create_connection(("127.0.0.1", port)):
        time.sleep(0.1)
        watching.step(20.0)
        watching.step(60.0)
        assert worker.poll() is None


# -- the deadline -----------------------------------------------------------------------------------------------------


def steps(watching: Any, start: float, until: Callable[[], bool]) -> float:
    """Look every second of the guard's time until something holds; when that was."""
    now = start
    end = time.monotonic() + 10
    while not until() and time.monotonic() < end:
        watching.step(now)
        now += 1.1
        time.sleep(0.02)
    assert until()
    return now


def test_at_the_deadline_a_worker_rank_stops_everything_of_the_candidate_and_is_done(rank: Rank) -> None:
    worker, harness = rank.unit(), rank.unit("k3-candidate-bench.service")
    rank.arm(deadline_uptime=guard.uptime() - 1)
    watching = rank.watch()
    assert watching.step(0.0)
    ended(worker)
    ended(harness)
    assert rank.record("guard-deadline")["stopped"] == [
        "k3-candidate-bench.service",
        "k3-candidate-worker@U2-2048.service",
    ]
    assert watching.step(1.1) is False
    assert not (rank.state / "guard.json").exists()
    said = rank.said.read_text()
    assert "disable k3-candidate-guard.service" in said and "stop --no-block k3-candidate.target" in said


def test_at_the_deadline_the_head_brings_production_back_and_tries_again_until_it_is(rank: Rank) -> None:
    program = rank.root / "libexec" / "k3_production.py"
    program.parent.mkdir()
    tries = rank.root / "tries"
    program.write_text(
        "import sys\n"
        f"tries = {str(tries)!r}\n"
        "open(tries, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
        "sys.exit(len(open(tries).readlines()) < 2)\n"
    )
    rank.arm(deadline_uptime=guard.uptime() - 1, is_head=True)
    watching = rank.watch()
    now = steps(watching, 0.0, lambda: not (rank.state / "guard.json").exists())
    assert tries.read_text().splitlines() == [f"restore --root {rank.root}"] * 2
    assert now > guard.RETRY_S, "it does not hammer a production that does not come"


def test_before_the_deadline_nothing_ends(rank: Rank) -> None:
    worker = rank.unit()
    rank.arm()
    watching = rank.watch()
    assert watching.step(0.0) and watching.step(500.0) and worker.poll() is None


WINDOW = {"deadline": 1000.0, "seconds": 600, "boot_id": "a", "deadline_uptime": 5600.0}


@pytest.mark.parametrize(
    ("boot", "up", "wall", "left"),
    [
        pytest.param("a", 5500, 900, 100, id="the clock agrees"),
        pytest.param("a", 5500, 900 - 3600, 100, id="the clock was set back an hour in the window"),
        pytest.param("a", 5500, 900 + 3600, 100, id="the clock was set forward an hour in the window"),
        pytest.param("b", 30, 950, 50, id="after a reboot the clock counts"),
        pytest.param("b", 30, 0, 570, id="a clock that came up wrong cannot make the window longer"),
        pytest.param("b", 700, 0, -100, id="nor keep it open"),
    ],
)
def test_the_windows_end_by_the_ranks_own_clock(boot: str, up: float, wall: float, left: float) -> None:
    assert guard.seconds_left(WINDOW, boot, up, wall) == left


# -- arming -----------------------------------------------------------------------------------------------------------

PARAMS = {
    **dict.fromkeys(("run_id", "meminfo"), "x"),
    **{
        "floor_mib": 1,
        "floors": {},
        "free_floor_mib": 0,
        "warn_mib": 2,
        "orphan_s": 3,
        "is_head": False,
        "production": {},
    },
    "seconds_left": 3600,
}


def test_arming_again_a_little_later_changes_nothing_and_another_end_or_floor_does() -> None:
    have = module.wanted(PARAMS, 1000.0, 50.0)
    assert module.same(have, module.wanted(PARAMS, 1020.0, 70.0))
    assert not module.same(have, module.wanted(PARAMS, 1100.0, 150.0))
    assert not module.same(have, module.wanted({**PARAMS, "floor_mib": 9}, 1000.0, 50.0))
    assert not module.same(
        module.wanted({**PARAMS, "seconds_left": 5}, 1000.0, 50.0),
        module.wanted({**PARAMS, "seconds_left": 4}, 1000.0, 50.0),
    )


def test_what_the_rank_needs_to_bring_production_back_is_put_there_whole(tmp_path: Path) -> None:
    """The files that the role installs run by themselves: no Ansible, no checkout."""
    import yaml

    tasks = yaml.safe_load((COLLECTION / "roles/guard/tasks/main.yml").read_text())
    entries = [*tasks[0]["vars"]["guard_files"], *tasks[0]["vars"]["guard_libraries"]]
    for entry in entries:
        if "guard_shared" in entry.get("file", ""):
            target = tmp_path / entry["path"].replace("{{ guard_libexec }}", "libexec")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(COLLECTION / "plugins/module_utils" / Path(entry["file"]).name, target)
    done = subprocess.run(
        [
            sys.executable,
            "-E",
            "-S",
            "-s",
            str(tmp_path / "libexec/k3_production.py"),
            "restore",
            "--root",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        env={"PATH": "/nowhere"},
        timeout=20,
        check=False,
    )
    assert json.loads(done.stdout) == {"note": "no window is open on this rank"}, done.stderr


# -- in words ---------------------------------------------------------------------------------------------------------


def test_a_trip_is_told_with_its_values_and_the_cause_comes_before_what_followed() -> None:
    floor = {
        **{
            "what": "memory",
            "at": 43391.0,
            "floor_mib": 1536,
            "available_mib": 1490,
            "free_mib": 900,
            "cma_free_mib": 0,
        },
        **{
            "cached_mib": 300,
            "psi_some": 12.4,
            "top": [{"pid": 7, "name": "ggml-rpc-server", "rss_mib": 812}],
            "killed": [],
        },
    }
    orphan = {"what": "orphan", "at": 43390.0, "text": "the head's connection to w is gone for 20 s", "killed": ["w"]}
    stops: dict[str, dict[str, Any]] = {"rank1": {"guard": orphan}, "rank2": {"guard": floor}, "rank3": {"guard": None}}
    said = guard_trips({"rank4": {}, **{rank: {"block_stop": stop} for rank, stop in stops.items()}})
    assert said["floors"] == [
        "memory floor crossed on rank2: 1490 MiB at 12:03:11 UTC (floor 1536 MiB; MemFree 900, CmaFree 0, page cache "
        "300 MiB, 12 % of 10 s waited for memory; largest: ggml-rpc-server 812 MiB), candidate stopped by the guard"
    ]
    assert said["all"][0] == said["floors"][0] and "with SIGKILL" in said["all"][1]


def test_what_broke_a_block_is_the_task_that_failed_and_its_first_words() -> None:
    failed = {
        "ansible_failed_task": {"name": "Start the head"},
        "ansible_failed_result": {"msg": "it ended with signal\nlog"},
    }
    lost = {"ansible_failed_task": {"name": "Stop"}, "ansible_failed_result": {"unreachable": True, "msg": "ssh"}}
    said = block_failures({"rank0": failed, "rank1": {}, "rank2": lost})
    assert said == ["rank0: Start the head: it ended with signal"]


def test_the_state_of_the_block_before_is_not_taken_for_a_broken_blocks_own() -> None:
    state = {"time": 50.0, "units": {"k3-candidate-worker@U2.service": {}}}
    variables: dict[str, Any] = {
        "block_state": {"state": state},
        "block_stop": {"memory": [[40.0, 1, 1, 0, 1, 0.0, 0.0]]},
    }
    assert block_broken(variables, "U2")["state"] is state
    assert block_broken(variables, "baseline")["state"] is None
    variables["block_stop"]["memory"][0][0] = 60.0
    assert block_broken(variables, "U2")["state"] is None
    assert block_broken({}, "U2") == {"state": None, "stop": {}}


def test_the_logs_of_a_broken_block_name_the_transfers_that_broke() -> None:
    broken = "RDMA CQ wc error: status=12 (transport retry counter exceeded)"
    crashed = "Remote RPC server crashed or returned malformed response"
    head = f"0.1 I slot: decoding\n0.2 E {broken}\n0.2 E {broken}\n0.3 E {crashed}\n"
    ranks = {
        "rank0": {"block_stop": {"k3_logs": {"head": head, "worker": "Accepted client connection\n"}}},
        "rank1": {"block_stop": {}},
        "rank2": {},
    }
    assert transfer_breaks(ranks) == [
        f"rank0, head: {broken}",
        f"rank0, head: {crashed}",
    ]
