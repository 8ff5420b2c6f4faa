"""What is promised, refused or merely allowed before a run begins."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_plan import MATRIX, cluster, plan

from k3deploy.calibration import Calibration, Power
from k3deploy.commands import power
from k3deploy.commands.cost import Cost
from k3deploy.commands.planning import Planned
from k3deploy.errors import ExitCode, PreflightError
from k3deploy.plan import make_plan

COST = Cost(blocks=10, block_s=1200.0, load_s=600.0)
KNOWN = Calibration(cluster="c", model="m", build_key="b", run_id="RUN", measured="now", pairs=6, cells=[])


def planned(pairs: int, row: str = "U9") -> Planned:
    made = plan(row, pairs=pairs)
    return Planned(Path("inventory"), cluster(), made, made.model_dump(mode="json"))


def test_a_plan_is_promised_in_pairs_hours_and_gain() -> None:
    found = Power(8, KNOWN, spread=0.012, half_width=0.01, detects=0.034, needed=8)
    assert power.words(planned(8), found, COST) == (
        "8 pairs, about 5 h 20 min (a load takes 10 min 00 s), detects +3.4 % (spread 1.2 % by RUN)"
    )


def test_a_cell_that_needs_more_pairs_to_be_shown_not_slower_is_part_of_the_promise() -> None:
    found = Power(8, KNOWN, 0.01, 0.008, 0.03, 8, hardest=("tg100 cold", 13))
    assert power.words(planned(8), found, None).endswith("it takes 13 pairs to show that tg100 cold is not slower")


def test_what_is_not_known_is_not_promised() -> None:
    text = power.words(planned(1), Power(1, None, problem="nobody knows"), None)
    assert text == (
        "1 pair, for how long is not known yet, what gain that detects is not known. No ACCEPT: nobody knows"
    )


def test_pairs_that_are_known_to_be_too_few_are_refused_with_the_number_that_is_enough() -> None:
    found = Power(6, KNOWN, spread=0.02, half_width=0.02, detects=0.06, needed=20, problem="too wide")
    with pytest.raises(PreflightError, match="too wide; nothing was changed") as refused:
        power.weigh(planned(6), found, COST, anyway=False)
    assert refused.value.exit_code == ExitCode.PREFLIGHT
    assert "--pairs 20 (about 13 h 20 min)" in refused.value.remedy and "--anyway" in refused.value.remedy


@pytest.mark.parametrize(
    ("pairs", "known", "anyway"), [(6, KNOWN, True), (6, None, False), (1, KNOWN, False)], ids=["anyway", "new", "look"]
)
def test_what_is_not_refused_cannot_end_in_accept(pairs: int, known: Calibration | None, anyway: bool) -> None:
    found = Power(pairs, known, problem="the reason")
    weighed = power.weigh(planned(pairs), found, None, anyway=anyway)
    assert weighed.plan.rule.no_accept == "the reason"
    assert weighed.mapping["rule"]["no_accept"] == "the reason"


def test_a_plan_without_a_problem_stays_as_it_is() -> None:
    before = planned(8)
    assert power.weigh(before, Power(8, KNOWN), COST, anyway=False) is before


def test_hours_become_pairs_by_what_blocks_took() -> None:
    assert power.pairs_in(4, 2, COST) == 6
    assert power.pairs_in(0.1, 2, COST) == 1
    assert power.pairs_in(4, 2, None) == 1


def test_the_advisor_knows_when_to_stop() -> None:
    argv = power.advisor(1.0, COST)
    assert argv[1:3] == ["-m", "k3deploy.commands.advise"] and argv[-2:] == ["--block-s", "1200.0"]
    assert "--until" in argv and "--until" not in power.advisor(None, None)


def test_the_baseline_against_itself_is_planned_like_a_row() -> None:
    made = make_plan(MATRIX, cluster(), "calibrate", pairs=4)
    assert [arm.name for arm in made.arms] == ["baseline", "baseline-again"]
    assert made.rule.fixed and made.arms[1].differences == []
    assert made.arms[0].processes == made.arms[1].processes
    assert made.gates["cold_prefill"].cells == ["pp2048", "pp4096"]
