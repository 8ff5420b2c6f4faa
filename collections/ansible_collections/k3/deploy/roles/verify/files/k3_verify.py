#!/usr/bin/env python3
"""Run test-backend-ops on a rank's GPU, the candidate's kernels off and on, and say what they did. Standard library only.

Reads a spec (JSON: program, libraries, device, environment, markers, test, perf, timeout_s) and writes `result` and `progress` (JSON, atomically).
`test` and `perf` are lists of {op, params}: params is a regular expression over a case's description. Times are taken in turns, off and on,
three times each; a case's time is the median.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import time
from pathlib import Path

ROUNDS = 3
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
CASE = re.compile(r"^.*?\b(\w+\(type.*\)): *(.*)$", re.MULTILINE)
TIMED = re.compile(r"runs -\s*([\d.]+) us/run")
ERRORS = re.compile(r"^K3_ERRORS output=(\S+) state=(\S+)$", re.MULTILINE)
VERDICT = re.compile(r"(OK|FAIL|not supported)[^\n]*$")


class VerifyError(Exception):
    """Nothing can be said of the kernels; the message says why."""


def write_json(path: Path, value: object) -> None:
    """Write JSON so that a reader sees the old document or the new one."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(json.dumps(value, indent=1, sort_keys=True))
    temporary.replace(path)


def cases(text: str) -> list[tuple[str, str]]:
    """(case, what was said of it) of each line that describes one."""
    return CASE.findall(text)


class Verification:
    """One candidate's kernels on one device."""

    def __init__(self, spec: dict, progress: Path | None) -> None:
        self.spec = spec
        self.progress_path = progress
        self.started = time.time()
        self.steps = len(spec["test"]) + 2 * ROUNDS * len(spec["perf"])
        self.done = 0

    def run(self, mode: str, what: dict, environment: dict) -> str:
        """What the program says of one operator; its end by a signal or after `timeout_s` is an error."""
        if self.progress_path:
            message = f"{mode} {what['op']}" + ("" if environment else ", switched off")
            write_json(self.progress_path, {"message": message, "done": self.done, "total": self.steps, "started": self.started})
        argv = [self.spec["program"], mode, "-o", what["op"], "-b", self.spec["device"], "-p", what["params"]]
        print("+", *argv, environment or "", flush=True)
        clean = {key: value for key, value in os.environ.items() if key not in self.spec["environment"]}
        try:
            done = subprocess.run(
                argv,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                check=False,
                timeout=self.spec["timeout_s"],
                env={**clean, **environment, "LD_LIBRARY_PATH": self.spec["libraries"]},
            )
        except subprocess.TimeoutExpired:
            raise VerifyError(f"{mode} of {what['op']} took longer than {self.spec['timeout_s']} s") from None
        self.done += 1
        text = COLOUR.sub("", done.stdout)
        print(text, flush=True)
        if done.returncode not in (0, 1) or not cases(text):
            last = [line for line in text.splitlines() if line.strip()][-3:]
            raise VerifyError(f"{mode} of {what['op']} ran no case on {self.spec['device']} (exit {done.returncode}): " + " | ".join(last))
        return text

    def test(self) -> dict:
        """The cases with the kernels switched on: what failed, the errors, the markers."""
        passed, failed, errors, marked = 0, [], [], []
        for what in self.spec["test"]:
            text = self.run("test", what, self.spec["environment"])
            for case, said in cases(text):
                verdict = VERDICT.search(said)
                if verdict and verdict[1] == "OK":
                    passed += 1
                elif not verdict or verdict[1] == "FAIL":
                    failed.append(case)
            errors += [(float(output), float(state)) for output, state in ERRORS.findall(text)]
            marked += [line.strip() for line in text.splitlines() if any(marker in line for marker in self.spec["markers"])]
        active = [line for line in marked if "_ACTIVE" in line]
        return {
            "passed": passed,
            "failed": failed,
            "max_output_error": max((output for output, _ in errors), default=None),
            "max_state_error": max((state for _, state in errors), default=None),
            "active": len(active),
            "fallbacks": sorted({match[1] for line in marked if (match := re.search(r'_FALLBACK reason="([^"]*)"', line))}),
            "markers": sorted(set(marked)),
        }

    def perf(self) -> dict:
        """The times of each case, off and on; the speed-up is that of the case that gains least."""
        times: dict[str, tuple[list[float], list[float]]] = {}
        for what in self.spec["perf"]:
            for turn in range(ROUNDS):
                # who is first changes from round to round
                for on in (turn % 2 == 0, turn % 2 != 0):
                    for case, said in cases(self.run("perf", what, self.spec["environment"] if on else {})):
                        timed = TIMED.search(said)
                        if timed:
                            times.setdefault(case, ([], []))[on].append(float(timed[1]))
        found = [
            {
                "case": case,
                "off_us": statistics.median(off),
                "on_us": statistics.median(on),
                "speedup": statistics.median(off) / statistics.median(on),
            }
            for case, (off, on) in times.items()
            if off and on
        ]
        return {"cases": found, "kernel_speedup": min((case["speedup"] for case in found), default=None)}

    def main(self) -> dict:
        return {"changed": False, "verification": {**self.test(), **self.perf(), "seconds": round(time.time() - self.started, 1)}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--progress", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        result = Verification(json.loads(arguments.spec.read_text()), arguments.progress).main()
    except (VerifyError, OSError) as error:
        result = {"error": str(error)}
    write_json(arguments.result, result)
    return 1 if "error" in result else 0


if __name__ == "__main__":
    raise SystemExit(main())
