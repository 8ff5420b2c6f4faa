"""What every scenario's verify step has: the ranks over the lab's own ssh, and questions that several scenarios ask."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import testinfra
import yaml
from testinfra.host import Host

SHARED = Path(__file__).parent / "shared"
ROOT = "/opt/k3deploy"

Show = Callable[..., dict[str, str]]


@pytest.fixture(scope="session")
def lab() -> dict[str, Any]:
    """What the create step wrote: release, model, inventory, ssh_config."""
    inventory = Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"], "inventory", "lab.yml")
    found: dict[str, Any] = yaml.safe_load(inventory.read_text())["all"]["vars"]["molecule_lab"]
    return found


def _host(lab: dict[str, Any], name: str) -> Host:
    control = Path(lab["ssh_config"]).parent / "cp" / "verify-%C"  # `k3deploy lab down` closes what is here
    persist = f"-o ControlMaster=auto -o ControlPersist=60 -o ControlPath={control}"
    return testinfra.get_host(f"ssh://{name}", ssh_config=lab["ssh_config"], ssh_extra_args=persist)


@pytest.fixture(scope="session")
def rank0(lab: dict[str, Any]) -> Host:
    return _host(lab, "rank0")


@pytest.fixture(scope="session")
def rank1(lab: dict[str, Any]) -> Host:
    return _host(lab, "rank1")


@pytest.fixture(scope="session")
def addresses(lab: dict[str, Any]) -> dict[str, str]:
    """{rank: address}."""
    hosts = yaml.safe_load(Path(lab["inventory"], "hosts.yml").read_text())["ranks"]["hosts"]
    return {name: variables["k3_fabric_address"] for name, variables in hosts.items()}


@pytest.fixture(scope="session")
def build_id(rank0: Host) -> str:
    """The release that the scenarios' arm runs."""
    return rank0.check_output(f"basename $(readlink {ROOT}/candidates/baseline/release)")


@pytest.fixture(scope="session")
def show() -> Show:
    """systemctl show as a mapping."""

    def ask(host: Host, unit: str, *properties: str) -> dict[str, str]:
        said = host.check_output(f"systemctl show --property={','.join(properties)} -- {unit}")
        return dict(line.split("=", 1) for line in said.splitlines())

    return ask


@pytest.fixture(scope="session")
def environ() -> Callable[[Host, str], dict[str, str]]:
    """The environment of a process as it really runs."""

    def ask(host: Host, pid: str) -> dict[str, str]:
        said = host.check_output(f"tr '\\0' '\\n' < /proc/{pid}/environ")
        return dict(line.split("=", 1) for line in said.splitlines() if "=" in line)

    return ask


@pytest.fixture(scope="session")
def status() -> Callable[[Host, str], dict[str, str]]:
    """/proc/PID/status as a mapping."""

    def ask(host: Host, pid: str) -> dict[str, str]:
        said = host.check_output(f"cat /proc/{pid}/status")
        return {name: value.strip() for name, _, value in (line.partition(":") for line in said.splitlines())}

    return ask


@pytest.fixture(scope="session")
def listens() -> Callable[[Host, int], list[str]]:
    """Local addresses on which somebody listens at a port."""

    def ask(host: Host, port: int) -> list[str]:
        said = host.check_output(f"ss -Hltn 'sport = :{port}'")
        return [line.split()[3] for line in said.splitlines()]

    return ask


@pytest.fixture(scope="session")
def exposure(request: pytest.FixtureRequest) -> Callable[[Host, str], float]:
    """systemd's own score of a unit's sandbox (0 is best, 10 is none); shown at the end of the run."""

    def ask(host: Host, unit: str) -> float:
        said = host.check_output(f"systemd-analyze security --no-pager {unit}").splitlines()[-1]
        score = float(next(word for word in said.split() if word.replace(".", "").isdigit()))
        request.config.stash.setdefault(_SCORES, {})[unit] = score
        return score

    return ask


_SCORES = pytest.StashKey[dict[str, float]]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for unit, score in config.stash.get(_SCORES, {}).items():
        terminalreporter.write_line(f"systemd-analyze security {unit}: {score}")


@pytest.fixture(scope="session")
def written() -> Callable[[Host], set[str]]:
    """Paths that appeared, went or changed on a rank since the reset before the role ran."""

    def ask(host: Host) -> set[str]:
        before = set(host.check_output("cat /run/k3-molecule/before").splitlines())
        now = set(host.check_output(SHARED.joinpath("snapshot.sh").read_text()).splitlines())
        return {line.split("\t")[0] for line in before ^ now}

    return ask
