"""The transport of each RPC connection, proven from both ends; why one is on TCP in silence; what breaks a block."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "collections"))
sys.path.insert(0, str(Path(__file__).parent))

from ansible_collections.k3.deploy.plugins.filter import transport
from ansible_collections.k3.deploy.plugins.module_utils import rdma, rdma_link, rdma_proof
from rdmatree import FIXTURES

MIB = 1 << 20
PLAN = {"require": "rdma", "chunk_bytes": rdma.STOCK_CHUNK_BYTES, "rx_depth": 24, "workload_bytes": 8 * MIB}
ENDPOINTS = {"rank1": "10.0.0.2:50053", "rank2": "10.0.0.3:50053"}
PROBED = "RDMA probed: dev=roce0 gid=3 RoCEv2 qpn={} inline=316"
ACTIVATED = "RDMA activated: qpn={}->{} mtu=4096 rx_depth=24"


def device(words: int, address: str) -> dict:
    gid = {"index": 3, "gid": rdma.gid_of(address), "type": rdma.ROCE_V2, "netdev": "eth0"}
    counters = {"port_xmit_data": words, "port_rcv_data": words, "symbol_error": 0, "link_downed": 0}
    port = {"state": "ACTIVE", "link_layer": "Ethernet", "gids": [gid], "counters": counters, "hw_counters": {}}
    return {"roce0": {"pci": None, "ports": {"1": port}}}


def link(address: str, words: int, lines: dict, sockets: list, pid: int) -> dict:
    devices = device(words, address)
    netdevs = {"eth0": {"mtu": 9000, "carrier_changes": 4}}
    process = {"pid": pid, "memlock_bytes": 64 * MIB, "environment": {}, "knows_rdma": True, "ring": None}
    return {
        "address": address,
        "interface": "eth0",
        "resolved": rdma.resolve(devices, netdevs, address),
        "devices": devices,
        "netdevs": netdevs,
        "verbs": {"nodes": ["uverbs0"], "accessible": True},
        "connections": sockets,
        "processes": [process],
        "qps": None,
        "lines": lines,
    }


def socket(pid: int, local: str, peer: str, size: int) -> dict:
    return {"pid": pid, "local": local, "peer": peer, "sent": size, "received": 100}


def cluster(words: tuple[int, int], tcp: int) -> dict:
    """A head and two workers whose connections run over RDMA; words: of the port counters before and after."""
    local = {"rank1": "10.0.0.1:40001", "rank2": "10.0.0.1:40002"}
    # Each worker numbers its own queue pairs, so both have 77; the head's first connection (30) was a discovery.
    head_lines = [PROBED.format(30), ACTIVATED.format(30, 76), PROBED.format(31), ACTIVATED.format(31, 77)]
    head_lines += [PROBED.format(32), ACTIVATED.format(32, 77)]
    ranks = {}
    for phase, count in (("before", words[0]), ("after", words[1])):
        size = 300 if phase == "before" else 300 + tcp
        sockets = [socket(9, local[name], ENDPOINTS[name], size) for name in ENDPOINTS]
        head = link("10.0.0.1", 2 * count, {"head": list(head_lines)}, sockets, 9)
        ranks.setdefault("rank0", {"is_head": True, "listen": None})[phase] = head
        for number, (name, endpoint) in enumerate(ENDPOINTS.items()):
            lines = [
                "Accepted client connection",
                PROBED.format(76),
                ACTIVATED.format(76, 30),
                "Client connection closed",
            ]
            lines += ["Accepted client connection", PROBED.format(77), ACTIVATED.format(77, 31 + number)]
            sockets = [socket(7, endpoint, local[name], 100)]
            one = link(endpoint.partition(":")[0], count, {"worker": lines}, sockets, 7)
            ranks.setdefault(name, {"is_head": False, "listen": endpoint})[phase] = one
    return ranks


@pytest.fixture
def ranks() -> dict:
    return cluster((1000, 1000 + 4 * MIB), 0)


@pytest.fixture
def tcp() -> dict:
    """The same cluster where TCP carries rank1: nothing is logged, the socket moved the bytes."""
    found = cluster((1000, 1000), 10 * MIB)
    for name in found:
        for phase in ("before", "after"):
            lines = found[name][phase]["lines"]
            found[name][phase]["lines"] = {kind: ["Accepted client connection"] for kind in lines}
    return found


def result(ranks: dict, name: str = "rank1", **plan: object) -> dict:
    found = rdma_proof.prove({**PLAN, **plan}, ranks)
    return next(item for item in found["connections"] if item["worker"] == name)


def both(ranks: dict, name: str) -> list[dict]:
    return [ranks[name]["before"], ranks[name]["after"]]


def test_connections_are_paired_by_the_queue_pairs_that_are_open_now(ranks: dict) -> None:
    found = rdma_proof.prove(PLAN, ranks)
    assert found["problems"] == found["events"] == []
    assert found["transport"] == "RDMA"
    assert [(item["worker"], item["qp"], item["mtu"]) for item in found["connections"]] == [
        ("rank1", "31->77", [4096, 4096]),
        ("rank2", "32->77", [4096, 4096]),
    ]
    assert found["connections"][0]["rdma_bytes"] == [4 * MIB * 2 * 4 * 2, 4 * MIB * 2 * 4]


def test_an_activation_that_is_not_open_any_more_proves_nothing(ranks: dict) -> None:
    queue = {"device": "roce0", "qpn": 32, "remote": 77, "state": "RTS", "pid": 9}
    ranks["rank0"]["after"]["qps"] = [queue]
    assert result(ranks, "rank2")["result"] == "RDMA"
    assert result(ranks, "rank1")["result"] == "unknown"
    ranks["rank0"]["after"]["qps"] = [{**queue, "state": "ERR"}]
    assert result(ranks, "rank2")["result"] == "unknown"


def test_an_earlier_connection_of_a_worker_does_not_stand_for_the_open_one(ranks: dict) -> None:
    for one in both(ranks, "rank1"):
        one["lines"]["worker"] = [*one["lines"]["worker"], "Client connection closed", "Accepted client connection"]
    ranks["rank0"]["after"]["connections"][0]["sent"] += 10 * MIB
    assert result(ranks)["result"] == "TCP"


def test_ports_that_did_not_move_the_workload_prove_no_rdma(ranks: dict) -> None:
    idle = cluster((1000, 1001), 0)
    assert result(idle)["result"] == "unknown"
    assert "moved 16 bytes, the workload is at least" in result(idle)["reason"]
    del ranks["rank1"]["after"]["devices"]["roce0"]["ports"]["1"]["counters"]["port_xmit_data"]
    assert "no port counters" in result(ranks)["reason"]


def test_bytes_over_tcp_contradict_an_activation() -> None:
    found = result(cluster((1000, 1000 + 4 * MIB), 10 * MIB))
    assert (found["result"], found["tcp_bytes"]) == ("unknown", 10 * MIB)


def test_a_head_without_a_connection_is_unknown(ranks: dict) -> None:
    ranks["rank0"]["after"]["connections"] = []
    assert "no open connection from rank0" in result(ranks)["reason"]


@pytest.mark.parametrize("require", ["rdma", "tcp"])
def test_tcp_is_a_problem_only_where_rdma_is_required(tcp: dict, require: str) -> None:
    found = rdma_proof.prove({**PLAN, "require": require}, tcp)
    assert found["transport"] == "TCP"
    assert (found["problems"] == []) is (require == "tcp")


def change(ranks: dict, name: str, **values: object) -> None:
    for one in both(ranks, name):
        one["processes"][0].update(values)


def test_a_switch_in_the_environment_is_the_first_cause(tcp: dict) -> None:
    change(tcp, "rank0", environment={"GGML_RPC_NO_RDMA": "1"})
    assert result(tcp)["cause"] == "environment"
    assert "rank0's head" in result(tcp)["reason"]


def test_a_device_that_is_not_there_or_not_of_the_address_is_the_cause(tcp: dict) -> None:
    change(tcp, "rank1", environment={"GGML_RDMA_DEV": "mlx9"})
    assert result(tcp)["cause"] == "device"
    assert "does not exist" in result(tcp)["reason"]
    change(tcp, "rank1", environment={"GGML_RDMA_DEV": "roce0"})
    for one in both(tcp, "rank1"):
        one["address"] = "10.0.0.99"
    assert "does not own 10.0.0.99" in result(tcp)["reason"]


def test_a_rank_without_a_device_is_the_cause(tcp: dict) -> None:
    for one in both(tcp, "rank1"):
        one["devices"] = {}
        one["resolved"] = rdma.resolve({}, {}, "10.0.0.2")
    found = result(tcp)
    assert (found["cause"], found["reason"]) == ("device", "rank1 has no RDMA device")


def test_too_little_lockable_memory_is_the_cause_on_the_worker(tcp: dict) -> None:
    change(tcp, "rank1", memlock_bytes=6 * MIB)
    assert result(tcp)["cause"] == "memlock"
    assert "may lock 6 MiB and needs 6.25 MiB" in result(tcp)["reason"]


def test_the_head_needs_memory_for_every_connection(tcp: dict) -> None:
    change(tcp, "rank0", memlock_bytes=12 * MIB)
    for one in both(tcp, "rank1"):  # the worker was ready for RDMA: the head offered none
        one["lines"]["worker"] = ["Accepted client connection", PROBED.format(77)]
    assert "rank0's head may lock 12 MiB and needs 12.5 MiB for 2 connections" in result(tcp)["reason"]


def test_a_wrong_gid_and_a_gid_without_its_device_are_the_cause(tcp: dict) -> None:
    for one in both(tcp, "rank1"):
        one["lines"]["worker"] = [
            "Accepted client connection",
            "RDMA probed: dev=roce0 gid=9 qpn=5 inline=316",
            "RDMA activate failed, staying on TCP",
        ]
    assert result(tcp)["cause"] == "gid"
    assert "took roce0 at GID 9, but 10.0.0.2 is roce0 at GID 3" in result(tcp)["reason"]
    change(tcp, "rank1", environment={"GGML_RDMA_GID": "9"})
    assert "GGML_RDMA_GID without GGML_RDMA_DEV" in result(tcp)["reason"]


def test_a_failed_activation_of_the_head_is_not_that_of_a_worker_which_offered_nothing(tcp: dict) -> None:
    for one in both(tcp, "rank0"):
        one["lines"]["head"] = [PROBED.format(30), "RDMA activate failed, staying on TCP"]
    change(tcp, "rank1", memlock_bytes=MIB)
    assert result(tcp)["cause"] == "memlock"


def test_a_peer_that_offers_nothing_is_the_cause_when_nothing_else_is(tcp: dict) -> None:
    assert result(tcp)["cause"] == "peer"
    change(tcp, "rank1", knows_rdma=False)
    assert "built without RDMA" in result(tcp)["reason"]


def test_activation_of_another_build_than_planned_is_a_problem(ranks: dict) -> None:
    plan = {**PLAN, "chunk_bytes": MIB, "rx_depth": 63}
    problems = "\n".join(rdma_proof.prove(plan, ranks)["problems"])
    assert "rank1 has rx_depth 24, its build was planned with 63" in problems
    assert "rank1 runs a library with the usual chunks, planned are 1048576 bytes" in problems
    change(ranks, "rank1", ring={"chunk_bytes": 2 * MIB, "rx_depth": 63})
    assert "chunks of 2097152 bytes" in "\n".join(rdma_proof.prove(plan, ranks)["problems"])


def test_mtus_that_differ_or_exceed_the_interface_are_problems(ranks: dict) -> None:
    for one in both(ranks, "rank1"):
        one["netdevs"]["eth0"]["mtu"] = 1500
        one["resolved"] = rdma.resolve(one["devices"], one["netdevs"], "10.0.0.2")
    assert "rank1 uses a path MTU of 4096, its interface leaves 1024" in "\n".join(result(ranks)["problems"])
    for one in both(ranks, "rank1"):
        one["lines"]["worker"][-1] = one["lines"]["worker"][-1].replace("4096", "1024")
    assert "different path MTUs: 4096 and 1024" in "\n".join(result(ranks)["problems"])


@pytest.mark.parametrize(
    "line",
    [
        "RDMA CQ wc error: status=12 (transport retry counter exceeded) vendor_err=0x81",
        "recv failed (bytes_recv=0, size_to_recv=8)",
        "Remote RPC server crashed or returned malformed response",
        "HELLO request size mismatch (3 vs 27) - client needs upgrade to protocol v7.x",
        "Unknown command: 99",
    ],
)
def test_a_broken_transfer_during_the_block_is_an_event_and_one_before_it_is_not(ranks: dict, line: str) -> None:
    ranks["rank1"]["after"]["lines"]["worker"].append(line)
    assert rdma_proof.prove(PLAN, ranks)["events"] == [f"rank1, worker: {line}"] or line.startswith("HELLO")
    assert len(rdma_proof.events(ranks)) == 1
    ranks["rank1"]["before"] = copy.deepcopy(ranks["rank1"]["after"])
    assert rdma_proof.events(ranks) == []


def test_port_errors_and_link_flaps_are_events(ranks: dict) -> None:
    after = ranks["rank1"]["after"]
    after["devices"]["roce0"]["ports"]["1"]["counters"]["symbol_error"] = 3
    after["netdevs"]["eth0"]["carrier_changes"] = 6
    assert rdma_proof.events(ranks) == [
        "rank1: symbol_error of roce0 grew by 3",
        "rank1: the link of eth0 changed its state 2 times",
    ]


def count(ranks: dict, group: str, **counters: tuple[int, int]) -> None:
    """Counters of rank1's port: {name: (before, after)}."""
    for place, phase in enumerate(("before", "after")):
        port = ranks["rank1"][phase]["devices"]["roce0"]["ports"]["1"]
        port[group] = {**port[group], **{name: values[place] for name, values in counters.items()}}


