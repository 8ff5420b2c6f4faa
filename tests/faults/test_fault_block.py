"""Faults inside a block: workers and the head killed, stopped and stuck, ports taken, floors of memory crossed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from faultkit import MEMINFO, RANKS, Fault

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("installed")]

WORKER = "-x ggml-rpc-server -u k3deploy"
# A worker has its head: the model's tensors follow.
CONNECTED = "ss -Htn state established 'sport = :50053' | grep -q ."


@dataclass(frozen=True, slots=True)
class Broken:
    """A block that broke: the exit code, the words of the record, and the record itself."""

    code: int
    said: str
    record: dict[str, Any]


def break_in(fault: Fault, rank: str, deed: str, **extra: object) -> Broken:
    """Measure a block and do something to a rank in the case's phase."""
    rig = fault.rig
    # Long enough to be hit in the middle: many prefills, or one prompt with a long answer.
    cells = {"prefill": ("pp256", 900, 1, 40), "decode": ("tg100", 16, 900, 8)}
    name, prompt, predict, repeats = cells.get(fault.where, ("pp256", 256, 1, 1))
    with rig.applying("measure", extra={**rig.one_block(name, prompt, predict, repeats), **extra}) as going:
        if fault.where == "load":
            rig.arm(rank, CONNECTED, deed)
        else:
            going.until_measuring(name)
            rig.controller.on(rank, deed)
        going.wait()
    (record,) = going.records().values()
    return Broken(going.code, f"{record['void'] or record['bench']['error']}\n{going.said}", record)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("rank0: Start the head", marks=pytest.mark.fault("kill -9 of a worker", "load"), id="load"),
        pytest.param(
            "k3-candidate-bench: pp256 cold: ", marks=pytest.mark.fault("kill -9 of a worker", "prefill"), id="prefill"
        ),
        pytest.param(
            "k3-candidate-bench: tg100 cold: ", marks=pytest.mark.fault("kill -9 of a worker", "decode"), id="decode"
        ),
    ],
)
def test_kill_of_a_worker(fault: Fault, words: str) -> None:
    broken = break_in(fault, "rank1", f"pkill -KILL {WORKER}")
    assert broken.code == 1, broken.said
    fault.holds(broken.code, broken.said, words)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            "not ready within its deadline", marks=pytest.mark.fault("SIGSTOP of a worker", "load"), id="load"
        ),
        pytest.param(
            "k3-candidate-bench: pp256 cold: ", marks=pytest.mark.fault("SIGSTOP of a worker", "prefill"), id="prefill"
        ),
        pytest.param(
            "k3-candidate-bench: tg100 cold: ", marks=pytest.mark.fault("SIGSTOP of a worker", "decode"), id="decode"
        ),
    ],
)
def test_stop_of_a_worker(fault: Fault, words: str) -> None:
    broken = break_in(fault, "rank1", f"pkill -STOP {WORKER}")
    assert broken.code == 1, broken.said
    fault.holds(broken.code, broken.said, words)


@pytest.mark.fault("kill -9 of the head", "prefill")
def test_kill_of_the_head(fault: Fault) -> None:
    broken = break_in(fault, "rank0", "pkill -KILL -x llama-server -u k3deploy")
    assert broken.code == 1, broken.said
    fault.holds(broken.code, broken.said, "k3-candidate-bench: pp256 cold: ")


# --- memory ---------------------------------------------------------------------------------------------------------


TRIPPED = "/opt/k3deploy/state/guard-tripped.json"
LOW = f"sed -i 's/^MemAvailable:.*/MemAvailable: 1024000 kB/' {MEMINFO}"


@pytest.mark.parametrize(
    "least",
    [
        pytest.param("load_min_mib", marks=pytest.mark.fault("memory floor crossed", "load"), id="load"),
        pytest.param("run_min_mib", marks=pytest.mark.fault("memory floor crossed", "prefill"), id="prefill"),
    ],
)
def test_memory_floor(fault: Fault, least: str) -> None:
    fault.rig.controller.everywhere(f"cp /proc/meminfo {MEMINFO}")
    broken = break_in(fault, "rank1", LOW, k3_guard={"meminfo": MEMINFO})
    assert broken.code == 10, broken.said  # the run ended early, and its verdict is REJECT all the same
    assert broken.record["ranks"]["rank1"]["memory"][least] == 1000
    fault.holds(
        broken.code, broken.said, "memory floor crossed on rank1: 1000 MiB", "candidate stopped by the guard", "REJECT"
    )


@pytest.mark.fault("memory floor crossed with the controller dead", "prefill")
def test_memory_floor_with_nobody_there(fault: Fault) -> None:
    rig = fault.rig
    rig.controller.everywhere(f"cp /proc/meminfo {MEMINFO}")
    guard = {"meminfo": MEMINFO, "orphan_s": 2}
    with rig.applying("measure", extra={**rig.one_block("pp256", 900, 1, 500), "k3_guard": guard}) as going:
        going.until_measuring("pp256")
        going.kill()
    rig.controller.on("rank1", LOW)
    # The worker goes with its guard's stop, the head with its worker, and the head's own worker when its head is gone.
    for rank in RANKS:
        rig.until(rank, "! systemctl is-active --quiet 'k3-candidate-worker@*' 'k3-candidate-head@*'")
    texts = [json.loads(rig.controller.on(rank, f"cat {TRIPPED}"))["text"] for rank in reversed(RANKS)]
    code, words = rig.rollback()
    assert code == 0, words
    said = f"rank1: {texts[0]}; rank0: {texts[1]}"
    fault.holds("killed; rollback 0", said, "MemAvailable 1000 MiB is below the floor of 1536 MiB", "is gone for")


# --- what does not listen, and what is in the way --------------------------------------------------------------------


@pytest.mark.fault("a worker that ignores SIGTERM", "stop")
def test_a_deaf_worker(fault: Fault) -> None:
    rig = fault.rig
    with rig.deaf("rank1", "k3-candidate-worker@F1.service"):
        going = rig.apply("measure", extra=rig.one_block())
    (record,) = going.records().values()
    killed = json.dumps({"rank1 killed": record["ranks"]["rank1"]["killed"]})
    fault.holds(going.code, killed, '{"rank1 killed": ["k3-candidate-worker@F1.service"]}')


@pytest.mark.fault("the candidate's worker port is taken", "preflight")
def test_worker_port_taken_before(fault: Fault) -> None:
    with fault.rig.squatter("rank1", 50053):
        done = fault.rig.apply("preflight")
    assert done.code == 4, done.said
    fault.holds(done.code, done.said, "port 50053 is taken by pid")


@pytest.mark.fault("the candidate's worker port is taken", "start")
def test_worker_port_taken_in_the_window(fault: Fault) -> None:
    with fault.rig.squatter("rank1", 50053):
        done = fault.rig.apply("measure", extra=fault.rig.one_block())
    (record,) = done.records().values()
    assert done.code == 1, done.said
    fault.holds(done.code, f"{record['void']}\n{done.said}", "k3-candidate-worker@F1.service did not come up")


@pytest.mark.fault("production's port is taken by someone else", "return")
def test_production_port_taken(fault: Fault) -> None:
    rig = fault.rig
    assert rig.controller.k3deploy("window", "open", "--yes", "--deadline", "20m").returncode == 0
    with rig.squatter("rank0", 8080):
        code, said = rig.rollback()
    assert code == 20, said
    again, _ = rig.rollback()
    assert again == 0
    fault.holds("20, then 0", said, "port 8080 is held by pid", "PRODUCTION IS NOT PROVEN TO BE BACK")
