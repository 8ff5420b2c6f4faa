#!/usr/bin/python
"""k3.deploy.rank_state: everything that decides about a rank, read in one round trip."""

from __future__ import annotations

DOCUMENTATION = r"""
module: rank_state
short_description: Read a rank's whole state in one round trip
description:
  - Reads memory, candidate units with their processes as they really run, listening sockets, releases, production and tools.
  - Read-only. Never opens a connection to an RPC worker, because a worker serves one client at a time.
options:
  root:
    description: Directory under which everything of k3deploy lives on the rank.
    type: path
    default: /opt/k3deploy
  production:
    description: The inventory's C(k3_production); names units, files and the head's URL.
    type: dict
    default: {}
  is_head:
    description: Whether this rank is the head, so that production's head is asked over HTTP.
    type: bool
    default: false
  is_worker:
    description: Whether production runs a worker on this rank.
    type: bool
    default: true
  tools:
    description: Programs whose presence and path are reported.
    type: list
    elements: str
    default: []
  paths:
    description: Paths whose size, free space and kind are reported; taken as they are, a C($) or C(~) in them means itself.
    type: list
    elements: str
    default: []
  hashes:
    description: Files whose sha256 is reported; remembered in C(<root>/state/hashes.json) by size and time of change, since a model is large.
    type: list
    elements: str
    default: []
  variables:
    description: Names of environment variables that are reported of candidate processes beside those of llama.cpp and its libraries.
    type: list
    elements: str
    default: []
  holdings:
    description: Whether to find out how much memory the processes of production's and of candidates' units hold.
    type: bool
    default: false
author: [the k3deploy project (@k3deploy)]
attributes:
  check_mode:
    support: full
    description: Changes nothing in any mode; outside check mode the memory of hashes may grow.
"""

EXAMPLES = r"""
- name: Read the state of every rank
  k3.deploy.rank_state:
    production: "{{ k3_production }}"
    is_head: "{{ inventory_hostname in groups['head'] }}"
  register: state
"""

RETURN = r"""
state:
  description: The rank's state; memory in MiB, times in seconds since the epoch.
  type: dict
  returned: always
"""

import json
import os
import platform
import shutil
import socket
import time

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.k3.deploy.plugins.module_utils import holders, host
from ansible_collections.k3.deploy.plugins.module_utils.production import read_window


def unit_state(shown, root, variables, exposure):
    """One unit with the process behind it. exposure: see host.exposures."""
    pid = int(shown.get("MainPID") or 0)
    process = host.process(pid, variables) if pid else None
    state = {
        "active": shown.get("ActiveState"),
        "sub": shown.get("SubState"),
        "result": shown.get("Result"),
        "exit_status": shown.get("ExecMainStatus"),
        "limit_memlock": shown.get("LimitMEMLOCK"),
        "user": shown.get("User"),
        "exposure": exposure,
        "pid": pid or None,
    }
    if process:
        state.update(
            exe=process["exe"],
            exe_sha256=host.sha256_file(process["exe"]),
            argv=process["argv"],
            environment=process["environment"],
            affinity=process["affinity"],
            build_id=host.release_of(process["exe"], root),
        )
    return state


def production_state(production, is_head, is_worker):
    """Production as it is now: units, hashes of its files, and whether its head answers."""
    wanted = (production.get("head_unit") if is_head else None, production.get("worker_unit") if is_worker else None)
    names = [name for name in wanted if name]
    shown = host.show_units(names)
    files = list(production.get("unit_files") or []) + list(production.get("binaries") or [])
    state = {
        "units": {
            name: {"load": value.get("LoadState"), "active": value.get("ActiveState"), "pid": int(value["MainPID"])} for name, value in shown.items()
        },
        "files": {path: host.sha256_file(path) for path in files if os.path.exists(path)},
    }
    if is_head and production.get("head_url"):
        status, body = host.http_json(production["head_url"] + "/health", timeout=3)
        state["head"] = {"status": status, "detail": body}
    return state


def holdings(names):
    """{unit: what its processes hold of the rank's memory} of the units that have a process."""
    meminfo = host.meminfo()
    found = {name: holders.held(name, meminfo) for name in names if name not in host.GUARD_UNITS}
    return {name: seen for name, seen in found.items() if seen}


def path_state(path):
    """Kind, size and free space (MiB) of a path, or of the nearest parent that exists."""
    parent = path
    while not os.path.exists(parent):
        parent = os.path.dirname(parent)
    usage = shutil.disk_usage(parent)
    return {
        "exists": os.path.exists(path),
        "is_file": os.path.isfile(path),
        "size": os.path.getsize(path) if os.path.isfile(path) else None,
        "free_mib": usage.free // 1048576,
        "writable": os.access(parent, os.W_OK),
    }


def ip_json(*arguments):
    """What ``ip -j`` says, as data; an empty list where it cannot say."""
    rc, out, _err = host.run(["ip", "-j", *arguments])
    return json.loads(out) if rc == 0 and out.strip() else []


