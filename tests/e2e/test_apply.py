"""`k3deploy apply` and `k3deploy campaign` on the lab, to a verdict for each row."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from controllerkit import Applied, Controller

pytestmark = pytest.mark.lab

Apply = Callable[[str], Applied]
ROWS = ("U3@16", "U7", "U9")


@pytest.fixture(scope="module")
def campaign(thrifty: Controller) -> Applied:
    """Three rows in one window, stopped by Ctrl-C in its second block, and resumed."""
    before = thrifty.production()
    with thrifty.ongoing("campaign", *ROWS, "--repeats", "1", "--yes") as going:
        going.until("block 2/")
        going.process.send_signal(signal.SIGINT)
        assert going.process.wait(120) == 130, going.said
    done = thrifty.k3deploy("apply", "--resume", "latest", "--yes")
    run = (thrifty.runs / "latest").resolve(strict=True)
    return Applied(run, done.returncode, done.stdout + done.stderr, before, thrifty.production())


def test_a_campaign_goes_on_after_an_interruption_and_judges_every_row_by_one_baseline(campaign: Applied) -> None:
    campaign.assert_complete()
    arms = [block["arm"] for block in campaign.blocks]
    assert sorted(arms) == sorted(["baseline", *ROWS])  # one round: four starts for three verdicts
    verdicts = {arm["arm"]: arm["outcome"] for arm in campaign.record("verdict")["arms"]}
    assert verdicts.keys() == set(ROWS) and "INVALID" not in verdicts.values()
    for row in ROWS:
        assert row in campaign.said  # the matrix at the end


def test_plan_and_verdict_say_that_this_build_refuses_k_and_v_of_different_types(campaign: Applied) -> None:
    words = "K q8_0 with V f16 cannot start"
    run = campaign
    plan = run.record("plan")
    assert any(words in note for note in plan["arms"][0]["notes"])
    assert any(words in finding["text"] for finding in run.record("verdict")["findings"])
    assert words in (run.run / "report.html").read_text()
    ran = {block["arm"]: block["observations"]["kv_types"] for block in run.blocks}
    assert ran["baseline"] == {"k": "q8_0", "v": "q8_0"} and ran["U9"] == {"k": "f16", "v": "f16"}


def test_u7_is_rejected_because_cache_reuse_changes_the_text_of_a_recurrent_model(campaign: Applied) -> None:
    run = campaign
    (arm,) = (arm for arm in run.record("verdict")["arms"] if arm["arm"] == "U7")
    assert arm["outcome"] == "REJECT"
    probes = {block["arm"]: block["bench"]["probes"]["shifted_prefix"] for block in run.blocks}
    assert probes["baseline"]["cache_n"] == 0 and probes["baseline"]["identical"] is True
    assert probes["U7"]["cache_n"] > 0 and probes["U7"]["identical"] is False
    words = f"reused {probes['U7']['cache_n']} tokens with the state of what was dropped (the baseline: 0)"
    assert words in arm["reasons"][0] and words in " ".join(run.said.split())  # the terminal wraps lines


# U2 and U6 come to their verdicts after an interruption: test_recovery.py.
# `next` comes last, because test_check.py looks at the ranks as it leaves them.
def test_a_row_comes_to_a_verdict_from_all_its_cells_and_leaves_production_alone(applied: Apply) -> None:
    applied("next").assert_complete()
