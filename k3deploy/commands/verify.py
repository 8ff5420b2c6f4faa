"""`k3deploy verify`: a candidate's kernels by themselves, on one rank's GPU, before any window is opened for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from k3deploy.commands.options import (
    CONTEXT,
    CandidateType,
    UsageProblem,
    inventory_option,
    json_option,
    matrix_option,
    print_json,
    runs_option,
)
from k3deploy.errors import ExitCode, K3Error

if TYPE_CHECKING:
    from k3deploy.facts import Verified
    from k3deploy.verification import Work

EPILOG = """\b
Examples:
  k3deploy verify candidate-U1 --on gb10-0 -i inventory/gb10
  k3deploy verify candidate-U12@exact --on gb10-0 -i inventory/gb10 --json

Builds test-backend-ops with the candidate's patch sets on that rank (which must hold the source), runs the cases that
reach its kernels, and times them with the candidate's switches off and on. What was seen is kept below the directory of
runs and is part of every later verdict of the same build and switches: the errors against FP64, the speed-up, the
cases. It starts no candidate, but compiling and running take memory and the GPU's time: in a window, or on a rank that
serves nobody. Exit codes: 0 all cases pass and reached the kernels, 10 they do not, 4 the rank has no GPU or is too
full."""


@click.command(epilog=EPILOG, context_settings=CONTEXT)
@click.argument("candidate", type=CandidateType())
@click.option("--on", "host", required=True, help="The rank with a GPU.")
@inventory_option
@matrix_option
@runs_option
@json_option
def verify(candidate: str, host: str, inventory: Path, matrix_dir: Path | None, runs: Path, as_json: bool) -> int:
    """Hold the kernels of CANDIDATE against FP64 and the existing ones on the GPU of one rank."""
    from k3deploy import verification
    from k3deploy.commands import planning
    from k3deploy.paths import find_playbook
    from k3deploy.store import lock

    planned = planning.make(candidate, inventory, matrix_dir)
    names = [rank.name for rank in planned.cluster.ranks]
    if host not in names:
        raise UsageProblem(f"{host} is no rank of {planned.cluster.name}; there are {', '.join(names)}")
    works = verification.works(planned.mapping)
    find_playbook("verify", [inventory])
    found: dict[str, Verified] = {}
    with lock(planned.cluster.name, f"verify {candidate} on {host}"):
        for work in works:
            found[work.arm] = run_on(host, work, inventory)
            verification.write(runs, planned.mapping, work.arm, found[work.arm])
    if as_json:
        print_json({arm: seen.model_dump(mode="json") for arm, seen in found.items()})
    else:
        for arm, seen in found.items():
            _print(arm, seen)
    good = all(not seen.failed and seen.active for seen in found.values())
    return int(ExitCode.OK if good else ExitCode.REJECT)


class Unfit(K3Error):
    """The rank has no GPU, or no room."""

    exit_code = ExitCode.PREFLIGHT


def run_on(host: str, work: Work, inventory: Path) -> Verified:
    """One arm's cases on the rank; raises ``K3Error`` with what the rank said."""
    from datetime import UTC, datetime

    from k3deploy.facts import Verified
    from k3deploy.runner import run_playbook

    seen: dict[str, Any] = {}

    def collect(event: dict[str, Any]) -> None:
        result = (event.get("event_data") or {}).get("res")
        facts = result.get("ansible_facts") if isinstance(result, Mapping) else None
        if isinstance(facts, Mapping) and isinstance(facts.get("verify_seen"), Mapping):
            seen.update(facts["verify_seen"])

    extra = {
        "k3_verify_host": host,
        "verify_build_key": work.build_key,
        "verify_build_spec": work.build_spec,
        "verify_request": work.request,
    }
    result = run_playbook("verify", [inventory], extra, collect)
    failures = [*result.unreachable, *result.failures]
    if failures or not seen:
        said = str(failures[0]) if failures else f"the playbook ended with {result.status} and nothing was seen"
        refused = any(failure.task.endswith(("a rank without a GPU", "a rank that is full")) for failure in failures)
        raise (Unfit if refused else K3Error)(said)
    names = Verified.model_fields.keys() & seen.keys()
    when = datetime.now(UTC).isoformat(timespec="seconds")
    return Verified.model_validate({name: seen[name] for name in names} | {"host": host, "date": when})


def _print(arm: str, seen: Verified) -> None:
    from k3deploy.commands.options import console
    from k3deploy.commands.plan import table_of

    table = table_of("case", "off us", "on us", "faster")
    for case in seen.cases:
        table.add_row(case["case"], f"{case['off_us']:.1f}", f"{case['on_us']:.1f}", f"{case['speedup']:.2f}x")
    out = console()
    out.print(f"candidate-{arm} on {seen.host} ({seen.device}, driver {seen.driver})")
    out.print(table)
    out.print(f"{seen.passed} cases pass, {len(seen.failed)} fail; {seen.active} kernels active")
    for failed in seen.failed:
        out.print(f"  failed: {failed}", markup=False)
    for reason in seen.fallbacks:
        out.print(f"  fell back: {reason}", markup=False)
    for what, error in (("output", seen.max_output_error), ("state / max|S|", seen.max_state_error)):
        if error is not None:
            out.print(f"max {what} error against FP64: {error:.2e}")
    if seen.kernel_speedup is not None:
        out.print(f"least speed-up: {seen.kernel_speedup:.2f}x")
