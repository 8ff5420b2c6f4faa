#!/usr/bin/python
"""k3.deploy.rdma_bandwidth: what an RDMA link really moves, between two ranks, by perftest's ib_write_bw."""

from __future__ import annotations

DOCUMENTATION = r"""
module: rdma_bandwidth
short_description: Measure what an RDMA link moves between two ranks
description:
  - A link can show 200 Gb/s and move 13. With O(state=serving) a rank serves one measurement, with O(state=measured) another rank makes it.
  - The server is a transient unit (C(k3-bandwidth.service)) that ends by itself; it listens on O(port) while it lives.
  - A report without a result is a failure although C(ib_write_bw) exits with 0 there, as it does with a wrong GID.
options:
  state:
    description: What this rank does.
    type: str
    choices: [serving, measured]
    required: true
  device:
    description: The rank's RDMA device.
    type: str
    required: true
  gid:
    description: The GID index of its fabric address.
    type: int
    required: true
  peer:
    description: Fabric address of the rank that serves; for O(state=measured).
    type: str
  seconds:
    description: How long it is measured. The same on both ranks.
    type: int
    default: 2
  port:
    description: TCP port of the measurement's handshake.
    type: int
    default: 18515
author: [the k3deploy project (@k3deploy)]
attributes:
  check_mode:
    support: none
    description: Does nothing in check mode.
"""

EXAMPLES = r"""
- name: Serve one measurement
  k3.deploy.rdma_bandwidth:
    state: serving
    device: rocep1s0f1
    gid: 3

- name: Measure the link to it
  k3.deploy.rdma_bandwidth:
    state: measured
    device: rocep1s0f1
    gid: 3
    peer: 192.168.100.11
  register: bandwidth
"""

RETURN = r"""
gbps:
  description: Average Gb/s of one connection.
  type: float
  returned: when state is measured
"""

import time

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.k3.deploy.plugins.module_utils import host, rdma

UNIT = "k3-bandwidth"
START_S = 10  # within which the server listens
LIFE_S = 60  # after which it ends although nobody came


def command(given):
    """The program's command line, the peer left out."""
    words = ["ib_write_bw", "-d", given["device"], "-i", rdma.IB_PORT, "-x", str(given["gid"]), "-p", str(given["port"])]
    return [*words, "-F", "--report_gbits", "-s", "1048576", "-D", str(given["seconds"])]


def serve(module, given):
    """Start the server and wait until it listens."""
    host.run(["systemctl", "stop", UNIT])
    unit = ["systemd-run", f"--unit={UNIT}", "--collect", "--quiet", f"--property=RuntimeMaxSec={LIFE_S}", "--property=LimitMEMLOCK=infinity"]
    rc, _out, err = host.run([*unit, *command(given)])
    if rc != 0:
        module.fail_json(msg=f"ib_write_bw cannot be started: {err.strip()}")
    end = time.monotonic() + START_S
    while not any(item["port"] == given["port"] for item in host.listeners()):
        if time.monotonic() > end:
            module.fail_json(msg=f"ib_write_bw does not listen on port {given['port']}: see journalctl -u {UNIT}")
        time.sleep(0.1)
    module.exit_json(changed=True)


def measure(module, given):
    """Make the measurement that the peer serves."""
    rc, out, err = host.run([*command(given), given["peer"]], timeout=given["seconds"] + LIFE_S)
    gbps = rdma.write_bandwidth(out)
    if rc != 0 or gbps is None:
        last = (err.strip() or out.strip()).splitlines()[-1:] or ["no output"]
        module.fail_json(msg=f"ib_write_bw to {given['peer']} gave no result (exit {rc}): {last[0]}; a wrong GID looks like this too")
    module.exit_json(changed=False, gbps=gbps)


def main():
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["serving", "measured"], "required": True},
            "device": {"type": "str", "required": True},
            "gid": {"type": "int", "required": True},
            "peer": {"type": "str"},
            "seconds": {"type": "int", "default": 2},
            "port": {"type": "int", "default": 18515},
        },
        required_if=[("state", "measured", ["peer"])],
        supports_check_mode=True,
    )
    if module.check_mode:
        module.exit_json(changed=False, skipped=True)
    (serve if module.params["state"] == "serving" else measure)(module, module.params)


if __name__ == "__main__":
    main()
