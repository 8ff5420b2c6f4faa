"""The test machine for a session: made where it is not there yet, woken once, gone at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "collections"))

from fabric import Fabric
from machine import Machine
from stand import install_tools, prepare

from k3deploy.errors import K3Error


@pytest.fixture(scope="session")
def fabric() -> Iterator[Fabric]:
    """A machine with RDMA devices and an installed arm for every case; skipped, with the reason, where none can run."""
    try:
        root = install_tools(print)
    except K3Error as why:
        pytest.skip(f"no test machine can run here: {why}")
    disk, frozen = prepare(root, print)
    with Machine(disk, frozen.payload, wake=frozen) as machine:
        yield Fabric(machine)
