"""What `lab up` and `lab down` do with what they find, against an engine that only remembers."""

from __future__ import annotations

import fcntl
import json
import stat
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import yaml
from click.testing import CliRunner

from k3deploy.commands import lab as command
from k3deploy.errors import K3Error, LockedError, PreflightError
from k3deploy.lab import cluster, image, packages
from k3deploy.lab.cluster import Lab
from k3deploy.lab.config import Rank, lab_config
from k3deploy.lab.engine import Container, Engine
from k3deploy.lab.host import Decision

DECISION = Decision("podman", "root", False, None, None, True, False, False, ("this is a test",))


class RememberingEngine(Engine):
    """Containers and networks as two collections; every rank boots at once."""

    def __init__(self, config: Any, decision: Decision) -> None:
        super().__init__(config, decision)
        self.ranks: dict[str, Container] = {}
        self.network = False
        self.images = {image.image_reference()}
        self.boot = "running\n\n"
        self.others: set[str] = set()

    def is_installed(self) -> bool:
        return True

    def image_exists(self, reference: str) -> bool:
        return reference in self.images

    def remove_image(self, reference: str) -> None:
        self.images.discard(reference)

    def network_exists(self) -> bool:
        return self.network

    def create_network(self) -> None:
        self.network = True

    def remove_network(self) -> None:
        self.network = False

    def containers(self) -> dict[str, Container]:
        return dict(self.ranks)

    def create(self, rank: Rank, *, image: str, recipe: str, volumes: Sequence[str]) -> None:
        assert image in self.images
        assert rank.container not in self.ranks
        assert volumes
        self.ranks[rank.container] = Container(rank.container, "stopped", recipe)

    def start(self, rank: Rank) -> None:
        self.set(rank.container, state="running")

    def set(self, name: str, **changes: Any) -> None:
        container = self.ranks[name]
        self.ranks[name] = Container(
            name, changes.get("state", container.state), changes.get("recipe", container.recipe)
        )

    def remove(self, *containers: str) -> None:
        for name in containers:
            self.ranks.pop(name, None)

    def execute(self, rank: Rank, script: str, *, timeout_s: float = 60.0) -> str:
        assert "authorized_keys" in script
        assert timeout_s > 0
        return f"{self.boot}ssh-ed25519 KEY-OF-{rank.name} root@{rank.name}\n"

    def other_labs(self) -> set[str]:
        return self.others


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    made = Lab(lab_config({"HOME": str(tmp_path)}), DECISION)
    made.engine = RememberingEngine(made.config, made.decision)
    monkeypatch.setattr(cluster, "subnet_conflicts", lambda _: [])
    return made


def engine_of(lab: Lab) -> RememberingEngine:
    assert isinstance(lab.engine, RememberingEngine)
    return lab.engine


def test_up_makes_everything_once_and_a_second_up_changes_nothing(lab: Lab) -> None:
    first = lab.up()
    assert first == ["ssh key", "network", *(f"created rank{number}" for number in range(4)), "known_hosts"]
    assert lab.up() == []


def test_up_starts_a_stopped_rank_and_remakes_one_whose_recipe_has_changed(lab: Lab) -> None:
    lab.up()
    engine_of(lab).set("k3lab-rank1", state="stopped")
    engine_of(lab).set("k3lab-rank2", recipe="from an older version")
    assert lab.up() == ["started rank1", "created rank2"]


def test_host_keys_are_pinned_by_name_and_address_and_the_private_key_is_private(lab: Lab) -> None:
    lab.up()
    assert lab.config.known_hosts.read_text().splitlines()[1] == "rank1,10.77.53.11 ssh-ed25519 KEY-OF-rank1"
    assert stat.S_IMODE(lab.config.private_key.stat().st_mode) == 0o600
    assert stat.S_IMODE(lab.config.state_dir.stat().st_mode) == 0o700


def test_the_ssh_configuration_never_trusts_an_unknown_host(lab: Lab) -> None:
    lab.up()
    text = lab.config.ssh_config.read_text()
    assert "StrictHostKeyChecking yes" in text
    assert str(lab.config.known_hosts) in text
    assert lab.shell_argv("3") == ["ssh", "-F", str(lab.config.ssh_config), "rank3"]


def test_the_second_inventory_gives_each_rank_its_address_for_ssh_and_for_the_fabric(lab: Lab) -> None:
    lab.up()
    hosts = yaml.safe_load((lab.config.inventory_dir / "hosts.yml").read_text())["ranks"]["hosts"]
    assert hosts["rank3"] == {"ansible_host": "10.77.53.13", "k3_fabric_address": "10.77.53.13"}


