"""Who holds a rank's memory: what a unit's processes have of it, and which processes to name when it does not come back. Standard library only.

On unified memory (GB10) what CUDA holds is in no process' resident size and in no field of /proc/meminfo: it shows only as the part of MemTotal
that no field explains.
"""

from __future__ import annotations

import glob
import os

from ansible_collections.k3.deploy.plugins.module_utils import host

# Fields of /proc/meminfo that do not overlap. Shmem is in Cached.
ACCOUNTED = (
    *("MemFree", "Buffers", "Cached", "SwapCached", "AnonPages", "Slab", "KernelStack", "PageTables"),
    *("SecPageTables", "VmallocUsed", "Percpu", "Hugetlb"),
)
# What kernel, firmware and drivers keep outside of every field on a healthy GB10 without a CUDA process.
UNEXPLAINED_MIB = 4096
# Page cache that a busy kernel does not count as available at once, and what comes and goes beside us.
SHARE = 0.9


def unit_pids(unit):
    """Processes of a unit, all of its control group."""
    rc, out, _err = host.run(["systemctl", "show", "--property=ControlGroup", "--value", "--", unit])
    group = out.strip() if rc == 0 else ""
    pids = []
    for path in glob.glob(f"/sys/fs/cgroup{glob.escape(group)}/**/cgroup.procs", recursive=True) if group else []:
        try:
            with open(path, encoding="ascii") as lines:
                pids += [int(line) for line in lines]
        except OSError:
            continue  # a control group that has just gone
    return sorted(pids)


def status(pid, proc="/proc"):
    """{name, state, and RssAnon, RssShmem, RssFile in MiB} of a process; None when it is gone."""
    try:
        with open(f"{proc}/{pid}/status", encoding="utf-8", errors="replace") as lines:
            fields = dict(line.rstrip("\n").split(":", 1) for line in lines if ":" in line)
    except OSError:
        return None
    found = {"name": fields.get("Name", "?").strip(), "state": fields.get("State", "?").split()[0]}
    for name in ("RssAnon", "RssShmem", "RssFile"):
        found[name] = int(fields.get(name, "0 kB").split()[0]) // 1024
    return found


def wait_channel(pid, proc="/proc"):
    """The kernel's function in which a process sleeps; empty when the kernel does not say."""
    try:
        with open(f"{proc}/{pid}/wchan", encoding="ascii", errors="replace") as text:
            return text.read().strip().removeprefix("0")
    except OSError:
        return ""


def gpu_users(proc="/proc"):
    """{pid: devices} of the processes that have an nvidia device open."""
    found = {}
    for link in glob.glob(f"{proc}/[0-9]*/fd/*"):
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target.startswith("/dev/nvidia"):
            found.setdefault(int(link.split("/")[-3]), set()).add(target)
    return {pid: sorted(devices) for pid, devices in found.items()}


def unexplained(meminfo):
    """MiB of MemTotal that no field of /proc/meminfo explains: CUDA's part on unified memory, and the firmware's."""
    return max(0, meminfo["MemTotal"] - sum(meminfo.get(name, 0) for name in ACCOUNTED))


def gpu_memory(pids, meminfo):
    """``(MiB of system memory that a GPU holds for these processes, how that is known)``.

    nvidia-smi says [N/A] for the total on unified memory; a GPU with a total has its own memory, which does not come out of the rank's. What it
    says of a process is taken when it is a number. It hangs on a wedged driver: its time is limited.
    """
    mine = sorted(set(pids) & set(gpu_users()))
    if not mine:
        return 0, "no process of production has a GPU open"
    rc, out, _err = host.run(["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"], timeout=15)
    totals = [line.strip() for line in out.splitlines() if line.strip()]
    if rc == 0 and totals and all(total.isdigit() for total in totals):
        return 0, "the GPU has memory of its own"
    rc, out, _err = host.run(["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"], timeout=15)
    rows = [[part.strip() for part in line.split(",")] for line in out.splitlines() if rc == 0]
    said = {int(row[0]): row[1] for row in rows if len(row) == 2 and row[0].isdigit()}
    if all(said.get(pid, "").isdigit() for pid in mine):
        return sum(int(said[pid]) for pid in mine), "nvidia-smi"
    return max(0, unexplained(meminfo) - UNEXPLAINED_MIB), "what /proc/meminfo does not explain"


def held(unit, meminfo):
    """``{anon_mib, gpu_mib, gpu_from}`` that the processes of a unit hold now; None when it has none."""
    pids = unit_pids(unit)
    if not pids:
        return None
    resident = [found for found in map(status, pids) if found]
    gpu, source = gpu_memory(pids, meminfo)
    return {"anon_mib": sum(found["RssAnon"] + found["RssShmem"] for found in resident), "gpu_mib": gpu, "gpu_from": source}


def expectation(unit, freed_mib, slack_mib):
    """What must come back when a unit stops, as the window keeps it.

    Returns ``{available_mib, anon_mib, gpu_mib, gpu_from, expected_mib, level_mib}``: MemAvailable must reach ``level_mib``. ``freed_mib`` (from the
    inventory; None: unknown) goes before what the processes show. File pages are left out: MemAvailable counts them already.
    """
    meminfo = host.meminfo()
    seen = held(unit, meminfo) or {"anon_mib": 0, "gpu_mib": 0, "gpu_from": "the unit has no process"}
    expected = seen["anon_mib"] + seen["gpu_mib"] if freed_mib is None else freed_mib
    available = meminfo["MemAvailable"]
    level = max(0, int(available + SHARE * expected - slack_mib))
    return {"available_mib": available, **seen, "expected_mib": expected, "level_mib": level}


def who_holds(count=5, proc="/proc"):
    """Sentences for a person: processes that cannot be killed, that have a GPU open, and that are largest."""
    found = {int(name): status(name, proc) for name in os.listdir(proc) if name.isdigit()}
    # Kernel threads have no resident memory; one of them in state D is the kernel's own affair.
    alive = {pid: seen for pid, seen in found.items() if seen and seen["RssAnon"] + seen["RssFile"] + seen["RssShmem"] > 0}
    words = []
    stuck = [pid for pid, seen in found.items() if seen and seen["state"] == "D" and pid in alive]
    for pid in sorted(stuck):
        where = wait_channel(pid, proc)
        words.append(f"pid {pid} ({alive[pid]['name']}) hangs in the kernel{' in ' + where if where else ''}: only a reboot of this rank ends it")
    users = gpu_users(proc)
    words += [f"pid {pid} ({(found.get(pid) or {}).get('name', '?')}) has {', '.join(users[pid])} open" for pid in sorted(users)]
    largest = sorted(alive, key=lambda pid: -(alive[pid]["RssAnon"] + alive[pid]["RssShmem"]))[:count]
    words += [f"pid {pid} ({alive[pid]['name']}) holds {alive[pid]['RssAnon'] + alive[pid]['RssShmem']} MiB" for pid in largest]
    return words
