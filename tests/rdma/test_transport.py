"""What carries each connection, proven on real verbs: how RDMA activates, fails in silence, or breaks."""

from __future__ import annotations

import cases
import pytest
from cases import Head, Worker
from fabric import Fabric, Links

COUNTED = [(head, worker) for head in cases.HEADS if head.starts for worker in head.workers]


def fabric_packets(links: Links) -> int:
    """Packets that the fabric's device has sent and received."""
    counters = links["head"]["devices"][cases.DEVICE]["ports"]["1"]["hw_counters"]
    return int(counters["sent_pkts"] + counters["rcvd_pkts"])


@pytest.mark.parametrize(
    ("head", "worker"),
    [pair for pair in COUNTED if pair[1].transport != "either"],
    ids=lambda item: item.slug,
)
def test_the_proof_finds_what_carries_the_connection(fabric: Fabric, head: Head, worker: Worker) -> None:
    started = fabric.start(head)
    assert started.serves, started.said
    found = started.connection(worker.slug)
    assert (found["result"], found["cause"]) == (worker.transport, worker.cause), found
