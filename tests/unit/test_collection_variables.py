"""Names that nothing reads, and RPC ports that too many reach: what preflight says with Ansible alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from k3deploy import inventory
from k3deploy.inventory import reading

COLLECTION = Path(__file__).parents[2] / "collections/ansible_collections/k3/deploy"
sys.path.insert(0, str(COLLECTION.parents[2]))

from ansible_collections.k3.deploy.plugins.filter import exposure, variables  # noqa: E402


def test_preflight_knows_the_same_variables_as_the_command_line() -> None:
    cluster = {name for name in inventory.known_variables() if name.startswith("k3_")}
    assert cluster == set(variables.INVENTORY)
    assert reading.RUN_PREFIXES == variables.RUN


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("k3_rooot", "k3_root"),
        ("worker_start_timeout", "worker_start_timeout_s"),
        ("benchmark_tokn", "benchmark_token"),
    ],
)
def test_a_misspelt_variable_is_named_with_the_nearest_one(wrong: str, near: str) -> None:
    (sentence,) = variables.unknown_variables({wrong: 1, "k3_root": 1, "ansible_host": 1, "http_port": 1})
    assert wrong in sentence and f"did you mean {near}?" in sentence


def test_what_roles_register_and_a_run_adds_is_known() -> None:
    names = ("preflight_read", "worker_started", "build_manifests", "k3_run_processes")
    assert variables.unknown_variables(dict.fromkeys(names)) == []


def state(*listening: tuple[str, int], routed: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "listeners": [{"address": address, "port": port, "pid": 1} for address, port in listening],
        "addresses": ["127.0.0.1", "192.0.2.7", "10.0.0.2", "fe80::1"],
        "default_route_addresses": list(routed),
    }


@pytest.mark.parametrize("address", ["0.0.0.0", "*", "::"])
def test_a_worker_open_to_every_network_is_a_warning_with_the_addresses(address: str) -> None:
    (said,) = exposure.exposure_warnings(state((address, 50052)), "10.0.0.2", {"worker_port": 50052})
    assert f"{address}:50052" in said and "192.0.2.7" in said and "--host 10.0.0.2" in said and "127.0.0.1" not in said


def test_a_fabric_address_on_the_default_route_is_a_warning() -> None:
    (said,) = exposure.exposure_warnings(state(routed=("10.0.0.2",)), "10.0.0.2", {"worker_port": 50052})
    assert "10.0.0.2 is on the interface of the default route" in said


def test_a_worker_on_another_address_is_a_warning_and_one_on_the_fabric_is_none() -> None:
    production = {"worker_port": 50052}
    assert exposure.exposure_warnings(state(("10.0.0.2", 50052), ("0.0.0.0", 22)), "10.0.0.2", production) == []
    (said,) = exposure.exposure_warnings(state(("192.0.2.7", 50052)), "10.0.0.2", production)
    assert "192.0.2.7 port 50052" in said
