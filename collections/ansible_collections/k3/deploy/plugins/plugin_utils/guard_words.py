"""What a rank's guard recorded, in a sentence."""

from __future__ import annotations

import time

_CROSSED = {
    "memory": "memory floor crossed on {rank}: {available_mib} MiB at {clock} (floor {floor_mib} MiB; {rest})",
    "free": "floor of free memory crossed on {rank}: {driver_free} MiB free without CMA at {clock} ({rest})",
}


def clock(seconds):
    """The time of day of a moment, UTC."""
    return time.strftime("%H:%M:%S UTC", time.gmtime(seconds or 0))


def guard_words(rank, record):
    """One sentence for people: what happened, when, the values, and who held most.

    record: guard-tripped.json of that rank: {what, text, at, floor_mib, available_mib, free_mib, cma_free_mib, cached_mib, psi_some, top, killed}.
    """
    about = dict(record, rank=rank, clock=clock(record.get("at")))
    about["driver_free"] = record.get("free_mib", 0) - record.get("cma_free_mib", 0)
    rest = "MemFree {}, CmaFree {}, page cache {} MiB".format(*(record.get(key, "?") for key in ("free_mib", "cma_free_mib", "cached_mib")))
    if record.get("psi_some", -1) > 0:
        rest += ", {:.0f} % of 10 s waited for memory".format(record["psi_some"])
    if record.get("top"):
        rest += "; largest: " + ", ".join("{name} {rss_mib} MiB".format(**entry) for entry in record["top"][:3])
    words = _CROSSED.get(record.get("what"), "{rank} at {clock}: {text}").format(**about, rest=rest)
    return words + ", candidate stopped by the guard" + (" with SIGKILL" if record.get("killed") else "")
