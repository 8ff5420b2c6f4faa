"""The window over production and the way back, without a rank: one holder, no start outside, proof before release."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "collections"))

from ansible_collections.k3.deploy.plugins.module_utils import holders, host
from ansible_collections.k3.deploy.plugins.module_utils import production as window_of
from ansible_collections.k3.deploy.plugins.modules import production as production_module
from ansible_collections.k3.deploy.plugins.modules import window as window_module

TOKENS = [5, 6, 7]


class Done(Exception):
    """What a module said at its end."""

    def __init__(self, failed: bool, said: dict[str, Any]) -> None:
        super().__init__(said.get("msg", ""))
        self.failed, self.said = failed, said


class Production:
    """Production's head on a rank that is not there."""

    def __init__(self) -> None:
        self.state, self.tokens, self.healthy = "active", list(TOKENS), True
        self.calls: list[str] = []

    def run(self, argv: list[str], **_: Any) -> tuple[int, str, str]:
        self.calls.append(" ".join(argv))
        if argv[1] == "start":
            self.state = "active"
        if argv[1] == "stop":
            self.state = "inactive"
        return 0, "", ""

    def show(self, names: list[str]) -> dict[str, dict[str, str]]:
        return {name: {"LoadState": "loaded", "ActiveState": self.state, "MainPID": "0"} for name in names}

    def http(self, url: str, payload: Any = None, timeout: float = 0, key: str = "") -> tuple[int, Any]:
        del timeout, key
        if self.state != "active" or not self.healthy:
            return 0, "refused"
        return (200, {"tokens": self.tokens}) if payload else (200, [] if url.endswith("/slots") else {"status": "ok"})


@pytest.fixture
def production(monkeypatch: pytest.MonkeyPatch) -> Production:
    made = Production()
    monkeypatch.setattr(host, "run", made.run)
    monkeypatch.setattr(host, "show_units", made.show)
    monkeypatch.setattr(host, "http_json", made.http)
    monkeypatch.setattr(host, "units_matching", lambda _: [])
    monkeypatch.setattr(host, "meminfo", lambda: {"MemAvailable": 9000, "MemTotal": 16000})
    return made


def call(module_class: Any, method: str, root: Path, check: bool = False, **params: Any) -> Done:
    """One call of a module's step, and what it ended with."""
    defaults = {
        **{
            "run_id": "r1",
            "kind": "run",
            "owner": "ann@east",
            "reason": "",
            "deadline_s": 3600,
            "ranks": {},
            "force": "",
        },
        **{
            "head_unit": "head.service",
            "head_url": "http://h:1",
            "api_key_file": None,
            "probe_prompt": "a",
            "probe_tokens": 3,
        },
        **{"start_timeout": 60, "freed_mib": 0, "memory_slack_mib": 0, "memory_timeout": 1, "drain_timeout": 1},
        **{"stop_timeout": 5, "slice": 5, "root": str(root)},
    }

    def end(failed: bool) -> Callable[..., None]:
        def say(**said: Any) -> None:
            raise Done(failed, said)

        return say

    module = SimpleNamespace(params={**defaults, **params}, check_mode=check, exit_json=end(False), fail_json=end(True))
    with pytest.raises(Done) as caught:
        getattr(module_class(module), method)()
    return caught.value


def hold(root: Path, **params: Any) -> Done:
    return call(window_module.Window, "hold", root, **params)


def kept(root: Path, name: str = "window") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / "state" / f"{name}.json").read_text())
    return found


# --- taking the window ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("production")
def test_of_twenty_racers_one_gets_the_window(tmp_path: Path) -> None:
    go = tmp_path / "go"
    racers = []
    for number in range(20):
        pid = os.fork()
        if pid == 0:
            while not go.exists():
                time.sleep(0.001)
            code = 99
            try:
                code = 1 if hold(tmp_path, run_id=f"r{number}").failed else 0
            finally:
                os._exit(code)
        racers.append(pid)
    go.touch()
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in racers]
    assert sorted(codes) == [0] + [1] * 19
    assert kept(tmp_path)["run_id"] == f"r{codes.index(0)}"


@pytest.mark.usefixtures("production")
def test_a_new_window_records_all_that_the_way_back_needs(tmp_path: Path) -> None:
    done = hold(tmp_path, reason="why", ranks={"rank0": "10.0.0.1"})
    window = kept(tmp_path)
    assert done.said["changed"] and 3590 <= done.said["deadline_left_s"] <= 3600
    assert window["tokens"] == TOKENS and window["was_active"] is True
    assert (window["head_unit"], window["head_url"], window["start_timeout"]) == ("head.service", "http://h:1", 60)
    assert window["ranks"] == {"rank0": "10.0.0.1"}


