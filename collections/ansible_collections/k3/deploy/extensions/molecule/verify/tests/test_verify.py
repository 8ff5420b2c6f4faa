"""Verification: what was run and seen lies on the rank, and nobody's service was touched for it."""

from __future__ import annotations

import json

from testinfra.host import Host

WORK = "/opt/k3deploy/work/verify-7665726966790000"


def test_the_result_and_the_log_of_the_cases_stay_on_the_rank(rank0: Host) -> None:
    seen = json.loads(rank0.check_output(f"cat {WORK}.result.json"))["verification"]
    assert (seen["passed"], seen["failed"], seen["fallbacks"]) == (1, [], [])
    assert seen["cases"][0]["off_us"] == 500.0 and seen["cases"][0]["on_us"] == 100.0
    assert "K3_ERRORS" in rank0.check_output(f"cat {WORK}.log")


def test_the_cases_ran_unprivileged(rank0: Host) -> None:
    assert rank0.check_output(f"stat -c %U {WORK}.result.json") == "k3deploy"
