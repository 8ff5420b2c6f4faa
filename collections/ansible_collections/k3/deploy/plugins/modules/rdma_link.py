#!/usr/bin/python
"""k3.deploy.rdma_link: the RDMA device, port and GID that own a rank's fabric address, and what its transport does now."""

from __future__ import annotations

DOCUMENTATION = r"""
module: rdma_link
short_description: Resolve a rank's RDMA device and GID, and read what its RPC transport does
description:
  - Resolves, from sysfs, the RDMA device, port and GID index that own the fabric address. Indices move, so this is done at every launch.
  - Reads ports with their counters, interfaces, access to user-space verbs, open connections of the RPC endpoints, the limits of their processes,
    open queue pairs, and the log lines that speak of the transport. Nothing is connected to.
  - With O(environment_file), also writes what was resolved for the program (C(GGML_RDMA_DEV), C(GGML_RDMA_GID)) when O(mode=pinned), and nothing else
    otherwise. A rank that cannot be resolved is told in RV(link.resolved.problems); the caller decides.
options:
  address:
    description: The rank's fabric address.
    type: str
    required: true
  device:
    description: The RDMA device that the inventory pins.
    type: str
  gid:
    description: The GID index that the inventory pins; needs O(device).
    type: int
  mode:
    description: What the arm's setting C(rdma) says.
    type: str
    choices: [auto, pinned, "off"]
    default: auto
  environment_file:
    description: File that the units read the resolved device and GID from. Not written when it is not given.
    type: path
  user:
    description: Account whose access to user-space verbs is looked at.
    type: str
    default: ""
  endpoints:
    description: Every worker's C(address:port); empty leaves processes and connections out.
    type: list
    elements: str
    default: []
  logs:
    description: Log files whose lines about the transport are returned, by name (C(worker), C(head)).
    type: dict
    default: {}
  units:
    description: Units whose limit of locked memory is reported as systemd will set it, by name (C(worker), C(head)).
    type: dict
    default: {}
  tools:
    description: Programs whose presence and path are reported.
    type: list
    elements: str
    default: []
  release:
    description: A release link whose build id is reported, so that ranks of different builds are found before anything starts.
    type: path
  sysfs:
    description: Where sysfs is.
    type: path
    default: /sys
author: [the k3deploy project (@k3deploy)]
attributes:
  check_mode:
    support: full
    description: Reads the same; says whether it would write.
"""

EXAMPLES = r"""
- name: Resolve the RDMA device of every rank at launch
  k3.deploy.rdma_link:
    address: "{{ k3_fabric_address }}"
    mode: pinned
    environment_file: /opt/k3deploy/candidates/U4/rdma.env
  register: launch

- name: Read what the transport does while the arm runs
  k3.deploy.rdma_link:
    address: "{{ k3_fabric_address }}"
    endpoints: ["10.0.0.2:50053", "10.0.0.3:50053"]
    logs: {worker: /opt/k3deploy/candidates/U4/log/worker.log}
  register: ready
"""

RETURN = r"""
link:
  description:
    - C(resolved) is {device, port, gid, type, netdev, mtu, rdma_mtu, state, sharing, why, problems}; C(devices) {name, {pci, ports}}; C(netdevs)
      {name, {mtu, carrier_changes, ...}}; C(verbs) {nodes, accessible}; C(connections) [{pid, local, peer, sent, received}]; C(processes)
      [{pid, memlock_bytes, environment, knows_rdma, ring}]; C(qps) [{device, qpn, remote, state, pid}] or null; C(lines) {log, lines}; C(tools);
      C(units) {name, {memlock_bytes, drop_ins}}; C(build_id).
  type: dict
  returned: always
"""

import os
import shutil

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.k3.deploy.plugins.module_utils import host, rdma_link


def environment(mode, resolved):
    """The lines of the environment file: the program is told what was resolved, or nothing."""
    if mode != "pinned" or resolved["device"] is None:
        return ""
    return 'GGML_RDMA_DEV="{}"\nGGML_RDMA_GID="{}"\n'.format(resolved["device"], resolved["gid"])


def write_environment(module, path, text):
    """Write the file where it differs; True when it does. A directory that is not there belongs to an arm that is not installed."""
    if not os.path.isdir(os.path.dirname(path)):
        module.fail_json(msg=f"{os.path.dirname(path)} does not exist: the arm is not installed on this rank")
    same = os.path.exists(path) and host.tail(path) == text
    if not same and not module.check_mode:
        host.write_atomic(path, text.encode(), 0o600)
    return not same


def main():
    module = AnsibleModule(
        argument_spec={
            "address": {"type": "str", "required": True},
            "device": {"type": "str"},
            "gid": {"type": "int"},
            "mode": {"type": "str", "choices": ["auto", "pinned", "off"], "default": "auto"},
            "environment_file": {"type": "path"},
            "user": {"type": "str", "default": ""},
            "endpoints": {"type": "list", "elements": "str", "default": []},
            "logs": {"type": "dict", "default": {}},
            "units": {"type": "dict", "default": {}},
            "tools": {"type": "list", "elements": "str", "default": []},
            "release": {"type": "path"},
            "sysfs": {"type": "path", "default": "/sys"},
        },
        supports_check_mode=True,
    )
    given = module.params
    try:
        link = rdma_link.read_link(given["address"], given["user"], given["endpoints"], given["logs"], given["device"], given["gid"], given["sysfs"])
    except ValueError as error:
        module.fail_json(msg=f"address {given['address']}: {error}")
    link["tools"] = {name: shutil.which(name) for name in given["tools"]}
    link["units"] = rdma_link.unit_limits(given["units"])
    link["build_id"] = os.path.basename(os.path.realpath(given["release"])) if given["release"] and os.path.exists(given["release"]) else None
    changed = False
    if given["environment_file"]:
        changed = write_environment(module, given["environment_file"], environment(given["mode"], link["resolved"]))
    module.exit_json(changed=changed, link=link)


if __name__ == "__main__":
    main()
