"""What carries each connection, proven on real verbs: how RDMA activates, fails in silence, or breaks."""

from __future__ import annotations

import cases
import pytest
from ansible_collections.k3.deploy.plugins.module_utils import rdma_proof
from cases import Head, Worker
from fabric import Fabric, Links

CERTAIN = [(head, worker) for head in cases.HEADS for worker in head.workers if worker.transport in ("RDMA", "TCP")]
SERVING = [head for head in cases.HEADS if head.starts]


def packets(links: Links) -> int:
    """Packets that the fabric's device has sent and received."""
    counters = links["head"]["devices"][cases.DEVICE]["ports"]["1"]["hw_counters"]
    return int(counters["sent_pkts"] + counters["rcvd_pkts"])


# In an order in which the machine starts each head once: the last one that is found to work is the one that is broken.


def test_a_head_and_a_worker_of_different_rings_die(fabric: Fabric) -> None:
    seen = fabric.run(cases.MIXED)
    assert not seen.serves
    assert any("RDMA CQ wc error" in event for event in seen.start["events"]), seen.start


def test_a_head_that_may_lock_memory_for_one_connection_has_one(fabric: Fabric) -> None:
    seen = fabric.run(cases.TIGHT)
    assert seen.serves, seen.said
    found = sorted((item["result"], item["cause"]) for item in seen.start["connections"])
    assert found == [("RDMA", None), ("TCP", "memlock")], seen.start


@pytest.mark.parametrize(("head", "worker"), CERTAIN, ids=lambda item: item.slug)
def test_the_proof_finds_what_carries_a_connection_and_why(fabric: Fabric, head: Head, worker: Worker) -> None:
    seen = fabric.run(head)
    assert seen.serves, seen.said
    found = seen.connection(worker.slug)
    assert (found["result"], found["cause"]) == (worker.transport, worker.cause), found
    if worker.transport == "RDMA":
        depth = head.ring[1]
        assert found["rx_depth"] == [depth, depth]
        assert found["devices"] == [cases.DEVICE, cases.DEVICE]
        assert found["problems"] == []


@pytest.mark.parametrize("head", SERVING, ids=lambda head: head.slug)
def test_required_rdma_makes_a_run_count_only_where_every_connection_has_it(fabric: Fabric, head: Head) -> None:
    seen = fabric.run(head)
    lacking = {worker.slug for worker in head.workers if worker.transport == "TCP"}
    blamed = {item["worker"] for item in seen.start["connections"] if item["result"] != "RDMA"}
    assert lacking <= blamed
    assert bool(seen.start["problems"]) == bool(blamed)


def test_the_ports_do_not_move_when_tcp_carries(fabric: Fabric) -> None:
    seen = fabric.run(cases.OFF)
    assert packets(seen.links["after"]) == packets(seen.links["before"])


def test_the_tokens_are_the_same_whatever_carries_them(fabric: Fabric) -> None:
    answers = {head.slug: fabric.run(head).tokens for head in SERVING}
    assert len({tuple(tokens) for each in answers.values() for tokens in each}) == 1, answers


def test_queue_pairs_live_through_requests_and_a_pause(fabric: Fabric) -> None:
    seen = fabric.run(cases.ONE)
    assert rdma_proof.persistence(seen.start, seen.block) == []
    assert seen.block["transport"] == "RDMA", seen.block
    assert seen.block["problems"] == seen.block["events"] == []


def test_a_killed_worker_takes_the_head_with_it_and_voids_the_block(fabric: Fabric) -> None:
    broken = fabric.interrupt(cases.ONE, "systemctl kill --signal=KILL k3-candidate-worker@one-worker.service")
    assert broken["midway"]
    assert broken["ended"]["ActiveState"] == "failed"
    proof = fabric.prove(cases.ONE, fabric.run(cases.ONE).links["ready"], broken["after"])
    assert [item["result"] for item in proof["connections"]] == ["unknown"]
    assert "head, head: Remote RPC server crashed or returned malformed response" in proof["events"]


# Last: the addresses, and with them the GIDs, go with the link.
def test_a_link_that_goes_down_breaks_the_transfer_and_voids_the_block(fabric: Fabric) -> None:
    broken = fabric.interrupt(cases.ONE, "ip link set eth2 down")
    assert broken["midway"]
    assert broken["ended"]["ActiveState"] == "failed"
    proof = fabric.prove(cases.ONE, fabric.run(cases.ONE).links["ready"], broken["after"])
    assert [item["result"] for item in proof["connections"]] == ["unknown"]
    # Which end sees the failed transfer first is a matter of the moment; both ports and the head's end are not.
    assert {"head: link_downed of rxe1 grew by 1", "one-worker: link_downed of rxe1 grew by 1"} <= set(proof["events"])
    assert "head, head: Remote RPC server crashed or returned malformed response" in proof["events"]
