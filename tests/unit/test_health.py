"""A rank's health: what tools print is read whole, and faults are told apart from what healthy hosts print too."""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3deploy.facts import Block
from k3deploy.judge.health import health_findings, health_problems

sys.path.insert(0, str(Path(__file__).parents[2] / "collections"))

from ansible_collections.k3.deploy.plugins.action import record_block
from ansible_collections.k3.deploy.plugins.filter import health as filters
from ansible_collections.k3.deploy.plugins.module_utils import bounded, health
from ansible_collections.k3.deploy.plugins.plugin_utils import health_rules, kernel_rules

FIXTURES = Path(__file__).parents[1] / "fixtures" / "gb10"
BANDS = {"sm_clock_mhz": {"min": 1500}, "gemv_gb_s": {"min": 150}}


def fixture(name: str) -> str:
    """A fixture without the lines that say where it is from."""
    lines = (FIXTURES / name).read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if not line.startswith("#@"))


def kernel(name: str, scope: str) -> dict[str, str]:
    """{rule: severity} of a kernel log."""
    found = kernel_rules.kernel_findings(health.kernel_selection(fixture(f"kernel/{name}.log"), None), scope)
    return {item["rule"]: item["severity"] for item in found}


def reading(**changes: Any) -> dict[str, Any]:
    """A healthy rank without a GPU."""
    return {
        "boot_id": "a",
        "monotonic": 1000.0,
        "page_size": 4096,
        "kernel": {"error": None, "lines": [], "mark": 900.0},
        "gpu": {"installed": False, "error": None, "gpus": [], "counters_us": {}},
        "probe": {"kind": "cpu", "error": None, "copy_gb_s": 9.0, "hash_mb_s": 900.0},
        "buddyinfo": health.buddyinfo(fixture("host/buddyinfo-fresh.txt")),
        "pressure": {"memory": health.pressure(fixture("host/pressure-memory-idle.txt"))},
        "link": {"netdev": "eth0", "operstate": "up", "carrier_changes": 2, "counters": {}, "rdma": {}},
        **changes,
    }


def gpu_reading(row: dict[str, Any], **probe: Any) -> dict[str, Any]:
    """A GPU rank whose probe saw this row of nvidia-smi under load."""
    probe = {"kind": "gpu", "error": None, "under_load": row, "gemv_gb_s": {"median": 228.0}, "correct": True, **probe}
    return reading(gpu={"installed": True, "error": None, "gpus": [row], "counters_us": {}}, probe=probe)


def rules(findings: list[dict[str, str]], severity: str) -> list[str]:
    return [item["rule"] for item in findings if item["severity"] == severity]


# --- the kernel log --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log", "in_a_block", "since_the_boot"),
    [
        ("healthy-boot", {}, {}),
        ("nvrm-no-memory-healthy", {"nvrm_no_memory": "warning"}, {"nvrm_no_memory": "warning"}),
        ("nvrm-no-memory-wedge", {"nvrm_no_memory": "warning"}, {"nvrm_no_memory": "warning"}),
        ("aer-cx7-fatal", {"pcie_aer": "fault", "lockup": "fault"}, {"pcie_aer": "fault", "lockup": "fault"}),
        ("hung-task", {"hung_task": "fault"}, {"hung_task": "warning"}),
        (
            "oom-kill",
            {"oom": "fault", "nvrm_no_memory": "warning"},
            {"oom": "warning", "nvrm_no_memory": "warning"},
        ),
        (
            "xid",
            {"xid_program": "fault", "xid_device": "fault"},
            {"xid_program": "warning", "xid_device": "fault"},
        ),
        (
            "mlx5-link-flap-and-errors",
            {"optic": "fault", "link_flap": "fault", "nic_health": "fault"},
            {"optic": "warning", "link_flap": "warning", "nic_health": "fault"},
        ),
        (
            "cable-plug-hot",
            {"cable_hot_plug": "fault", "link_flap": "fault"},
            {"cable_hot_plug": "warning", "link_flap": "warning"},
        ),
    ],
)
def test_kernel_faults_are_told_apart_from_what_healthy_hosts_print(
    log: str, in_a_block: dict[str, str], since_the_boot: dict[str, str]
) -> None:
    assert kernel(log, "block") == in_a_block
    assert kernel(log, "boot") == since_the_boot