def test_a_rank_with_failed_units_is_named_with_them(lab: Lab) -> None:
    engine_of(lab).boot = "degraded\nssh.service,foo.service\n"
    with pytest.raises(K3Error, match=r"rank0 is degraded \(failed: ssh.service,foo.service\)"):
        lab.up()


def test_a_rank_that_was_up_already_may_have_a_failed_service(lab: Lab) -> None:
    lab.up()
    engine_of(lab).boot = "degraded\nk3-candidate-head@U2.service\n"
    assert lab.up() == []


def test_models_and_sources_are_read_only_in_the_ranks_and_only_the_builder_has_the_compiler_cache(lab: Lab) -> None:
    builder, worker = (lab._volumes(rank) for rank in lab.config.ranks[:2])
    cache = lab.config.cache_dir
    assert {f"{cache}/models:/srv/models:ro", f"{cache}/src:/srv/src:ro"} < set(builder)
    assert f"{cache}/ccache:/var/cache/k3deploy/ccache:rw" in builder
    assert not any(volume.endswith(":rw") for volume in worker)


def test_a_subnet_in_use_is_refused_before_anything_is_made(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "subnet_conflicts", lambda _: ["10.77.0.0/16 dev vpn0"])
    with pytest.raises(PreflightError, match="vpn0") as refused:
        lab.up()
    assert "K3DEPLOY_LAB_SUBNET" in refused.value.remedy
    assert not engine_of(lab).ranks


def test_down_removes_ranks_network_and_keys_and_keeps_the_image(lab: Lab) -> None:
    lab.up()
    lab.down()
    assert (engine_of(lab).ranks, engine_of(lab).network) == ({}, False)
    assert not lab.config.state_dir.exists()
    assert engine_of(lab).images
    lab.down()  # and once more, with nothing there


def test_purge_removes_the_image_and_its_archive_but_no_models(lab: Lab) -> None:
    lab.up()
    archive = lab.config.cache_dir / "images" / "x.tar.zst"
    archive.parent.mkdir(parents=True)
    archive.touch()
    lab.down(purge=True)
    assert not engine_of(lab).images
    assert not archive.exists()
    assert (lab.config.cache_dir / "models").exists()


def test_purge_is_refused_while_another_lab_uses_the_image(lab: Lab) -> None:
    engine_of(lab).others = {"second"}
    with pytest.raises(LockedError, match="second"):
        lab.down(purge=True)


def test_only_one_up_or_down_at_a_time(lab: Lab) -> None:
    lab.up()
    with (lab.config.state_dir.parent / "k3lab.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(LockedError):
            lab.down()


def test_shell_without_a_lab_says_how_to_get_one(lab: Lab) -> None:
    with pytest.raises(K3Error) as refused:
        lab.shell_argv("rank0")
    assert refused.value.remedy == "k3deploy lab up"


def test_status_of_a_lab_that_was_never_up(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lab, "from_environment", classmethod(lambda _: lab))
    shown = CliRunner().invoke(command.lab, ["status", "--json"])
    assert shown.exit_code == 1
    seen = json.loads(shown.stdout)
    assert next((rank["name"], rank["state"], rank["ssh"]) for rank in seen["ranks"]) == ("rank0", "absent", False)
    assert seen["up"] is False


def test_half_a_keypair_is_made_whole(lab: Lab) -> None:
    lab.up()
    lab.config.private_key.with_suffix(".pub").unlink()
    assert lab.up() == ["ssh key"]


# -- what a rank's container may do --------------------------------------------------------------------------------


def _created_with(monkeypatch: pytest.MonkeyPatch, decision: Decision) -> list[str]:
    calls: list[list[str]] = []
    monkeypatch.setattr(
        Engine,
        "call",
        lambda _self, *arguments, **_: calls.append(list(arguments)),  # type: ignore[func-returns-value]
    )
    config = lab_config({"HOME": "/h"})
    Engine(config, decision).create(config.ranks[1], image="i", recipe="r", volumes=["/a:/b:ro"])
    return calls[0]


@pytest.mark.parametrize("engine", ["podman", "docker"])
def test_a_rank_gets_the_capabilities_of_a_machines_root_but_never_the_hosts_devices(
    monkeypatch: pytest.MonkeyPatch, engine: Literal["podman", "docker"]
) -> None:
    argv = _created_with(monkeypatch, replace(DECISION, engine=engine))
    assert "--privileged" not in argv
    assert "--device" not in argv
    assert {"SYS_ADMIN", "SYS_PTRACE", "SYS_RESOURCE"} < set(argv)
    assert argv[argv.index("--ip") + 1] == "10.77.53.11"
    assert argv[argv.index("--mac-address") + 1] == "02:4b:0a:4d:35:0b"


def test_a_capability_that_the_host_lacks_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "SYS_RESOURCE" not in _created_with(monkeypatch, replace(DECISION, grant_sys_resource=False))


def test_apparmor_is_lifted_only_where_it_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "apparmor=unconfined" in _created_with(monkeypatch, replace(DECISION, apparmor=True))
    assert "apparmor=unconfined" not in _created_with(monkeypatch, DECISION)


def test_a_state_directory_too_deep_for_ssh_is_refused_with_its_length_and_the_remedy(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 80)
    with pytest.raises(PreflightError, match=r"79 fit") as refused:
        Lab.from_environment({"HOME": "/nowhere", "XDG_STATE_HOME": str(deep)})
    assert "XDG_STATE_HOME" in str(refused.value.remedy)
    assert not deep.exists()


# -- system packages -----------------------------------------------------------------------------------------------


def _dpkg(output: str) -> Any:
    def answer(argv: Sequence[str], **_: Any) -> Any:
        calls.append(list(argv))
        return SimpleNamespace(stdout=output, returncode=1)

    calls: list[list[str]] = []
    answer.calls = calls  # type: ignore[attr-defined]
    return answer


def test_a_removed_but_configured_package_counts_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "run", _dpkg("podman installed\nrunc config-files\n"))
    assert packages.missing_packages(["podman", "runc", "netavark"]) == ["runc", "netavark"]


