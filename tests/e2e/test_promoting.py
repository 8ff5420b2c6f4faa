"""Into production and back on the lab: in a held window, with proof, and never further than what was there before."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from controllerkit import Controller
from promotionkit import accepted_run

from k3deploy.commands import planning
from k3deploy.paths import write_json

pytestmark = pytest.mark.lab

HEAD, WORKER = "llama-production.service", "llama-production-worker.service"
FILES = "sha256sum /etc/systemd/system/llama-production*.service; readlink /opt/llama-production/{bin,lib}"
PROGRAMS = "for unit in {units}; do readlink /proc/$(systemctl show -P MainPID $unit)/exe; done"
DROPINS = "ls /etc/systemd/system/llama-production*.service.d/50-k3deploy.conf 2>/dev/null || true"


@dataclass(frozen=True, slots=True)
class Accepted:
    """An accepted run of U9 and what an operator does with it."""

    controller: Controller
    build_id: str

    def plan(self, *command: str) -> Path:
        """What k3deploy promote or demote wrote."""
        done = self.controller.k3deploy(*command, "--promotions", str(self.controller.place / "promotions"), "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        return Path(json.loads(done.stdout)["path"])

    def open_window(self) -> None:
        done = self.controller.k3deploy("window", "open", "--yes", "--reason", "a test of promotion")
        assert done.returncode == 0, done.stdout + done.stderr

    def apply(self, playbook: str, plan: Path) -> tuple[int, str]:
        """The operator's own call."""
        layers = ["-i", str(self.controller.inventory), "-i", str(plan / "inventory")]
        done = self.controller.ansible("ansible-playbook", *layers, f"playbooks/{playbook}.yml")
        return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def accepted(controller: Controller) -> Accepted:
    """Two starts on a small machine earn no ACCEPT: the run is made up; build, ranks and production are not."""
    plan = planning.make("candidate-U9", controller.inventory, None).plan
    key = plan.arms[1].build_key
    (build_id,) = controller.on("rank0", f"ls /opt/k3deploy/releases | grep ^{key}").split()
    sums = controller.on("rank0", f"cd /opt/k3deploy/releases/{build_id}/bin && sha256sum llama-server ggml-rpc-server")
    hashes = {name: digest for digest, name in (line.split() for line in sums.splitlines())}
    accepted_run(controller.runs, plan, controller.inventory, hashes, build_id.removeprefix(f"{key}-"))
    return Accepted(controller, build_id)


@pytest.fixture(scope="module")
def plan(accepted: Accepted) -> Path:
    return accepted.plan("promote", "candidate-U9")


def everything(controller: Controller) -> tuple[dict[str, str], dict[str, str], list[int]]:
    """Production's own files, the programs that run, and what it answers."""
    programs = controller.everywhere(PROGRAMS.format(units=WORKER))
    programs["head"] = controller.on("rank0", PROGRAMS.format(units=HEAD))
    return controller.everywhere(FILES), programs, controller.ask_production()


def test_nothing_is_promoted_without_a_window(accepted: Accepted, plan: Path) -> None:
    before = everything(accepted.controller)
    code, said = accepted.apply("promote", plan)
    assert code != 0 and "no maintenance window is open" in said
    assert everything(accepted.controller) == before
    assert set(accepted.controller.everywhere(DROPINS).values()) == {""}


def test_a_promotion_that_does_not_come_up_puts_back_what_was_there(
    accepted: Accepted, plan: Path, tmp_path: Path
) -> None:
    before = everything(accepted.controller)
    data = yaml.safe_load((plan / "inventory" / "promotion.yml").read_text().replace("!unsafe ", ""))
    data["all"]["hosts"]["rank0"]["k3_run_promotion_units"][HEAD] = "[Service]\nExecStart=\nExecStart=/bin/false\n"
    write_json(tmp_path / "inventory" / "promotion.yml", data)  # JSON is YAML
    accepted.open_window()
    code, said = accepted.apply("promote", tmp_path)
    assert code != 0 and "production is as it was before; the promotion failed" in said
    assert everything(accepted.controller) == before
    assert set(accepted.controller.everywhere(DROPINS).values()) == {""}


def test_an_accepted_candidate_is_promoted_and_demoted(accepted: Accepted, plan: Path) -> None:
    controller = accepted.controller
    before = everything(controller)

    assert "--cache-type-k f16" in (plan / "PLAN.md").read_text()
    accepted.open_window()
    code, said = accepted.apply("promote", plan)
    assert code == 0, said
    files, programs, answer = everything(controller)
    assert (files, answer) == (before[0], before[2])  # the units' own files and what production says
    place = f"/opt/llama-production/{accepted.build_id}/bin"
    assert {program.strip() for program in programs.values()} == {f"{place}/ggml-rpc-server", f"{place}/llama-server"}
    head = controller.on("rank0", f"tr '\\0' ' ' < /proc/$(systemctl show -P MainPID {HEAD})/cmdline")
    assert "--cache-type-k f16" in head and ":50052" in head and "--port 8080" in head
    record = json.loads(controller.on("rank0", "cat /opt/k3deploy/state/promotion.json"))
    assert record["current"]["candidate"] == "candidate-U9"
    assert set(controller.everywhere("ls /opt/k3deploy/state/window.json 2>/dev/null || true").values()) == {""}

    back = accepted.plan("demote")
    accepted.open_window()
    code, said = accepted.apply("demote", back)
    assert code == 0, said
    assert everything(controller) == before
    assert set(controller.everywhere(DROPINS).values()) == {""}
    refused = controller.k3deploy("demote", "--promotions", str(controller.place / "promotions"))
    assert refused.returncode == 4 and "nothing is promoted" in refused.stderr