def test_lines_of_one_kind_are_one_finding_that_counts_them() -> None:
    text = fixture("kernel/nvrm-no-memory-wedge.log")
    (found,) = kernel_rules.kernel_findings(health.kernel_selection(text, None), "block")
    assert "24 times" in found["text"]
    (many,) = kernel_rules.kernel_findings(health.kernel_selection("\n".join([text] * 8), None), "block")
    assert "as often as on hosts that then wedged" in many["text"]


def test_every_finding_says_what_to_do() -> None:
    for name in sorted((FIXTURES / "kernel").glob("*.log")):
        for found in kernel_rules.kernel_findings(
            health.kernel_selection(fixture(f"kernel/{name.name}"), None), "boot"
        ):
            assert len(found["remedy"]) > 20, found
    aer = kernel_rules.kernel_findings(health.kernel_selection(fixture("kernel/aer-cx7-fatal.log"), None), "boot")
    assert "reboot both hosts" in aer[0]["remedy"]


def test_a_mark_divides_the_log_by_its_own_stamps() -> None:
    lines = ["[   10.5] pcieport 0: AER: device recovery failed", "[   20.5] pcieport 0: AER: device recovery failed"]
    before = health.kernel_selection("\n".join(lines[:1]), None)
    assert before["mark"] == 10.5
    after = health.kernel_selection("\n".join(lines), before["mark"])
    assert (after["mark"], after["read"], len(after["lines"])) == (20.5, 1, 1)
    assert health.kernel_selection("\n".join(lines), after["mark"])["lines"] == []


@pytest.mark.parametrize("prefix", ["[   12.345678] ", "[   12.345678] kernel: ", "[   12.345678] host1 kernel: "])
def test_the_journals_and_dmesgs_lines_read_the_same(prefix: str) -> None:
    message = "NVRM: Xid (PCI:000f:01:00): 79, pid=1, name=x, GPU has fallen off the bus."
    assert health.kernel_line(prefix + message) == (12.345678, message)


def test_a_kernel_log_that_cannot_be_read_is_said_and_stops_nobody() -> None:
    found = kernel_rules.kernel_findings({"error": "dmesg: Operation not permitted", "lines": []}, "block")
    assert rules(found, "warning") == ["kernel_log"]
    assert rules(found, "fault") == []


# --- the GPU ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["query-gpu-loaded-healthy.csv", "query-gpu-stuck-low-power.csv"])
def test_a_stuck_power_state_is_seen_by_the_clock_under_load_alone(name: str) -> None:
    fields = ("name", "driver_version", "pstate", "temperature.gpu", "power.draw", "power.limit", "utilization.gpu")
    fields += ("utilization.memory", "clocks.sm", "clocks.max.sm", "memory.used", "memory.total", "reasons")
    rows = health.gpu_rows(fixture(f"nvidia-smi/{name}"), fields)
    assert len(rows) == 3
    for row in rows:
        # Healthy decode draws as few watts as the stuck state: only the clock tells them apart.
        faults = rules(health_rules.band_findings(gpu_reading(row), BANDS), "fault")
        assert faults == (["band_sm_clock_mhz"] if "stuck" in name else [])


def test_what_nvidia_smi_does_not_know_is_never_zero() -> None:
    line = "NVIDIA GB10, 580.173.02, P0, [N/A], 15.90, [N/A], [Not Supported], 3003, [N/A]"
    (row,) = health.gpu_rows(line)
    assert row["temperature.gpu"] is None and row["utilization.gpu"] is None and row["clocks.sm"] is None
    assert row["power.draw"] == 15.9
    assert health_rules.band_findings(gpu_reading(row), {"sm_clock_mhz": {"min": 1500}}) == []


def test_the_cumulative_throttle_counters_are_read_by_name() -> None:
    counters = health.throttle_counters(fixture("nvidia-smi/q-extract-loaded.txt"))
    assert counters["SW Power Capping"] == 10800240649
    assert counters["HW Thermal Slowdown"] == 1195386
    assert set(counters) == {
        *("SW Power Capping", "Sync Boost", "SW Thermal Slowdown", "HW Thermal Slowdown", "HW Power Braking"),
    }


