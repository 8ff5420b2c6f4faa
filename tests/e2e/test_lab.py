"""The lab as it really is: systemd in four containers, pinned host keys, names, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from k3deploy.lab.cluster import Lab
from k3deploy.lab.config import Rank

pytestmark = pytest.mark.lab

ROOT = Path(__file__).parents[2]
K3DEPLOY = (str(Path(sys.executable).with_name("k3deploy")),)
# A lab of its own for what must be killed: the other tests' ranks stay as they are.
DOOMED = {key: value for key, value in os.environ.items() if key != "K3DEPLOY_LAB_SUBNET"} | {
    "K3DEPLOY_LAB": "k3doomed"
}


def ssh(lab: Lab, rank: Rank, command: str) -> subprocess.CompletedProcess[str]:
    argv = ["ssh", "-F", str(lab.config.ssh_config), rank.name, command]
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)


def test_systemd_is_pid_1_of_every_rank_and_all_its_units_are_well(lab: Lab) -> None:
    for rank in lab.config.ranks:
        said = ssh(lab, rank, "cat /proc/1/comm; systemctl is-system-running; hostname")
        assert said.stdout.split() == ["systemd", "running", rank.name], said.stderr


def test_every_rank_finds_the_others_by_name_and_has_the_address_it_should(lab: Lab) -> None:
    names = {rank.name: rank.address for rank in lab.config.ranks}
    for rank in lab.config.ranks:
        said = ssh(lab, rank, f"getent -s files hosts {' '.join(names)}; ip -4 -o address show scope global")
        assert dict(reversed(line.split()[:2]) for line in said.stdout.splitlines()[:4]) == names
        assert f" {rank.address}/" in said.stdout


def test_a_rank_with_another_host_key_is_refused(lab: Lab, tmp_path: Path) -> None:
    pinned = lab.config.known_hosts.read_text().splitlines()
    swapped = tmp_path / "known_hosts"
    swapped.write_text(f"{pinned[0].split()[0]} {' '.join(pinned[1].split()[1:])}\n")
    rank = lab.config.ranks[0]
    argv = ["ssh", "-F", str(lab.config.ssh_config), "-o", f"UserKnownHostsFile={swapped}", rank.name, "true"]
    assert subprocess.run(argv, capture_output=True, timeout=30, check=False).returncode == 255
    assert ssh(lab, rank, "true").returncode == 0


def test_a_sandboxed_unit_is_really_sandboxed(lab: Lab) -> None:
    probe = "systemd-run --quiet --collect --wait --pipe -p ProtectSystem=strict -p DynamicUser=yes"
    said = ssh(lab, lab.config.ranks[1], f"{probe} touch /usr/x; {probe} id -un")
    assert "Read-only file system" in said.stderr
    assert said.stdout.strip() != "root"


def test_models_are_read_only_in_a_rank(lab: Lab) -> None:
    assert "Read-only file system" in ssh(lab, lab.config.ranks[2], "touch /srv/models/x").stderr


def test_the_builder_has_a_toolchain_and_a_compiler_cache_that_outlives_it(lab: Lab) -> None:
    name = f"probe-{os.getpid()}"
    said = ssh(
        lab, lab.config.ranks[0], f"g++ -dumpversion && cmake --version && touch /var/cache/k3deploy/ccache/{name}"
    )
    assert said.returncode == 0, said.stderr
    (lab.config.cache_dir / "ccache" / name).unlink()


@pytest.mark.parametrize("folder", [".", "playbooks"])
def test_ansible_reaches_all_ranks_from_the_root_and_from_playbooks(lab: Lab, folder: str) -> None:
    layers = [part for path in lab.inventories() for part in ("-i", str(ROOT / path))]
    ansible = Path(sys.executable).with_name("ansible")
    done = subprocess.run(
        [str(ansible), *layers, "all", "-m", "ansible.builtin.ping"],
        cwd=ROOT / folder,
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.count("SUCCESS") == len(lab.config.ranks), done.stdout + done.stderr


def test_a_second_up_changes_nothing_and_takes_seconds(lab: Lab) -> None:
    started = time.monotonic()
    assert lab.up() == []
    assert time.monotonic() - started < 15


@pytest.mark.usefixtures("lab")
def test_status_prints_json() -> None:
    done = subprocess.run([*K3DEPLOY, "lab", "status", "--json"], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["up"] is True
    assert {(rank["state"], rank["ssh"], rank["systemd"]) for rank in seen["ranks"]} == {("running", True, "running")}


def leftovers(lab: Lab) -> list[str]:
    """Whatever of a lab can still be seen on this host: processes, mounts, interfaces, addresses, directories."""
    marks = (f"{lab.config.name}-rank", str(lab.config.run_dir), f"building-{lab.config.name}")
    found = []
    for command in (
        ["ps", "-eo", "args"],
        ["cat", "/proc/self/mountinfo"],
        ["ip", "-o", "address"],
        ["ip", "-o", "link"],
    ):
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        prefix = str(lab.config.subnet).rsplit(".", 1)[0] + "."
        found += [line for line in lines if any(mark in line for mark in (*marks, lab.config.bridge, prefix))]
    found += [str(path) for path in (lab.config.state_dir, lab.config.run_dir) if path.exists()]
    if lab.engine.is_usable():
        found += [*lab.engine.containers(), *(["network"] if lab.engine.network_exists() else [])]
    return found


@pytest.fixture(scope="module")
def doomed() -> Iterator[Lab]:
    """A second lab, never up for long; its image goes too where labs keep their own (a shared one has other users)."""
    made = Lab.from_environment(DOOMED)
    yield made
    made.engine.remove_storage()


def test_a_service_that_failed_in_a_rank_does_not_make_the_lab_unusable(lab: Lab) -> None:
    rank = lab.config.ranks[3]
    ssh(lab, rank, "systemd-run --quiet --unit=probe-fails --wait false")
    try:
        assert ssh(lab, rank, "systemctl is-system-running").stdout.strip() == "degraded"
        assert lab.up() == []
        assert lab.status().up
    finally:
        ssh(lab, rank, "systemctl reset-failed probe-fails")


@pytest.mark.parametrize("line", ["creating the bridge", "created rank1", "waiting for systemd"])
def test_down_leaves_nothing_after_an_up_that_was_killed(doomed: Lab, line: str) -> None:
    try:
        argv = [*K3DEPLOY, "lab", "up", "--yes"]
        with subprocess.Popen(argv, env=DOOMED, cwd=ROOT, stdout=subprocess.PIPE, text=True) as up:
            assert up.stdout is not None
            assert any(said.startswith(line) for said in up.stdout), "the step was reached"
            up.send_signal(signal.SIGKILL)
    finally:
        doomed.down()
    assert leftovers(doomed) == []
