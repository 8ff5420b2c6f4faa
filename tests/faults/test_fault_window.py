"""Faults while a window is open: its end, ranks that reboot or cannot be reached, rivals, clocks."""

from __future__ import annotations

import json

import pytest
import yaml
from faultkit import RANKS, Fault

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("installed")]

RACERS = 20
RACE = """\
- hosts: racers
  gather_facts: false
  become: true
  any_errors_fatal: false
  tasks:
    - name: Take the window
      k3.deploy.window:
        state: held
        run_id: "{{ inventory_hostname }}"
        owner: "{{ inventory_hostname }}"
        ranks: {}
        head_unit: "{{ k3_production.head_unit }}"
        head_url: "{{ k3_production.head_url }}"
"""


@pytest.mark.fault("the window's end is reached with the controller dead", "prefill")
def test_deadline_with_nobody_there(fault: Fault) -> None:
    rig = fault.rig
    with rig.applying("measure", extra=rig.one_block("pp256", 900, 1, 500)) as going:
        going.until_measuring("pp256")
        owner = rig.state("window")["owner"]
        near = ["playbooks/window_extend.yml", "-e", f"k3_run_owner={owner} k3_run_deadline_s=3"]
        moved = rig.controller.ansible("ansible-playbook", "-i", str(rig.controller.inventory), *near)
        assert moved.returncode == 0, moved.stdout
        going.kill()
    for rank in RANKS:  # each by its own clock
        rig.until(rank, "[ -z \"$(systemctl list-units --plain --no-legend --state=active 'k3-candidate*')\" ]")
    ended, last = rig.state("guard-deadline"), rig.state("window-last")
    assert last["run_id"] == ended["run_id"] == going.run.name
    said = (
        f"rank0 stopped {', '.join(ended['stopped'])}; production's proof: as_recorded {last['proof']['as_recorded']}"
    )
    fault.holds("killed", said, "rank0 stopped k3-candidate", "as_recorded True")


@pytest.mark.fault("a rank reboots", "prefill")
def test_rank_reboots(fault: Fault) -> None:
    rig = fault.rig
    with rig.applying("measure", extra=rig.one_block("pp256", 900, 1, 500)) as going:
        going.until_measuring("pp256")
        rig.controller.reboot("rank1")
        going.wait()
    assert going.code in (1, 21), going.said
    code, words = rig.rollback()
    assert code == 0, words
    fault.holds(going.code, going.said, "k3-candidate-bench: pp256 cold: ", rebooted="rank1")


def lost(where: str, playbook: str, rank: str, task: str, code: int) -> object:
    mark = pytest.mark.fault("a rank cannot be reached", where)
    return pytest.param(playbook, rank, task, code, marks=mark, id=where)


@pytest.mark.parametrize(
    ("playbook", "rank", "task", "code"),
    [
        lost("preflight", "preflight", "rank1", "", 4),
        lost("build", "build", "rank0", "", 1),
        lost("install", "install", "rank1", "Make the candidate directories", 1),
        lost("window", "measure", "rank1", "arm each rank's guard", 1),
        lost("prefill", "measure", "rank1", "measuring", 1),
        lost("close", "measure", "rank1", "Close | stop the candidate", 21),
    ],
)
def test_unreachable_rank(fault: Fault, playbook: str, rank: str, task: str, code: int) -> None:
    """Production spans all ranks: it cannot be back before the network is."""
    rig = fault.rig
    measured = rig.one_block("pp256", 900, 1, 40 if task == "measuring" else 1)
    extra = {"install_manifests": rig.manifests()} if playbook == "install" else measured
    with rig.applying(playbook, extra=extra) as going:
        if task == "measuring":
            going.until_measuring("pp256")
        elif task:
            going.until_task(task)
        with rig.cut_off(rank):
            if playbook == "measure":
                going.until_task("Close | bring production back")
            else:
                going.wait()
        going.wait()
    assert going.code == code, going.said
    if code == 21:
        again, said = rig.rollback()
        assert again == 0, said
        fault.holds("21, then 0", going.said, f"{rank} was not reached")
    else:
        fault.holds(code, going.said, f"{rank}: ", "ssh: connect to host")