@pytest.mark.usefixtures("production")
def test_taking_ones_own_window_again_changes_nothing_or_moves_its_end(tmp_path: Path) -> None:
    hold(tmp_path)
    before = kept(tmp_path)
    assert hold(tmp_path).said["changed"] is False and kept(tmp_path) == before
    assert hold(tmp_path, deadline_s=9000).said["changed"] is True
    assert kept(tmp_path)["deadline"] > before["deadline"] + 5000


@pytest.mark.usefixtures("production")
def test_a_run_works_inside_its_owners_hand_work_and_nobody_elses(tmp_path: Path) -> None:
    hold(tmp_path, kind="hand", run_id="by-hand")
    other = hold(tmp_path, run_id="r2", owner="bob@west")
    assert other.failed and "held by ann@east for work by hand" in str(other)
    assert not hold(tmp_path, run_id="r2").failed
    window = kept(tmp_path)
    assert (window["run_id"], window["guest"]) == ("by-hand", "r2")


@pytest.mark.usefixtures("production")
@pytest.mark.parametrize(("force", "taken"), [("ann@east", True), ("ann", False), ("", False)])
def test_a_window_is_taken_over_only_by_its_holders_name(tmp_path: Path, force: str, taken: bool) -> None:
    hold(tmp_path)
    done = hold(tmp_path, run_id="r2", owner="bob@west", force=force)
    assert done.failed is not taken
    window = kept(tmp_path)
    assert window["owner"] == ("bob@west" if taken else "ann@east")
    assert window["tokens"] == TOKENS, "what production answered before the first holder is kept"


def test_production_that_runs_and_does_not_answer_is_not_drained(tmp_path: Path, production: Production) -> None:
    production.healthy = False
    assert "does not answer" in str(hold(tmp_path))
    assert window_of.read_window(str(tmp_path)) is None


def test_check_mode_takes_nothing_and_asks_production_nothing(tmp_path: Path, production: Production) -> None:
    production.healthy = False
    assert call(window_module.Window, "hold", tmp_path, check=True).said["changed"] is True
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("production")
def test_the_end_is_moved_by_the_owner_alone_and_not_while_it_closes(tmp_path: Path) -> None:
    assert "nothing to extend" in str(call(window_module.Window, "extend", tmp_path))
    hold(tmp_path)
    assert call(window_module.Window, "extend", tmp_path, owner="bob@west").failed
    assert not call(window_module.Window, "extend", tmp_path, deadline_s=7200).failed
    assert kept(tmp_path)["deadline"] > time.time() + 7000
    window_of.write_window(str(tmp_path), {**kept(tmp_path), "closing": 1})
    assert "it is closing" in str(call(window_module.Window, "extend", tmp_path))


@pytest.mark.usefixtures("production")
@pytest.mark.parametrize(
    ("params", "stop", "close"),
    [
        ({"run_id": "r1"}, True, True),  # the holder
        ({"run_id": "r2"}, False, False),  # a run whose window was taken over: another's candidate is not stopped
        ({"run_id": "guest"}, True, False),  # a run inside hand work
        ({"run_id": "", "owner": ""}, True, True),  # rollback closes any
    ],
)
def test_who_may_stop_and_who_may_close(tmp_path: Path, params: dict[str, str], stop: bool, close: bool) -> None:
    hold(tmp_path)
    window_of.write_window(str(tmp_path), {**kept(tmp_path), "guest": "guest"})
    said = call(window_module.Window, "judge", tmp_path, **params).said
    assert (said["stop"], said["close"]) == (stop, close)


# --- draining -------------------------------------------------------------------------------------------------------


def drain(root: Path, **params: Any) -> Done:
    return call(production_module.Production, "drain", root, **params)


def test_draining_stops_production_and_waits_for_its_memory(tmp_path: Path, production: Production) -> None:
    hold(tmp_path)
    assert drain(tmp_path).said["changed"] is True
    assert production.state == "inactive"
    assert kept(tmp_path)["memory"]["back_mib"] == 9000
    assert drain(tmp_path).said["changed"] is False


