"""What the verdicts are worth, shown on a lab: equal arms are not accepted, slower ones rejected, faster ones accepted.

    K3DEPLOY_LAB=mine python tests/bench/shown.py                     all of it: 25 minutes on two free cores
    K3DEPLOY_LAB=mine python tests/bench/shown.py --cases faster link --pairs 6
    K3DEPLOY_LAB=mine python tests/bench/shown.py --again 2 --keep    a taste, and the lab stays up

Brings the lab up with a tiny model and production, takes two of its ranks, calibrates them, and applies rows of its
own in a copied matrix:

again    the baseline against itself, many times: none may be an ACCEPT
threads  workers with one thread instead of two: REJECT
link     one rank whose link carries 64 Mbit/s (a token bucket, which every kernel has): REJECT
faster   workers with two threads, compared with a baseline of one: ACCEPT

Beside each effect stands a direct measurement of the same two command lines: started by hand on the ranks, asked
in turn with plain requests, without roles, harness or judge. Prints a Markdown table; exit 1 when a verdict is another
one, or an effect lies outside the direct measurement's 95 % interval.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import shlex
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from controllerkit import Controller, one_inventory
from labkit import lab_up

from k3deploy import stats
from k3deploy.lab.cluster import Lab

CELL, SIZE = "pp512", 512
SLOW_RANK = "rank1"
LIMIT = "tc qdisc replace dev eth0 root tbf rate 64mbit burst 32k latency 2s"
FREE = "tc qdisc del dev eth0 root"
# Candidates run before everything else: four ranks share the machine with whatever else it does.
FIRST = {"CPUSchedulingPolicy": "rr", "CPUSchedulingPriority": "1"}
ROW = {
    "hypothesis": "None; made to be judged.",
    "guard": "none",
    "rejection": "none",
    "kind": "runtime",
    "gates": {"cold_prefill": {"cells": [CELL], "require": "faster"}},
}


@dataclass(frozen=True, slots=True)
class Case:
    """A row, and what it must come to. link: whether the arm's link is slow."""

    name: str
    row: dict[str, Any]
    verdict: str
    link: bool = False

    @property
    def id(self) -> str:
        return f"Shown{self.name}"


CASES = [
    Case("again", {"title": "the baseline itself"}, "not ACCEPT"),
    Case("threads", {"title": "one thread a worker", "set": {"worker_threads": 1}}, "REJECT"),
    Case("link", {"title": f"{SLOW_RANK} behind 64 Mbit/s"}, "REJECT", link=True),
    Case(
        "faster",
        {"title": "two threads a worker", "set": {"worker_threads": 2}, "against": {"worker_threads": 1}},
        "ACCEPT",
    ),
]


@dataclass(frozen=True, slots=True)
class Effect:
    """A ratio with its 95 % interval."""

    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return " ".join(f"{(value - 1) * 100:+.1f}" for value in (self.ratio, self.low, self.high))


def prepare(controller: Controller) -> None:
    """Rows of ours in the copied matrix, a shorter context, and a slow link for the arm that shall have one."""
    matrix = controller.inventory.parent / "matrix"
    for case in CASES:
        (matrix / f"{case.id}.yml").write_text(yaml.safe_dump({"id": case.id, **ROW, **case.row}))
        if case.link:
            folder = f"/etc/systemd/system/k3-candidate-worker@{case.id}.service.d"
            unit = f"[Service]\nExecStartPre=+/usr/sbin/{LIMIT}\nExecStopPost=+/usr/sbin/{FREE}\n"
            script = f"mkdir -p {folder}; printf %s {shlex.quote(unit)} > {folder}/link.conf; systemctl daemon-reload"
            controller.on(SLOW_RANK, script)
    folders = " ".join(f"/etc/systemd/system/k3-candidate-{kind}@.service.d" for kind in ("worker", "head"))
    first = "[Service]\n" + "".join(f"{name}={value}\n" for name, value in FIRST.items())
    controller.everywhere(
        f"mkdir -p {folders}; for at in {folders}; do printf %s {shlex.quote(first)} > $at/first.conf; done; "
        "systemctl daemon-reload"
    )
    controller.change(lambda values: values["k3_scale"].update(ctx_size=4096))  # what the parity questions need


def calibrated_delta(controller: Controller, pairs: int, repeats: int) -> float:
    """The smallest delta, in per cent, that ``pairs`` can show at this machine's spread."""
    said = controller.k3deploy(
        *("calibrate", "--cells", CELL, "--pairs", str(pairs), "--repeats", str(repeats), "--yes"), timeout_s=3600
    )
    if said.returncode != 0:
        sys.exit(said.stdout + said.stderr)
    (kept,) = (controller.runs / "calibration").glob("*.json")
    spread = next(cell["spread"] for cell in json.loads(kept.read_text())["cells"] if cell["metric"] == "speed")
    # Half of delta must hold the half-width; a quarter more, since the next run's spread is not this one's.
    return max(2.0, float(math.ceil(100 * math.expm1(2.5 * stats.half_width(pairs, spread)))))


