"""Who may be talked to, and what is told to whom: host keys, and what plain Ansible is told of a wrong variable."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from controllerkit import Controller

pytestmark = pytest.mark.lab
# No other list of keys, and no connection that is open already.
ALONE = "-o GlobalKnownHostsFile=/dev/null -o ControlPath=none"


@pytest.fixture
def mine(controller: Controller, tmp_path: Path) -> Controller:
    """The lab with an inventory that a test may spoil."""
    shutil.copytree(controller.inventory, tmp_path / "lab")
    shutil.copytree(controller.inventory.parent / "matrix", tmp_path / "matrix")
    return replace(controller, inventory=tmp_path / "lab", place=tmp_path)


def add(controller: Controller, **variables: str) -> None:
    """Variables that win over the inventory's own."""
    place = controller.inventory / "group_vars" / "all" / "zz-spoilt.yml"
    place.write_text(yaml.safe_dump(variables))


@pytest.mark.parametrize("change", ["another key", "no key"])
def test_a_host_whose_key_is_not_the_pinned_one_is_refused(mine: Controller, change: str) -> None:
    known = mine.lab.config.state_dir / "known_hosts"
    lines = known.read_text().splitlines()
    address = mine.lab.config.ranks[2].address
    pinned = next(line for line in lines if address in line)
    other = next(line.split(" ", 1)[1] for line in lines if line.split(" ", 1)[1] != pinned.split(" ", 1)[1])
    others = [line for line in lines if address not in line]
    doctored = mine.place / "known hosts"
    doctored.write_text("\n".join([*others, *([f"{address} {other}"] if change == "another key" else [])]) + "\n")
    add(mine, ansible_ssh_common_args=f"-o UserKnownHostsFile='\"{doctored}\"' {ALONE}")
    done = mine.k3deploy("status")
    said = done.stdout + done.stderr
    assert done.returncode == 1 and "rank1" in done.stdout, said
    if change == "another key":
        assert f"the host key of {address} is not the one that is pinned for it" in said
        assert f"ssh-keygen -R {address}" in said
    else:
        assert "no host key is pinned for" in said and ("rank2: " in said or address in said)


def test_host_keys_are_checked_although_the_environment_says_otherwise(
    mine: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANSIBLE_HOST_KEY_CHECKING", "False")
    empty = mine.place / "empty"
    empty.touch()
    add(
        mine,
        ansible_ssh_common_args=f"-o UserKnownHostsFile={empty} {ALONE}",
    )
    done = mine.k3deploy("status")
    assert done.returncode == 1 and "no host key is pinned" in done.stdout + done.stderr
    assert empty.read_text() == ""


def test_a_misspelt_variable_stops_plain_ansible_before_anything_is_done(mine: Controller) -> None:
    add(mine, k3_rooot="/opt/elsewhere", worker_start_timeuot_s="5")
    done = mine.ansible("ansible-playbook", "-i", str(mine.inventory), "playbooks/preflight.yml")
    assert done.returncode != 0
    assert "nothing reads the variable k3_rooot: did you mean k3_root?" in done.stdout
    assert "did you mean worker_start_timeout_s?" in done.stdout


def test_an_rpc_port_that_others_reach_is_a_warning(mine: Controller) -> None:
    done = mine.ansible("ansible-playbook", "-i", str(mine.inventory), "playbooks/preflight.yml")
    assert done.returncode == 0, done.stdout
    # The lab's only network is the one with the default route.
    assert "is on the interface of the default route" in done.stdout
