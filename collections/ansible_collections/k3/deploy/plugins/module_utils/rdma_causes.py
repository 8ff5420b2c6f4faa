"""Why a connection is on TCP although nothing says so, and how an activated one can differ from its build. Pure functions of what was read."""

from __future__ import annotations

from ansible_collections.k3.deploy.plugins.module_utils import rdma

MIB = 1048576


def connections_of(link, pid, kind):
    """How many connections a process holds pinned memory for: a head one a worker, a worker one at a time."""
    if kind == "worker":
        return 1
    return max(1, sum(item["pid"] == pid for item in link.get("connections") or []))


def memlock_needed(plan, connections):
    """Bytes that connections pin: one chunk to send and rx_depth to receive, each."""
    return connections * plan["chunk_bytes"] * (plan["rx_depth"] + 1)


def _silent_cause(plan, end):
    """Why an end did not even probe: (cause, reason), or None when nothing that was read explains it."""
    name, link, process = f"{end['rank']}'s {end['kind']}", end["after"], end["process"]
    switches = process.get("environment") or {}
    device, index = switches.get("GGML_RDMA_DEV"), switches.get("GGML_RDMA_GID")
    devices, address, resolved = link["devices"], link["address"], link["resolved"]
    if "GGML_RPC_NO_RDMA" in switches:
        return "environment", f"GGML_RPC_NO_RDMA is set for {name}"
    if process.get("knows_rdma") is False:
        return "peer", f"the RPC library of {name} was built without RDMA"
    if not devices:
        return "device", f"{end['rank']} has no RDMA device"
    if device is not None and device not in devices:
        return "device", f"GGML_RDMA_DEV={device} of {name} does not exist (there is: {', '.join(sorted(devices))})"
    if index is None:
        entries = devices[device]["ports"].get(rdma.IB_PORT, {}).get("gids", []) if device else None
        if entries is not None and all(entry["gid"] != rdma.gid_of(address) for entry in entries):
            return "device", f"GGML_RDMA_DEV={device} of {name} does not own {address}"
        if device is None and resolved["device"] is None:
            return "device", f"{end['rank']}: {'; '.join(resolved['problems'])}"
    limit = process.get("memlock_bytes")
    needed = memlock_needed(plan, end["connections"])
    if limit is not None and limit < needed:
        return "memlock", f"{name} may lock {limit / MIB:g} MiB and needs {needed / MIB:g} MiB for {end['connections']} connections"
    if (link.get("verbs") or {}).get("accessible") is False:
        return "device", f"the account of {name} may not open /dev/infiniband/uverbs*"
    return None


def _misplaced(end):
    """Where an end that probed took another device or GID than those of its address: the reason, or None."""
    probed, resolved = end["said"]["probed"], end["after"]["resolved"]
    if not probed or (probed["device"], probed["gid"]) == (resolved["device"], resolved["gid"]):
        return None
    right = f"{resolved['device']} at GID {resolved['gid']}" if resolved["device"] else "no device of this rank"
    text = f"{end['rank']}'s {end['kind']} took {probed['device']} at GID {probed['gid']}, but {end['after']['address']} is {right}"
    switches = end["process"].get("environment") or {}
    if "GGML_RDMA_GID" in switches and "GGML_RDMA_DEV" not in switches:
        text += ": GGML_RDMA_GID without GGML_RDMA_DEV takes the first device, whatever its address"
    return text


def why_tcp(plan, head, worker):
    """The most likely cause of a connection on TCP: (device | gid | memlock | peer | environment, reason).

    head, worker: {rank, kind, after, process, said}. Said of the head is the whole log's, since its lines do not name the peer.
    """
    ends = [{**end, "connections": connections_of(end["after"], end["process"].get("pid"), end["kind"])} for end in (worker, head)]
    for end in ends:
        if "GGML_RPC_NO_RDMA" in (end["process"].get("environment") or {}) or end["process"].get("knows_rdma") is False:
            return _silent_cause(plan, end)
    misplaced = next(filter(None, map(_misplaced, ends)), None)
    # An end only tries to activate what the other one offered, and the head's lines are of all its connections: its failure is not this
    # connection's when the worker offered nothing.
    mine = [end for end in ends if end["kind"] == "worker" or worker["said"]["probed"]]
    failed = next((end for end in mine if end["said"]["failed"]), None)
    if failed:
        return "gid", misplaced or f"{failed['rank']}'s {failed['kind']} could not activate: the network of its GID does not reach the peer"
    # A worker that probed and did not activate was told by the head that it has no RDMA; the head's own lines are of all its connections.
    suspects = [ends[1]] if worker["said"]["probed"] else ends
    for end in suspects:
        if found := _silent_cause(plan, end):
            return found
    if misplaced:
        return "gid", misplaced
    silent = head["rank"] if worker["said"]["probed"] else worker["rank"]
    return "peer", f"{silent} offered no RDMA, and nothing that was read says why"


def unlike_the_build(plan, ends, pair):
    """Where activated ends differ from what their build and their interfaces should give."""
    problems = []
    for end, line in zip(ends, pair, strict=True):
        if line["rx_depth"] != plan["rx_depth"]:
            problems.append(f"{end['rank']} has rx_depth {line['rx_depth']}, its build was planned with {plan['rx_depth']}")
        expected = end["after"]["resolved"]["rdma_mtu"]
        if expected and line["mtu"] > expected:
            problems.append(f"{end['rank']} uses a path MTU of {line['mtu']}, its interface leaves {expected}")
        ring = end["process"].get("ring")
        if ring and ring["chunk_bytes"] != plan["chunk_bytes"]:
            problems.append(f"{end['rank']} runs a library with chunks of {ring['chunk_bytes']} bytes, planned are {plan['chunk_bytes']}")
        elif not ring and plan["chunk_bytes"] != rdma.STOCK_CHUNK_BYTES and end["process"]:
            problems.append(f"{end['rank']} runs a library with the usual chunks, planned are {plan['chunk_bytes']} bytes")
    if pair[0]["mtu"] != pair[1]["mtu"]:
        problems.append(f"the ends have different path MTUs: {pair[0]['mtu']} and {pair[1]['mtu']}: compare the MTUs of their interfaces")
    return problems


def unlike_the_pins(ends, probes):
    """Where activated ends run over another device or GID than the inventory pins, whatever the arm's setting."""
    problems = []
    for end, probe in zip(ends, probes, strict=True):
        for what, shown in (("device", "device"), ("gid", "GID")):
            wanted, used = end["pin"].get(what), probe.get(what)
            if None not in (wanted, used) and str(used) != str(wanted):
                problems.append(
                    f"{end['rank']}'s {end['kind']} runs over {shown} {used}, but k3_rdma_{what} pins {wanted}: "
                    f"rdma: pinned makes the program use the pin, or take it out of the inventory"
                )
    return problems
