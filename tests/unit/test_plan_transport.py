"""The plan of the RPC transport: what is proven of an arm, the sizes of its build, and the memory that they pin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_plan import CUDA_BUILD, cluster, facts

from k3deploy.inventory import Cluster, Transport
from k3deploy.matrix import Matrix
from k3deploy.plan import Plan, PlanError, make_plan, render_run_layer

MATRIX = Matrix.load(Path(__file__).parents[2] / "inventory" / "matrix")
KIB, MIB = 1 << 10, 1 << 20
QUEUES = 512 * KIB


def plan(candidate: str, on: Cluster | None = None, **options: Any) -> Plan:
    return make_plan(MATRIX, on or on_rdma(), f"candidate-{candidate}", model_facts=facts(True), **options)


def on_rdma(**changes: Any) -> Cluster:
    return cluster(cpu=False, transport=Transport(require="rdma"), **changes)


def test_a_pinned_arm_names_no_index_in_the_plan_since_indices_move() -> None:
    arm = plan("U4").arms[1]
    assert arm.transport.rdma == "pinned"
    for processes in arm.processes.values():
        for process in filter(None, (processes.worker, processes.head)):
            assert not {name for name in process.environment if name.startswith("GGML_RDMA")}


def test_pinned_needs_a_cluster_that_has_rdma() -> None:
    with pytest.raises(PlanError, match=r"U4 needs RDMA on every rank: test says k3_transport\.require: tcp"):
        plan("U4", cluster())
    assert plan("U4", cluster(cpu=False)).arms[1].transport.rdma == "pinned"


def test_u4_is_compared_with_the_fall_back_to_tcp_on_every_rank() -> None:
    found = plan("U4")
    baseline, arm = found.arms
    assert (baseline.transport.require, arm.transport.require) == ("tcp", "rdma")
    for processes in baseline.processes.values():
        for process in filter(None, (processes.worker, processes.head)):
            assert process.environment["GGML_RPC_NO_RDMA"] == "1"
    assert [(d.key, d.baseline, d.arm) for d in arm.differences] == [("rdma", "off", "pinned")]
    assert "the baseline of this comparison runs with rdma off, not as production does" in found.notes
    assert plan("U2").baseline.transport.require == "rdma"


def test_what_is_proven_reaches_the_roles() -> None:
    arms = render_run_layer(plan("U5@1024x63"))["all"]["vars"]["k3_run_arms"]
    assert [arm["transport"] for arm in arms] == [
        {"rdma": "auto", "require": "rdma", "chunk_bytes": 256 * KIB, "rx_depth": 24, "token_bytes": 7168 * 4},
        {"rdma": "auto", "require": "rdma", "chunk_bytes": MIB, "rx_depth": 63, "token_bytes": 7168 * 4},
    ]


def test_sizes_that_a_build_sets_itself_are_expected_of_it() -> None:
    cmake = {"GGML_RPC_RDMA_CHUNK": "524288", "GGML_RPC_RDMA_RX_DEPTH": "32"}
    own = CUDA_BUILD.model_copy(update={"cmake": cmake, "patch_sets": ["u5-rdma-chunk"]})
    transport = plan("U2", on_rdma(builds={"default": own})).baseline.transport
    assert (transport.chunk_bytes, transport.rx_depth) == (512 * KIB, 32)


def test_a_limit_of_locked_memory_is_the_budget_and_room_for_the_queues_of_every_connection() -> None:
    processes = plan("U2").baseline.processes["r0"]
    worker = plan("U2").baseline.processes["r1"].worker
    assert worker is not None and processes.head is not None
    assert worker.memlock_bytes == 64 * MIB + QUEUES
    assert processes.head.memlock_bytes == 3 * (64 * MIB + QUEUES)
    assert worker.memlock_bytes < 65 * MIB, "a ring above the budget must not slip in through the room for queues"


def test_a_sweep_over_chunk_and_depth_is_one_run_with_a_build_an_arm() -> None:
    found = plan("U5")
    assert [arm.name for arm in found.arms] == ["baseline", "U5@1024x63", "U5@512x64", "U5@1024x6"]
    assert len({arm.build_key for arm in found.arms}) == 4
    assert {key: found.builds[key]["name"] for key in found.builds} == {arm.build_key: arm.build for arm in found.arms}
    assert [entry["rdma_pinned_mib"] for entry in found.arms[1].forecast] == [192.0, 64.0, 64.0, 64.0]
    assert found.arms[0].forecast[0]["rdma_pinned_mib"] == pytest.approx(18.75, abs=0.1)


def test_a_ring_above_the_budget_is_left_out_of_a_sweep_and_the_one_that_fits_is_offered() -> None:
    notes = "\n".join(plan("U5").notes)
    assert "U5@1024x64 is left out: a connection with 1024 KiB x 64 pins 65 MiB, 64 MiB are allowed" in notes
    assert "1024x63 fits" in notes


def test_a_ring_above_the_budget_is_refused_alone() -> None:
    with pytest.raises(PlanError, match="pins 65 MiB, 64 MiB are allowed") as caught:
        plan("U5@1024x64")
    assert caught.value.remedy.startswith("1024x63 fits")


def test_a_prebuilt_program_of_the_row_is_taken_as_it_is() -> None:
    own = CUDA_BUILD.model_copy(update={"source": CUDA_BUILD.source.model_copy(update={"kind": "prebuilt"})})
    arm = plan("U5@1024x63", on_rdma(builds={"default": CUDA_BUILD, "u5": own})).arms[1]
    assert (arm.build, arm.transport.rx_depth) == ("u5", 63)


def test_the_timing_proxy_stands_where_the_worker_is_reached_and_the_worker_behind_it() -> None:
    found = plan("U8proxy", cluster())
    for rank in ("r1", "r2"):
        baseline, arm = (one.processes[rank].worker for one in found.arms)
        assert baseline is not None and arm is not None
        assert (arm.listen, arm.server) == (baseline.listen, "127.0.0.1:50053") and baseline.server is None
        assert arm.argv[1:5] == ["--host", "127.0.0.1", "--port", "50053"]
        assert arm.environment["GGML_RPC_NO_RDMA"] == "1"
    assert found.arms[0].build_key == found.arms[1].build_key
    heads = [one.processes["r0"].head for one in found.arms]
    assert heads[0] is not None and heads[1] is not None and heads[0].argv == heads[1].argv
    layer = render_run_layer(found)["all"]["hosts"]["r1"]["k3_run_processes"]
    assert "server" not in layer["baseline"]["worker"] and layer["U8proxy"]["worker"]["server"] == "127.0.0.1:50053"


def test_the_timing_proxy_is_refused_where_bytes_could_go_past_it() -> None:
    with pytest.raises(PlanError, match="sees TCP alone, and test requires RDMA") as caught:
        plan("U8proxy")
    assert "candidate-U8" in (caught.value.remedy or "")
    with pytest.raises(PlanError, match="needs rdma off"):
        plan("U2@2048", cluster(settings={"rpc_profile": "proxy"}))


def undecided(candidate: str, on: Cluster | None = None) -> list[str]:
    return [note for note in plan(candidate, on).notes if note.startswith("no run with this inventory decides")]


def with_timing(patch_sets: list[str], **environment: str) -> Cluster:
    """A cluster whose build has these patch sets and whose settings have this environment."""
    before = on_rdma()
    build = before.builds[before.build].model_copy(update={"patch_sets": patch_sets})
    settings = {**before.settings, "environment": environment}
    return before.model_copy(update={"builds": {**before.builds, before.build: build}, "settings": settings})


@pytest.mark.parametrize(("row", "gate"), [("U3", "worker_link_idle"), ("U5@512x64", "tail_latency (rpc_p99)")])
def test_a_gate_that_no_run_can_decide_is_said_beforehand_with_what_it_takes(row: str, gate: str) -> None:
    (note,) = undecided(row)
    assert gate in note and "the workers of baseline, U" in note and "INCONCLUSIVE at best" in note
    assert "u8-rpc-timing" in note and 'GGML_RPC_TIMING: "1" in k3_settings.environment' in note
    assert undecided("U9") == []


def test_a_gate_on_times_needs_the_patch_and_its_switch() -> None:
    assert undecided("U3", with_timing(["u8-rpc-timing"], GGML_RPC_TIMING="1")) == []
    assert undecided("U5@512x64", with_timing(["u8-rpc-timing"], GGML_RPC_TIMING="1")) == []
    assert undecided("U3", with_timing(["u8-rpc-timing"], GGML_RPC_TIMING="0"))
    assert undecided("U3", with_timing(["u8-rpc-timing"]))
    assert undecided("U3", with_timing([], GGML_RPC_TIMING="1"))
