"""The inventory: Ansible's precedence, every mistake at its line, nothing unsafe taken."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from k3deploy.errors import InputError
from k3deploy.inventory import Production, Source, load
from k3deploy.inventory.schema import RankVariables

ROOT = Path(__file__).parents[2]
CLUSTER: dict[str, Any] = {
    "k3_cluster": "test",
    "k3_model": {"name": "m", "path": "/srv/m.gguf", "arch": "kimi-k3"},
    "k3_builds": {
        "default": {
            "source": {"kind": "tree", "path": "/srv/src"},
            "backend": "cpu",
            "cmake": {"GGML_RPC": "ON"},
        }
    },
    "k3_candidate_head_port": 8081,
    "k3_production": {
        "head_unit": "llama.service",
        "worker_unit": "rpc.service",
        "head_url": "http://10.0.0.1:8080",
        "worker_port": 50052,
    },
}
HOSTS: dict[str, Any] = {
    "all": {
        "children": {
            "ranks": {
                "children": {
                    "workers": {
                        "hosts": {
                            "w1": {"k3_fabric_address": "10.0.0.2"},
                            "w2": {"k3_fabric_address": "10.0.0.3"},
                        }
                    },
                    "head": {"hosts": {"h": {"k3_fabric_address": "10.0.0.1", "k3_local_worker": True}}},
                }
            },
            "builder": {"hosts": {"h": None}},
        }
    }
}


def make(folder: Path, cluster: dict[str, Any] | None = None, hosts: dict[str, Any] | None = None) -> Path:
    (folder / "group_vars" / "all").mkdir(parents=True)
    (folder / "hosts.yml").write_text(yaml.safe_dump(hosts or HOSTS, sort_keys=False))
    (folder / "group_vars" / "all" / "k3.yml").write_text(
        yaml.safe_dump({**CLUSTER, **(cluster or {})}, sort_keys=False)
    )
    return folder


def told(inventory: Path, *more: Path) -> str:
    with pytest.raises(InputError) as caught:
        load(inventory, *more)
    return "\n".join(str(problem).replace(f"{inventory}/", "") for problem in caught.value.problems)


def test_the_head_is_rank_zero_and_workers_follow_in_order(tmp_path: Path) -> None:
    cluster = load(make(tmp_path))
    assert [(rank.index, rank.name) for rank in cluster.ranks] == [(0, "h"), (1, "w1"), (2, "w2")]
    assert cluster.head.is_head
    assert [rank.name for rank in cluster.workers] == ["h", "w1", "w2"]
    assert cluster.builder == "h"
    assert Path(cluster.matrix) == tmp_path.parent / "matrix"


def test_the_precedence_is_ansibles(tmp_path: Path) -> None:
    inventory = make(tmp_path, {"k3_load_timeout_s": 1, "k3_cpus": 4})
    (tmp_path / "group_vars" / "ranks.yml").write_text("k3_load_timeout_s: 2\n")
    (tmp_path / "host_vars").mkdir()
    (tmp_path / "host_vars" / "w1.yml").write_text("k3_cpus: 8\n")
    cluster = load(inventory)
    assert cluster.load_timeout_s == 2
    assert [rank.cpus for rank in cluster.ranks] == [4, 8, 4]


def test_a_second_inventory_lies_over_the_first(tmp_path: Path) -> None:
    first = make(tmp_path / "first")
    second = tmp_path / "second"
    second.mkdir()
    (second / "hosts.yml").write_text("ranks: {hosts: {w1: {k3_fabric_address: 10.9.9.9}}}\n")
    assert load(first, second).ranks[1].fabric_address == "10.9.9.9"


def test_misspelt_variables_are_found_in_every_file(tmp_path: Path) -> None:
    hosts = copy.deepcopy(HOSTS)
    hosts["all"]["children"]["ranks"]["children"]["workers"]["hosts"]["w1"]["k3_rdma_divice"] = "mlx5_0"
    inventory = make(tmp_path, {"k3_setings": {}, "worker_devicse": [], "unrelated_variable": 1}, hosts)
    text = told(inventory)
    assert "hosts.yml:9: unknown variable 'k3_rdma_divice'; did you mean 'k3_rdma_device'?" in text
    assert "unknown variable 'k3_setings'; did you mean 'k3_settings'?" in text
    assert "unknown variable 'worker_devicse'; did you mean 'worker_devices'?" in text
    assert "unrelated" not in text


def test_all_mistakes_are_told_at_once_with_their_lines(tmp_path: Path) -> None:
    hosts = copy.deepcopy(HOSTS)
    hosts["all"]["children"]["ranks"]["children"]["workers"]["hosts"]["w2"]["k3_fabric_address"] = "0.0.0.0"
    changes = {
        "k3_model": {"name": "m\nx", "path": "srv/m.gguf", "arch": "kimi-k3"},
        "k3_scale": {"ctx_sise": 1},
        "k3_settings": {"environment": {"A": "1\n2"}},
        "k3_candidate_head_port": "8081",
    }
    lines = told(make(tmp_path, changes, hosts)).splitlines()
    assert len(lines) == 6
    text = "\n".join(lines)
    assert "k3.yml:3: k3_model.name: must not contain newlines or other control characters" in text
    assert "k3.yml:6: k3_model.path: must be an absolute path" in text
    assert "unknown key 'k3_scale.ctx_sise'; did you mean 'ctx_size'?" in text
    assert "k3_settings.environment.A: must not contain newlines" in text
    assert "k3_candidate_head_port: input should be a valid integer, got '8081'" in text
    assert "hosts.yml:10: k3_fabric_address: 0.0.0.0 is not one machine's address" in text
    assert "(rank w2)" in text


def test_values_that_only_ansible_could_resolve_are_refused(tmp_path: Path) -> None:
    text = told(make(tmp_path, {"k3_cluster": "{{ name }}", "k3_scale": {"environment": {"A": "{% if x %}"}}}))
    assert "k3_cluster: must be a plain value, not a template or a secret" in text
    assert "k3_scale.environment.A: must be a plain value" in text


def test_the_groups_must_be_as_the_plan_needs_them(tmp_path: Path) -> None:
    hosts = copy.deepcopy(HOSTS)
    children = hosts["all"]["children"]["ranks"]["children"]
    children["head"]["hosts"]["w1"] = None
    del hosts["all"]["children"]["builder"]
    text = told(make(tmp_path, hosts=hosts))
    assert "the group head must hold exactly one host, it holds 2" in text
    assert "the group builder must hold exactly one host, it holds 0" in text
    assert "w1 is in both head and workers" in text


def test_a_fabric_address_belongs_to_one_rank(tmp_path: Path) -> None:
    hosts = copy.deepcopy(HOSTS)
    hosts["all"]["children"]["ranks"]["children"]["workers"]["hosts"]["w2"]["k3_fabric_address"] = "10.0.0.2"
    assert "10.0.0.2 is w1's address too" in told(make(tmp_path, hosts=hosts))


def test_cluster_wide_variables_are_cluster_wide(tmp_path: Path) -> None:
    inventory = make(tmp_path, {"k3_build": "fast"})
    (tmp_path / "host_vars").mkdir()
    (tmp_path / "host_vars" / "w1.yml").write_text("k3_load_timeout_s: 1\n")
    (tmp_path / "host_vars" / "w2.yml").write_text("k3_load_timeout_s: 2\n")
    text = told(inventory)
    assert "host_vars/w2.yml:1: k3_load_timeout_s differs between ranks (w2)" in text
    assert "k3_build: no build 'fast' in k3_builds (there is: default)" in text


def test_files_that_cannot_be_read_are_problems(tmp_path: Path) -> None:
    assert "no such inventory" in told(tmp_path / "absent")
    inventory = make(tmp_path)
    (tmp_path / "group_vars" / "all" / "more.yml").write_text("a: 1\na: 2\n")
    assert "group_vars/all/more.yml:2: duplicate key 'a'" in told(inventory)


def test_an_inventory_that_ansible_refuses_is_a_problem(tmp_path: Path) -> None:
    inventory = tmp_path / "hosts.ini"
    inventory.write_text("[head\nx\n")
    assert "Ansible cannot read this inventory" in told(inventory)


@pytest.mark.parametrize("name", ["gb10", "lab"])
def test_the_shipped_inventories_are_valid(name: str) -> None:
    cluster = load(ROOT / "inventory" / name)
    assert len(cluster.ranks) == 4
    assert cluster.production.worker_port == 50052
    assert Path(cluster.matrix) == ROOT / "inventory" / "matrix"


def test_the_seed_cluster_builds_by_the_runbook() -> None:
    spec = load(ROOT / "inventory" / "gb10").builds["default"]
    assert spec.cuda is not None
    assert spec.cuda.nvcc == "/usr/local/cuda-13.0/bin/nvcc"
    assert spec.cuda.flashkda_dir == "/home/acer_gn100/flash-kda-source-20260801"
    assert spec.cuda.architectures == "121a-real"
    assert spec.cmake == {"GGML_CUDA": "ON", "GGML_RPC": "ON", "GGML_NATIVE": "ON", "GGML_CUDA_K3_FLASHKDA": "ON"}
    assert spec.jobs == 12


@pytest.mark.parametrize(
    "address", ["0.0.0.0", "224.0.0.1", "fd00::1", "::", "host", "10.0.0", "10.0.0.1 ", "10.0.0.1:50053"]
)
def test_an_address_that_rpc_cannot_or_must_not_use_is_refused(address: str) -> None:
    with pytest.raises(ValidationError):
        RankVariables.model_validate({"k3_fabric_address": address})


@given(st.ip_addresses(v=4).filter(lambda ip: not (ip.is_unspecified or ip.is_multicast)))
def test_every_other_ipv4_address_is_taken(address: object) -> None:
    assert RankVariables.model_validate({"k3_fabric_address": str(address)}).k3_fabric_address == str(address)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"kind": "archive", "path": "/a.tgz"}, "needs sha256"),
        ({"kind": "git", "url": "https://example.org/a"}, "needs ref"),
        ({"kind": "tree", "path": "/a", "sha256": "a" * 64}, "takes no sha256"),
        ({"kind": "tree", "path": "a"}, "absolute path"),
        ({"kind": "tree", "path": "/a/../b"}, "absolute path"),
        ({"kind": "archive", "path": "/a", "sha256": "A" * 64}, "pattern"),
    ],
)
def test_a_source_is_complete_or_refused(source: dict[str, str], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Source.model_validate(source)


@given(st.text(max_size=12))
def test_no_control_character_reaches_a_unit_or_a_path(text: str) -> None:
    base = CLUSTER["k3_production"]
    try:
        taken = Production.model_validate({**base, "binaries": [f"/{text}"], "head_unit": f"{text}.service"})
    except ValidationError:
        return
    for value in (taken.binaries[0], taken.head_unit):
        assert value.isprintable() or all(ord(character) >= 32 for character in value)
        assert not set(value) & {"\n", "\r", "\0", "\x1b", "\x7f", "\x85"}


def test_a_band_of_health_is_named_and_closed_rightly_or_refused(tmp_path: Path) -> None:
    bands = {"gemv_gbs": {"min": 1}, "power_w": {"min": 9, "max": 3}, "copy_gb_s": {}}
    with pytest.raises(InputError) as caught:
        load(make(tmp_path / "a", {**CLUSTER, "k3_health": {"bands": bands}}))
    said = str(caught.value)
    assert "gemv_gb_s" in said and "min 9 is above max 3" in said and "must give min, max or both" in said
    load(make(tmp_path / "b", {**CLUSTER, "k3_health": {"probe_s": 0.2, "bands": {"gemv_gb_s": {"min": 150}}}}))