def addresses():
    """{interface: addresses that this rank owns there}, without their prefix length."""
    return {link["ifname"]: [item["local"] for item in link.get("addr_info", []) if item.get("local")] for link in ip_json("addr")}


def remembered_hashes(paths, root, remember):
    """{path: sha256}, hashing only what changed since the last time."""
    memory_path = os.path.join(root, "state", "hashes.json")
    memory = host.read_json(memory_path) or {}
    found, fresh = {}, False
    for path in paths:
        try:
            info = os.stat(path)
        except OSError:
            found[path] = None
            continue
        key = "%s %d %d %d" % (path, info.st_ino, info.st_size, info.st_mtime_ns)
        if key not in memory:
            memory[key], fresh = host.sha256_file(path), True
        found[path] = memory[key]
    if fresh and remember and os.path.isdir(os.path.dirname(memory_path)):
        host.write_atomic(memory_path, json.dumps(memory).encode())
    return found


def candidates(root):
    """{slug: build id that its release link names, or None when the link leads nowhere}."""
    folder = os.path.join(root, "candidates")
    found = {}
    for slug in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
        link = os.path.join(folder, slug, "release")
        found[slug] = os.path.basename(os.path.realpath(link)) if os.path.exists(link) else None
    return found


def nccl_found(root, installed):
    """{slug: whether the configure step of its build found NCCL}, by the releases' own manifests; without those that do not say."""
    said = {}
    for build in {build for build in installed.values() if build}:
        manifest = host.read_json(os.path.join(root, "releases", build, "manifest.json"))
        nccl = manifest.get("nccl") if isinstance(manifest, dict) else None
        if isinstance(nccl, dict) and isinstance(nccl.get("found"), bool):
            said[build] = nccl["found"]
    return {slug: said[build] for slug, build in installed.items() if build in said}


def window_state(root):
    """The maintenance window with ``left_s``, the seconds until its end by this rank's clock; None when it is closed."""
    window = read_window(root)
    if window and window.get("deadline"):
        window["left_s"] = int(window["deadline"] - time.time())
    return window


def guard_state(root):
    """The rank's guard: what it watches (null: not armed), and its records of the last floor and the last deadline that it enforced."""
    files = {"armed": "guard.json", "tripped": "guard-tripped.json", "deadline": "guard-deadline.json"}
    return {name: host.read_json(os.path.join(root, "state", file)) for name, file in files.items()}


def main():
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "default": "/opt/k3deploy"},
            "production": {"type": "dict", "default": {}},
            "is_head": {"type": "bool", "default": False},
            "is_worker": {"type": "bool", "default": True},
            "tools": {"type": "list", "elements": "str", "default": []},
            "paths": {"type": "list", "elements": "str", "default": []},
            "hashes": {"type": "list", "elements": "str", "default": []},
            "variables": {"type": "list", "elements": "str", "default": []},
            "holdings": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    root = module.params["root"]
    names = host.units_matching(["k3-candidate*"])
    try:
        shown = host.show_units(names)
        production = production_state(module.params["production"], module.params["is_head"], module.params["is_worker"])
    except OSError as error:
        module.fail_json(msg=f"this rank has no usable systemd: {error}")
    exposed = host.exposures([name for name in shown if name.endswith(".service")])
    units = {name: unit_state(value, root, module.params["variables"], exposed.get(name)) for name, value in shown.items()}
    releases = os.path.join(root, "releases")
    installed = candidates(root)
    interfaces = addresses()
    routed = {route["dev"] for route in ip_json("route", "show", "default") if route.get("dev")}
    state = {
        "host": socket.gethostname(),
        "time": host.utc_now(),
        "kernel": platform.release(),
        "os": platform.freedesktop_os_release().get("PRETTY_NAME", "") if os.path.exists("/etc/os-release") else "",
        "arch": platform.machine(),
        "cpus": os.cpu_count(),
        "mem": host.meminfo(),
        "units": units,
        "listeners": [dict(item, unit=host.unit_of(item["pid"])) for item in host.listeners()],
        "releases": sorted(name for name in os.listdir(releases) if name[0] != ".") if os.path.isdir(releases) else [],
        "candidates": installed,
        "nccl": nccl_found(root, installed),
        "production": production,
        "tools": {name: shutil.which(name) for name in module.params["tools"]},
        "paths": {path: path_state(path) for path in module.params["paths"]},
        "hashes": remembered_hashes(module.params["hashes"], root, not module.check_mode),
        "addresses": [address for owned in interfaces.values() for address in owned],
        "default_route_addresses": [address for name in sorted(routed) for address in interfaces.get(name, [])],
        "window": window_state(root),
        "guard": guard_state(root),
        "holdings": holdings([*production["units"], *units]) if module.params["holdings"] else {},
    }
    module.exit_json(changed=False, state=state)


if __name__ == "__main__":
    main()
