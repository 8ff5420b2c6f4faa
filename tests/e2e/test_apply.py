"""`k3deploy apply` on the lab, row by row, to a verdict."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from controllerkit import Applied

pytestmark = pytest.mark.lab

Apply = Callable[[str], Applied]


# U2 and U6 come to their verdicts after an interruption: test_recovery.py.
@pytest.mark.parametrize("row", ["U3@16", "U7", "U9", "next"])
def test_a_row_comes_to_a_verdict_from_all_its_cells_and_leaves_production_alone(applied: Apply, row: str) -> None:
    applied(row).assert_complete()


def test_plan_and_verdict_say_that_this_build_refuses_k_and_v_of_different_types(applied: Apply) -> None:
    words = "K q8_0 with V f16 cannot start"
    run = applied("U9")
    plan = run.record("plan")
    assert any(words in note for note in plan["arms"][0]["notes"])
    assert any(words in finding["text"] for finding in run.record("verdict")["findings"])
    assert words in (run.run / "report.html").read_text()
    ran = {block["arm"]: block["observations"]["kv_types"] for block in run.blocks}
    assert ran == {"baseline": {"k": "q8_0", "v": "q8_0"}, "U9": {"k": "f16", "v": "f16"}}


def test_u7_is_rejected_because_cache_reuse_changes_the_text_of_a_recurrent_model(applied: Apply) -> None:
    run = applied("U7")
    assert run.record("verdict")["outcome"] == "REJECT"
    (arm,) = run.record("verdict")["arms"]
    probes = {block["arm"]: block["bench"]["probes"]["shifted_prefix"] for block in run.blocks}
    assert probes["baseline"]["cache_n"] == 0 and probes["baseline"]["identical"] is True
    assert probes["U7"]["cache_n"] > 0 and probes["U7"]["identical"] is False
    words = f"reused {probes['U7']['cache_n']} tokens with the state of what was dropped (the baseline: 0)"
    assert words in arm["reasons"][0] and words in " ".join(run.said.split())  # the terminal wraps lines
