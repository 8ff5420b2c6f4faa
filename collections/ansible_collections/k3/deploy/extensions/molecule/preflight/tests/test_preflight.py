"""Preflight reads."""

from __future__ import annotations

from collections.abc import Callable

from testinfra.host import Host


def test_a_rank_is_left_as_it_was(rank0: Host, rank1: Host, written: Callable[[Host], set[str]]) -> None:
    # The hash of a large model is remembered, so that it is read once.
    assert written(rank0) <= {"/opt/k3deploy/state/hashes.json"}
    assert written(rank1) == set()
