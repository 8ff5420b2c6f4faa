"""A run that is interrupted: by Ctrl-C, by kill -9, by another operator. Production comes back; the run goes on later.

U2 and U6 come to their verdicts here, with the blocks from before the interruption kept.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from controllerkit import ROOT, Applied, Controller, Ongoing, changes, roles_that_changed

pytestmark = pytest.mark.lab

NOTHING = {"rank0": "", "rank1": "", "rank2": "", "rank3": ""}
WAIT_FOR_THE_HARNESS = "timeout 120 bash -c 'until systemctl is-active --quiet k3-candidate-bench; do sleep 0.1; done'"


def state_of(controller: Controller, name: str) -> dict[str, Any]:
    """A file of the head's own record of windows."""
    found: dict[str, Any] = json.loads(controller.on("rank0", f"cat /opt/k3deploy/state/{name}.json"))
    return found


def rollback(controller: Controller, *, folder: Path = ROOT) -> str:
    """The playbook alone, as whoever has no k3deploy at hand would run it: what it printed."""
    playbook = "rollback.yml" if folder.name == "playbooks" else "playbooks/rollback.yml"
    done = controller.ansible("ansible-playbook", playbook, "-i", str(controller.inventory), cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def measured(run: Path) -> dict[str, float]:
    """The recorded blocks, with the time of each record."""
    return {path.name: path.stat().st_mtime for path in (run / "blocks").glob("*.json")}


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A run after its interruption in the second block, and what was seen on the ranks right before."""

    run: Path
    blocks: dict[str, float]
    exit_code: int
    said: str
    ran: dict[str, str]
    answer: list[int]
    production: dict[str, str]


def interrupt(
    controller: Controller, row: str, number: signal.Signals, meanwhile: Callable[[Ongoing], None]
) -> Interrupted:
    """Apply a row, do something ``meanwhile`` in its first block, and send a signal while its second is measured."""
    answer, production = controller.ask_production(), controller.production()
    with controller.ongoing("apply", f"candidate-{row}", "--repeats", "1", "--yes") as going:
        going.until("block 1/")
        meanwhile(going)
        going.until("block 2/")
        controller.on("rank0", WAIT_FOR_THE_HARNESS)
        ran = controller.candidate()
        going.process.send_signal(number)
        exit_code = going.process.wait(120)
    run = (controller.runs / "latest").resolve()
    return Interrupted(run, measured(run), exit_code, going.said, ran, answer, production)


def second_slug(interrupted: Interrupted) -> str:
    """The arm of the block that was interrupted, as the ranks name it."""
    slug: str = json.loads((interrupted.run / "plan.json").read_text())["blocks"][1]["slug"]
    return slug


def resume(controller: Controller, before: Interrupted) -> Applied:
    """Go on with an interrupted run, to its end."""
    done = controller.k3deploy("apply", "--resume", "latest", "--yes")
    assert (controller.runs / "latest").resolve() == before.run
    return Applied(before.run, done.returncode, done.stdout + done.stderr, before.production, controller.production())


# --- Ctrl-C, while another operator tries ---------------------------------------------------------------------------


@dataclass(slots=True)
class Rivals:
    """What the second operator's attempts gave: at the same controller, and from another one."""

    here: tuple[int, str] = (0, "")
    elsewhere: tuple[int, str] = (0, "")


@pytest.fixture(scope="module")
def stopped(controller: Controller) -> tuple[Interrupted, Rivals]:
    """U2, stopped by Ctrl-C in its second block; two others wanted the cluster during the first."""
    rivals = Rivals()

    def try_too(_: Ongoing) -> None:
        here = controller.k3deploy("apply", "candidate-U9", "--yes")
        rivals.here = (here.returncode, here.stderr)
        elsewhere = controller.elsewhere("elsewhere").k3deploy("apply", "candidate-U9", "--yes")
        rivals.elsewhere = (elsewhere.returncode, elsewhere.stderr)

    return interrupt(controller, "U2", signal.SIGINT, try_too), rivals


def test_a_second_operator_is_told_who_holds_the_cluster_and_disturbs_nobody(
    stopped: tuple[Interrupted, Rivals],
) -> None:
    first, rivals = stopped
    code, said = rivals.here
    assert code == 5 and "apply candidate-U2" in said and "since" in said and "its window ends at" in said, said
    code, said = rivals.elsewhere
    assert code == 5 and first.run.name in said, said
    assert (first.run / "blocks" / "000.json").exists()


def test_ctrl_c_ends_with_130_and_production_serves_as_before(
    controller: Controller, stopped: tuple[Interrupted, Rivals]
) -> None:
    first, _ = stopped
    assert first.exit_code == 130, first.said
    assert all(f"k3-candidate-worker@{second_slug(first)}.service" in text for text in first.ran.values())
    assert controller.candidate() == NOTHING
    assert controller.ask_production() == first.answer
    assert controller.production() == first.production
    assert state_of(controller, "window-last")["proof"]["as_recorded"] is True


@pytest.fixture(scope="module")
def resumed(controller: Controller, stopped: tuple[Interrupted, Rivals]) -> Applied:
    return resume(controller, stopped[0])


def test_a_resumed_run_keeps_its_blocks_and_comes_to_a_verdict(
    stopped: tuple[Interrupted, Rivals], resumed: Applied
) -> None:
    before, after = stopped[0].blocks, measured(resumed.run)
    assert before.keys() == {"000.json"} and after.keys() == {"000.json", "001.json", "002.json"}
    assert after["000.json"] == before["000.json"]
    resumed.assert_complete()


# --- kill -9, then rollback.yml ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def doomed(controller: Controller) -> Controller:
    """Somebody whose blocks are short; what is killed in them is the same."""
    return controller.thrifty("doomed", halved=False)


@pytest.fixture(scope="module")
def killed(controller: Controller, doomed: Controller, resumed: Applied) -> Interrupted:
    """U6, whose command line was killed with SIGKILL in its second block, and its connections with it."""
    del resumed  # after U2, which it would disturb
    found = interrupt(doomed, "U6", signal.SIGKILL, lambda _: None)
    controller.on("rank0", "pkill --uid root --exact python3 || true")  # the module that waits for the harness
    return found


@pytest.fixture(scope="module")
def rolled_back(controller: Controller, killed: Interrupted) -> str:
    """What rollback.yml printed after the kill."""
    assert killed.exit_code == -signal.SIGKILL
    return rollback(controller)


def test_kill_9_leaves_the_candidate_running_and_the_window_open(killed: Interrupted) -> None:
    assert all(f"k3-candidate-worker@{second_slug(killed)}.service" in text for text in killed.ran.values())
    assert f"k3-candidate-head@{second_slug(killed)}.service" in killed.ran["rank0"]


def test_rollback_after_a_kill_9_stops_the_candidate_and_proves_production(
    controller: Controller, killed: Interrupted, rolled_back: str
) -> None:
    assert all(changes(rolled_back)), rolled_back
    assert controller.candidate() == NOTHING
    assert controller.ask_production() == killed.answer
    assert controller.production() == killed.production
    window = state_of(controller, "window-last")
    assert window["run_id"] == killed.run.name and window["proof"]["as_recorded"] is True


@pytest.mark.parametrize("folder", [ROOT, ROOT / "playbooks"], ids=["from the root", "from inside playbooks"])
@pytest.mark.usefixtures("rolled_back")
def test_rollback_again_changes_nothing(controller: Controller, folder: Path) -> None:
    assert changes(rollback(controller, folder=folder)) == [0, 0, 0, 0]


@pytest.fixture(scope="module")
def finished(doomed: Controller, killed: Interrupted, rolled_back: str) -> Applied:
    del rolled_back  # after it
    return resume(doomed, killed)


def test_a_killed_run_goes_on_later_and_comes_to_a_verdict(killed: Interrupted, finished: Applied) -> None:
    after = measured(finished.run)
    assert killed.blocks.keys() == {"000.json"} and after.keys() == {"000.json", "001.json"}
    assert after["000.json"] == killed.blocks["000.json"]
    finished.assert_complete()


def test_applying_again_with_ansible_alone_builds_installs_and_measures_nothing(
    doomed: Controller, finished: Applied
) -> None:
    before = measured(finished.run)
    layers = ["-i", str(doomed.inventory), "-i", str(finished.run / "inventory")]
    done = doomed.ansible("ansible-playbook", *layers, "playbooks/apply.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert roles_that_changed(done.stdout) == {"window", "guard"}, done.stdout
    assert "k3.deploy.install : Make the candidate directories and the common units" in done.stdout
    assert measured(finished.run) == before
    assert doomed.production() == finished.production_before
