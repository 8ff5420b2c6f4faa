"""What lines of a rank's kernel log mean: faults apart from what healthy hosts print too. Pure functions, on the controller.

A finding is {rule, severity: fault|warning, text, remedy}.
"""

from __future__ import annotations

import re

REBOOT_BOTH = "reboot both hosts of the link with the cable in (systemctl reboot --no-block)"
REBOOT = "reboot this rank (systemctl reboot --no-block)"

# Xids that a program causes (it read what is not its own, it crashed); every other is the device's, the driver's or the firmware's.
PROGRAM_XIDS = frozenset((13, 31, 43, 45))
# As many NV_ERR_NO_MEMORY lines as a boot that ended in a wedge had; hosts that served well had 55 in three days.
NO_MEMORY_ALARM = 150

# Lines that hosts print which serve well for months; the first rule that matches a line decides, so these come first.
HEALTHY = re.compile(
    r"insufficient power on the PCIe slot|slot power capability was not advertised|AER: enabled with IRQ|"
    r"AER: (?:Multiple )?Correct(?:able|ed) error|severity=Correct(?:able|ed)",
)
# rule, pattern, severity in a block, severity since the boot, what it is, remedy. A fault of long ago that has passed is a warning; one that
# leaves the device broken until a reboot is not.
KERNEL_RULES = [
    (
        rule,
        re.compile(pattern),
        {"block": block, "boot": boot},
        what,
        remedy,
    )
    for rule, pattern, block, boot, what, remedy in (
        ("nvrm_no_memory", r"NV_ERR_NO_MEMORY", "warning", "warning", "the GPU driver found no memory block", "see fragmentation below"),
        (
            "pcie_aer",
            r"AER:.*Uncorrectable|severity=Uncorrectable|mlx5_pci_err_detected|AER: device recovery failed",
            "fault",
            "fault",
            "an uncorrectable PCIe error",
            REBOOT_BOTH,
        ),
        (
            "nic_health",
            r"health compromised|unrecoverable hardware error|mlx5_core.*timeout\. Will cause a leak",
            "fault",
            "fault",
            "the network adapter's firmware is broken",
            REBOOT_BOTH,
        ),
        (
            "optic",
            r"Port module event\[error\]",
            "fault",
            "warning",
            "the cable's module reports an error",
            "use a passive copper cable: active optics overheat in this port",
        ),
        (
            "cable_hot_plug",
            r"pcie-hotplug.*Cable (?:plug|unplug)",
            "fault",
            "warning",
            "the cable was plugged in or out while the rank ran; the link can be stuck at 13 Gb/s and still show 200",
            "measure it (ib_write_bw); if it is slow, " + REBOOT_BOTH,
        ),
        ("link_flap", r"Link (?:is )?(?:down|DOWN|Down)\b", "fault", "warning", "a network link went down", "check cable and switch; " + REBOOT_BOTH),
        ("lockup", r"(?:soft|hard) (?:lockup|LOCKUP)|detected stalls? on CPUs", "fault", "fault", "a CPU was locked up in the kernel", REBOOT),
        (
            "hung_task",
            r"blocked for more than \d+ seconds",
            "fault",
            "warning",
            "a process hung in the kernel",
            "see which; if it still hangs, " + REBOOT,
        ),
        (
            "oom",
            r"oom-kill:|Out of memory: Killed process",
            "fault",
            "warning",
            "the kernel killed a process for want of memory",
            "see whether a service that is needed is gone (systemctl --failed), and what took the memory",
        ),
        ("hardware", r"event severity: (?:fatal|recoverable)|kernel BUG at|\bOops\b", "fault", "fault", "the hardware or the kernel failed", REBOOT),
        ("disk", r"I/O error, dev|nvme\S* .*timeout", "fault", "warning", "a disk failed to answer", "check the disk (smartctl -a)"),
        ("heat", r"temperature above threshold", "warning", "warning", "the processor was too hot", "check the air flow"),
    )
]
XID = re.compile(r"NVRM: Xid \([^)]{1,80}\): (\d{1,6}),")


def finding(rule, severity, text, remedy):
    """One finding."""
    return {"rule": rule, "severity": severity, "text": text, "remedy": remedy}


def kernel_findings(kernel, scope):
    """Findings of a kernel log. scope: block (lines of one block), or boot (everything since the boot)."""
    if kernel.get("error"):
        return [
            finding(
                "kernel_log",
                "warning",
                f"the kernel log could not be read ({kernel['error']})",
                "let root read it on this rank; a container has none to read",
            )
        ]
    seen = {}
    for _stamp, message in kernel.get("lines") or []:
        if HEALTHY.search(message):
            continue
        named = xid_rule(message, scope) or line_rule(message, scope)
        if named:
            seen.setdefault(named, []).append(message)
    return [kernel_finding(*named, messages) for named, messages in seen.items()]


def line_rule(message, scope):
    """(rule, severity, what, remedy) of a kernel line; None when nothing is known against it."""
    for rule, pattern, severity, what, remedy in KERNEL_RULES:
        if pattern.search(message):
            return rule, severity[scope], what, remedy
    return None


def xid_rule(message, scope):
    """The same for a line of the GPU driver's with an Xid."""
    found = XID.search(message)
    if not found:
        return None
    if int(found.group(1)) in PROGRAM_XIDS:
        severity = "fault" if scope == "block" else "warning"
        return "xid_program", severity, "a program crashed on the GPU", "read that program's log; the GPU itself goes on"
    return "xid_device", "fault", "the GPU, its driver or its firmware failed", REBOOT


def kernel_finding(rule, severity, what, remedy, messages):
    """Many lines of one kind as one finding, with the first of them."""
    times = "" if len(messages) == 1 else f" {len(messages)} times"
    if rule == "nvrm_no_memory":
        remedy = "free and compact memory (echo 3 > /proc/sys/vm/drop_caches; echo 1 > /proc/sys/vm/compact_memory)"
        if len(messages) >= NO_MEMORY_ALARM:
            what += ", as often as on hosts that then wedged"
    return finding(rule, severity, f"kernel log: {what}{times}: {messages[0].strip()[:160]}", remedy)
