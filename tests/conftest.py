"""One lab for all tests that need one, with production on it; taken down at the end, always."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from controllerkit import Applied, Controller, one_inventory

from k3deploy.lab.cluster import Lab

ROOT = Path(__file__).parent
# What fails in a second fails first; what needs the lab comes together, so that the lab is up for as long as it takes.
ORDER = ("lint", "unit", "e2e", "bench")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        folder = item.path.relative_to(ROOT).parts[0] if item.path.is_relative_to(ROOT) else ""
        return ORDER.index(folder) if folder in ORDER else len(ORDER)

    items.sort(key=rank)


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """The lab that K3DEPLOY_LAB names, k3test without it. K3DEPLOY_TEST_KEEP leaves it up, for who works on tests."""
    made = Lab.from_environment({**os.environ, "K3DEPLOY_LAB": os.environ.get("K3DEPLOY_LAB") or "k3test"})
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
    for command in (["lab", "model", "--spec", "tiny"], ["lab", "production"]):
        done = made.k3deploy(*command, timeout_s=1800)  # compiles llama.cpp where no compiler cache is there
        assert done.returncode == 0, done.stdout + done.stderr
    return made


@pytest.fixture(scope="session")
def applied(controller: Controller) -> Callable[[str], Applied]:
    """``applied("U9")``: this candidate, applied to its end the first time that somebody asks."""
    done: dict[str, Applied] = {}

    def apply(row: str) -> Applied:
        if row not in done:
            before = controller.production()
            said = controller.k3deploy("apply", f"candidate-{row}", "--repeats", "1", "--yes")
            done[row] = Applied(
                run=(controller.runs / "latest").resolve(strict=True),
                exit_code=said.returncode,
                said=said.stdout + said.stderr,
                production_before=before,
                production_after=controller.production(),
            )
        return done[row]

    return apply
