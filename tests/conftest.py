"""One lab for all tests that need one, with production on it; taken down at the end, always.

``scripts/test.sh`` runs the tests in several processes: what shares a lab stays together, so that each lab is brought
up once, and what needs none runs beside it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
from controllerkit import Applied, Controller, one_inventory
from faultkit import Fault, Rig, fault_of
from faulttable import (  # noqa: F401 (pytest finds its hooks here)
    case,
    pytest_addoption,
    pytest_collection_finish,
    pytest_runtest_makereport,
    pytest_terminal_summary,
)
from labkit import lab_named, one_compiler
from xdist.scheduler import LoadScopeScheduling

from k3deploy.lab.cluster import Lab

ROOT = Path(__file__).parent
# Three test processes share two cores: how long an example takes says nothing.
hypothesis.settings.register_profile("crowded", deadline=None)
hypothesis.settings.load_profile("crowded")
# What fails in a second fails first. With several processes each takes the longest group that is left.
ORDER = ("lint", "unit", "molecule", "rdma", "e2e", "bench", "faults")
ORDER_OF_SEVERAL = ("e2e", "bench", "faults", "molecule", "rdma", "lint", "unit")
LONG = {"test_patches_upstream"}
# Tests of these folders share a lab, or a machine, and what was applied to it.
GROUPS = {"e2e": "e2e", "bench": "e2e", "faults": "faults", "molecule": "molecule", "rdma": "rdma"}


def folder_of(nodeid: str) -> str:
    parts = nodeid.split("::")[0].split("/")
    return parts[1] if parts[0] == ROOT.name and len(parts) > 2 else parts[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = ORDER_OF_SEVERAL if "PYTEST_XDIST_WORKER" in os.environ else ORDER

    def rank(item: pytest.Item) -> tuple[int, bool]:
        folder = folder_of(item.nodeid)
        # A long file that is begun last is waited for by processes that have nothing left.
        return order.index(folder) if folder in order else len(order), item.path.stem not in LONG

    items.sort(key=rank)


class ByGroup(LoadScopeScheduling):
    """Hands a whole group to one process, and files of other folders one by one."""

    def _split_scope(self, nodeid: str) -> str:
        return GROUPS.get(folder_of(nodeid)) or super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    config.option.loadscopereorder = False  # how many tests a group has says nothing of how long it takes
    return ByGroup(config, log)


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """The lab that K3DEPLOY_LAB names, k3test without it, and in the second of several processes k3test1.

    K3DEPLOY_TEST_KEEP leaves it up, for who works on tests.
    """
    number = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw").removeprefix("0")
    made = lab_named((os.environ.get("K3DEPLOY_LAB") or "k3test") + number)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("K3DEPLOY_LAB", made.config.name)
        environment.setenv("K3DEPLOY_LAB_SUBNET", str(made.config.subnet))
        try:
            made.up(progress=print)
            yield made
        finally:
            if not os.environ.get("K3DEPLOY_TEST_KEEP"):
                made.down()


@pytest.fixture(scope="session")
def controller(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Controller:
    """Somebody with the lab's inventory, a tiny model, and production that serves."""
    place = tmp_path_factory.mktemp("controller")
    made = Controller(lab, one_inventory(lab, place / "inventory"), place)
    with one_compiler(lab):
        for command in (["lab", "model", "--spec", "tiny"], ["lab", "production"]):
            done = made.k3deploy(*command, timeout_s=1800)  # compiles llama.cpp where no compiler cache is there
            assert done.returncode == 0, done.stdout + done.stderr
    return made


@pytest.fixture(scope="session")
def thrifty(controller: Controller) -> Controller:
    """The same lab, with an inventory in which a block costs half."""
    return controller.thrifty("thrifty")


@pytest.fixture(scope="session")
def applied(controller: Controller, thrifty: Controller) -> Callable[[str], Applied]:
    """``applied("U9")``: this candidate, applied to its end the first time that somebody asks.

    On all four ranks and with all parity questions: ``next``, which has most rows in it.
    """
    done: dict[str, Applied] = {}

    def apply(row: str) -> Applied:
        if row not in done:
            who = controller if row == "next" else thrifty
            before = controller.production()
            said = who.k3deploy("apply", f"candidate-{row}", "--repeats", "1", "--yes")
            done[row] = Applied(
                run=(who.runs / "latest").resolve(strict=True),
                exit_code=said.returncode,
                said=said.stdout + said.stderr,
                production_before=before,
                production_after=controller.production(),
            )
        return done[row]

    return apply


@pytest.fixture(scope="session")
def rig(controller: Controller) -> Rig:
    """Somebody with a cheap row and short limits, for faults."""
    return Rig.of(controller)


@pytest.fixture
def fault(request: pytest.FixtureRequest, rig: Rig) -> Iterator[Fault]:
    """The case that the test's mark names; production is brought back for the next one when it fails."""
    found = case(request.node)
    assert found is not None, "a test of a fault has the mark fault(name, where)"
    with fault_of(rig, *found, request.node.user_properties) as made:
        yield made


@pytest.fixture(scope="session")
def installed(rig: Rig) -> Rig:
    """The cheap row's arms on the ranks."""
    rig.install()
    return rig
