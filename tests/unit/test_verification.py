"""A candidate's kernels by themselves: what is run on the rank, what is read of it, and what a verdict makes of it."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from judgekit import ARM, facts_of, plan_of
from test_plan import cluster, plan

from k3deploy import verification
from k3deploy.commands import verify as command
from k3deploy.errors import K3Error
from k3deploy.facts import Facts, Verified
from k3deploy.inventory import Source
from k3deploy.judge import judge
from k3deploy.patches import find_directory
from k3deploy.runner import HostFailure, RunResult

SEEN: dict[str, Any] = {
    "host": "rank1",
    "device": "NVIDIA GB10",
    "driver": "580.0",
    "date": "2026-11-30T12:00:00+00:00",
    "kernel_speedup": 5.5,
    "max_output_error": 4e-7,
    "max_state_error": 7.7e-7,
    "passed": 53,
    "failed": [],
    "active": 1,
    "fallbacks": ["few tokens"],
    "markers": [],
    "cases": [],
}


def seen(**changes: Any) -> Verified:
    return Verified.model_validate({**SEEN, **changes})


def planned(row: str) -> dict[str, Any]:
    return plan(row, cluster(cpu=False)).model_dump(mode="json")


# -- what is run ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "switch", "op"),
    [
        ("U1", {"GGML_CUDA_K3_KDA_CHUNKED": "1"}, "GATED_DELTA_NET"),
        ("U11", {"GGML_CUDA_K3_KDA_BLOCKED": "1"}, "GATED_DELTA_NET"),
        ("U10", {"GGML_CUDA_K3_IQ1S_ROWS256": "1"}, "MUL_MAT_ID"),
        ("U10b", {"GGML_CUDA_K3_IQ1S_NCOLS": "1"}, "MUL_MAT_ID"),
        ("U12@exact", {"GGML_CUDA_K3_IQ1S_GROUPED": "exact"}, "MUL_MAT_ID"),
    ],
)
def test_the_cases_are_built_with_the_candidates_sets_and_run_with_its_switches(
    row: str, switch: dict[str, str], op: str
) -> None:
    found = planned(row)
    (work,) = verification.works(found)
    arm = found["arms"][1]
    assert work.request["environment"] == switch
    assert work.build_spec["patch_sets"] == [*found["builds"][arm["build_key"]]["patch_sets"], "tests-k3-ops"]
    assert work.build_spec["targets"] == ["test-backend-ops"]
    assert work.build_spec["cmake"]["LLAMA_BUILD_TESTS"] == "ON"
    assert work.build_key != arm["build_key"]
    assert {case["op"] for case in work.request["perf"]} == {op}
    assert any("ACTIVE" in marker for marker in work.request["markers"])


def test_a_sweep_is_one_program_and_one_verification_for_each_value() -> None:
    exact, fine = verification.works(planned("U12"))
    assert exact.build_key == fine.build_key
    assert exact.request["environment"] != fine.request["environment"]


def test_a_candidate_without_kernels_is_refused_with_the_rows_that_have_some() -> None:
    for row in ("U2", "U8"):
        with pytest.raises(verification.NothingToVerify, match=f"candidate-{row}") as caught:
            verification.works(planned(row))
        assert "U1, U10, U10b, U11, U12" in caught.value.remedy


def test_a_prebuilt_program_has_no_cases_to_build() -> None:
    found = planned("U11")
    spec = found["builds"][found["arms"][1]["build_key"]]
    spec["source"] = Source(kind="prebuilt", path="/srv/build").model_dump()
    with pytest.raises(verification.NothingToVerify, match="prebuilt"):
        verification.works(found)


# -- what is kept ---------------------------------------------------------------------------------------------------


def test_what_was_seen_is_found_again_for_the_same_build_and_switches_alone(tmp_path: Path) -> None:
    found = planned("U12")
    exact, fine = (arm["name"] for arm in found["arms"][1:])
    path = verification.write(tmp_path, found, exact, seen())
    assert verification.find(tmp_path, found) == {exact: seen()}
    assert verification.find(tmp_path, planned("U12@fine")) == {}
    assert verification.find(tmp_path, {**found, "cluster": "another"}) == {}
    path.write_text(path.read_text().replace('"passed": 53', '"passed": "many"'))
    assert verification.find(tmp_path, found) == {}, "what is damaged is not there"
    assert fine != exact


# -- what a verdict makes of it -------------------------------------------------------------------------------------


def gate(name: str, verified: Verified | None, gates: Mapping[str, Any]) -> tuple[str, str]:
    arms = {} if verified is None else {"verified": {ARM: verified.model_dump()}}
    verdict = judge(plan_of(gates=dict(gates)), Facts.model_validate({**facts_of(1), **arms}))
    found = next(one for one in verdict.arms[0].gates if one.name == name)
    return found.outcome, found.reason


STATE = {"state_parity": {"observation": "max_state_error", "require": "at_most", "limit": 1e-6}}
SPEED = {"kernel_timing": {"observation": "kernel_speedup", "require": "at_least", "limit": 1.0}}


def test_the_errors_against_fp64_decide_where_no_server_was_asked() -> None:
    assert gate("state_parity", None, STATE)[0] == "open"
    assert gate("state_parity", seen(), STATE)[0] == "pass"
    outcome, reason = gate("state_parity", seen(max_state_error=2e-6), STATE)
    assert outcome == "fail" and "2e-06" in reason


def test_the_speed_up_of_the_kernel_is_the_verifications() -> None:
    assert gate("kernel_timing", None, SPEED)[0] == "open"
    assert gate("kernel_timing", seen(), SPEED)[0] == "pass"
    assert gate("kernel_timing", seen(kernel_speedup=0.92), SPEED)[0] == "fail"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"failed": ["GATED_DELTA_NET(type=f32)"]}, "1 of 54 cases fail on rank1"),
        ({"active": 0, "fallbacks": ["layout"]}, "no case reached the kernels on rank1 .*: layout"),
    ],
)
def test_a_kernel_that_fails_a_case_or_never_ran_is_rejected(changes: dict[str, Any], said: str) -> None:
    assert gate("operator_cases", seen(), STATE)[0] == "pass"
    outcome, reason = gate("operator_cases", seen(**changes), STATE)
    assert outcome == "fail"
    assert re.search(said, reason)


# -- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "error"), [("k3.deploy.verify : Refuse a rank without a GPU", 4), ("k3.deploy.build : Compile", 1)]
)
def test_a_rank_without_a_gpu_is_unfit_and_anything_else_is_a_failure(
    task: str, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = RunResult(rc=2, status="failed", failures=[HostFailure("rank1", task, "rank1 has no GPU")])
    monkeypatch.setattr("k3deploy.runner.run_playbook", lambda *_: failed)
    (work,) = verification.works(planned("U1"))
    with pytest.raises(K3Error, match="rank1 has no GPU") as caught:
        command.run_on("rank1", work, Path("inventory"))
    assert caught.value.exit_code == error


def test_what_the_role_hands_over_is_kept_with_host_and_date(monkeypatch: pytest.MonkeyPatch) -> None:
    def played(
        _name: str, _inventories: object, extra: Mapping[str, Any], on_event: Callable[[Any], None]
    ) -> RunResult:
        assert extra["k3_verify_host"] == "rank1" and extra["verify_build_spec"]["targets"] == ["test-backend-ops"]
        facts = {key: value for key, value in SEEN.items() if key not in ("host", "date")} | {"seconds": 3.0}
        on_event({"event_data": {"res": {"ansible_facts": {"verify_seen": facts}}}})
        return RunResult(rc=0, status="successful")

    monkeypatch.setattr("k3deploy.runner.run_playbook", played)
    (work,) = verification.works(planned("U1"))
    found = command.run_on("rank1", work, Path("inventory"))
    assert found == seen(date=found.date)


# -- the program on the rank ----------------------------------------------------------------------------------------


FAKE = """#!/bin/sh
echo "$@" >> "$0.log"
if [ "$1" = test ]; then
    echo 'K3_KERNEL_ACTIVE heads=96'
    echo 'K3_KERNEL_FALLBACK reason="few tokens" tokens=1'
    echo 'K3_ERRORS output=1.000e-07 state=7.700e-07'
    printf '  OP(type=f32,t=16): \\033[1;32mOK\\033[0m\\n'
    echo 'K3_ERRORS output=3.000e-07 state=5.000e-07'
    echo '[OP] ERR = 0.2 > 0.1   OP(type=f32,t=17): FAIL'
    echo '  OP(type=f16,t=1): not supported [CUDA0]'
    exit 1