def test_memory_that_does_not_come_back_ends_it_and_names_who_holds_memory(
    tmp_path: Path, production: Production
) -> None:
    hold(tmp_path, freed_mib=100_000)
    done = drain(tmp_path, memory_timeout=0)
    assert production.state == "inactive"
    assert "MemAvailable is 9000 MiB, 99000 MiB are to be had" in str(done) and "pid " in str(done)


def test_production_that_came_up_by_itself_in_the_window_is_drained_again(
    tmp_path: Path, production: Production
) -> None:
    hold(tmp_path)
    drain(tmp_path)
    production.state = "active"  # its unit is enabled and the rank was restarted
    assert hold(tmp_path).failed is False
    assert drain(tmp_path).said["changed"] is True and production.state == "inactive"


def test_nothing_is_drained_in_a_window_that_was_closed_meanwhile(tmp_path: Path, production: Production) -> None:
    hold(tmp_path)
    window_of.write_window(str(tmp_path), {**kept(tmp_path), "closing": 1})
    assert "closed meanwhile" in str(drain(tmp_path))
    (tmp_path / "state" / "window.json").unlink()
    assert "closed meanwhile" in str(drain(tmp_path))
    assert production.state == "active"


# --- starting only inside -------------------------------------------------------------------------------------------

OPEN = {"run_id": "r1", "owner": "a", "deadline": 2000.0, "opened": 1.0}


@pytest.mark.parametrize(
    ("window", "live", "why"),
    [
        (OPEN, False, ""),
        ({**OPEN, "run_id": "by-hand", "guest": "r1"}, False, ""),
        (None, False, "no maintenance window is open"),
        ({**OPEN, "run_id": "r2"}, False, "held by a for run r2"),
        ({**OPEN, "closing": 5}, False, "closing"),
        ({**OPEN, "deadline": 900.0}, False, "ended at 1970-01-01 00:15:00 UTC"),
        ({"damaged": True}, False, "cannot be read"),
        (OPEN, True, "production runs inside the window"),
    ],
)
def test_a_head_starts_only_in_its_runs_open_window_with_production_down(
    window: dict[str, Any] | None, live: bool, why: str
) -> None:
    words = window_of.outside_words(window, "r1", live, 1000.0)
    assert why in words if why else words == ""


# --- the way back ---------------------------------------------------------------------------------------------------


def test_production_comes_back_by_the_window_alone_and_the_proof_is_kept(
    tmp_path: Path, production: Production
) -> None:
    hold(tmp_path)
    drain(tmp_path)
    said: list[str] = []
    proof = window_of.restore(str(tmp_path), said.append)
    assert proof["as_recorded"] is True and proof["window"]["run_id"] == "r1"
    assert production.state == "active" and said == ["production is back"]
    assert window_of.read_window(str(tmp_path)) is None
    assert kept(tmp_path, "window-last")["proof"]["tokens"] == TOKENS
    assert window_of.restore(str(tmp_path))["note"] == "no window is open on this rank"


def test_other_tokens_keep_the_window_open(tmp_path: Path, production: Production) -> None:
    hold(tmp_path)
    drain(tmp_path)
    production.tokens = [1, 2, 3]
    with pytest.raises(window_of.ProductionError, match="not as recorded") as caught:
        window_of.restore(str(tmp_path))
    assert caught.value.facts == {"tokens": [1, 2, 3], "recorded": TOKENS}
    assert kept(tmp_path)["closing"]


def test_production_that_did_not_run_before_is_not_started(tmp_path: Path, production: Production) -> None:
    production.state = "inactive"
    hold(tmp_path)
    drain(tmp_path)
    assert window_of.restore(str(tmp_path))["note"] == "production did not run before"
    assert production.state == "inactive" and window_of.read_window(str(tmp_path)) is None


def test_a_torn_file_is_put_aside_once_production_answers(tmp_path: Path, production: Production) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "window.json").write_text('{"run_id": "r')
    production.state = "inactive"
    with pytest.raises(window_of.ProductionError, match="roll back with the inventory"):
        window_of.restore(str(tmp_path))
    done = call(production_module.Production, "serve", tmp_path)
    assert done.said["production"]["answers"] is True and production.state == "active"
    assert (tmp_path / "state" / "window-damaged.json").exists()
    assert window_of.read_window(str(tmp_path)) is None


@pytest.mark.usefixtures("production")
def test_a_window_that_was_released_meanwhile_is_no_error(tmp_path: Path) -> None:
    hold(tmp_path)
    back = window_of.Return(str(tmp_path))
    window_of.restore(str(tmp_path))
    hold(tmp_path, run_id="r2")
    assert back.prove()["as_recorded"] is True
    assert kept(tmp_path)["run_id"] == "r2", "the next holder's window stays"


