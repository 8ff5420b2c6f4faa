"""What a rank's RPC transport does right now: sockets, processes with their limits, open queue pairs, log lines. Runs on the rank."""

from __future__ import annotations

import grp
import json
import os
import pwd
import re
import stat
from collections import deque

from ansible_collections.k3.deploy.plugins.module_utils import host, rdma

# What of an environment decides about the transport.
_VARIABLES = ("GGML_RDMA_DEV", "GGML_RDMA_GID", "GGML_RPC_NO_RDMA")
# Log lines that a proof reads, or that void a block. A long run has millions of others.
_TELLING = re.compile(
    r"RDMA |Accepted client connection|Client connection closed|(?:send|recv) failed \(|Remote RPC server|RPC server version mismatch"
    r"|RPC handshake failed|HELLO|Unknown command|size mismatch|[Tt]imed? ?out"
)
_KEPT_LINES = 1000
_RING = re.compile(rb"K3_RDMA_RING chunk=(\d{1,12}) rx_depth=(\d{1,9})")


def telling_lines(path):
    """The lines of a log that speak of the transport, the last thousand of them."""
    kept = deque(maxlen=_KEPT_LINES)
    try:
        with open(path, encoding="utf-8", errors="replace") as lines:
            kept.extend(line.strip()[:400] for line in lines if _TELLING.search(line))
    except OSError:
        return []
    return list(kept)


def parse_ss(text):
    """Established sockets from `ss -HtinpO`: [{pid, local, peer, sent, received}]; bytes over the socket's life."""
    found = []
    for line in text.splitlines():
        ends = re.match(r"\s*\d+\s+\d+\s+(\S+)\s+(\S+)", line)
        if not ends:
            continue
        numbers = {name: int(value) for name, value in re.findall(r"\b(bytes_sent|bytes_acked|bytes_received):(\d{1,20})", line)}
        pid = re.search(r"pid=(\d{1,10})", line)
        found.append(
            {
                "pid": int(pid[1]) if pid else None,
                "local": _endpoint(ends[1]),
                "peer": _endpoint(ends[2]),
                # Absent means zero: ss leaves out what has not happened.
                "sent": numbers.get("bytes_sent", numbers.get("bytes_acked", 0)),
                "received": numbers.get("bytes_received", 0),
            }
        )
    return found


def _endpoint(text):
    """An address:port without an IPv4 address' mapped form or brackets."""
    address, _colon, port = text.rpartition(":")
    return "{}:{}".format(address.strip("[]").removeprefix("::ffff:"), port)


def connections(endpoints):
    """Open TCP connections from or to RPC endpoints. Nothing is opened: a worker serves one client at a time."""
    ports = sorted({endpoint.rpartition(":")[2] for endpoint in endpoints})
    if not ports:
        return []
    query = " or ".join(f"sport = :{port} or dport = :{port}" for port in ports)
    rc, out, _err = host.run(["ss", "-HtinpO", "state", "established", f"( {query} )"])
    wanted = set(endpoints)
    return [item for item in (parse_ss(out) if rc == 0 else []) if item["local"] in wanted or item["peer"] in wanted]


def parse_qps(text):
    """Connected queue pairs from `rdma -j resource show qp`: [{device, qpn, remote, state, pid}]; None for what is no list."""
    try:
        listed = json.loads(text)
    except ValueError:
        return None
    return [
        {"device": item.get("ifname"), "qpn": item.get("lqpn"), "remote": item.get("rqpn"), "state": item.get("state"), "pid": item.get("pid")}
        for item in listed
        if isinstance(item, dict) and item.get("type") == "RC"
    ]


def queue_pairs():
    """Queue pairs as the kernel has them; None where the `rdma` program cannot say."""
    rc, out, _err = host.run(["rdma", "-j", "resource", "show", "qp"])
    return parse_qps(out) if rc == 0 and out.strip() else None


def memlock_limit(limits):
    """The soft limit of locked memory in bytes from /proc/PID/limits; None means unlimited or not known."""
    found = re.search(r"^Max locked memory\s+(\d{1,20})\s", limits, re.MULTILINE)
    return int(found[1]) if found else None