def applied(controller: Controller, case: Case, pairs: int, repeats: int, delta: float) -> tuple[str, Effect | None]:
    """Verdict and effect of one apply."""
    arguments = ["apply", f"candidate-{case.id}", "--cells", CELL, "--pairs", str(pairs), "--repeats", str(repeats)]
    said = controller.k3deploy(*arguments, "--delta", f"{delta:g}", "--yes", timeout_s=3600)
    if said.returncode not in (0, 10, 11, 12):
        sys.exit(said.stdout + said.stderr)
    verdict = json.loads((controller.runs / "latest" / "verdict.json").read_text())
    cell = next(cell for cell in verdict["arms"][0]["cells"] if cell["cell"] == CELL and cell["metric"] == "speed")
    known = cell["low"] is not None
    return verdict["outcome"], Effect(cell["ratio"], cell["low"], cell["high"]) if known else None


# --- the same two command lines by hand ---


@contextlib.contextmanager
def by_hand(controller: Controller, arm: dict[str, Any], link: bool) -> Iterator[str]:
    """An arm's processes without the tool; yields the head's address."""
    release = f"/opt/k3deploy/candidates/{arm['slug']}/release"

    def start(rank: str, kind: str) -> None:
        process = arm["processes"][rank].get(kind)
        if process:
            variables = {"LD_LIBRARY_PATH": f"{release}/lib", **process["environment"]}
            front = ["systemd-run", "--quiet", "--collect", f"--unit=shown-{kind}"]
            front += [f"--setenv={name}={value}" for name, value in variables.items()]
            front += [f"--property={name}={value}" for name, value in FIRST.items()]
            argv = [f"{release}/{process['argv'][0]}", *process["argv"][1:]]
            controller.on(rank, shlex.join([*front, *argv]))

    (head,) = (rank for rank, processes in arm["processes"].items() if processes.get("head"))
    url = arm["processes"][head]["head"]["url"]
    try:
        if link:
            controller.on(SLOW_RANK, LIMIT)
        for rank in arm["processes"]:
            start(rank, "worker")
        time.sleep(1)  # a worker is never asked over its port: it serves one client at a time
        start(head, "head")
        end = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2):
                break
            if time.monotonic() > end:
                sys.exit(f"{url} does not answer: journalctl -u shown-head on {head}")
            time.sleep(0.2)
        yield url
    finally:
        controller.everywhere("systemctl stop 'shown-*'")
        if link:
            controller.on(SLOW_RANK, FREE)


def speed(url: str, luck: random.Random, requests: int) -> float:
    """Logarithm of the prompt tokens per second of plain requests: the median; the first is not counted."""
    found = []
    for _ in range(requests + 1):
        prompt = [1, *(luck.randrange(300, 2000) for _ in range(SIZE - 1))]
        body = {"prompt": prompt, "n_predict": 1, "cache_prompt": False, "temperature": 0}
        asked = urllib.request.Request(
            f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=120) as answer:
            timings = json.load(answer)["timings"]
        found.append(math.log(timings["prompt_n"] / timings["prompt_ms"]))
    return statistics.median(found[1:])


def direct(controller: Controller, case: Case, rounds: int, repeats: int) -> Effect:
    """The effect of the latest run's arm, measured by hand."""
    arms = json.loads((controller.runs / "latest" / "plan.json").read_text())["arms"]
    luck, differences = random.Random(7), []
    for number in range(rounds):
        values = {}
        for place in (0, 1) if number % 2 else (1, 0):
            with by_hand(controller, arms[place], case.link and place == 1) as url:
                values[place] = speed(url, luck, repeats)
        differences.append(values[1] - values[0])
    low, high = stats.interval(np.asarray(differences))
    return Effect(math.exp(statistics.fmean(differences)), math.exp(float(low)), math.exp(float(high)))


def show(controller: Controller, given: argparse.Namespace) -> bool:
    """Print the table; whether everything is as it must be."""
    prepare(controller)
    delta = calibrated_delta(controller, given.pairs, given.repeats)
    print(f"calibrated on {CELL}: delta {delta:g} %, {given.pairs} pairs of {given.repeats} requests\n")
    print("| row | must be | verdict | effect %, 95 % | by hand %, 95 % | inside |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    good = True
    for case in (case for case in CASES if case.name in given.cases):
        for _ in range(given.again if case.name == "again" else 1):
            verdict, effect = applied(controller, case, given.pairs, given.repeats, delta)
            right = verdict != "ACCEPT" if case.name == "again" else verdict == case.verdict
            hand, inside = None, ""
            if case.name != "again" and effect is not None:
                hand = direct(controller, case, given.pairs, given.repeats)
                inside = "yes" if hand.low <= effect.ratio <= hand.high else "NO"
            good &= right and inside != "NO"
            mark = "" if right else " (!)"
            print(f"| {case.id} | {case.verdict} | {verdict}{mark} | {effect} | {hand or ''} | {inside} |", flush=True)
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--pairs", type=int, default=8, help="of every run, and rounds by hand")
    parser.add_argument("--repeats", type=int, default=3, help="requests of a block")
    parser.add_argument("--again", type=int, default=10, help="how often the baseline is held against itself")
    parser.add_argument("--keep", action="store_true", help="leave the lab up")
    given = parser.parse_args()
    lab = Lab.from_environment()
    with tempfile.TemporaryDirectory(prefix="shown-") as place, contextlib.ExitStack() as held:
        if given.keep:
            lab.up(progress=print)
        else:
            held.enter_context(lab_up(lab))
        controller = Controller(lab, one_inventory(lab, Path(place) / "inventory"), Path(place))
        for command in (["lab", "model", "--spec", "tiny"], ["lab", "production"]):
            done = controller.k3deploy(*command, timeout_s=1800)
            if done.returncode != 0:
                sys.exit(done.stdout + done.stderr)
        good = show(controller.thrifty("thrifty"), given)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
