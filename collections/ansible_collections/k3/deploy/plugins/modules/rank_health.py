#!/usr/bin/python
"""k3.deploy.rank_health: how well a rank is, read in one round trip."""

from __future__ import annotations

DOCUMENTATION = r"""
module: rank_health
short_description: Read a rank's health in one round trip
description:
  - Reads the kernel log, the GPU's clocks, temperature, power and cumulative throttle counters, free memory blocks, pressure stall
    information and the fabric link with its error counters, and runs a short probe of bandwidth.
  - Read-only, and every value is raw. What is a fault is decided on the controller (P(k3.deploy.health_findings#filter)).
  - Every tool runs under a hard timeout; one that hangs in the kernel is left behind. C(mstflint) is never run, because after a cable
    was plugged in its queries have made the kernel panic.
options:
  since:
    description: >-
      Kernel lines to return: V(boot) for all of this boot, V(now) for none but the RV(health.kernel.mark), or such a mark for the lines after it.
    type: str
    default: boot
  fabric_address:
    description: The address whose network device and RDMA devices are read.
    type: str
    default: ""
  probe_seconds:
    description: How long the bandwidth probe runs; 0 for none. A GPU gets twice as long, because its clocks must rise first.
    type: float
    default: 0.3
  probe_free_mib:
    description: Memory (MemAvailable less CmaFree, MiB) below which the GPU probe, which takes 256 MiB, is left out.
    type: int
    default: 4096
  file:
    description: A file (the model) of which the part in the page cache is told. Nothing of it is read.
    type: path
  timeout:
    description: Seconds within which each tool must answer.
    type: int
    default: 10
author: [the k3deploy project (@k3deploy)]
attributes:
  check_mode:
    support: full
    description: Changes nothing in any mode.
"""

EXAMPLES = r"""
- name: Read the rank's health
  k3.deploy.rank_health:
    fabric_address: "{{ k3_fabric_address }}"
  register: health
"""

RETURN = r"""
health:
  description: >-
    C(boot_id), C(monotonic) (seconds since the boot), C(kernel) (RV(health.kernel.mark), C(lines)), C(gpu), C(probe), C(buddyinfo), C(pressure),
    C(link), C(page_cache) (of O(file)). What a tool does not say is null.
  type: dict
  returned: always
  contains:
    kernel:
      description: The kernel log's lines that may matter, and the stamp of its newest line.
      type: dict
      returned: always
      contains:
        mark:
          description: The stamp; the next reading's O(since).
          type: float
          returned: always
"""

import os
import time

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.k3.deploy.plugins.module_utils import bounded, health, host, page_cache


def probe(params, gpu):
    """The probe that fits the rank, or why there was none."""
    seconds = params["probe_seconds"]
    if seconds <= 0:
        return {"kind": None, "error": None, "skipped": "not asked for"}
    if not gpu["installed"]:
        return {"kind": "cpu", "error": None, **health.probe_cpu(seconds)}
    if gpu["error"] or not gpu["gpus"]:
        return {"kind": None, "error": None, "skipped": "nvidia-smi shows no GPU"}
    memory = host.meminfo()
    # What the driver can have: page cache makes way for it, the contiguous area does not.
    free = memory.get("MemAvailable", 0) - memory.get("CmaFree", 0)
    if free < params["probe_free_mib"]:
        return {"kind": None, "error": None, "skipped": "%d MiB of memory are free, %d would be needed" % (free, params["probe_free_mib"])}
    return health.probe_gpu(2 * seconds, params["timeout"])


def link(address, timeout):
    """The link of the fabric address; null when no device has it."""
    rc, out, _err = bounded.run(["ip", "-j", "addr"], timeout) if address else (1, "", "")
    netdev = health.netdev_of(address, out) if rc == 0 else None
    return health.link_state(netdev) if netdev else None


def main():
    module = AnsibleModule(
        argument_spec={
            "since": {"type": "str", "default": "boot"},
            "fabric_address": {"type": "str", "default": ""},
            "probe_seconds": {"type": "float", "default": 0.3},
            "probe_free_mib": {"type": "int", "default": 4096},
            "file": {"type": "path"},
            "timeout": {"type": "int", "default": 10},
        },
        supports_check_mode=True,
    )
    params = module.params
    since, timeout = params["since"], params["timeout"]
    if since not in ("boot", "now") and health.number(since) is None:
        module.fail_json(msg=f"since is {since!r}; valid: boot, now, or the mark of an earlier reading")
    # A mark is taken before the probe, so that what the probe does to the kernel log is seen; lines are read after it, for the same reason.
    kernel = health.kernel_log(since, timeout) if since == "now" else None
    gpu = health.gpu_state(timeout)
    result = {
        "time": host.utc_now(),
        "monotonic": time.monotonic(),
        "boot_id": health.read_text("/proc/sys/kernel/random/boot_id"),
        "uptime_s": health.number(health.read_text("/proc/uptime")),
        "page_size": os.sysconf("SC_PAGE_SIZE"),
        "gpu": gpu,
        "buddyinfo": health.buddyinfo(health.read_text("/proc/buddyinfo") or ""),
        "pressure": {name: health.pressure(health.read_text("/proc/pressure/" + name) or "") for name in ("cpu", "memory", "io")},
        "link": link(params["fabric_address"], timeout),
        "page_cache": page_cache.state(params["file"]) if params["file"] else None,
        "probe": probe(params, gpu),
    }
    result["kernel"] = kernel or health.kernel_log(since, timeout)
    module.exit_json(changed=False, health=result)


if __name__ == "__main__":
    main()