def _transport_library(pid, exe):
    """What the RPC library that a process has loaded says of itself: (whether it knows RDMA, its ring where it is not the usual one)."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
            paths = {line.split(None, 5)[5].strip() for line in maps if line.count("/")}
    except OSError:
        return None, None
    library = next((path for path in sorted(paths) if "ggml-rpc" in os.path.basename(path) and ".so" in path), exe)
    try:
        with open(library, "rb") as raw:
            content = raw.read()
    except OSError:
        return None, None
    ring = _RING.search(content)
    return b"RDMA activated" in content, {"chunk_bytes": int(ring[1]), "rx_depth": int(ring[2])} if ring else None


def _limits(pid):
    """/proc/PID/limits, which cannot be read from its end as a log is; an empty string when the process is gone."""
    try:
        with open(f"/proc/{pid}/limits", encoding="ascii") as raw:
            return raw.read()
    except OSError:
        return ""


def process(pid):
    """One process of the transport: its limit, its switches, and what its RPC library is."""
    seen = host.process(pid)
    if seen is None:
        return None
    limits = _limits(pid)
    knows, ring = _transport_library(pid, seen["exe"])
    environment = {name: seen["environment"][name] for name in _VARIABLES if name in seen["environment"]}
    return {"pid": pid, "memlock_bytes": memlock_limit(limits), "environment": environment, "knows_rdma": knows, "ring": ring}


def parse_limits(text):
    """What `systemctl show` says of a unit's locked memory: {memlock_bytes (None: unlimited), drop_ins}; None where there is no such unit."""
    values = dict(line.partition("=")[::2] for line in text.splitlines())
    limit = values.get("LimitMEMLOCKSoft") or values.get("LimitMEMLOCK") or ""
    if values.get("LoadState") != "loaded" or not (limit.isdecimal() or limit == "infinity"):
        return None
    return {"memlock_bytes": int(limit) if limit.isdecimal() else None, "drop_ins": values.get("DropInPaths", "").split()}


def unit_limits(units):
    """The locked memory that systemd will give to units, with every drop-in applied: {kind: parse_limits}. units: {kind: name}."""
    found = {}
    for kind, name in units.items():
        rc, out, _err = host.run(["systemctl", "show", "--property=LoadState,LimitMEMLOCK,LimitMEMLOCKSoft,DropInPaths", name])
        limits = parse_limits(out) if rc == 0 else None
        if limits:
            found[kind] = limits
    return found


def verbs_access(user, folder="/dev/infiniband"):
    """Device nodes of user-space verbs, and whether an account may open one: {nodes, accessible}; None when the account does not exist yet."""
    try:
        nodes = sorted(name for name in os.listdir(folder) if name.startswith("uverbs"))
    except OSError:
        nodes = []
    try:
        account = pwd.getpwnam(user)
    except KeyError:
        return {"nodes": nodes, "accessible": None}
    groups = {account.pw_gid} | {group.gr_gid for group in grp.getgrall() if user in group.gr_mem}
    return {"nodes": nodes, "accessible": any(_may_write(os.path.join(folder, name), account.pw_uid, groups) for name in nodes)}


def _may_write(path, uid, groups):
    info = os.stat(path)
    if uid in (0, info.st_uid):
        return uid == 0 or bool(info.st_mode & stat.S_IWUSR)
    if info.st_gid in groups:
        return bool(info.st_mode & stat.S_IWGRP)
    return bool(info.st_mode & stat.S_IWOTH)


def interface_of(address):
    """The network interface that has an address; None when no interface has it."""
    rc, out, _err = host.run(["ip", "-j", "addr"])
    links = json.loads(out) if rc == 0 and out.strip() else []
    return next((link["ifname"] for link in links if any(item.get("local") == address for item in link.get("addr_info", []))), None)


def read_link(address, user="", endpoints=(), logs=None, device=None, gid=None, sysfs="/sys"):
    """Everything of a rank that decides about its transport, and what of it is resolved.

    address: the fabric address. endpoints: every worker's address:port of the arm, none to leave processes out. logs: {worker, head: path}.
    Returns {time, address, interface, resolved, devices, netdevs, verbs, connections, processes, qps, lines}.
    """
    devices, netdevs = rdma.read_devices(sysfs), rdma.read_netdevs(sysfs)
    sockets = connections(endpoints)
    listening = [item["pid"] for item in host.listeners() if f"{item['address']}:{item['port']}" in set(endpoints)] if endpoints else []
    pids = sorted({pid for pid in [*listening, *(item["pid"] for item in sockets)] if pid})
    return {
        "time": host.utc_now(),
        "address": address,
        "interface": interface_of(address),
        "resolved": rdma.resolve(devices, netdevs, address, device or None, gid),
        "devices": devices,
        "netdevs": netdevs,
        "verbs": verbs_access(user) if user else None,
        "connections": sockets,
        "processes": [found for found in (process(pid) for pid in pids) if found],
        "qps": queue_pairs() if devices and endpoints else None,
        "lines": {kind: telling_lines(path) for kind, path in (logs or {}).items()},
    }
