"""`apply --check` changes nothing, on bare ranks as on installed ones; nor does a rollback with nothing deployed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from controllerkit import ROOT, Applied, Controller, changes, roles_that_changed

pytestmark = pytest.mark.lab

# Every file, link and directory on a rank's own disk: the one that the roles' scenarios use.
SNAPSHOT = (ROOT / "collections/ansible_collections/k3/deploy/extensions/molecule/shared/snapshot.sh").read_text()
PUT_AWAY = """\
mkdir /srv/kept
mv /opt/k3deploy /etc/systemd/system/k3-candidate* /srv/kept/
cp -a /etc/passwd /etc/group /etc/shadow /etc/gshadow /srv/kept/
userdel k3deploy
systemctl daemon-reload
"""
PUT_BACK = """\
mv /srv/kept/k3deploy /opt/
mv /srv/kept/k3-candidate* /etc/systemd/system/
mv /srv/kept/* /etc/
rmdir /srv/kept
systemctl daemon-reload
"""


def disks(controller: Controller) -> dict[str, set[str]]:
    return {rank: set(listing.splitlines()) for rank, listing in controller.everywhere(SNAPSHOT).items()}


def changed(before: dict[str, set[str]], after: dict[str, set[str]]) -> dict[str, list[str]]:
    """What is otherwise on each rank's disk; empty where nothing is."""
    found = {rank: sorted(before[rank] ^ after[rank]) for rank in before}
    return {rank: lines for rank, lines in found.items() if lines}


def test_a_check_on_installed_ranks_foresees_a_window_alone(
    controller: Controller, applied: Callable[[str], Applied]
) -> None:
    applied("next")
    before, production = disks(controller), controller.production()
    done = controller.k3deploy("apply", "candidate-next", "--repeats", "1", "--check", "--yes")
    assert done.returncode == 0, done.stdout + done.stderr
    assert roles_that_changed(done.stdout) == {"window", "guard"}, done.stdout
    assert changed(before, disks(controller)) == {}
    assert controller.production() == production


# From here on the ranks are bare.


@pytest.fixture(scope="module")
def bare(controller: Controller) -> Iterator[Controller]:
    """Ranks that run production and have never seen k3deploy."""
    controller.everywhere(PUT_AWAY)
    try:
        yield controller
    finally:
        controller.everywhere("rm -rf /opt/k3deploy /etc/systemd/system/k3-candidate*\n" + PUT_BACK)


def test_a_check_on_bare_ranks_foresees_everything_and_changes_nothing(bare: Controller) -> None:
    before, production = disks(bare), bare.production()
    done = bare.k3deploy("apply", "candidate-U9", "--check", "--yes")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"base", "build", "install", "worker", "head", "benchmark"} <= roles_that_changed(done.stdout), done.stdout
    assert changed(before, disks(bare)) == {}
    assert bare.production() == production


def test_a_rollback_with_nothing_deployed_changes_nothing(bare: Controller) -> None:
    before, production = disks(bare), bare.production()
    done = bare.ansible("ansible-playbook", "-i", str(bare.inventory), "playbooks/rollback.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert changes(done.stdout) == [0, 0, 0, 0], done.stdout
    assert changed(before, disks(bare)) == {}
    assert bare.production() == production
