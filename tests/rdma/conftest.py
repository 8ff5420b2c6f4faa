"""The test machine for a session: made where it is not there yet, woken once, gone at the end."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "collections"))

from fabric import Fabric
from machine import Machine, scratch
from stand import Stand, install_tools, prepare

from k3deploy.errors import K3Error


@pytest.fixture(scope="session")
def stand() -> Stand:
    """What machines are woken from; skipped, with the reason, where none can run."""
    try:
        root = install_tools(print)
    except K3Error as why:
        pytest.skip(f"no test machine can run here: {why}")
    return prepare(root, print)


@pytest.fixture(scope="session")
def fabric(stand: Stand) -> Iterator[Fabric]:
    """A machine with RDMA devices and an installed arm for every case."""
    with stand.wake() as machine:
        yield Fabric(machine)


@pytest.fixture
def pair(stand: Stand) -> Iterator[tuple[Machine, Machine]]:
    """Two machines whose fabrics are joined by a cable."""
    wires = scratch()
    near, far = wires / "0", wires / "1"
    try:
        with stand.wake((near, far)) as first, stand.wake((far, near)) as second:
            second.sh("machine-network 1")
            yield first, second
    finally:
        shutil.rmtree(wires)
