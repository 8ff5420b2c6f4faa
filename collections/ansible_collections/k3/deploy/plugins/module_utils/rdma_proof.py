"""Which transport carries each RPC connection, proven from what both ends say: a pure function of what rdma_link read on the ranks."""

from __future__ import annotations

import re

from ansible_collections.k3.deploy.plugins.module_utils import log_lines, rdma_causes

# A connection that has gone over to RDMA sent its greeting over TCP and nothing since.
TCP_QUIET_BYTES = 16 * 1024
# What a loaded model or a measured block moves at the very least, where the workload is not known better.
LEAST_MOVED_BYTES = 64 * 1024

_PROBED = re.compile(r"RDMA probed: dev=(\S+) gid=(\d{1,4})\s?(\S*) qpn=(\d{1,10})")
_ACTIVATED = re.compile(r"RDMA activated: qpn=(\d{1,10})->(\d{1,10}) mtu=(\d{1,5}) rx_depth=(\d{1,6})")
_FAILED = re.compile(r"RDMA activate failed")
_ACCEPTED, _CLOSED = "Accepted client connection", "Client connection closed"
_BREAKS = re.compile(log_lines.KINDS["broken"].pattern)
# Counters whose movement during a block says that something broke. Retransmissions and flushed entries are no faults by themselves.
_ERROR_COUNTERS = (
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "port_rcv_remote_physical_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "req_cqe_error",
    "resp_cqe_error",
    "resp_local_length_error",
    "req_remote_access_errors",
    "req_remote_invalid_request",
    "resp_remote_access_errors",
    "rnr_nak_retry_err",
    "retry_exceeded_err",
    "retry_rnr_exceeded_err",
    "send_err",
    # A RoCE packet whose own checksum was wrong: nothing on the way but a fault of cable, port or memory makes one.
    "rx_icrc_encapsulated",
)
# Packets that were lost or came out of order. The adapter sends them again and the program sees nothing, and a busy RoCE link without priority
# flow control loses a few whenever a buffer of the switch is full: a handful is what such a fabric is, and a warning of the rank's health
# (health_rules.link_findings); more are a path that carries its load badly, and what is measured over it is the loss.
_LOSS_COUNTERS = ("out_of_sequence", "packet_seq_err", "implied_nak_seq_err", "local_ack_timeout_err")
LOSSES_ALLOWED = 10
PACKETS_A_LOSS = 100_000  # and one more for each so many packets that the port received


def session(lines):
    """A worker's lines about the connection that is open now: it serves one client at a time."""
    starts = [place for place, line in enumerate(lines) if _ACCEPTED in line]
    if not starts:
        starts = [place for place, line in enumerate(lines) if "RDMA probed" in line]
    return lines[starts[-1] :] if starts else list(lines)


def spoken(lines):
    """What log lines say: {probed (the last of probes), probes: [{device, gid, type, qpn}], activated: [{local, remote, mtu, rx_depth}],
    failed, closed}."""
    probes, activated = [], []
    for line in lines:
        if found := _PROBED.search(line):
            probes.append({"device": found[1], "gid": int(found[2]), "type": found[3], "qpn": int(found[4])})
        if found := _ACTIVATED.search(line):
            activated.append({"local": int(found[1]), "remote": int(found[2]), "mtu": int(found[3]), "rx_depth": int(found[4])})
    failed = any(_FAILED.search(line) for line in lines)
    closed = bool(lines) and _CLOSED in lines[-1]
    return {"probed": probes[-1] if probes else None, "probes": probes, "activated": activated, "failed": failed, "closed": closed}


def moved_bytes(before, after, device, mtu):
    """Bytes that an RDMA device sent and received between two readings; None where it has no counters.

    ConnectX counts words of four bytes. Soft-RoCE counts packets alone: the bytes are then at most packets times the path MTU.
    """
    ports = [(link.get("devices") or {}).get(device, {}).get("ports", {}).get("1") for link in (before, after)]
    if not all(ports):
        return None
    for group, names, size in (("counters", ("port_xmit_data", "port_rcv_data"), 4), ("hw_counters", ("sent_pkts", "rcvd_pkts"), mtu)):
        if size and all(name in port[group] for port in ports for name in names):
            return sum(ports[1][group][name] - ports[0][group][name] for name in names) * size
    return None


