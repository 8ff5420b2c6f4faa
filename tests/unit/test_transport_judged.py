"""The transport in launch checks, records, verdicts and status: what is refused, what voids a block, what is told."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "collections"))
sys.path.insert(0, str(Path(__file__).parent))

from ansible_collections.k3.deploy.plugins.filter import transport
from ansible_collections.k3.deploy.plugins.module_utils import rdma_link
from judgekit import arm_of, facts_of, plan_of
from test_rdma_proof import MIB, PLAN, cluster

from k3deploy.commands.status import fabric_lines
from k3deploy.facts import TransportProof, parse_worker_log

ARM = {"rdma": "auto", "require": "rdma", "chunk_bytes": PLAN["chunk_bytes"], "rx_depth": 24, "token_bytes": 1024}


@pytest.fixture
def seen() -> dict[str, Any]:
    """Three ranks, read at launch, when ready and at the end of a block; RDMA carries both connections."""
    start, block = cluster((0, 4 * MIB), 0), cluster((4 * MIB, 9 * MIB), 0)
    found = {}
    for name, rank in start.items():
        kinds = {"head": 40 * MIB} if rank["is_head"] else {"worker": 7 * MIB}
        launch = {**rank["before"], "build_id": "b-1", "lines": {}, "connections": []}
        links = {"launch": launch, "ready": rank["after"], "end": block[name]["after"]}
        found[name] = {"is_head": rank["is_head"], "listen": rank["listen"], "memlock": kinds, **links}
    return found


def launch(seen: dict[str, Any], **changes: Any) -> str:
    return "\n".join(transport.transport_launch_problems(seen, {**ARM, **changes}))


def test_ranks_that_fit_together_are_launched(seen: dict[str, Any]) -> None:
    assert launch(seen) == ""


def test_mixed_builds_are_refused_before_anything_starts(seen: dict[str, Any]) -> None:
    seen["rank2"]["launch"]["build_id"] = "b-2"
    assert "different builds, whose transports need not fit: b-1 on rank0, rank1; b-2 on rank2" in launch(seen)
    assert "different builds" in launch(seen, rdma="off")


def test_a_drop_in_that_lowers_the_locked_memory_is_refused_before_it_ends_on_tcp(seen: dict[str, Any]) -> None:
    folder = "/etc/systemd/system/k3-candidate-worker@.service.d"
    arm = "/etc/systemd/system/k3-candidate-worker@U4.service.d/arm.conf"
    limits = {"memlock_bytes": 4 * MIB, "drop_ins": [f"{folder}/site.conf", arm]}
    seen["rank1"]["launch"]["units"] = {"worker": limits, "head": {"memlock_bytes": 1, "drop_ins": []}}
    assert launch(seen) == (
        "rank1: the worker pins 6.25 MiB for 1 connections, its unit may lock 4 MiB as systemd has it: "
        f"take LimitMEMLOCK= out of {folder}/site.conf, then systemctl daemon-reload"
    )
    limits["memlock_bytes"] = None
    assert launch(seen) == "", "unlimited"


def test_the_limit_of_a_unit_is_read_as_systemd_prints_it() -> None:
    shown = "LimitMEMLOCK=67108864\nLimitMEMLOCKSoft=8388608\nLoadState=loaded\nDropInPaths=/etc/a.conf /run/b.conf\n"
    found = {"memlock_bytes": 8 * MIB, "drop_ins": ["/etc/a.conf", "/run/b.conf"]}
    assert rdma_link.parse_limits(shown) == found
    unlimited = "LimitMEMLOCK=infinity\nLimitMEMLOCKSoft=infinity\nLoadState=loaded\nDropInPaths=\n"
    assert rdma_link.parse_limits(unlimited) == {"memlock_bytes": None, "drop_ins": []}
    assert rdma_link.parse_limits("LimitMEMLOCK=8388608\nLoadState=not-found\n") is None


@pytest.mark.parametrize(("changes", "refused"), [({}, True), ({"require": "tcp"}, False), ({"rdma": "off"}, False)])
def test_what_rdma_needs_is_refused_only_where_rdma_is_needed(
    seen: dict[str, Any], changes: dict[str, str], refused: bool
) -> None:
    seen["rank1"]["launch"]["resolved"]["problems"] = ["no RDMA device owns 10.0.0.2"]
    seen["rank1"]["launch"]["resolved"]["mtu"] = 1500
    seen["rank2"]["launch"]["verbs"]["accessible"] = False
    seen["rank0"]["memlock"]["head"] = 12 * MIB
    text = launch(seen, **changes)
    for words in (
        "rank1: no RDMA device owns",
        "different MTUs: 1500 on rank1; 9000 on rank0, rank2",
        "rank2: the service's account may not open",
        "rank0: the head pins 12.5 MiB for 2 connections, its unit may lock 12 MiB",
    ):
        assert (words in text) is refused


def test_a_pinned_arm_needs_rdma_even_where_the_cluster_does_not(seen: dict[str, Any]) -> None:
    seen["rank1"]["launch"]["resolved"]["problems"] = ["gone"]
    assert "rank1: gone" in launch(seen, rdma="pinned", require="tcp")


def test_a_pinned_arm_runs_with_what_was_resolved(seen: dict[str, Any]) -> None:
    link = seen["rank1"]["launch"]
    pinned = transport.pinned_environment(link, {**ARM, "rdma": "pinned"})
    assert pinned == {"GGML_RDMA_DEV": "roce0", "GGML_RDMA_GID": "3"}
    assert transport.pinned_environment(link, ARM) == {}


def test_a_block_is_proven_at_its_start_and_over_its_own_workload(seen: dict[str, Any]) -> None:
    assert transport.transport_start(seen, ARM)["problems"] == []
    bench = {"cells": [{"samples": [{"prompt_n": 4096, "predicted_n": 1}, {"prompt_n": None}]}]}
    proof = transport.transport_block(seen, ARM, bench)
    assert (proof["transport"], proof["workload_bytes"], proof["reconnected"]) == ("RDMA", 4097 * 1024, [])
    assert TransportProof.model_validate(proof).connections[0].result == "RDMA"
    long = {"cells": [{"samples": [{"prompt_n": 1 << 20, "predicted_n": 1}]}]}
    assert "the workload is at least" in "\n".join(transport.transport_block(seen, ARM, long)["problems"])


def variables_of(seen: dict[str, Any], began: float) -> dict[str, Any]:
    """What the ranks' variables hold after a block of the arm A1 that began then."""
    found = {}
    for name, rank in seen.items():
        worker = {"listen": rank["listen"], "memlock_bytes": rank["memlock"].get("worker")} if rank["listen"] else None
        head = {"memlock_bytes": rank["memlock"]["head"]} if rank["is_head"] else None
        processes = {kind: process for kind, process in (("worker", worker), ("head", head)) if process}
        found[name] = {
            "k3_run_processes": {"A1": processes},
            "block_launch": {"link": {**rank["launch"], "time": 90.0}},
            "block_ready": {"link": {**rank["ready"], "time": 200.0}},
            "block_stop": {"memory": [[began, 1, 1, 0, 1, 0.0, 0.0]]},
        }
    return found


