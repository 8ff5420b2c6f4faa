"""docs/faults.md has the cases that the code has: none is injected and not shown, none shown and not injected."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import faulttable

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_of_faults_has_every_case_of_the_code_once_and_no_other() -> None:
    argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "fault", "--collect-only", "--faults-list"]
    done = subprocess.run([*argv, "-q", "tests/faults"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = [tuple(json.loads(line)) for line in done.stdout.splitlines() if line.startswith('["')]
    assert len(cases) > 40
    assert sorted(faulttable.cases_in((ROOT / "docs/faults.md").read_text())) == sorted(cases), (
        "write it again: pytest -m fault --faults-doc docs/faults.md tests"
    )
