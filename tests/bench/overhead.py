"""What k3deploy itself costs: an apply that has nothing left to measure, beside `ansible -m ping`, on the same ranks.

    python tests/bench/overhead.py                    the newest complete run of the lab
    python tests/bench/overhead.py --run ID --times 5

Resumes a run whose blocks are all recorded, so that what is left is the tool: plan, preflight, build, install, window
(production is drained and brought back), close, judge. Prints a Markdown table; times are medians over the repetitions.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from k3deploy.paths import DEFAULT_RUNS
from k3deploy.store import Run, Store

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
VERDICTS = (0, 10, 11, 12)  # exit codes of an apply that came to its end


@dataclass(frozen=True, slots=True)
class Cost:
    """One repetition, in seconds. ``phases`` are those of the run's own record."""

    ping: float
    apply: float
    phases: dict[str, float]
    tasks: int
    round_trips: int


def timed(argv: Sequence[str], good: Sequence[int] = (0,)) -> float:
    started = time.monotonic()
    done = subprocess.run(argv, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode not in good:
        sys.exit(f"{' '.join(argv)} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return time.monotonic() - started


def measure(run: Run) -> Cost:
    """Ping, then a no-op apply, both over connections that are open already."""
    command = [str(BIN / "ansible"), "-i", run.inventory, "ranks", "-m", "ansible.builtin.ping"]
    timed(command)  # opens the connections
    ping = timed(command)
    before = run.events.stat().st_size
    command = [str(BIN / "k3deploy"), "apply", "--runs", str(run.path.parent), "--resume", run.id, "--yes"]
    apply = timed(command, VERDICTS)
    with run.events.open(encoding="utf-8") as stream:
        stream.seek(before)
        events = [json.loads(line) for line in stream]
    phases: dict[str, float] = {}
    for event in events:
        if event["event"] == "phase_end":
            phases[event["phase"]] = phases.get(event["phase"], 0) + event["elapsed_s"]
    (end,) = (event for event in events if event["event"] == "playbook_end")
    return Cost(ping, apply, phases, end["tasks"], end["round_trips"])


def table(costs: Sequence[Cost], ranks: int) -> str:
    """Medians as a Markdown table; ratios to ping."""
    ping = statistics.median(cost.ping for cost in costs)

    def row(name: str, seconds: float, tasks: object = "", trips: object = "") -> str:
        return f"| {name} | {seconds:.1f} | {seconds / ping:.1f} | {tasks} | {trips} |"

    lines = [
        "| what | seconds | ratio to ping | tasks | round trips |",
        "| --- | ---: | ---: | ---: | ---: |",
        row("`ansible ranks -m ping`", ping, 1, ranks),
        row("no-op apply", statistics.median(cost.apply for cost in costs), costs[-1].tasks, costs[-1].round_trips),
    ]
    phases = {name: statistics.median(cost.phases[name] for cost in costs) for name in costs[-1].phases}
    lines += [row(f"its phase {name}", seconds) for name, seconds in phases.items()]
    inside = statistics.median(cost.apply - sum(cost.phases.values()) for cost in costs)
    return "\n".join([*lines, row("its start, plan and end", inside)])


def complete_run(store: Store, reference: str | None) -> Run:
    """The named run, or the newest whose blocks are all recorded."""
    runs = [store.load(reference)] if reference else store.runs()
    for run in runs:
        if len(run.blocks) == len(run.plan()["blocks"]):
            return run
    sys.exit(f"no run in {store.root} has all its blocks: k3deploy apply candidate-U2 makes one")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path(os.environ.get("K3DEPLOY_RUNS") or DEFAULT_RUNS))
    parser.add_argument("--run", help="a run's id, or latest; the newest complete one without it")
    parser.add_argument("--times", type=int, default=3, help="repetitions (default 3)")
    options = parser.parse_args(arguments)
    run = complete_run(Store(options.runs), options.run)
    os.environ.setdefault("ANSIBLE_CONFIG", str(ROOT / "ansible.cfg"))
    costs = [measure(run) for _ in range(options.times)]
    print(f"{run.id}: {len(run.blocks)} recorded blocks, {options.times} repetitions\n")
    print(table(costs, len(run.plan()["ranks"])))


if __name__ == "__main__":
    main()