def message_bytes(before, after, device, mtu):
    """Mean size of a message at most, where the driver counts sends (Soft-RoCE does, ConnectX does not)."""
    ports = [(link.get("devices") or {}).get(device, {}).get("ports", {}).get("1") for link in (before, after)]
    if not all(ports) or not mtu or not all("rdma_sends" in port["hw_counters"] for port in ports):
        return None
    sends, packets = (ports[1]["hw_counters"][name] - ports[0]["hw_counters"].get(name, 0) for name in ("rdma_sends", "sent_pkts"))
    return round(packets * mtu / sends) if sends > 0 else None


def least_message_bytes(before, after, device, mtu):
    """Mean size of a message at the very least, where the driver counts sends: what proves messages above a chunk.

    Packets that answer another one carry nothing, and there is at most one of them for each that was received; of a message's packets all but the
    last are full. Small messages are normal (commands, tensors of a token), so that a mean below the chunk says nothing and is never judged.
    """
    ports = [(link.get("devices") or {}).get(device, {}).get("ports", {}).get("1") for link in (before, after)]
    names = ("rdma_sends", "sent_pkts", "rcvd_pkts")
    if not all(ports) or not mtu or not all(name in port["hw_counters"] for port in ports for name in names):
        return None
    sends, sent, received = (ports[1]["hw_counters"][name] - ports[0]["hw_counters"][name] for name in names)
    return max(0, round(((sent - received) / sends - 1) * mtu)) if sends > 0 else None


def _open_pair(head, worker, head_pid, worker_pid, current, spoken_head):
    """The two ends' activation lines that belong to one another and to queue pairs that are open: (head's, worker's) or None."""
    for mine in reversed(current["activated"]):
        theirs = next(
            (line for line in reversed(spoken_head["activated"]) if (line["local"], line["remote"]) == (mine["remote"], mine["local"])), None
        )
        if theirs and _is_open(head, head_pid, theirs) and _is_open(worker, worker_pid, mine):
            return theirs, mine
    return None


def _is_open(link, pid, line):
    """Whether the kernel has the queue pair; true where it was not asked, or names no process of any queue pair."""
    listed = link.get("qps")
    if listed is None or (listed and all(item.get("pid") is None for item in listed)):
        return True
    known = [item for item in listed if item.get("pid") == pid and item.get("qpn") is not None]
    return any(item["qpn"] == line["local"] and item.get("state") in (None, "RTS") for item in known)


def _socket(link, local=None, peer=None):
    return next(
        (item for item in link.get("connections") or [] if local in (None, item["local"]) and peer in (None, item["peer"])),
        None,
    )


def _process(link, pid):
    return next((item for item in link.get("processes") or [] if item["pid"] == pid), {})


def _tcp_bytes(before, now):
    """Bytes over TCP since the earlier reading; over the socket's life when it was not there."""
    then = _socket(before, now["local"], now["peer"]) or {"sent": 0, "received": 0}
    return now["sent"] + now["received"] - then["sent"] - then["received"]


def _end(name, kind, rank, pid, said):
    """One end of a connection as the causes need it."""
    before, after = rank["before"], rank["after"]
    return {"rank": name, "kind": kind, "before": before, "after": after, "process": _process(after, pid), "said": said, "pin": rank.get("pin") or {}}


def _probe_of(end, line):
    """The probe of an activated queue pair; the end's last one where no line names it."""
    return next((probe for probe in reversed(end["said"]["probes"]) if probe["qpn"] == line["local"]), end["said"]["probed"])