fi
for t in 256 512; do
    if [ -z "$SWITCH" ]; then us=$t; elif [ $t = 256 ]; then us=128; else us=640; fi
    echo "  OP(type=f32,t=$t):    100 runs -  $us.00 us/run -  1 kFLOP/run"
done
"""


@pytest.fixture
def verify(tmp_path: Path) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location(
        "k3_verify", find_directory().parents[2] / "verify" / "files" / "k3_verify.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    program = tmp_path / "test-backend-ops"

    def make(script: str, timeout_s: int = 10) -> Any:
        program.write_text(script)
        program.chmod(0o755)
        cases = [{"op": "OP", "params": "t="}]
        given = {"program": str(program), "libraries": "", "device": "CUDA0", "environment": {"SWITCH": "1"}}
        more = {"markers": ["K3_KERNEL_ACTIVE", "K3_KERNEL_FALLBACK"], "test": cases, "perf": cases}
        return module.Verification({**given, **more, "timeout_s": timeout_s}, tmp_path / "progress.json")

    make.error = module.VerifyError  # type: ignore[attr-defined]
    return make


def test_cases_errors_markers_and_times_are_read(verify: Callable[..., Any], tmp_path: Path) -> None:
    found = verify(FAKE).main()["verification"]
    assert (found["passed"], found["failed"]) == (1, ["OP(type=f32,t=17)"])
    assert (found["max_output_error"], found["max_state_error"]) == (3e-7, 7.7e-7)
    assert (found["active"], found["fallbacks"]) == (1, ["few tokens"])
    assert {case["case"]: case["speedup"] for case in found["cases"]} == {
        "OP(type=f32,t=256)": 2.0,
        "OP(type=f32,t=512)": 0.8,
    }
    assert found["kernel_speedup"] == 0.8, "of the case that gains least"
    assert (tmp_path / "test-backend-ops.log").read_text().splitlines()[0] == "test -o OP -b CUDA0 -p t="
    assert json.loads((tmp_path / "progress.json").read_text())["total"] == 7


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("#!/bin/sh\necho 'no CUDA device'; exit 0\n", r"ran no case on CUDA0 \(exit 0\): no CUDA device"),
        ("#!/bin/sh\nkill -9 $$\n", r"ran no case on CUDA0 \(exit -9\)"),
        ("#!/bin/sh\nexec sleep 30\n", "took longer than 1 s"),
    ],
)
def test_a_program_that_runs_no_case_is_an_error_and_no_pass(
    verify: Callable[..., Any], script: str, said: str
) -> None:
    with pytest.raises(verify.error, match=said):  # type: ignore[attr-defined]
        verify(script, timeout_s=1).main()
