"""What a rank's raw health means: findings, each a fault or a warning with its remedy. Pure functions, on the controller.

The one home of these rules: preflight asserts on them, the block record holds their result, and the judge reads it from there.
A finding is {rule, severity: fault|warning, text, remedy}.
"""

from __future__ import annotations

from ansible_collections.k3.deploy.plugins.plugin_utils.kernel_rules import REBOOT, REBOOT_BOTH, finding, kernel_findings

POWER_OFF = "take the mains off, at the wall and at the unit, for one to five minutes; a reboot is not enough. If it comes back: repair"

HELD_DOWN = ("HW Thermal Slowdown", "SW Thermal Slowdown", "HW Power Braking")  # cumulative counters that no healthy load moves
HELD_DOWN_PERCENT = 5.0
STALL_PERCENT = 1.0
LARGE_BLOCK = 2 << 20  # what the GPU driver asks for


def busy(gpu):
    """Whether something else used the GPU when it was read: what a probe measures beside it says nothing about the GPU."""
    return any((row.get("utilization.gpu") or 0) >= 5 for row in gpu.get("gpus") or [])


def measured(reading):
    """The numbers of a reading that a band can hold: {name: number}; what is not known is left out."""
    probe, gpu = reading.get("probe") or {}, reading.get("gpu") or {}
    loaded = probe.get("under_load") or next((row for row in gpu.get("gpus") or [] if (row.get("utilization.gpu") or 0) >= 80), None) or {}
    values = {
        "sm_clock_mhz": loaded.get("clocks.sm"),
        "temperature_c": loaded.get("temperature.gpu"),
        "power_w": loaded.get("power.draw"),
    }
    if probe.get("kind") == "gpu" and not busy(gpu):
        values.update({name: (probe.get(name) or {}).get("median") for name in ("gemv_gb_s", "copy_gb_s")})
    if probe.get("kind") == "cpu":
        values.update(cpu_copy_gb_s=probe.get("copy_gb_s"), cpu_hash_mb_s=probe.get("hash_mb_s"))
    return {name: value for name, value in values.items() if value is not None}


BANDS = {
    "sm_clock_mhz": ("the GPU's clock under load", "MHz", POWER_OFF),
    "gemv_gb_s": (
        "the GPU's bandwidth in a matrix-vector product",
        "GB/s",
        "see that nothing else uses the GPU and repeat; clocks and watts do not show this state. If it stays, power this rank off and on",
    ),
    "copy_gb_s": ("the GPU's bandwidth in a copy", "GB/s", "see that nothing else uses the memory and repeat; if it stays, " + REBOOT),
    "temperature_c": ("the GPU's temperature under load", "C", "check the air flow and let it cool"),
    "power_w": ("the GPU's power under load", "W", POWER_OFF),
    "cpu_copy_gb_s": ("memory bandwidth on one thread", "GB/s", "see what else runs on this rank"),
    "cpu_hash_mb_s": ("speed of one thread", "MB/s", "see what else runs on this rank"),
}


def band_findings(reading, bands, when=""):
    """Faults where a number lies outside its band {name: {min, max}}. A number that is not known is no fault; see probe_findings."""
    found = []
    for name, value in measured(reading).items():
        band = (bands or {}).get(name) or {}
        low, high = band.get("min"), band.get("max")
        what, unit, remedy = BANDS[name]
        if low is not None and value < low:
            found.append(finding("band_" + name, "fault", f"{what} is {value:g} {unit}{when}, at least {low:g} is healthy", remedy))
        if high is not None and value > high:
            found.append(finding("band_" + name, "fault", f"{what} is {value:g} {unit}{when}, at most {high:g} is healthy", remedy))
    return found


def probe_findings(reading, bands, when=""):
    """What the GPU's tools and the probe could not do."""
    gpu, probe = reading.get("gpu") or {}, reading.get("probe") or {}
    found = []
    if gpu.get("error"):
        found.append(finding("nvidia_smi", "fault", f"nvidia-smi gives no answer{when} ({gpu['error']})", "do not wait for it: " + REBOOT))
    if probe.get("error"):
        found.append(finding("probe", "warning", f"the bandwidth probe failed{when} ({probe['error']})", "see the kernel log of this rank"))
    if probe.get("correct") is False:
        found.append(finding("probe_wrong", "fault", f"the GPU computed a wrong sum{when}", REBOOT + "; if it comes back: repair"))
    why = probe.get("skipped") or ("something else used it" if probe.get("kind") == "gpu" and busy(gpu) else None)
    if (bands or {}).get("gemv_gb_s") and why and gpu.get("gpus"):
        text = f"the GPU's bandwidth is not known{when} ({why})"
        found.append(finding("probe", "warning", text, "a slow state that clocks do not show would go unseen"))
    return found


def blind_findings(before, after, bands):
    """A fault where the inventory has a band and no reading around the block has its number: what it is there for may have been so.

    A rank without a GPU owes no numbers of one, and where no probe is asked for none is owed.
    """
    probe, gpus = after.get("probe") or {}, (after.get("gpu") or {}).get("gpus")
    if probe.get("skipped") == "not asked for":
        return []
    owed = [name for name in bands or {} if name.startswith("cpu_") == (not gpus)]
    known = {**measured(before), **measured(after)}
    missing = sorted(name for name in owed if name not in known)
    if not missing:
        return []
    why = probe.get("skipped") or probe.get("error") or "something else used the GPU"
    text = f"{', '.join(missing)} could not be measured before or after the block ({why})"
    return [finding("blind", "fault", text, "see that the rank is idle and has memory for the probe, or take the band out of k3_health")]


