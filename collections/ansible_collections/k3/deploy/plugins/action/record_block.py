"""k3.deploy.record_block: write a block's record and its logs into the run directory on the controller. No round trip to a rank."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

from ansible_collections.k3.deploy.plugins.module_utils import log_excerpt, log_lines, masking
from ansible_collections.k3.deploy.plugins.plugin_utils import health_rules
from ansible_collections.k3.deploy.plugins.plugin_utils.guard_words import guard_words


def iso_time(seconds):
    """Seconds since the epoch as an ISO 8601 time in UTC, to the millisecond."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(float(seconds), UTC).isoformat(timespec="milliseconds")


SERIES_ROWS = 400  # of a block and rank: what a plot can show


def thinned(series):
    """The series with at most SERIES_ROWS rows: of each stretch the row with least MemAvailable."""
    step = -(-len(series) // SERIES_ROWS) or 1
    return [min(series[place : place + step], key=lambda row: row[1]) for place in range(0, len(series), step)]


def memory_summary(series, ready_at):
    """Least memory (MiB) over the block; MemAvailable also apart for load (before the head was ready) and run.

    series: rows of the rank's guard: time, MemAvailable, MemFree, CmaFree, Cached, and the pressure (some, full; -1: not known).
    ready_at: when the head was ready, by this rank's clock.
    """
    if not series:
        return {"min_available_mib": None, "min_at": None, "samples": 0, "load_min_mib": None, "run_min_mib": None, "series": []}
    least = min(series, key=lambda row: row[1])
    load = [row[1] for row in series if ready_at is None or row[0] <= ready_at]
    run = [row[1] for row in series if ready_at is not None and row[0] > ready_at]
    return {
        "min_available_mib": least[1],
        "min_at": iso_time(least[0]),
        "samples": len(series),
        "load_min_mib": min(load, default=None),
        "run_min_mib": min(run, default=None),
        "min_free_mib": min(row[2] for row in series),
        "min_driver_free_mib": min(row[2] - row[3] for row in series),
        "cached_at_min_mib": least[4],
        "pressure_max": max(row[5] for row in series),
        "ready_at": ready_at,
        "series": thinned(series),
    }


def health_summary(seen, bands):
    """A rank's two readings as they are, and what the rules find in them; None when the rank was not read."""
    if not seen or not seen.get("before") or not seen.get("after"):
        return None
    return {**seen, "findings": health_rules.block_findings(seen["before"], seen["after"], bands or {})}


def masked_log(text):
    """A log without secrets. Lines of numbers alone hold none; but a private key is looked for in the whole, since it has many lines."""
    if "PRIVATE KEY-----" in text:
        return masking.mask_text(text)
    pieces = log_lines.around_numbers(text)
    return "".join(piece if place % 2 else masking.mask_text(piece) for place, piece in enumerate(pieces))


def write_atomic(path, text):
    """A file is whole or not there: a resumed run trusts what it finds."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".new")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as stream:
        stream.write(text)
    temporary.replace(path)


def place_of(run_dir, index, void):
    """(path of a block's record, what its logs' names begin with). A block that broke again leaves the earlier records as they are."""
    if not void:
        return run_dir / "blocks" / f"{index:03d}.json", f"{index:03d}"
    number = 1
    while (run_dir / "void" / f"{index:03d}-{number}.json").exists():
        number += 1
    return run_dir / "void" / f"{index:03d}-{number}.json", f"{index:03d}-void{number}"


class ActionModule(ActionBase):
    """Arguments: run_dir, block, bench, load_seconds, started, ready_at, ended, ranks {name: {state, stop, health}}, health_bands, transport,
    void (why the block broke)."""

    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        arguments = self._task.args
        if self._task.check_mode:
            return {**result, "changed": False, "skipped": True}
        run_dir, block = Path(arguments["run_dir"]), arguments["block"]
        index = int(block["index"])
        ranks = {}
        try:
            path, mark = place_of(run_dir, index, arguments.get("void"))
            for name, seen in arguments["ranks"].items():
                ranks[name] = self._rank(run_dir, mark, name, seen, arguments)
            record = {
                **{key: block[key] for key in ("index", "pair", "arm", "slug")},
                **{key: iso_time(arguments.get(key)) for key in ("started", "ended")},
                **{key: arguments.get(key) for key in ("load_seconds", "void")},
                "bench": arguments.get("bench") or {},
                "transport": arguments.get("transport") or None,
                "broken": bool(arguments.get("void")),
                "ranks": ranks,
            }
            # Logs and what processes say of themselves come from elsewhere: no secret of theirs stays in the run directory.
            write_atomic(path, json.dumps(masking.mask(record), indent=1, sort_keys=True, default=str))
        except OSError as error:
            raise AnsibleActionFail(f"cannot record block {index} in {run_dir}: {error}") from error
        return {**result, "changed": True, "path": os.fspath(path)}

    def _rank(self, run_dir, mark, name, seen, arguments):
        stop = seen.get("stop") or {}
        logs = {}
        for kind, text in (stop.get("k3_logs") or {}).items():
            if text:
                path = run_dir / "logs" / name / f"{mark}-{kind}.log"
                write_atomic(path, masked_log(log_excerpt.unpack(text)))
                logs[kind] = os.fspath(path.relative_to(run_dir))
        return {
            "state": seen.get("state"),
            "memory": memory_summary(stop.get("memory") or [], (seen.get("state") or {}).get("time") or arguments.get("ready_at")),
            "guard": dict(stop["guard"], words=guard_words(name, stop["guard"])) if stop.get("guard") else None,
            "health": health_summary(seen.get("health"), arguments.get("health_bands")),
            "logs": logs,
            "killed": stop.get("killed") or [],
        }