def test_a_gpu_held_back_by_heat_during_the_block_voids_it_and_a_power_cap_is_told() -> None:
    before, after = reading(), reading(monotonic=1100.0)
    before["gpu"]["counters_us"] = {"HW Thermal Slowdown": 0.0, "SW Power Capping": 5e9, "Sync Boost": None}
    after["gpu"] = {**after["gpu"], "counters_us": {"HW Thermal Slowdown": 1e7, "SW Power Capping": 5.06e9}}
    found = health_rules.block_findings(before, after, BANDS)
    assert [(item["severity"], "10 %" in item["text"]) for item in found] == [("fault", True), ("warning", False)]


def test_the_slow_state_that_clocks_do_not_show_is_seen_by_the_product() -> None:
    row = {"clocks.sm": 2411.0, "power.draw": 17.6}
    slow = gpu_reading(row, gemv_gb_s={"median": 69.0}, copy_gb_s={"median": 221.0})
    assert rules(health_rules.band_findings(slow, BANDS), "fault") == ["band_gemv_gb_s"]
    assert health_rules.band_findings(gpu_reading(row), BANDS) == []


def test_a_band_that_cannot_be_checked_is_said() -> None:
    skipped = gpu_reading({"clocks.sm": 2400.0}, kind=None, under_load=None, skipped="300 MiB of memory are free")
    assert rules(health_rules.probe_findings(skipped, BANDS), "warning") == ["probe"]


def test_a_band_that_no_reading_around_a_block_could_check_voids_it() -> None:
    seen = gpu_reading({"clocks.sm": 2400.0})
    blind = gpu_reading({"clocks.sm": 2400.0}, kind=None, under_load=None, skipped="300 MiB of memory are free")
    unasked = gpu_reading({"clocks.sm": 2400.0}, kind=None, under_load=None, skipped="not asked for")
    (found,) = [item for item in health_rules.block_findings(blind, blind, BANDS) if item["severity"] == "fault"]
    assert "gemv_gb_s" in found["text"] and "300 MiB" in found["text"]
    for before, after in ((seen, blind), (blind, seen), (seen, seen), (unasked, unasked)):
        assert rules(health_rules.block_findings(before, after, BANDS), "fault") == []
    assert health_rules.block_findings(reading(), reading(), BANDS) == []  # no GPU, no numbers of one


def test_a_probe_beside_a_working_service_does_not_judge_the_bandwidth_but_the_clock() -> None:
    serving = gpu_reading({"clocks.sm": 695.0, "utilization.gpu": 96.0}, gemv_gb_s={"median": 100.0})
    assert rules(health_rules.preflight_findings(serving, BANDS), "fault") == ["band_sm_clock_mhz"]
    assert rules(health_rules.preflight_findings(serving, BANDS), "warning") == ["probe"]


def test_a_gpu_that_answers_nothing_or_computes_wrongly_is_a_fault() -> None:
    hung = reading(gpu={"installed": True, "error": "nvidia-smi: no answer in 10 s", "gpus": [], "counters_us": {}})
    assert rules(health_rules.preflight_findings(hung, BANDS), "fault") == ["nvidia_smi"]
    wrong = gpu_reading({"clocks.sm": 2400.0}, correct=False)
    assert rules(health_rules.preflight_findings(wrong, BANDS), "fault") == ["probe_wrong"]


# --- memory, link ----------------------------------------------------------------------------------------


def test_fragmentation_is_told_where_a_gpu_needs_large_blocks() -> None:
    fragmented = health.buddyinfo(fixture("host/buddyinfo-fragmented.txt"))
    rank = {**gpu_reading({"clocks.sm": 2400.0}), "buddyinfo": fragmented}
    assert rules(health_rules.preflight_findings(rank, {}), "warning") == ["fragmentation"]
    assert health_rules.preflight_findings(gpu_reading({"clocks.sm": 2400.0}), {}) == []
    assert health_rules.preflight_findings(reading(buddyinfo=fragmented), {}) == []


def test_a_block_that_stood_still_for_want_of_memory_is_told() -> None:
    thrash = {"memory": health.pressure(fixture("host/pressure-memory-thrash.txt"))}
    assert rules(health_rules.preflight_findings(reading(pressure=thrash), {}), "warning") == ["memory_stall"]
    (found,) = health_rules.block_findings(reading(), reading(monotonic=1900.0, pressure=thrash), {})
    assert "10.0 % of the block" in found["text"]