def _connection(plan, head_name, name, ranks, sharing):
    """The proof of the connection from the head to one worker."""
    head, worker, endpoint = ranks[head_name], ranks[name], ranks[name]["listen"]
    found = {"worker": name, "endpoint": endpoint, "result": "unknown", "cause": None, "reason": "", "problems": []}
    found |= {"qp": None, "mtu": None, "rx_depth": None, "devices": None, "tcp_bytes": None, "rdma_bytes": None, "message_bytes": None}
    near = _socket(head["after"], peer=endpoint)
    far = _socket(worker["after"], local=endpoint, peer=near["local"]) if near else None
    if near is None or far is None:
        side = f"from {head_name} to {endpoint}" if near is None else f"of {name} with {near['local']}"
        return {**found, "reason": f"no open connection {side} was seen"}
    current = spoken(session(worker["after"]["lines"].get("worker", [])))
    all_head = spoken(head["after"]["lines"].get("head", []))
    ends = [
        _end(head_name, "head", head, near["pid"], all_head),
        _end(name, "worker", worker, far["pid"], current),
    ]
    found["tcp_bytes"] = _tcp_bytes(head["before"], near)
    quiet = found["tcp_bytes"] <= TCP_QUIET_BYTES
    pair = _open_pair(head["after"], worker["after"], near["pid"], far["pid"], current, all_head)
    if pair is None:
        if quiet:
            return {**found, "reason": "no activation is logged on both ends, and TCP carried nothing either"}
        cause, reason = rdma_causes.why_tcp(plan, *ends)
        return {**found, "result": "TCP", "cause": cause, "reason": reason}
    theirs, mine = pair
    probes = [_probe_of(end, line) or {} for end, line in zip(ends, pair, strict=True)]
    devices = [probe.get("device") or end["after"]["resolved"]["device"] for end, probe in zip(ends, probes, strict=True)]
    moved = [moved_bytes(end["before"], end["after"], device, line["mtu"]) for end, device, line in zip(ends, devices, pair, strict=True)]
    found |= {
        "qp": f"{theirs['local']}->{theirs['remote']}",
        "mtu": [theirs["mtu"], mine["mtu"]],
        "rx_depth": [theirs["rx_depth"], mine["rx_depth"]],
        "devices": devices,
        "rdma_bytes": moved,
        "message_bytes": message_bytes(head["before"], head["after"], devices[0], theirs["mtu"]),
        "problems": rdma_causes.unlike_the_build(plan, ends, pair) + rdma_causes.unlike_the_pins(ends, probes),
    }
    found["problems"] += _oversized(plan, ends[0], devices[0], theirs["mtu"])
    least = max(plan.get("workload_bytes") or 0, LEAST_MOVED_BYTES)
    if not quiet:
        return {**found, "reason": f"both ends logged an activation, but {found['tcp_bytes']} bytes went over TCP"}
    for end, size, share in zip(ends, moved, (sharing, 1), strict=True):
        if size is None:
            return {**found, "reason": f"{end['rank']} has no port counters that could prove it"}
        if size < least * share:
            return {**found, "reason": f"the port of {end['rank']} moved {size} bytes, the workload is at least {least * share}"}
    return {**found, "result": "RDMA", "reason": "both ends activated it, their ports moved the bytes and TCP did not"}


def _oversized(plan, end, device, mtu):
    """The head's messages where they are surely larger than a chunk of the build: another build, or another user of the device."""
    size = least_message_bytes(end["before"], end["after"], device, mtu)
    if size is None or size <= plan["chunk_bytes"]:
        return []
    return [
        f"{device} of {end['rank']} sent messages of at least {size} bytes, the build's chunk is {plan['chunk_bytes']}: "
        "another build runs, or something else uses the device"
    ]


def breaks(lines):
    """What log lines say of transfers that broke, each once."""
    return list(dict.fromkeys(hit[0].strip() for line in lines if (hit := _BREAKS.search(line))))