def test_a_window_that_is_taken_again_ends_the_way_back(tmp_path: Path, production: Production) -> None:
    hold(tmp_path)
    drain(tmp_path)
    back = window_of.Return(str(tmp_path))
    back.begin()
    hold(tmp_path)
    production.state = "inactive"
    with pytest.raises(window_of.ProductionError, match="taken again"):
        back.waiting()


def test_a_process_of_the_candidate_that_cannot_be_killed_keeps_production_down(
    tmp_path: Path, production: Production, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(tmp_path)
    drain(tmp_path)
    left = {"stopped": ["w"], "killed": ["w"], "left": {"k3-candidate-worker@a.service": 7}}
    monkeypatch.setattr(host, "stop_units", lambda: left)
    with pytest.raises(window_of.ProductionError, match=r"worker@a\.service \(pid 7\); a reboot"):
        window_of.restore(str(tmp_path))
    assert production.state == "inactive"


# --- who holds memory -----------------------------------------------------------------------------------------------

UNIFIED = {"MemTotal": 124_000, "MemFree": 10_000, "Cached": 12_000, "AnonPages": 3_000, "MemAvailable": 20_000}


@pytest.mark.parametrize(
    ("total", "apps", "expected"),
    [
        ("[N/A]", "41, 93000", (93_000, "nvidia-smi")),
        ("[N/A]", "41, [N/A]", (124_000 - 25_000 - 4096, "what /proc/meminfo does not explain")),
        ("143771", "41, 93000", (0, "the GPU has memory of its own")),
        (None, "", (124_000 - 25_000 - 4096, "what /proc/meminfo does not explain")),  # nvidia-smi hangs
    ],
)
def test_what_a_gpu_holds_of_the_ranks_memory(
    monkeypatch: pytest.MonkeyPatch, total: str | None, apps: str, expected: tuple[int, str]
) -> None:
    def run(argv: list[str], **_: Any) -> tuple[int, str, str]:
        if total is None:
            return 124, "", "no answer"
        return 0, (total if "memory.total" in argv[1] else apps) + "\n", ""

    monkeypatch.setattr(host, "run", run)
    monkeypatch.setattr(holders, "gpu_users", lambda: {41: ["/dev/nvidia0"], 99: ["/dev/nvidia0"]})
    assert holders.gpu_memory([40, 41], UNIFIED) == expected
    assert holders.gpu_memory([40], UNIFIED)[0] == 0


def test_processes_are_named_stuck_ones_first_then_gpu_users_then_the_largest(tmp_path: Path) -> None:
    for pid, name, state, anon in ((7, "llama", "S", 90_000), (8, "rpc", "D", 4_000), (9, "kworker", "D", 0)):
        folder = tmp_path / str(pid)
        (folder / "fd").mkdir(parents=True)
        text = f"Name:\t{name}\nState:\t{state} (x)\nRssAnon:\t{anon * 1024} kB\nRssFile:\t0 kB\nRssShmem:\t0 kB\n"
        (folder / "status").write_text(text)
        (folder / "wchan").write_text("ib_destroy_qp")
    (tmp_path / "7" / "fd" / "3").symlink_to("/dev/nvidia0")
    assert holders.who_holds(proc=str(tmp_path)) == [
        "pid 8 (rpc) hangs in the kernel in ib_destroy_qp: only a reboot of this rank ends it",
        "pid 7 (llama) has /dev/nvidia0 open",
        "pid 7 (llama) holds 90000 MiB",
        "pid 8 (rpc) holds 4000 MiB",
    ]


def test_production_that_cannot_come_back_names_who_took_its_port(
    production: Production, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = [{"address": "0.0.0.0", "port": 8080, "pid": 77}, {"address": "::", "port": 80, "pid": 78}]
    monkeypatch.setattr(host, "listeners", lambda: taken)
    monkeypatch.setattr(host, "process", lambda pid: {"exe": f"/usr/bin/stranger{pid}"})
    back = window_of.Return("/nowhere", "p.service", "http://head:8080", 5)
    production.state, production.healthy = "failed", False
    with pytest.raises(
        window_of.ProductionError, match=r"port 8080 is held by pid 77 \(/usr/bin/stranger77\): end that"
    ):
        back.waiting()
    taken.clear()
    with pytest.raises(window_of.ProductionError, match="failed: see its journal"):
        back.waiting()