@pytest.mark.parametrize(
    ("change", "faults", "warnings"),
    [
        ({}, [], []),
        ({"operstate": "down"}, ["link_down"], []),
        ({"carrier_changes": 4}, ["link_flap"], []),
        ({"counters": {"rx_errors": 7}}, [], ["link_errors"]),
        ({"rdma": {"roce0": {"counters": {"link_downed": 3}, "hw_counters": {}}}}, ["link_flap"], []),
        ({"rdma": {"roce0": {"counters": {}, "hw_counters": {"local_ack_timeout_err": 9}}}}, [], ["link_errors"]),
    ],
)
def test_what_the_fabric_link_did_during_a_block(
    change: dict[str, Any], faults: list[str], warnings: list[str]
) -> None:
    before = reading()
    before["link"] = {
        **before["link"],
        "counters": {"rx_errors": 2},
        "rdma": {"roce0": {"counters": {"link_downed": 2}, "hw_counters": {"local_ack_timeout_err": 5}}},
    }
    after = copy.deepcopy(before)
    after["link"].update(change)
    found = health_rules.block_findings(before, {**after, "monotonic": 1100.0}, {})
    assert (rules(found, "fault"), rules(found, "warning")) == (faults, warnings)


def test_a_rank_that_restarted_in_the_block_is_said_once() -> None:
    found = health_rules.block_findings(reading(), reading(boot_id="b", monotonic=3.0), BANDS)
    assert rules(found, "fault") == ["rebooted"]


def test_preflight_gets_sentences_with_remedies_and_warnings_apart() -> None:
    hot = reading(kernel=health.kernel_selection(fixture("kernel/cable-plug-hot.log"), None))
    assert filters.health_problems(hot) == []
    assert "reboot both hosts" in " ".join(filters.health_warnings(hot))
    broken = reading(kernel=health.kernel_selection(fixture("kernel/aer-cx7-fatal.log"), None))
    assert all(": " in sentence for sentence in filters.health_problems(broken))
    assert len(filters.health_problems(broken)) == 2