def test_a_checksum_that_was_wrong_is_an_event_on_the_device_and_on_its_interface(ranks: dict) -> None:
    count(ranks, "hw_counters", rx_icrc_encapsulated=(4, 5))
    for phase, errors in (("before", 2), ("after", 3)):
        ranks["rank1"][phase]["netdevs"]["eth0"]["rx_crc_errors"] = errors
    assert rdma_proof.events(ranks) == [
        "rank1: rx_icrc_encapsulated of roce0 grew by 1",
        "rank1: rx_crc_errors of eth0 grew by 1",
    ]


@pytest.mark.parametrize("name", ["out_of_sequence", "packet_seq_err", "implied_nak_seq_err", "local_ack_timeout_err"])
def test_a_few_lost_packets_are_what_a_busy_link_has_and_many_are_an_event(ranks: dict, name: str) -> None:
    count(ranks, "hw_counters", **{name: (7, 17)})
    assert rdma_proof.events(ranks) == []
    count(ranks, "hw_counters", **{name: (7, 18)})
    assert rdma_proof.events(ranks) == [f"rank1: {name} of roce0 grew by 11, allowed are 10"]
    count(ranks, "counters", port_rcv_packets=(0, 1_000_000))
    assert rdma_proof.events(ranks) == [], "one in a hundred thousand packets more"


