"""How the lab chooses its engine: facts of a host in, decision out, for each kind of host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from k3deploy.errors import PreflightError
from k3deploy.lab.engine import containers_conf
from k3deploy.lab.host import CAP_SYS_ADMIN, CAP_SYS_RESOURCE, HostFacts, decide, probe

ALL_CAPABILITIES = (1 << 41) - 1
ORDINARY = HostFacts(
    is_root=True,
    has_passwordless_sudo=False,
    tools=frozenset({"podman", "apt-get", "dpkg-query", "ssh", "ssh-keygen", "nsenter", "unshare", "ip"}),
    docker_daemon_answers=False,
    cgroup_is_pure_v2=True,
    kernel_has_cgroup2=True,
    capabilities=ALL_CAPABILITIES,
    nofile_limit=1048576,
    nproc_limit=-1,
    apparmor=False,
)
WITHOUT_ENGINE = replace(ORDINARY, tools=ORDINARY.tools - {"podman"})
HYBRID_AND_CAPPED = replace(
    ORDINARY,
    cgroup_is_pure_v2=False,
    capabilities=ALL_CAPABILITIES & ~(1 << CAP_SYS_RESOURCE),
    nofile_limit=20000,
    nproc_limit=96365,
)


def test_an_ordinary_host_runs_plain_podman_with_its_own_configuration() -> None:
    decision = decide(ORDINARY)
    assert (decision.engine, decision.privilege, decision.private_cgroup) == ("podman", "root", False)
    assert containers_conf(decision) == ""
    assert "runc" not in decision.packages


def test_a_user_with_passwordless_sudo_gets_the_same_lab_through_sudo() -> None:
    decision = decide(replace(ORDINARY, is_root=False, has_passwordless_sudo=True))
    assert decision.privilege == "sudo"
    assert replace(decision, privilege="root", because=()) == replace(decide(ORDINARY), because=())


def test_a_user_without_root_is_told_how_to_get_it() -> None:
    with pytest.raises(PreflightError) as refused:
        decide(replace(ORDINARY, is_root=False))
    assert "sudo" in refused.value.remedy


def test_docker_is_used_where_it_is_what_is_there() -> None:
    decision = decide(replace(WITHOUT_ENGINE, tools=WITHOUT_ENGINE.tools | {"docker"}, docker_daemon_answers=True))
    assert decision.engine == "docker"
    assert "podman" not in decision.packages


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (WITHOUT_ENGINE, "no container engine"),
        (replace(WITHOUT_ENGINE, tools=WITHOUT_ENGINE.tools | {"docker"}), "no daemon answers"),
        (
            replace(
                WITHOUT_ENGINE,
                tools=WITHOUT_ENGINE.tools | {"docker"},
                docker_daemon_answers=True,
                cgroup_is_pure_v2=False,
            ),
            "docker cannot run systemd",
        ),
    ],
    ids=["no engine", "docker without daemon", "docker on a hybrid tree"],
)
def test_podman_is_installed_where_nothing_else_can_run_the_lab(facts: HostFacts, reason: str) -> None:
    decision = decide(facts)
    assert decision.engine == "podman"
    assert {"podman", "netavark"} <= set(decision.packages)
    assert any(reason in sentence for sentence in decision.because)


def test_a_hybrid_tree_with_capped_limits_gets_a_private_cgroup2_and_limits_that_can_be_had() -> None:
    decision = decide(HYBRID_AND_CAPPED)
    assert decision.private_cgroup
    assert "runc" in decision.packages
    assert not decision.grant_sys_resource
    conf = containers_conf(decision)
    assert 'default_ulimits = ["nofile=20000:20000", "nproc=32768:32768"]' in conf
    assert 'runtime = "runc"' in conf
    assert 'cgroup_manager = "cgroupfs"' in conf
    assert sum("cgroup2" in sentence or "limits" in sentence for sentence in decision.because) == 2, "and it is said"


def test_capped_limits_alone_leave_the_hosts_cgroup_manager_alone() -> None:
    conf = containers_conf(decide(replace(HYBRID_AND_CAPPED, cgroup_is_pure_v2=True)))
    assert "nofile=20000" in conf
    assert "cgroup_manager" not in conf


def test_a_low_limit_is_no_cap_for_a_root_who_may_raise_it() -> None:
    decision = decide(replace(ORDINARY, nofile_limit=4096))
    assert decision.nofile_cap is None
    assert decision.grant_sys_resource


def test_never_asks_for_more_processes_than_the_host_allows() -> None:
    assert decide(replace(HYBRID_AND_CAPPED, nproc_limit=5000)).nproc_cap == 5000
    assert decide(replace(HYBRID_AND_CAPPED, nproc_limit=-1)).nproc_cap == 32768


def test_everything_that_stands_in_the_way_is_said_at_once_with_its_remedy() -> None:
    hopeless = HostFacts(
        is_root=False,
        has_passwordless_sudo=False,
        tools=frozenset(),
        docker_daemon_answers=False,
        cgroup_is_pure_v2=False,
        kernel_has_cgroup2=False,
        capabilities=ALL_CAPABILITIES & ~(1 << CAP_SYS_ADMIN),
        nofile_limit=1024,
        nproc_limit=1024,
        apparmor=True,
    )
    with pytest.raises(PreflightError) as refused:
        decide(hopeless)
    for word in ("sudo", "CAP_SYS_ADMIN", "cgroup2", "podman"):
        assert word in str(refused.value)
    for word in ("sudoers", "--privileged", "kernel", "install podman"):
        assert word in refused.value.remedy


def test_probing_this_host_answers_quickly_and_changes_nothing() -> None:
    assert probe() == probe()