def test_a_link_is_read_with_the_devices_on_it(tmp_path: Path) -> None:
    net = tmp_path / "sys/class/net/eth0"
    port = tmp_path / "sys/class/infiniband/roce0/ports/1"
    other = tmp_path / "sys/class/infiniband/roce1/ports/1"
    for path, text in {
        net / "operstate": "up\n",
        net / "speed": "200000",
        net / "carrier_changes": "3",
        net / "statistics/rx_errors": "1",
        net / "statistics/rx_bytes": "99",
        port / "gid_attrs/ndevs/0": "eth0",
        port / "state": "4: ACTIVE",
        port / "counters/link_downed": "0",
        port / "hw_counters/lifespan": "10",
        other / "gid_attrs/ndevs/0": "eth1",
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    state = health.link_state("eth0", str(tmp_path))
    assert (state["operstate"], state["speed"], state["carrier_changes"], state["mtu"]) == ("up", 200000, 3, None)
    assert state["counters"] == {"rx_errors": 1}
    assert state["rdma"]["roce0"]["counters"] == {"link_downed": 0}
    assert set(state["rdma"]) == {"roce0"} and state["rdma"]["roce0"]["hw_counters"] == {}


# --- nothing hangs, nothing fails ------------------------------------------------------------------------


def test_a_tool_that_hangs_is_left_after_its_time() -> None:
    start = time.monotonic()
    rc, out, err = bounded.run([sys.executable, "-c", "import time; print('x', flush=True); time.sleep(60)"], 0.5)
    assert (rc, out.strip()) == (124, "x") and "no answer in 0.5 s" in err
    assert time.monotonic() - start < 5


def test_a_tool_that_is_not_there_is_127() -> None:
    assert bounded.run(["k3-no-such-tool"], 1)[0] == 127


def test_a_probe_hangs_or_dies_alone() -> None:
    began: list[int] = []
    assert bounded.forked(lambda begun: begun() and {"n": 1}, 5, lambda: began.append(1)) == ({"n": 1}, None)
    assert began == [1]
    assert bounded.forked(lambda _: time.sleep(60), 0.3, lambda: None) == (None, "no answer in 0.3 s")
    assert bounded.forked(lambda _: os._exit(1), 5, lambda: None) == (None, "the probe died")
    assert bounded.forked(lambda _: 1 / 0, 5, lambda: None) == (None, "ZeroDivisionError: division by zero")


LINES = st.lists(
    st.one_of(
        st.text(max_size=80),
        st.sampled_from(
            [
                "[  1.5] NVRM: Xid (PCI:000f:01:00): 99999, x",
                "[ 2.5] mlx5_core 0000: Link down",
                "[Fri Aug  7 03:13:00 2026] cx7-pcie-hotplug MTKP0001:00: Cable plugin",
                "Node 0, zone   Normal  1 2 x",
                "Node 0, zone   Normal  1 2 3",
                "some avg10=x avg60= total",
                "full avg10=0.00 avg60=99 total=184220",
                "    Clocks Event Reasons Counters",
                "        SW Power Capping : [N/A]",
                "NVIDIA GB10, 580, P0, [N/A], x, , 1, 2, 0x0",
            ]
        ),
    ),
    max_size=12,
)


@given(LINES, st.one_of(st.none(), st.floats(allow_nan=False)))
def test_any_output_of_any_tool_is_read_and_judged_without_a_failure(lines: list[str], since: float | None) -> None:
    text = "\n".join(lines)
    rank = reading(
        kernel={"error": None, **health.kernel_selection(text, since)},
        gpu={
            "installed": True,
            "error": None,
            "gpus": health.gpu_rows(text),
            "counters_us": health.throttle_counters(text),
        },
        buddyinfo=health.buddyinfo(text),
        pressure={"memory": health.pressure(text)},
    )
    health.netdev_of("10.0.0.1", text)
    later = {**rank, "monotonic": rank["monotonic"] + 1}
    for found in (*health_rules.preflight_findings(rank, BANDS), *health_rules.block_findings(rank, later, BANDS)):
        assert found["severity"] in ("fault", "warning") and found["text"] and found["remedy"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["addr_info", "local", "ifname"]), inner)
    ),
    max_leaves=8,
)


@given(JSON)
def test_any_json_of_ip_is_read_without_a_failure(value: Any) -> None:
    assert health.netdev_of("10.0.0.1", json.dumps(value)) in (None, value if isinstance(value, str) else None)


# --- the verdict ------------------------------------------------------------------------------------------------------


def judged_block(index: int, *findings: tuple[str, str, str]) -> Block:
    ranks = {
        rank: {"health": {"before": {}, "after": {}, "findings": [finding(severity, text)]}}
        for rank, severity, text in findings
    }
    about = {"index": index, "pair": 0, "arm": "U2", "slug": "U2", "started": "2026-11-30T12:00:00+00:00"}
    return Block.model_validate({**about, "ranks": ranks})


def finding(severity: str, text: str) -> dict[str, str]:
    return {"rule": "r", "severity": severity, "text": text, "remedy": "do this"}


def test_a_fault_makes_its_block_void_with_rank_reason_and_remedy_and_a_warning_does_not() -> None:
    block = judged_block(3, ("rank1", "fault", "link went down"), ("rank2", "warning", "fragmented"))
    assert health_problems(block) == ["block 3 (U2), rank1: link went down: do this"]
    assert health_problems(judged_block(3)) == []


def test_one_warning_of_many_ranks_and_blocks_is_told_once() -> None:
    blocks = [judged_block(index, ("rank0", "warning", "x"), ("rank1", "warning", "x")) for index in (0, 1)]
    (seen,) = health_findings(blocks)
    assert seen.text == "rank0, rank1: x: do this (block 0, 1)"


def test_a_block_s_record_holds_both_readings_and_what_the_rules_find() -> None:
    seen = {"before": reading(), "after": reading(monotonic=1100.0, boot_id="b")}
    summary = record_block.health_summary(seen, {})
    assert summary is not None and rules(summary["findings"], "fault") == ["rebooted"]
    assert summary["before"] == seen["before"]
    assert record_block.health_summary({"before": reading(), "after": None}, {}) is None