@pytest.mark.fault(f"{RACERS} operators at once", "window")
def test_many_operators_at_once(fault: Fault) -> None:
    rig = fault.rig
    head = rig.controller.lab.config.ranks[0].address
    # sshd takes no twenty at a time: who is turned away knocks again.
    racers = {f"racer{number:02d}": {"ansible_host": head, "ansible_ssh_retries": 30} for number in range(RACERS)}
    place = rig.controller.place / "race"
    place.mkdir()
    (place / "racers.yml").write_text(yaml.safe_dump({"all": {"children": {"racers": {"hosts": racers}}}}))
    (place / "race.yml").write_text(RACE)
    layers = ["-i", str(rig.controller.inventory), "-i", str(place / "racers.yml"), "--forks", str(RACERS)]
    done = rig.controller.ansible("ansible-playbook", *layers, str(place / "race.yml"))
    window = rig.state("window")
    won = done.stdout.count("changed: [racer")
    refused = " ".join(done.stdout.split()).count(f"msg: 'LOCKED: the maintenance window is held by {window['owner']}")
    code, words = rig.rollback()
    assert code == 0, words
    assert (won, refused) == (1, RACERS - 1), done.stdout
    said = f"{won} won, {refused} were told: the maintenance window is held by {window['owner']}"
    fault.holds("1 holds it", said, f"1 won, {RACERS - 1} were told")


# The ranks of the lab share one machine's clock: what a rank whose clock was set would have in its file is put there.
CLOCK = """\
python3 - <<'END'
import json, os
path = "/opt/k3deploy/state/guard.json"
armed = json.load(open(path))
armed["deadline"] -= {seconds}
with open(path + ".set", "w") as sink:
    json.dump(armed, sink)
os.replace(path + ".set", path)
END
sleep 3
journalctl -u k3-candidate-guard --output cat -n 1
systemctl is-active k3-candidate-guard
ls /opt/k3deploy/state/guard-deadline.json 2>/dev/null || true
"""


@pytest.mark.fault("the clock of one rank is set an hour ahead or back after its guard was armed", "window")
def test_clock_off_by_an_hour(fault: Fault) -> None:
    rig = fault.rig
    rig.controller.everywhere("rm -f /opt/k3deploy/state/guard-deadline.json")
    opened = rig.controller.k3deploy("window", "open", "--yes", "--deadline", "10m")
    assert opened.returncode == 0, opened.stderr
    clocks = {"rank0": -3600, "rank1": 3600}
    said = {rank: rig.controller.on(rank, CLOCK.format(seconds=seconds)) for rank, seconds in clocks.items()}
    code, words = rig.rollback()
    assert code == 0, words
    for text in said.values():
        left, active, *ended = text.splitlines()
        assert 400 < float(left.split(", ")[1].split(" s left")[0]) <= 600, text
        assert (active, ended) == ("active", [])
    fault.holds(0, json.dumps(said), "s left", "active")


@pytest.mark.fault("the inventory lost a rank after the apply", "rollback")
def test_inventory_that_lost_a_rank(fault: Fault) -> None:
    rig = fault.rig
    with rig.applying("measure", extra=rig.one_block("pp256", 900, 1, 500)) as going:
        going.until_measuring("pp256")
        going.kill()
    done = rig.controller.without("rank1").k3deploy("rollback")
    assert done.returncode == 21, done.stderr
    left = rig.controller.candidate()
    assert "k3-candidate-worker@F1.service" in left["rank1"] and not left["rank0"], left
    code, words = rig.rollback()
    assert code == 0, words
    fault.holds("21, then 0", done.stderr, "rank1 (", "took part in the window and is not in this inventory")


@pytest.mark.fault("a release is gone from a rank", "rollback")
def test_release_that_is_gone(fault: Fault) -> None:
    rig = fault.rig
    with rig.applying("measure", extra=rig.one_block("pp256", 900, 1, 500)) as going:
        going.until_measuring("pp256")
        going.kill()
    rig.controller.on("rank1", "rm -r $(readlink -f /opt/k3deploy/candidates/F1/release)")
    code, words = rig.rollback()
    assert code == 0, words
    fault.holds("killed; rollback 0", words, "production is back")
    rig.install()