def test_a_block_that_fell_back_keeps_its_proof(seen: dict[str, Any]) -> None:
    assert transport.transport_broken(variables_of(seen, 100.0), "A1", ARM)["problems"] == []
    worker = next(name for name, rank in seen.items() if not rank["is_head"])
    seen[worker]["ready"]["lines"] = {"worker": ["Accepted client connection"]}
    proof = transport.transport_broken(variables_of(seen, 100.0), "A1", ARM)
    assert proof["problems"] and set(proof["resolved"]) == set(seen)
    kept = TransportProof.model_validate(proof)
    assert kept.require == "rdma" and kept.transport != "RDMA"


def test_a_reading_of_the_block_before_proves_nothing_of_a_block_that_broke(seen: dict[str, Any]) -> None:
    assert transport.transport_broken(variables_of(seen, 300.0), "A1", ARM) is None
    for name in ("block_launch", "block_ready", "block_stop"):
        variables = variables_of(seen, 100.0)
        del variables["rank1"][name]
        assert transport.transport_broken(variables, "A1", ARM) is None
    assert transport.transport_broken({}, "A1", ARM) is None


def test_what_a_rank_lacks_for_rdma_is_named_at_once(seen: dict[str, Any]) -> None:
    link = {**seen["rank1"]["launch"], "tools": {"rdma": "/usr/bin/rdma", "ibv_devinfo": None}}
    assert transport.link_problems(link) == ["ibv_devinfo is not installed: it comes with ibverbs-utils"]
    link["verbs"] = {"nodes": [], "accessible": False}
    assert transport.link_problems(link)[-1] == "there is no /dev/infiniband/uverbs*: load ib_uverbs"