def test_packages_are_named_and_installed_as_root_only_after_a_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    dpkg = _dpkg("podman installed\n")
    monkeypatch.setattr(packages, "run", dpkg)
    said: list[str] = []
    asked: list[str] = []

    def install(answer: bool) -> list[str]:
        return packages.ensure_packages(
            ["podman", "runc"],
            root=("sudo", "-n"),
            progress=said.append,
            confirm=lambda question: asked.append(question) or answer,  # type: ignore[func-returns-value]
        )

    with pytest.raises(PreflightError, match="runc"):
        install(False)
    assert not any("apt-get" in call for call in dpkg.calls)
    assert install(True) == ["runc"]
    assert "runc" in asked[0]
    assert dpkg.calls[-1][:2] == ["sudo", "-n"]
    assert dpkg.calls[-1][-1] == "runc"


@pytest.mark.parametrize(
    "said",
    [
        "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 17 (apt-get)",
        "E: Unable to acquire the dpkg frontend lock (/var/lib/dpkg/lock-frontend), is another process using it?",
    ],
)
def test_another_apt_is_waited_for_and_told_once(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    dpkg, busy, told = _dpkg(""), iter([True, True, False, True]), []

    def run(argv: list[str], **options: object) -> object:
        answer = dpkg(argv, **options)
        if "apt-get" in argv and next(busy, False):
            raise K3Error(f"exit 100: apt-get\n{said}")
        return answer

    monkeypatch.setattr(packages, "run", run)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    packages.ensure_packages(["podman"], root=(), progress=told.append, confirm=lambda _: True)
    verbs = [call[call.index("-qq") + 1] for call in dpkg.calls if "apt-get" in call]
    assert verbs == ["update"] * 3 + ["install"] * 2
    assert sum("another apt is at work" in line for line in told) == 2  # once for each command that waits


def test_an_apt_that_fails_for_itself_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    dpkg = _dpkg("")

    def run(argv: list[str], **options: object) -> object:
        if "apt-get" in argv:
            raise K3Error("exit 100: apt-get\nE: Unable to locate package podman")
        return dpkg(argv, **options)

    monkeypatch.setattr(packages, "run", run)
    with pytest.raises(K3Error, match="Unable to locate"):
        packages.ensure_packages(["podman"], root=(), progress=print, confirm=lambda _: True)


# -- the image -----------------------------------------------------------------------------------------------------


def test_two_labs_that_come_up_at_once_make_one_image(tmp_path: Path) -> None:
    """The second waits for the first, and finds the image there."""
    config = lab_config({"HOME": str(tmp_path)})
    made, told = [], []

    class Slow:
        root: tuple[str, ...] = ()

        def image_exists(self, _: str) -> bool:
            return bool(made)

        def pull(self, _: str) -> bool:
            return True

        def build(self, *_: object) -> None:
            time.sleep(0.2)
            made.append(1)

    def up(_: int) -> bool:
        return image.ensure_image(config, Slow(), progress=told.append, install=lambda _: None)  # type: ignore[arg-type]

    with ThreadPoolExecutor(2) as both:
        assert sorted(both.map(up, range(2))) == [False, True]
    assert made == [1]
    assert "waiting for another lab that makes the image" in told


def test_the_image_key_changes_with_the_recipe_and_only_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = image.image_key()
    assert image.image_key() == before
    monkeypatch.setattr(image, "BUILDER_PACKAGES", (*image.BUILDER_PACKAGES, "gdb"))
    assert image.image_key() != before
