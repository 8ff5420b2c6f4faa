"""What a rank can say about its own health: kernel log, GPU, memory, fabric link, a short probe. Standard library only: runs on the rank.

Values are raw: what they mean is decided on the controller (plugin_utils/health_rules.py). Parsers take any text and never fail; what a tool does
not say, or says as [N/A], is None and never 0.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time

from ansible_collections.k3.deploy.plugins.module_utils import bounded, gpu_probe

KERNEL_LINES = 400  # newest lines kept of those that may matter
# Words of kernel lines that may matter. A selection, no judgement: healthy lines among them are told apart on the controller.
INTERESTING = re.compile(
    r"AER:|PCIe Bus Error|NVRM|\bXid\b|mlx5|pcie-hotplug|Link (?:is )?(?:up|down)|blocked for more than|lockup|rcu_\w+ (?:self-)?detected|"
    r"oom-kill|Out of memory|[Hh]ardware [Ee]rror|machine check|\bMCE\b|I/O error|nvme\w* .*(?:timeout|reset|abort)|thermal|segfault|"
    r"Call Trace|kernel BUG|\bOops\b",
    re.IGNORECASE,
)
STAMP = re.compile(r"^\[\s{0,20}(\d{1,12}\.\d{1,9})\]\s?(?:(?:\S{1,253} )?kernel: )?(.*)$", re.DOTALL)
WALL_STAMP = re.compile(r"^\[\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}\] ?(.*)$", re.DOTALL)
GPU_FIELDS = (
    "name",
    "driver_version",
    "pstate",
    "temperature.gpu",
    "power.draw",
    "utilization.gpu",
    "clocks.sm",
    "clocks.max.sm",
    "clocks_event_reasons.active",
)
GPU_TEXT_FIELDS = ("name", "driver_version", "pstate", "clocks_event_reasons.active")
NOT_SAID = frozenset(("", "n/a", "[n/a]", "not supported", "[not supported]", "unknown error", "[unknown error]", "gpu requires reset"))
ERROR_COUNTER = re.compile(r"err|discard|drop|timeout|retr|downed|recovery|overrun|out_of|crc|missed|collision|carrier|fifo", re.IGNORECASE)


def read_text(path):
    """A file's content without the newline at its end; None when it cannot be read (an unset sysfs attribute fails with EINVAL)."""
    try:
        with open(path, encoding="utf-8", errors="replace") as text:
            return text.read().rstrip("\n")
    except OSError:
        return None


def number(text):
    """The number at the start of a tool's answer (units may follow); None when it says N/A or nothing."""
    text = (text or "").strip()
    if text.lower() in NOT_SAID:
        return None
    found = re.match(r"-?\d{1,18}(?:\.\d{1,9})?", text)
    return float(found.group()) if found else None


# -- kernel log ---------------------------------------------------------------------------------------------------------------------


def kernel_line(line):
    """(seconds since the boot or None, message) of a line of dmesg or of journalctl -o short-monotonic."""
    found = STAMP.match(line)
    if found:
        return float(found.group(1)), found.group(2)
    found = WALL_STAMP.match(line)
    return (None, found.group(1)) if found else (None, line)


def kernel_selection(text, since):
    """The lines of a kernel log after the stamp `since` that may matter.

    Returns {mark, read, lines: [[stamp, message]], left_out}. `mark` is the newest stamp of all: handed in as the next `since`, it divides the log
    by its own clock, which may differ from every other one.
    """
    mark, seen, kept = None, 0, []
    for line in text.splitlines():
        stamp, message = kernel_line(line)
        if stamp is not None:
            mark = stamp if mark is None else max(mark, stamp)
        if since is not None and (stamp is None or stamp <= since):
            continue
        seen += 1
        if INTERESTING.search(message):
            kept.append([stamp, message[:500]])
    return {"mark": mark, "read": seen, "lines": kept[-KERNEL_LINES:], "left_out": max(0, len(kept) - KERNEL_LINES)}