def _port_events(device, then, port):
    """Counters of one port that say that something broke, and losses beyond what a busy link has."""
    now, past = ({**one["counters"], **one["hw_counters"]} for one in (port, then))
    grown = {key: now[key] - past[key] for key in now if key in past and now[key] > past[key]}
    found = [f"{key} of {device} grew by {grown[key]}" for key in _ERROR_COUNTERS if key in grown]
    allowed = LOSSES_ALLOWED + grown.get("port_rcv_packets", 0) // PACKETS_A_LOSS
    return found + [f"{key} of {device} grew by {grown[key]}, allowed are {allowed}" for key in _LOSS_COUNTERS if grown.get(key, 0) > allowed]


def events(ranks):
    """What broke between the two readings: log lines, port errors and link flaps, each led by its rank."""
    found = []
    for name, rank in sorted(ranks.items()):
        before, after = rank["before"], rank["after"]
        for kind, lines in sorted((after.get("lines") or {}).items()):
            earlier = (before.get("lines") or {}).get(kind, [])
            fresh = lines[len(earlier) :] if lines[: len(earlier)] == earlier else lines
            found += [f"{name}, {kind}: {line}" for line in breaks(fresh)]
        for device, one in sorted((after.get("devices") or {}).items()):
            if device != (after.get("resolved") or {}).get("device"):
                continue
            for number, port in sorted(one["ports"].items()):
                then = (before.get("devices") or {}).get(device, {}).get("ports", {}).get(number, {"counters": {}, "hw_counters": {}})
                found += [f"{name}: {text}" for text in _port_events(device, then, port)]
        netdev = after.get("interface") or ""
        changes = [(link.get("netdevs") or {}).get(netdev, {}).get("carrier_changes") for link in (before, after)]
        if None not in changes and changes[1] > changes[0]:
            found.append(f"{name}: the link of {netdev} changed its state {changes[1] - changes[0]} times")
        broken = [(link.get("netdevs") or {}).get(netdev, {}).get("rx_crc_errors") for link in (before, after)]
        if None not in broken and broken[1] > broken[0]:
            found.append(f"{name}: rx_crc_errors of {netdev} grew by {broken[1] - broken[0]}")
    return found


def overall(results):
    """One word for all connections."""
    kinds = set(results)
    if not kinds:
        return "none"
    return kinds.pop() if len(kinds) == 1 else "mixed"


def prove(plan, ranks):
    """The transport of every connection between two readings of all ranks.

    plan: {require (rdma, tcp), chunk_bytes, rx_depth, workload_bytes (at least, per connection; 0 where it is not known)}.
    ranks: {name: {is_head, listen (the worker's endpoint, or None), pin ({device, gid} of the inventory), before, after (links of rdma_link)}}.
    Before the start of an arm, and once more while it runs, for its start; both while it runs for a block.
    Returns {require, transport (RDMA, TCP, mixed, unknown, none), connections, events, problems}: problems are what makes the run not count.
    """
    head_name = next((name for name, rank in ranks.items() if rank["is_head"]), None)
    workers = [name for name, rank in sorted(ranks.items()) if rank["listen"]]
    connections = [_connection(plan, head_name, name, ranks, len(workers)) for name in workers] if head_name else []
    problems = []
    for item in connections:
        lead = f"{item['worker']} ({item['endpoint']})"
        if plan["require"] == "rdma" and item["result"] != "RDMA":
            problems.append(f"{lead}: {item['result']}, not RDMA: {item['reason']}")
        problems += [f"{lead}: {problem}" for problem in item["problems"]]
    return {
        "require": plan["require"],
        "transport": overall(item["result"] for item in connections),
        "connections": connections,
        "events": events(ranks),
        "problems": problems,
    }


def persistence(start, end):
    """Connections that are not the ones of the start: what "kept alive across requests" would contradict."""
    then = {item["worker"]: item["qp"] for item in start["connections"]}
    return [
        f"{item['worker']}: queue pair {then.get(item['worker'])} at the start, {item['qp']} at the end"
        for item in end["connections"]
        if item["qp"] != then.get(item["worker"])
    ]