def test_a_queue_pair_that_the_kernel_does_not_have_any_more_is_not_open(ranks: dict) -> None:
    for others in ([], [{"device": "roce0", "qpn": 99, "remote": 1, "state": "RTS", "pid": 4711}]):
        ranks["rank1"]["after"]["qps"] = others
        assert result(ranks)["result"] != "RDMA"
    ranks["rank1"]["after"]["qps"] = [{"device": "roce0", "qpn": 99, "remote": 1, "state": "RTS", "pid": None}]
    assert result(ranks)["result"] == "RDMA", "a kernel that names no process of any queue pair tells nothing of ours"


def test_messages_that_are_surely_larger_than_a_chunk_are_a_problem(ranks: dict) -> None:
    sends, chunk = 100, PLAN["chunk_bytes"]
    for packets, larger in ((chunk // 4096 + 1, False), (chunk // 4096 + 2, True)):
        for phase, number in (("before", 0), ("after", sends)):
            port = ranks["rank0"][phase]["devices"]["roce0"]["ports"]["1"]
            # Each message is answered by one that is answered in turn: a packet of what was sent carries nothing.
            values = {"rdma_sends": number, "sent_pkts": number * (packets + 1), "rcvd_pkts": number}
            port["hw_counters"] = values
        said = "\n".join(result(ranks)["problems"])
        assert ("messages of at least 266240 bytes, the build's chunk is 262144" in said) is larger


def test_a_connection_over_another_device_than_the_pinned_one_is_a_problem(ranks: dict) -> None:
    ranks["rank1"]["pin"] = {"device": "roce1", "gid": 3}
    found = result(ranks)
    assert found["result"] == "RDMA"
    assert found["problems"] == [
        "rank1's worker runs over device roce0, but k3_rdma_device pins roce1: "
        "rdma: pinned makes the program use the pin, or take it out of the inventory"
    ]
    assert "k3_rdma_device pins roce1" in "\n".join(rdma_proof.prove(PLAN, ranks)["problems"])
    ranks["rank1"]["pin"] = {"device": "roce0", "gid": "4"}
    assert "runs over GID 3, but k3_rdma_gid pins 4" in "\n".join(result(ranks)["problems"])
    ranks["rank1"]["pin"] = {"device": "roce0", "gid": None}
    assert result(ranks)["problems"] == []


def test_the_device_of_a_connection_is_that_of_its_own_queue_pair(ranks: dict) -> None:
    for phase in ("before", "after"):
        lines = ranks["rank0"][phase]["lines"]["head"]
        lines[4] = lines[4].replace("roce0", "roce1")
    ranks["rank0"]["pin"] = {"device": "roce0", "gid": None}
    assert result(ranks, "rank1")["problems"] == [], "the other connection's"
    assert "rank0's head runs over device roce1" in "\n".join(result(ranks, "rank2")["problems"])


def test_what_broke_while_the_model_was_loaded_is_kept_with_the_block(ranks: dict) -> None:
    seen = {}
    for name, rank in ranks.items():
        links = {"launch": rank["before"], "ready": rank["after"], "end": copy.deepcopy(rank["after"])}
        seen[name] = {**{key: value for key, value in rank.items() if key not in ("before", "after")}, **links}
    farewell, broken = "recv failed (bytes_recv=0, size_to_recv=8)", "RDMA CQ wc error: status=12"
    for phase in ("ready", "end"):
        seen["rank1"][phase]["lines"]["worker"][:0] = [farewell, broken]
        for name in ranks:
            seen[name][phase]["lines"] = copy.deepcopy(seen[name][phase]["lines"])
    block = transport.transport_block(seen, {**PLAN, "rdma": "auto"}, None)
    assert block["events"] == [f"while loading: rank1, worker: {broken}"]
    assert len(block["start"]["events"]) == 2, "discovery that says goodbye is kept and held against nobody"


def test_other_queue_pairs_at_the_end_are_told_apart(ranks: dict) -> None:
    start = rdma_proof.prove(PLAN, ranks)
    end = copy.deepcopy(start)
    assert rdma_proof.persistence(start, end) == []
    end["connections"][1]["qp"] = "40->80"
    assert rdma_proof.persistence(start, end) == ["rank2: queue pair 32->77 at the start, 40->80 at the end"]


def test_soft_roce_counts_packets_and_tells_the_size_of_messages() -> None:
    before, after = ({"devices": device(0, "10.0.0.2")} for _ in range(2))
    for one, sends in ((before, 10), (after, 30)):
        port = one["devices"]["roce0"]["ports"]["1"]
        port["counters"] = {}
        port["hw_counters"] = {"sent_pkts": 256 * sends, "rcvd_pkts": sends, "rdma_sends": sends}
    assert rdma_proof.moved_bytes(before, after, "roce0", 1024) == (256 * 20 + 20) * 1024
    assert rdma_proof.message_bytes(before, after, "roce0", 1024) == 256 * 1024


@pytest.mark.parametrize(
    ("name", "activated", "failed"),
    [
        ("rpc-worker-log", [{"local": 33437, "remote": 33437, "mtu": 4096, "rx_depth": 24}], False),
        ("rpc-worker-log-tcp-fallback", [], True),
    ],
)
def test_logs_of_other_hosts_are_read(name: str, activated: list, failed: bool) -> None:
    lines = rdma_link.telling_lines(str(FIXTURES / f"llama/{name}.txt"))
    said = rdma_proof.spoken(lines)
    assert (said["activated"], said["failed"], said["probed"]["device"]) == (activated, failed, "rocep1s0f1")


def test_sockets_and_queue_pairs_are_read_as_the_programs_print_them() -> None:
    text = (
        '0      0      10.77.53.10:41234  10.77.53.11:50053 users:(("llama-server",pid=812,fd=11)) '
        "timer:(keepalive,1min,0)\t "
        "cubic wscale:7,7 rto:204 bytes_sent:1500 bytes_retrans:10 bytes_acked:1490 bytes_received:2500 segs_out:9\n"
        "0      0      [::ffff:10.0.0.1]:5  [::ffff:10.0.0.2]:6\t cubic bytes_acked:7\n"
    )
    assert rdma_link.parse_ss(text) == [
        {"pid": 812, "local": "10.77.53.10:41234", "peer": "10.77.53.11:50053", "sent": 1500, "received": 2500},
        {"pid": None, "local": "10.0.0.1:5", "peer": "10.0.0.2:6", "sent": 7, "received": 0},
    ]
    queues = (
        '[{"ifname":"rxe0","port":1,"lqpn":17,"rqpn":18,"type":"RC","state":"RTS","pid":812},'
        '{"ifname":"rxe0","lqpn":1,"type":"GSI"}]'
    )
    assert rdma_link.parse_qps(queues) == [{"device": "rxe0", "qpn": 17, "remote": 18, "state": "RTS", "pid": 812}]
    assert rdma_link.parse_qps("not json") is None


def test_the_limit_of_a_running_process_is_read_from_the_kernel() -> None:
    command = ["prlimit", f"--memlock={MIB}:{MIB}", "cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdin is not None and running.stdout is not None
        running.stdin.write(b"up\n")
        running.stdin.flush()
        running.stdout.readline()  # it is cat by now
        found = rdma_link.process(running.pid)
        running.stdin.close()
    assert found is not None and found["memlock_bytes"] == MIB


def test_the_limit_of_a_process_is_read_and_unlimited_is_none() -> None:
    head = "Limit                     Soft Limit           Hard Limit           Units\n"
    assert (
        rdma_link.memlock_limit(head + "Max locked memory         67108864             67108864             bytes\n")
        == 64 * MIB
    )
    assert (
        rdma_link.memlock_limit(head + "Max locked memory         unlimited            unlimited            bytes\n")
        is None
    )
