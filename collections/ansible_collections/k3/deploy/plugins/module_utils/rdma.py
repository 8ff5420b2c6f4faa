"""RDMA as a rank has it: ports and GIDs from sysfs, and which of them own the fabric address. Standard library only: runs on the rank."""

from __future__ import annotations

import ipaddress
import os
import re

ROCE_V2 = "RoCE v2"
ROCE_V1 = "IB/RoCE v1"
# The RPC transport opens this port of a device and no other.
IB_PORT = "1"
# Upstream's sizes of the RPC transport: bytes of one message, and receive buffers of one connection.
STOCK_CHUNK_BYTES = 256 * 1024
STOCK_RX_DEPTH = 24
# What a RoCE packet needs beside its payload; the payload is the largest of these sizes that is left.
_RDMA_HEADERS = 96
_RDMA_MTUS = (4096, 2048, 1024, 512, 256)
_UNSET_GID = "0" * 32


def _text(*parts):
    """A sysfs file's text; an empty string where it is absent or the kernel refuses (an unset GID's attributes are EINVAL).

    Without Python's text files: a table of GIDs may have a thousand places, and each of them is a file.
    """
    try:
        handle = os.open(os.path.join(*parts), os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(handle, 4096).decode("ascii", "replace").strip()
        finally:
            os.close(handle)
    except OSError:
        return ""


def _names(*parts):
    try:
        return sorted(os.listdir(os.path.join(*parts)))
    except OSError:
        return []


def _whole(text):
    return int(text) if re.fullmatch(r"-?\d{1,20}", text) else None


def _word(text):
    """C(4: ACTIVE) -> C(ACTIVE). Fields are parsed: a line that says DOWN may carry LINK_UP elsewhere."""
    return text.partition(":")[2].strip() or text


def _counters(folder):
    values = {name: _whole(_text(folder, name)) for name in _names(folder)}
    return {name: value for name, value in values.items() if value is not None and name != "lifespan"}


def _gids(port):
    """The GIDs that are set: [{index, gid (32 hex digits), type, netdev}]."""
    found = []
    for index in sorted(int(name) for name in _names(port, "gids") if name.isdigit()):
        gid = _text(port, "gids", str(index)).replace(":", "").lower()
        if len(gid) != 32 or gid == _UNSET_GID:
            continue
        attributes = os.path.join(port, "gid_attrs")
        kind, netdev = _text(attributes, "types", str(index)), _text(attributes, "ndevs", str(index))
        found.append({"index": index, "gid": gid, "type": kind, "netdev": netdev})
    return found


def read_devices(sysfs="/sys"):
    """RDMA devices: {name: {pci, ports: {number: {state, phys_state, rate, link_layer, gids, counters, hw_counters}}}}."""
    base = os.path.join(sysfs, "class", "infiniband")
    devices = {}
    for name in _names(base):
        ports = {}
        for number in _names(base, name, "ports"):
            port = os.path.join(base, name, "ports", number)
            ports[number] = {
                "state": _word(_text(port, "state")),
                "phys_state": _word(_text(port, "phys_state")),
                "rate": _text(port, "rate"),
                "link_layer": _text(port, "link_layer"),
                "gids": _gids(port),
                "counters": _counters(os.path.join(port, "counters")),
                "hw_counters": _counters(os.path.join(port, "hw_counters")),
            }
        pci = os.path.join(base, name, "device")
        devices[name] = {"pci": os.path.basename(os.path.realpath(pci)) if os.path.exists(pci) else None, "ports": ports}
    return devices


def read_netdevs(sysfs="/sys"):
    """Network interfaces: {name: {mtu, operstate, carrier, carrier_changes, rx_crc_errors, phys_port_name}}."""
    base = os.path.join(sysfs, "class", "net")
    return {
        name: {
            "mtu": _whole(_text(base, name, "mtu")),
            "operstate": _text(base, name, "operstate"),
            "carrier": _whole(_text(base, name, "carrier")),
            "carrier_changes": _whole(_text(base, name, "carrier_changes")),
            "rx_crc_errors": _whole(_text(base, name, "statistics", "rx_crc_errors")),
            "phys_port_name": _text(base, name, "phys_port_name"),
        }
        for name in _names(base)
        if os.path.isdir(os.path.join(base, name))
    }


def gid_of(address):
    """The GID of an IP address as 32 hex digits: IPv4 in its mapped form, as the RPC transport compares it."""
    parsed = ipaddress.ip_address(address)
    if parsed.version == 4:
        return "0" * 20 + "ffff" + parsed.packed.hex()
    return parsed.packed.hex()


def address_of(gid):
    """The IP address that a GID stands for, as text."""
    parsed = ipaddress.IPv6Address(bytes.fromhex(gid))
    return str(parsed.ipv4_mapped or parsed)


def rdma_mtu(netdev_mtu):
    """The RDMA path MTU that an interface's MTU leaves (1500 -> 1024, 9000 -> 4096); None when it is not known or too small."""
    room = (netdev_mtu or 0) - _RDMA_HEADERS
    return next((size for size in _RDMA_MTUS if size <= room), None)


def _entries(devices, wanted):
    """GID entries that are the address, as (device, port, entry)."""
    return [
        (name, port, entry)
        for name, device in sorted(devices.items())
        for port in sorted(device["ports"])
        for entry in device["ports"][port]["gids"]
        if entry["gid"] == wanted
    ]


def _why_none(devices, address):
    """Why no device owns an address."""
    if not devices:
        return "this rank has no RDMA device (without a cable the adapter's functions can be gone): nothing can carry RDMA"
    layers = {port["link_layer"] for device in devices.values() for port in device["ports"].values()}
    if layers == {"InfiniBand"}:
        return (
            f"the RDMA ports ({', '.join(sorted(devices))}) are InfiniBand, whose GIDs are no IP addresses: "
            f"the RPC transport finds no GID for {address}"
        )
    owned = sorted(
        f"{name}: {address_of(entry['gid'])}"
        for name, device in devices.items()
        for port in device["ports"].values()
        for entry in port["gids"]
        if not entry["gid"].startswith("fe80") and entry["type"] != ROCE_V1
    )
    return f"no RDMA device owns {address} (they own {', '.join(owned) or 'link-local addresses alone'}): check k3_fabric_address"


def _pin_problems(devices, entries, address, device, gid):
    """What is wrong with the pins of the inventory."""
    if device is None:
        return ["k3_rdma_gid is given without k3_rdma_device: an index means nothing without its device"] if gid is not None else []
    if device not in devices:
        return [f"k3_rdma_device {device} does not exist on this rank (there is: {', '.join(sorted(devices)) or 'none'})"]
    mine = [entry for name, port, entry in entries if name == device and port == IB_PORT]
    if not mine:
        owner = next((name for name, port, _entry in entries if port == IB_PORT), None)
        return [f"k3_rdma_device {device} does not own {address}" + (f": {owner} does" if owner else "")]
    if gid is not None and all(entry["index"] != gid for entry in mine):
        valid = ", ".join(f"{entry['index']} ({entry['type']})" for entry in mine)
        return [f"k3_rdma_gid {gid} of {device} is not {address}: that is at {valid}, and indices move, so better leave it out"]
    return []


def _sharing(devices, netdevs, chosen, netdev):
    """Other active devices on the same physical port: [{device, address}]."""
    label = netdevs.get(netdev, {}).get("phys_port_name")
    found = []
    for name, device in sorted(devices.items()):
        port = device["ports"].get(IB_PORT)
        if name == chosen or port is None or port["state"] != "ACTIVE" or not label:
            continue
        entries = [entry for entry in port["gids"] if netdevs.get(entry["netdev"], {}).get("phys_port_name") == label]
        if entries:
            routable = [address_of(entry["gid"]) for entry in entries if not entry["gid"].startswith("fe80")]
            found.append({"device": name, "address": routable[0] if routable else None})
    return found


def _why(chosen, address, entry, others, sharing):
    text = f"{chosen} owns {address} at GID {entry['index']} ({entry['type']})"
    if others:
        text += f"; so does {', '.join(others)}: the first by name is taken, name another in k3_rdma_device"
    for other in sharing:
        if other["device"] not in others:
            owned = other["address"] or "no address"
            text += f"; {other['device']} is the same cable and has {owned}: one RPC connection uses one device"
    return text


def resolve(devices, netdevs, address, device=None, gid=None):
    """The device, port and GID index that own a rank's fabric address, and why.

    devices, netdevs: of read_devices and read_netdevs. device, gid: pins of the inventory, or None.
    Returns {device, port, gid, type, netdev, mtu (of the interface), rdma_mtu, state, sharing: [{device, address}], why, problems}; with problems,
    what could not be resolved is None.
    """
    result = {"device": None, "port": None, "gid": None, "type": None, "netdev": None, "mtu": None, "rdma_mtu": None}
    result |= {"state": None, "sharing": [], "why": "", "problems": []}
    entries = _entries(devices, gid_of(address))
    result["problems"] = _pin_problems(devices, entries, address, device, gid)
    if result["problems"]:
        return result
    usable = [item for item in entries if item[1] == IB_PORT and (device is None or item[0] == device) and (gid is None or item[2]["index"] == gid)]
    if not usable:
        elsewhere = [f"port {port} of {name}" for name, port, _entry in entries]
        result["problems"] = [
            f"{address} is on {', '.join(elsewhere)}: the RPC transport uses port {IB_PORT} alone" if elsewhere else _why_none(devices, address)
        ]
        return result
    modern = [item for item in usable if item[2]["type"] == ROCE_V2]
    if not modern:
        name, _port, entry = usable[0]
        result["problems"] = [f"{address} has no RoCE v2 GID: GID {entry['index']} of {name} is {entry['type']}, which does not cross a router"]
        return result
    # An active port before one that is down, then the first by name: the same choice at every launch.
    modern.sort(key=lambda item: (devices[item[0]]["ports"][item[1]]["state"] != "ACTIVE", item[0], item[2]["index"]))
    chosen, port, entry = modern[0]
    others = sorted({name for name, _port, _entry in modern} - {chosen})
    netdev = netdevs.get(entry["netdev"], {})
    sharing = _sharing(devices, netdevs, chosen, entry["netdev"])
    state = devices[chosen]["ports"][port]["state"]
    result |= {"device": chosen, "port": int(port), "gid": entry["index"], "type": entry["type"], "netdev": entry["netdev"]}
    result |= {"mtu": netdev.get("mtu"), "rdma_mtu": rdma_mtu(netdev.get("mtu")), "state": state, "sharing": sharing}
    result["why"] = _why(chosen, address, entry, others, sharing)
    if state != "ACTIVE":
        result["problems"] = [f"port {port} of {chosen} is {state or 'in an unknown state'}, not ACTIVE: check the cable and `rdma link`"]
    return result


def write_bandwidth(text):
    """Average Gb/s of an ib_write_bw report (--report_gbits); None without a result row, which comes with exit status 0 when the GID is wrong."""
    row = re.search(r"^\s*\d+\s+\d+\s+[\d.]+\s+([\d.]+)\s+[\d.]+\s*$", text, re.MULTILINE)
    return float(row[1]) if row else None
