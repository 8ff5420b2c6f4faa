"""What kind of host is this, and how can a lab run on it: facts in, decision out.

``probe`` looks and changes nothing; ``decide`` is a pure function of what was seen, so every kind of host can be
tested without being one.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from k3deploy.errors import PreflightError

CAP_NET_ADMIN = 12
CAP_SYS_ADMIN = 21
CAP_SYS_RESOURCE = 24
# Podman asks for this many open files and as many processes in every rootful container.
_PODMAN_NOFILE = 1048576
# Plenty for four ranks. Asking for all of a capped host's own hard limit has been refused.
_CAPPED_NPROC = 32768

EngineName = Literal["podman", "docker"]
Privilege = Literal["root", "sudo"]

_TOOLS = ("podman", "docker", "sudo", "apt-get", "dpkg-query", "ssh", "ssh-keygen", "nsenter", "unshare", "ip", "runc")


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What was seen on the host; limits are the hard ones (-1: unlimited)."""

    is_root: bool
    has_passwordless_sudo: bool
    tools: frozenset[str]
    docker_daemon_answers: bool
    cgroup_is_pure_v2: bool
    kernel_has_cgroup2: bool
    capabilities: int  # the bounding set: what root can have at all here
    nofile_limit: int
    nproc_limit: int
    apparmor: bool


@dataclass(frozen=True, slots=True)
class Decision:
    """How the lab runs on this host. ``because`` tells the user why, one sentence a fact."""

    engine: EngineName
    privilege: Privilege
    private_cgroup: bool  # a mount namespace of our own that holds a pure cgroup2
    nofile_cap: int | None  # limits to ask for instead of the engine's own, where those cannot be had
    nproc_cap: int | None
    grant_sys_resource: bool
    apparmor: bool
    can_install: bool  # apt-get is there
    because: tuple[str, ...]

    @property
    def packages(self) -> tuple[str, ...]:
        """Debian packages that this way of running needs, less those that only a missing image needs."""
        always = ("iproute2", "openssh-client", "util-linux")
        if self.engine == "docker":
            return always
        # netavark is only recommended by podman, and recommendations are not installed.
        podman = ("podman", "conmon", "netavark", "aardvark-dns", "iptables", "nftables", "catatonit")
        return (*always, *podman, "runc") if self.needs_runc else (*always, *podman)

    @property
    def needs_runc(self) -> bool:
        """crun refuses to raise limits and to start under a hybrid tree; runc does neither."""
        return self.engine == "podman" and (self.private_cgroup or self.nofile_cap is not None)


def decide(facts: HostFacts) -> Decision:
    """Choose engine and fallbacks. Raises PreflightError naming everything that stands in the way."""
    because: list[str] = []
    obstacles: list[str] = []
    remedies: list[str] = []

    privilege: Privilege = "root"
    if facts.is_root:
        because.append("running as root")
    elif facts.has_passwordless_sudo:
        privilege = "sudo"
        because.append("not root, but sudo asks for no password")
    else:
        obstacles.append("the lab's bridge and containers need root, and sudo asks for a password (or is not there)")
        remedies.append("run as root, or allow this user passwordless sudo in /etc/sudoers.d/")

    if not _has(facts, CAP_SYS_ADMIN) or not _has(facts, CAP_NET_ADMIN):
        obstacles.append("root has no CAP_SYS_ADMIN or CAP_NET_ADMIN here: this machine is itself a confined container")
        remedies.append("use a virtual or physical machine, or start the outer container with --privileged")

    private_cgroup = not facts.cgroup_is_pure_v2
    if private_cgroup and not facts.kernel_has_cgroup2:
        obstacles.append("this kernel has no cgroup2, which systemd needs in every rank")
        remedies.append("use a kernel of 4.15 or newer with CONFIG_CGROUPS and cgroup2")

    engine: EngineName = "podman"
    can_install = {"apt-get", "dpkg-query"} <= facts.tools
    if "podman" in facts.tools:
        because.append("podman is installed")
    elif facts.docker_daemon_answers and not private_cgroup:
        engine = "docker"
        because.append("docker is what is here, and its daemon answers")
    elif can_install:
        because.append(
            "podman will be installed: "
            + (
                "docker cannot run systemd on this host's cgroup tree"
                if facts.docker_daemon_answers
                else "docker is installed but no daemon answers"
                if "docker" in facts.tools
                else "no container engine is here"
            )
        )
    else:
        obstacles.append("there is neither podman nor a docker daemon, and no apt-get to install podman with")
        remedies.append("install podman (4.3 or newer) with netavark by this system's own package manager")

    if private_cgroup:
        because.append(
            "/sys/fs/cgroup is not a pure cgroup2 tree: podman runs with runc in a mount namespace that holds one "
            "(MemoryMax= is not enforced in the ranks)"
        )
    grant_sys_resource = _has(facts, CAP_SYS_RESOURCE)
    capped = engine == "podman" and not grant_sys_resource and 0 <= facts.nofile_limit < _PODMAN_NOFILE
    if capped:
        because.append(
            f"limits cannot be raised here (hard limit of {facts.nofile_limit} open files): "
            "containers get the host's, and memlock stays small in the ranks"
        )

    if obstacles:
        raise PreflightError("the lab cannot run here: " + "; ".join(obstacles), remedy="; ".join(remedies))
    return Decision(
        engine=engine,
        privilege=privilege,
        private_cgroup=private_cgroup,
        nofile_cap=facts.nofile_limit if capped else None,
        nproc_cap=(_CAPPED_NPROC if facts.nproc_limit < 0 else min(_CAPPED_NPROC, facts.nproc_limit))
        if capped
        else None,
        grant_sys_resource=grant_sys_resource,
        apparmor=facts.apparmor,
        can_install=can_install,
        because=tuple(because),
    )


def _has(facts: HostFacts, capability: int) -> bool:
    return bool(facts.capabilities >> capability & 1)


def probe() -> HostFacts:
    """Look at this host: reads /proc and /sys, and asks sudo and a docker daemon whether they answer."""
    tools = frozenset(tool for tool in _TOOLS if shutil.which(tool))
    is_root = os.geteuid() == 0
    has_sudo = not is_root and "sudo" in tools and _answers("sudo", "-n", "true")
    docker_prefix = ("sudo", "-n") if has_sudo else ()
    docker_answers = "docker" in tools and _answers(*docker_prefix, "docker", "version")
    return HostFacts(
        is_root=is_root,
        has_passwordless_sudo=has_sudo,
        tools=tools,
        docker_daemon_answers=docker_answers,
        # Only the root of a cgroup2 mount has this file directly under the mount point.
        cgroup_is_pure_v2=Path("/sys/fs/cgroup/cgroup.controllers").exists(),
        kernel_has_cgroup2="\tcgroup2\n" in Path("/proc/filesystems").read_text(),
        capabilities=_bounding_set(Path("/proc/self/status").read_text()),
        nofile_limit=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        nproc_limit=resource.getrlimit(resource.RLIMIT_NPROC)[1],
        apparmor=_first_letter(Path("/sys/module/apparmor/parameters/enabled")) == "Y",
    )


def _bounding_set(status: str) -> int:
    for line in status.splitlines():
        if line.startswith("CapBnd:"):
            return int(line.split()[1], 16)
    return 0


def _first_letter(file: Path) -> str:
    try:
        return file.read_text()[:1]
    except OSError:
        return ""


def _answers(*argv: str) -> bool:
    try:
        return subprocess.run(argv, capture_output=True, timeout=10, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