def kernel_log(since, timeout):
    """This boot's kernel log: kernel_selection, with its `source` (journal, dmesg, or None with `error`). since: boot, now, or a mark."""
    newest = ["-n", "1"] if since == "now" else ["-n", "200000"]
    tries = (
        ("journal", ["journalctl", "-k", "-b", "0", "-o", "short-monotonic", "--no-pager", "--no-hostname", "-q", *newest]),
        ("dmesg", ["dmesg"]),
    )
    errors = []
    for source, argv in tries:
        rc, out, err = bounded.run(argv, timeout)
        if rc == 0 and out.strip():
            found = kernel_selection(out, None if since in ("boot", "now") else float(since))
            if since == "now":
                found.update(read=0, lines=[], left_out=0)
            return {"source": source, "error": None, **found}
        errors.append(f"{argv[0]}: {err.strip()[:200] or 'says nothing'}")
    return {"source": None, "error": "; ".join(errors), "mark": None, "read": 0, "lines": [], "left_out": 0}


# -- GPU ----------------------------------------------------------------------------------------------------------------------------


def gpu_rows(text, fields=GPU_FIELDS):
    """nvidia-smi's csv,noheader,nounits as one dictionary a GPU: numbers, or text where the field is text; None where it says N/A."""
    rows = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(fields):
            continue
        rows.append(
            {
                field: (None if cell.lower() in NOT_SAID else cell) if field in GPU_TEXT_FIELDS else number(cell)
                for field, cell in zip(fields, cells, strict=True)
            }
        )
    return rows


def throttle_counters(text):
    """The cumulative "Clocks Event Reasons Counters" of `nvidia-smi -q` in microseconds by name; older drivers say "Throttle"."""
    counters, indent = {}, None
    for line in text.splitlines():
        depth = len(line) - len(line.lstrip())
        name, colon, value = line.strip().partition(":")
        name = name.strip()
        if indent is None:
            if re.fullmatch(r"Clocks (?:Event|Throttle) Reasons Counters", name):
                indent = depth
            continue
        if not colon or depth <= indent:
            break
        counters[name] = number(value)
    return counters


def gpu_query(timeout):
    """What nvidia-smi says of each GPU: (rc, rows, error)."""
    rc, out, err = bounded.run(["nvidia-smi", "--query-gpu=" + ",".join(GPU_FIELDS), "--format=csv,noheader,nounits"], timeout)
    return rc, gpu_rows(out) if rc == 0 else [], (err.strip() or out.strip())[:300] or f"exit code {rc}"


def gpu_state(timeout):
    """GPUs as nvidia-smi sees them: {installed, error, gpus, counters_us}; counters are those of the first GPU."""
    rc, rows, error = gpu_query(timeout)
    if rc != 0:
        return {"installed": rc != 127, "error": error if rc != 127 else None, "gpus": [], "counters_us": {}}
    rc, details, _err = bounded.run(["nvidia-smi", "-q", "-d", "PERFORMANCE"], timeout)
    return {"installed": True, "error": None, "gpus": rows, "counters_us": throttle_counters(details) if rc == 0 else {}}


# -- memory, links ------------------------------------------------------------------------------------------------------------------


def buddyinfo(text):
    """/proc/buddyinfo as [{node, zone, free}]: free[n] is the number of free blocks of 2^n pages."""
    zones = []
    for line in text.splitlines():
        found = re.match(r"\s{0,20}Node\s+(\d{1,6}),\s+zone\s+(\S{1,40})\s+(.*)$", line)
        counts = found.group(3).split() if found else []
        if counts and all(item.isdecimal() and item.isascii() and len(item) < 19 for item in counts):
            zones.append({"node": int(found.group(1)), "zone": found.group(2), "free": [int(item) for item in counts]})
    return zones


def pressure(text):
    """A /proc/pressure file as {some|full: {avg10, avg60, avg300 (percent), total (microseconds)}}."""
    values = {}
    for line in text.splitlines():
        kind, _blank, rest = line.partition(" ")
        pairs = dict(item.split("=", 1) for item in rest.split() if item.count("=") == 1)
        if kind in ("some", "full") and pairs:
            values[kind] = {name: number(value) for name, value in pairs.items()}
    return values