def memory_findings(reading):
    """Fragmentation: no free block as large as the GPU driver asks for, in a zone that has any."""
    order = max(0, (LARGE_BLOCK // max(1, reading.get("page_size") or 4096)).bit_length() - 1)
    zones = [zone for zone in reading.get("buddyinfo") or [] if zone["zone"] == "Normal"]
    if not (reading.get("gpu") or {}).get("gpus") or not zones or any(sum(zone["free"][order:]) for zone in zones):
        return []
    text = "memory is fragmented: zone Normal has no free block of 2 MiB, so the GPU driver can fail with gigabytes available"
    remedy = "echo 3 > /proc/sys/vm/drop_caches; echo 1 > /proc/sys/vm/compact_memory; if that does not help, " + REBOOT
    return [finding("fragmentation", "warning", text, remedy)]


def stall_findings(before, after):
    """How much of a block every process stood still for want of memory; without `before`, of the last minute."""
    now = ((after.get("pressure") or {}).get("memory") or {}).get("full") or {}
    then = (((before or {}).get("pressure") or {}).get("memory") or {}).get("full") or {}
    percent, span = now.get("avg60"), "the last minute"
    if before:
        seconds = after["monotonic"] - before["monotonic"]
        known = now.get("total") is not None and then.get("total") is not None and seconds > 0
        percent, span = (now["total"] - then["total"]) / seconds / 1e4 if known else None, "the block"
    if percent is None or percent < STALL_PERCENT:
        return []
    text = f"every process stood still for want of memory during {percent:.1f} % of {span} (pressure stall information)"
    return [finding("memory_stall", "warning", text, "give this rank less to hold, or stop what else takes memory")]


def throttle_findings(before, after):
    """What held the GPU back during a block, by its cumulative counters: its flags of the moment stay 0 while it is capped."""
    old, new = ((reading.get("gpu") or {}).get("counters_us") or {} for reading in (before, after))
    seconds = after["monotonic"] - before["monotonic"]
    found = []
    for name, value in new.items():
        if value is None or old.get(name) is None or seconds <= 0:
            continue
        percent = (value - old[name]) / seconds / 1e4
        if percent < STALL_PERCENT:
            continue
        severity = "fault" if name in HELD_DOWN and percent >= HELD_DOWN_PERCENT else "warning"
        text = f"the GPU was held back during {percent:.0f} % of the block ({name})"
        found.append(finding("throttled", severity, text, "check air flow and power supply; measure again when it is cool"))
    return found


def link_findings(before, after):
    """A link that is down, that went down during a block, or that counted errors."""
    link = after.get("link")
    if not link:
        return []
    found = []
    if link.get("operstate") not in ("up", "unknown"):
        found.append(finding("link_down", "fault", f"the fabric link {link['netdev']} is {link.get('operstate')}", REBOOT_BOTH))
    old = (before or {}).get("link")
    if not old or old.get("netdev") != link.get("netdev"):
        return found
    flaps = rise(old.get("carrier_changes"), link.get("carrier_changes"))
    before_port = {name: old["rdma"].get(name) or {} for name in link["rdma"]}
    downs = sum(
        rise((before_port[name].get("counters") or {}).get("link_downed"), port["counters"].get("link_downed")) for name, port in link["rdma"].items()
    )
    if flaps or downs:
        text = f"the fabric link {link['netdev']} went down or up during the block ({flaps:g} carrier change(s), link_downed +{downs:g})"
        found.append(finding("link_flap", "fault", text, "check cable and switch; " + REBOOT_BOTH))
    grown = dict(errors_between("", old.get("counters"), link.get("counters")))
    for name, port in link["rdma"].items():
        for kind in ("counters", "hw_counters"):
            grown.update(errors_between(name + " ", before_port[name].get(kind), port[kind]))
    if grown:
        text = "counters of the fabric link rose during the block: " + ", ".join(f"{name} +{value:g}" for name, value in sorted(grown.items()))
        found.append(finding("link_errors", "warning", text, "check cable, switch and MTU of both ends"))
    return found


def rise(old, new):
    """How much a counter rose; 0 when either value is not known."""
    return max(0, new - old) if old is not None and new is not None else 0


def errors_between(prefix, old, new):
    """Counters that rose, except those that are said otherwise."""
    for name, value in (new or {}).items():
        grown = rise((old or {}).get(name), value)
        if grown and name != "link_downed":
            yield prefix + name, grown


def preflight_findings(reading, bands):
    """What speaks against a rank before a run."""
    return [
        *kernel_findings(reading["kernel"], "boot"),
        *probe_findings(reading, bands),
        *band_findings(reading, bands),
        *memory_findings(reading),
        *stall_findings(None, reading),
        *link_findings(None, reading),
    ]


def block_findings(before, after, bands):
    """What speaks against a block on one rank: readings from before its start and after its end."""
    if before.get("boot_id") != after.get("boot_id"):
        return [finding("rebooted", "fault", "the rank restarted during the block", "see its console and journal (journalctl -b -1)")]
    return [
        *kernel_findings(after["kernel"], "block"),
        *probe_findings(before, bands, " before the block"),
        *band_findings(before, bands, " before the block"),
        *probe_findings(after, bands, " after the block"),
        *band_findings(after, bands, " after the block"),
        *blind_findings(before, after, bands),
        *memory_findings(after),
        *stall_findings(before, after),
        *throttle_findings(before, after),
        *link_findings(before, after),
    ]


def sentences(findings, severity):
    """The findings of one severity as sentences, each with its remedy."""
    return [f"{item['text']}: {item['remedy']}" for item in findings if item["severity"] == severity]
