"""While the window is open: production's head is down, its workers are not, and the head's host says who has it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from testinfra.host import Host


def test_only_the_head_of_production_is_down(
    rank0: Host, rank1: Host, show: Callable[..., dict[str, str]], listens: Callable[..., list[str]]
) -> None:
    shown = show(rank0, "llama-production.service", "ActiveState", "Result")
    assert shown == {"ActiveState": "inactive", "Result": "success"}
    assert listens(rank0, 8080) == []
    for rank in (rank0, rank1):
        assert show(rank, "llama-production-worker.service", "ActiveState") == {"ActiveState": "active"}


def test_the_window_says_who_took_it_when_and_how_production_was(rank0: Host) -> None:
    file = rank0.file("/opt/k3deploy/state/window.json")
    assert file.user == "root"
    window = json.loads(file.content_string)
    said = {key: window[key] for key in ("run_id", "owner", "reason", "kind", "head_unit", "was_active", "probe_prompt", "probe_tokens")}
    assert said == {
        "run_id": "molecule",
        "owner": "molecule",
        "reason": "the collection's own tests",
        "kind": "run",
        "head_unit": "llama-production.service",
        "was_active": True,
        "probe_prompt": "The quick brown fox",
        "probe_tokens": 16,
    }
    assert len(window["tokens"]) == 16 and all(isinstance(token, int) for token in window["tokens"])
    assert 0 < time.time() - window["opened"] < 600
    memory = window["memory"]
    assert memory["gpu_mib"] == 0 and memory["expected_mib"] == memory["anon_mib"] > 50
    assert memory["back_mib"] >= memory["level_mib"] > 0
    assert abs(window["deadline"] - window["opened"] - 14400) < 5
    assert window["head_url"] == "http://rank0:8080" and window["start_timeout"] == 180


def test_it_names_the_ranks_that_take_part_and_where_they_are(rank0: Host, addresses: dict[str, str]) -> None:
    assert json.loads(rank0.file("/opt/k3deploy/state/window.json").content_string)["ranks"] == addresses


def test_every_rank_guards_until_the_windows_end_and_after_a_reboot_too(rank0: Host, rank1: Host, show: Callable[..., dict[str, str]]) -> None:
    deadline = json.loads(rank0.file("/opt/k3deploy/state/window.json").content_string)["deadline"]
    for rank in (rank0, rank1):
        guard = json.loads(rank.file("/opt/k3deploy/state/guard.json").content_string)
        assert guard["run_id"] == "molecule" and abs(guard["deadline"] - deadline) < 60
        shown = show(rank, "k3-candidate-guard.service", "ActiveState", "UnitFileState")
        assert shown == {"ActiveState": "active", "UnitFileState": "enabled"}


def test_nothing_of_a_candidate_would_come_up_at_boot(rank0: Host, rank1: Host) -> None:
    for rank in (rank0, rank1):
        enabled = rank.check_output("find /etc/systemd/system -name 'k3-candidate*' -type l -printf '%f\\n'").split()
        assert enabled == ["k3-candidate-guard.service"]


def test_it_is_the_heads_alone(rank1: Host) -> None:
    assert not rank1.file("/opt/k3deploy/state/window.json").exists
