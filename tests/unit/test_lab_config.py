"""Names, addresses and paths of a lab, and that inventory/lab says the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml

from k3deploy.errors import K3Error
from k3deploy.lab.cluster import Lab
from k3deploy.lab.config import lab_config
from k3deploy.lab.host import Decision

INVENTORY = Path(__file__).parents[2] / "inventory" / "lab"
DECISION = Decision("podman", "root", False, None, None, True, False, True, ())


def test_two_labs_with_different_names_share_nothing_but_the_cache() -> None:
    one = lab_config({"HOME": "/h"})
    two = lab_config({"HOME": "/h", "K3DEPLOY_LAB": "second"})
    assert not one.subnet.overlaps(two.subnet)
    assert not {rank.container for rank in one.ranks} & {rank.container for rank in two.ranks}
    for path in ("state_dir", "run_dir", "data_dir", "bridge"):
        assert getattr(one, path) != getattr(two, path)
    assert one.cache_dir == two.cache_dir


def test_the_builder_is_the_head_alone() -> None:
    assert [rank.name for rank in lab_config({"HOME": "/h"}).ranks if rank.is_builder] == ["rank0"]


@pytest.mark.parametrize(
    "environ",
    [
        {"K3DEPLOY_LAB": "My-Lab"},
        {"K3DEPLOY_LAB": "waytoolonganame"},
        {"K3DEPLOY_LAB_SUBNET": "10.0.0.1/24"},
        {"K3DEPLOY_LAB_SUBNET": "10.0.0.0/30"},
        {"K3DEPLOY_LAB_SUBNET": "fd00::/64"},
    ],
)
def test_a_name_or_subnet_that_cannot_work_is_refused_with_what_is_valid(environ: dict[str, str]) -> None:
    with pytest.raises(K3Error, match=r"valid|too small"):
        lab_config({"HOME": "/h", **environ})


def test_a_rank_can_be_named_by_its_number_and_an_unknown_one_is_answered_with_the_valid_names() -> None:
    config = lab_config({"HOME": "/h"})
    assert config.rank("2") == config.rank("rank2")
    with pytest.raises(K3Error, match="rank0, rank1, rank2, rank3"):
        config.rank("rank4")


def _hosts(node: Any) -> dict[str, dict[str, Any]]:
    """Every host below an inventory group, with its variables."""
    found: dict[str, dict[str, Any]] = {}
    for name, variables in (node.get("hosts") or {}).items():
        found.setdefault(name, {}).update(variables or {})
    for child in (node.get("children") or {}).values():
        for name, variables in _hosts(child).items():
            found.setdefault(name, {}).update(variables)
    return found


def test_inventory_lab_has_the_addresses_of_the_default_lab() -> None:
    hosts = _hosts(yaml.safe_load((INVENTORY / "hosts.yml").read_text())["all"])
    expected = {rank.name: rank.address for rank in lab_config({"HOME": "/h"}).ranks}
    assert {name: variables["ansible_host"] for name, variables in hosts.items()} == expected


@pytest.mark.parametrize(
    "environ",
    [{"HOME": "/home/u"}, {"HOME": "/home/u", "K3DEPLOY_LAB": "second"}, {"HOME": "/h", "XDG_STATE_HOME": "/state"}],
)
def test_inventory_lab_finds_keys_where_the_lab_writes_them(environ: dict[str, str]) -> None:
    connection = yaml.safe_load((INVENTORY / "group_vars" / "all" / "connection.yml").read_text())
    templates = jinja2.Environment()
    templates.globals["lookup"] = lambda _plugin, name: environ.get(name, "")

    def value(name: str) -> str:
        text = str(connection[name])
        while "{{" in text:
            text = templates.from_string(text).render({key: value(key) for key in re.findall(r"lab_\w+", text)})
        return text

    config = lab_config(environ)
    assert value("ansible_ssh_private_key_file") == str(config.private_key)
    assert value("ansible_control_path_dir") == str(config.control_dir)
    arguments = value("ansible_ssh_common_args")
    assert f'UserKnownHostsFile="{config.known_hosts}"' in arguments
    assert "StrictHostKeyChecking=yes" in arguments


def test_no_playbook_names_its_connections_longer_than_ansible_does() -> None:
    for playbook in (INVENTORY.parents[1] / "playbooks").rglob("*.yml"):
        for found in re.findall(r"ansible_control_path:.*", playbook.read_text()):
            assert "%C" not in found and "truncate(9, true, '')" in found, playbook


def test_only_a_lab_with_other_addresses_needs_a_second_inventory() -> None:
    assert Lab(lab_config({"HOME": "/h"}), DECISION).inventories() == ["inventory/lab"]
    for other in ({"K3DEPLOY_LAB": "second"}, {"K3DEPLOY_LAB_SUBNET": "10.1.2.0/24"}):
        config = lab_config({"HOME": "/h", **other})
        assert Lab(config, DECISION).inventories() == ["inventory/lab", str(config.inventory_dir)]