def netdev_of(address, text):
    """The network device that owns an address, of `ip -j addr`; None when none does."""
    try:
        links = json.loads(text)
    except ValueError:
        return None
    for link in links if isinstance(links, list) else []:
        infos = link.get("addr_info") if isinstance(link, dict) else None
        for info in infos if isinstance(infos, list) else []:
            if isinstance(info, dict) and info.get("local") == address and isinstance(link.get("ifname"), str):
                return link["ifname"]
    return None


def counters(folder):
    """The counters of a directory that count something wrong: {name: number}; what cannot be read is left out."""
    found = {}
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return found
    for name in names:
        value = read_text(os.path.join(folder, name)) if ERROR_COUNTER.search(name) else None
        if value is not None and value.isdecimal() and value.isascii():
            found[name] = int(value)
    return found


def link_state(netdev, root="/"):
    """A network device and the RDMA devices on it: state, speed, carrier changes and error counters."""
    base = os.path.join(root, "sys/class/net", netdev)
    names = ("operstate", "speed", "mtu", "carrier", "carrier_changes", "carrier_up_count", "carrier_down_count")
    state = {"netdev": netdev, "counters": counters(os.path.join(base, "statistics")), "rdma": {}}
    for name in names:
        value = read_text(os.path.join(base, name))
        state[name] = value if name == "operstate" else None if value is None else number(value)
    folder = os.path.join(root, "sys/class/infiniband")
    for device in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
        port = os.path.join(folder, device, "ports/1")
        if netdev not in rdma_netdevs(folder, device):
            continue
        state["rdma"][device] = {
            "state": read_text(os.path.join(port, "state")),
            "phys_state": read_text(os.path.join(port, "phys_state")),
            "rate": read_text(os.path.join(port, "rate")),
            "counters": counters(os.path.join(port, "counters")),
            "hw_counters": counters(os.path.join(port, "hw_counters")),
        }
    return state


def rdma_netdevs(folder, device):
    """Network devices of an RDMA device: by its GIDs, or (no GID set) by the PCI function that both share."""
    names = set()
    gids = os.path.join(folder, device, "ports/1/gid_attrs/ndevs")
    for index in os.listdir(gids) if os.path.isdir(gids) else []:
        name = read_text(os.path.join(gids, index)) if int(index) < 16 else None
        names.update([name] if name else [])
    shared = os.path.join(folder, device, "device/net")
    return names | set(os.listdir(shared) if os.path.isdir(shared) else [])


# -- probes -------------------------------------------------------------------------------------------------------------------------


def probe_cpu(seconds):
    """Copy and hash for about `seconds` on one thread: GB/s of memory copied (read and written) and MB/s hashed."""
    block = bytearray(16 << 20)
    copy, source = memoryview(bytearray(len(block))), memoryview(block)
    copied = hashed = 0
    start = time.perf_counter()
    while time.perf_counter() - start < seconds / 2:
        copy[:] = source
        copied += 2 * len(block)
    middle = time.perf_counter()
    while time.perf_counter() - middle < seconds / 2:
        hashlib.sha256(source[: 1 << 20]).digest()
        hashed += 1 << 20
    end = time.perf_counter()
    return {"copy_gb_s": round(copied / (middle - start) / 1e9, 2), "hash_mb_s": round(hashed / (end - middle) / 1e6, 1)}


def probe_gpu(seconds, timeout):
    """The GPU's bandwidth, and what nvidia-smi says while it works: {kind, error, under_load, device, gemv_gb_s, copy_gb_s, correct}."""
    seen = []

    def sample():
        time.sleep(seconds * 0.6)  # the clocks have risen by then
        seen.extend(gpu_query(timeout)[1][:1])

    result, error = bounded.forked(lambda begun: gpu_probe.probe(seconds, begun), timeout, sample)
    return {"kind": "gpu", "error": error, "under_load": seen[0] if seen else None, **(result or {})}
