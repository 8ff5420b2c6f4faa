"""`k3deploy status`: every rank as it is now."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from k3deploy.commands.options import CONTEXT, console, inventory_option, json_option, print_json, warn
from k3deploy.commands.window import stale, words
from k3deploy.errors import ExitCode, K3Error

EPILOG = """\b
Examples:
  k3deploy status
  k3deploy status -i inventory/gb10
  k3deploy status --json | jq .production

Reads only, and never connects to a worker: an RPC server serves one client at a time."""


@click.command(epilog=EPILOG, context_settings=CONTEXT)
@inventory_option
@json_option
def status(inventory: Path, as_json: bool) -> int:
    """Show ranks, production, candidate units and the maintenance window.

    Exit code 1 when a rank cannot be read, production does not answer outside a window, or a window is past its end.
    """
    report = gather(inventory)
    if as_json:
        print_json(report)
    else:
        _print(report)
    for host, problem in report["problems"].items():
        warn(f"{host}: {problem}", "red")
    healthy = (
        not report["problems"]
        and not stale(report["window"])
        and (report["production"]["answers"] is not False or bool(report["window"]))
    )
    return int(ExitCode.OK if healthy else ExitCode.FAILED)


def gather(inventory: Path) -> dict[str, Any]:
    """Read every rank in one playbook run.

    Returns ``{ranks: {host: rank_state}, problems: {host: why not read}, production: {answers, units}, fabric: {host:
    its RDMA device and GID, or why none}, window}``.
    """
    from k3deploy.runner import run_playbook

    ranks: dict[str, dict[str, Any]] = {}
    fabric: dict[str, dict[str, Any]] = {}

    def collect(event: dict[str, Any]) -> None:
        data = event.get("event_data") or {}
        result = data.get("res")
        if isinstance(result, Mapping) and isinstance(result.get("state"), Mapping):
            ranks[str(data["host"])] = dict(result["state"])
        if isinstance(result, Mapping) and isinstance(result.get("link"), Mapping):
            fabric[str(data["host"])] = dict(result["link"]["resolved"])

    result = run_playbook("status", [inventory], {}, collect)
    problems = {failure.host: failure.message for failure in (*result.unreachable, *result.failures)}
    if not ranks and not problems:
        raise K3Error(f"{inventory}: no rank was read", remedy="does the inventory have the group ranks?")
    return {
        "ranks": dict(sorted(ranks.items())),
        "problems": problems,
        "production": production(ranks),
        "fabric": dict(sorted(fabric.items())),
        "window": next((state["window"] for state in ranks.values() if state.get("window")), None),
    }


def production(ranks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Whether production answers (None: no head was asked), and its units by rank."""
    units: dict[str, dict[str, str]] = {}
    answers = None
    for host, state in sorted(ranks.items()):
        seen = state.get("production") or {}
        units[host] = {name: str(unit.get("active")) for name, unit in (seen.get("units") or {}).items()}
        if "head" in seen:
            answers = seen["head"].get("status") == 200
    return {"answers": answers, "units": units}


def head_was_read(report: Mapping[str, Any]) -> bool:
    """Whether ``gather`` reached the rank that holds the window."""
    return report["production"]["answers"] is not None


def fabric_lines(fabric: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Which RDMA device each rank's fabric address has now, or plainly that RPC can only run over TCP."""
    if fabric and all(found.get("device") is None for found in fabric.values()):
        why = dict.fromkeys(problem for found in fabric.values() for problem in found.get("problems") or [])
        return [f"transport: TCP; {next(iter(why), 'no RDMA device was found')}"]
    return [
        f"transport of {host}: {found.get('why') or '; '.join(found.get('problems') or [])}"
        for host, found in fabric.items()
    ]


def candidate_units(state: Mapping[str, Any]) -> list[str]:
    """The candidate units of a rank that are not plainly inactive, as ``name state build``."""
    return [
        " ".join(filter(None, (name, str(unit.get("active")), unit.get("build_id"))))
        for name, unit in sorted((state.get("units") or {}).items())
        if unit.get("active") not in (None, "inactive")
    ]


def _print(report: Mapping[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("rank", "memory available", "production", "candidate", "releases"):
        table.add_column(heading)
    for host, state in report["ranks"].items():
        memory = state.get("mem") or {}
        units = report["production"]["units"][host]
        cells = (
            host,
            f"{memory.get('MemAvailable', '?')} of {memory.get('MemTotal', '?')} MiB",
            "\n".join(f"{name} {active}" for name, active in units.items()) or "-",
            "\n".join(candidate_units(state)) or "-",
            str(len(state.get("releases") or [])),
        )
        table.add_row(*(Text(cell) for cell in cells))
    out = console()
    out.print(table)
    answers = {True: "answers", False: "does not answer", None: "was not asked (no head was read)"}
    out.print(Text(f"production {answers[report['production']['answers']]}"))
    for line in fabric_lines(report["fabric"]):
        out.print(Text(line))
    out.print(Text(words(report["window"], known=head_was_read(report))))