def with_transport(facts: dict[str, Any], **changes: Any) -> dict[str, Any]:
    one = {"worker": "rank1", "endpoint": "10.0.0.2:50053", "result": "RDMA", "qp": "1->2"}
    for block in facts["blocks"]:
        block["transport"] = {"require": "rdma", "transport": "RDMA", "connections": [one], **changes}
    return facts


def test_a_connection_that_must_be_rdma_and_is_not_makes_the_run_invalid() -> None:
    assert arm_of(with_transport(facts_of(5, 1.05))).outcome == "ACCEPT"
    problem = "rank1 (10.0.0.2:50053): TCP, not RDMA: rank1's worker may lock 6 MiB"
    arm = arm_of(with_transport(facts_of(5, 1.05), transport="TCP", problems=[problem]))
    assert arm.outcome == "INVALID"
    assert problem in "; ".join(arm.reasons)


def test_what_broke_during_a_block_voids_it_and_is_a_rejection_where_a_row_judges_it() -> None:
    event = "rank1, worker: RDMA CQ wc error: status=12"
    facts = facts_of(5, 1.05)
    broken = with_transport(facts_of(5, 1.05), events=[event])
    for good, bad in zip(with_transport(facts)["blocks"], broken["blocks"], strict=True):
        if good["arm"] != "baseline":
            good["transport"] = bad["transport"]
            good["observations"]["rpc_errors"] = 1
    assert arm_of(facts).outcome == "INVALID"
    plan = plan_of()
    plan["gates"] = {"rpc_errors": {"observation": "rpc_errors", "require": "at_most", "limit": 0}}
    arm = arm_of(facts, plan)
    assert arm.outcome == "REJECT"
    assert "rpc_errors is 1, must be at most 0" in "; ".join(arm.reasons)


def test_a_cluster_without_rdma_is_told_plainly() -> None:
    one = {"worker": "rank1", "result": "TCP", "cause": "device", "reason": "rank1 has no RDMA device"}
    arm = arm_of(with_transport(facts_of(5, 1.05), require="tcp", transport="TCP", connections=[one]))
    texts = [found.text for found in arm.findings]
    assert any(text.startswith("the transport of all 1 RPC connections is TCP") for text in texts)
    assert any("rank1: rank1 has no RDMA device" in text for text in texts)
    none = {"device": None, "problems": ["this rank has no RDMA device"]}
    assert fabric_lines({"r0": none, "r1": none}) == ["transport: TCP; this rank has no RDMA device"]
    some = {"device": "roce0", "why": "roce0 owns 10.0.0.1"}
    assert fabric_lines({"r0": some, "r1": none}) == [
        "transport of r0: roce0 owns 10.0.0.1",
        "transport of r1: this rank has no RDMA device",
    ]


def test_a_gate_on_a_time_that_no_worker_tells_stays_open_and_says_what_it_takes() -> None:
    plan = plan_of()
    plan["gates"] = {"tail": {"observation": "rpc_p99", "require": "not_higher"}}
    arm = arm_of(facts_of(5, 1.05), plan)
    assert arm.outcome == "INCONCLUSIVE"
    assert "patch set u8-rpc-timing in the build of every arm" in arm.gates[0].reason


def test_timed_workers_tell_the_tail_of_transfers_and_the_share_of_waiting() -> None:
    line = "K3_RPC_TIMING graph={} kind=compute device=0 nodes=9 end_us={} prepare_us=100 compute_us=5000 "
    line += "set=1 set_bytes=8 set_us={} get=1 get_bytes=8 get_us=100\n"
    text = "".join(line.format(place, place * 10000, 9000 if place == 99 else 800) for place in range(100))
    found = parse_worker_log(text, "rank1")
    assert found.rank_rpc_p99_ms == {"rank1": 0.9}
    assert found.rank_idle_share == {"rank1": 0.4}
    assert found.rank_forward_ms == {"rank1": 500.0}
