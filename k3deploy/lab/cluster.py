"""The lab: four ranks as containers with their own systemd, address and name on one private bridge."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from k3deploy.errors import K3Error, LockedError, PreflightError
from k3deploy.lab import image
from k3deploy.lab.config import DEFAULT_NAME, DEFAULT_SUBNET, LabConfig, Rank, lab_config
from k3deploy.lab.engine import Engine, subnet_conflicts
from k3deploy.lab.host import Decision, decide, probe
from k3deploy.lab.packages import ensure_packages
from k3deploy.lab.process import run
from k3deploy.paths import write_text

Progress = Callable[[str], None]
Confirm = Callable[[str], bool]

_TITLE = "# Written by `k3deploy lab up`."
# A socket's path has 107 characters; Ansible's name takes a slash and 10, and ssh adds 17 while it makes the socket.
_LONGEST_SOCKET_DIR = 107 - 11 - 17
# Says when boot is over, and how it ended: running, degraded, ... `is-system-running --wait` itself fails while
# systemd does not listen yet.
_WAIT_FOR_BOOT = """\
for attempt in $(seq 200); do
  state=$(systemctl is-system-running --wait 2>/dev/null || true)
  case $state in running|degraded|maintenance) break ;; esac
  sleep 0.1
done
echo "$state"
systemctl --failed --plain --no-legend | cut -d' ' -f1 | paste -sd, -
"""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One rank as it is now. ``systemd`` is what `systemctl is-system-running` says, read over ssh."""

    name: str
    address: str
    container: str
    state: str  # running, stopped, absent
    ssh: bool  # answers with the pinned host key
    systemd: str


@dataclass(frozen=True, slots=True)
class LabStatus:
    """The whole lab; ``up`` when every rank runs, answers over ssh and has finished booting.

    A rank may be ``degraded`` later on: a service that was tried on it failed.
    """

    name: str
    up: bool
    engine: str
    subnet: str
    ssh_config: str
    inventory: list[str]  # what to give to -i, in order
    because: list[str]  # why the lab runs the way it does on this host
    ranks: list[RankStatus]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for --json."""
        return asdict(self)


def _silent(_: str) -> None:
    return None


def _yes(_: str) -> bool:
    return True


class Lab:
    """Bring a lab up, look at it, take it down. All methods are safe to repeat and to run after a killed one."""

    def __init__(self, config: LabConfig, decision: Decision) -> None:
        self.config = config
        self.decision = decision
        self.engine = Engine(config, decision)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Lab:
        """The lab that K3DEPLOY_LAB names, on this host. Raises PreflightError when no lab can run here."""
        config = lab_config(environ)
        if len(str(config.control_dir)) > _LONGEST_SOCKET_DIR:
            raise PreflightError(
                f"{config.control_dir} is too long for ssh's sockets: {len(str(config.control_dir))} characters, "
                f"{_LONGEST_SOCKET_DIR} fit",
                remedy="let XDG_STATE_HOME name a shorter directory",
            )
        return cls(config, decide(probe()))

    # -- up ------------------------------------------------------------------------------------------------------

    def up(self, progress: Progress = _silent, confirm: Confirm = _yes) -> list[str]:
        """Bring every rank up and return what had to be changed: an empty list means that all was well.

        ``progress`` gets one line a step; ``confirm`` is asked before system packages are installed.
        """
        with self._locked():
            for reason in self.decision.because:
                progress(f"host: {reason}")
            changes: list[str] = []

            def install(packages: tuple[str, ...]) -> None:
                if not self.decision.can_install:
                    return  # decide() saw an engine; what else is missing says so when it is called
                added = ensure_packages(packages, root=self.engine.root, progress=progress, confirm=confirm)
                changes.extend(f"package {name}" for name in added)

            install(self.decision.packages)
            self._make_identity(changes)
            image.discard_unfinished(self.config, self.engine)
            self.engine.prepare()
            if image.ensure_image(self.config, self.engine, progress=progress, install=install):
                changes.append("image")
            self._make_network(changes, progress)
            fresh = self._make_ranks(changes, progress)
            progress("waiting for systemd and pinning host keys")
            self._pin_host_keys(changes, fresh)
            progress("lab is up" if changes else "lab was up already: nothing changed")
            return changes

    def _make_identity(self, changes: list[str]) -> None:
        """The keypair, and the files that depend on names and addresses alone."""
        config = self.config
        for folder in (config.state_dir, config.control_dir):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
        for name in ("models", "src", "ccache"):
            (config.cache_dir / name).mkdir(parents=True, exist_ok=True)
        public_key = config.private_key.with_suffix(".pub")
        if not (config.private_key.exists() and public_key.exists()):
            config.private_key.unlink(missing_ok=True)  # half a pair, from an `up` that was killed right here
            comment = f"k3deploy-{config.name}"
            run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(config.private_key)])
            changes.append("ssh key")
        names = "".join(f"{rank.address}\t{rank.name}\n" for rank in config.ranks)
        _write_if_changed(config.state_dir / "hosts", f"127.0.0.1\tlocalhost\n::1\tlocalhost\n{names}", mode=0o644)
        _write_if_changed(config.ssh_config, _ssh_config(config))
        config.inventory_dir.mkdir(exist_ok=True)
        _write_if_changed(config.inventory_dir / "hosts.yml", _inventory_layer(config))

    def _make_network(self, changes: list[str], progress: Progress) -> None:
        if self.engine.network_exists():
            return
        conflicts = subnet_conflicts(self.config)
        if conflicts:
            raise PreflightError(
                f"the lab's subnet {self.config.subnet} is in use on this host: {', '.join(conflicts)}",
                remedy="choose another with K3DEPLOY_LAB_SUBNET, for example K3DEPLOY_LAB_SUBNET=10.77.54.0/24, and "
                f"give {self.config.inventory_dir} as a second -i",
            )
        progress(f"creating the bridge {self.config.subnet}")
        self.engine.create_network()
        changes.append("network")

    def _make_ranks(self, changes: list[str], progress: Progress) -> set[Rank]:
        """Create, recreate or start, so that each rank runs as described; returns those that were not running."""
        reference = image.image_reference()
        existing = self.engine.containers()

        def make(rank: Rank) -> str:
            volumes = self._volumes(rank)
            recipe = hashlib.sha256(json.dumps([reference, rank.address, volumes]).encode()).hexdigest()[:12]
            container = existing.get(rank.container)
            if container and container.recipe == recipe and container.state == "running":
                return ""
            if container and container.recipe == recipe:
                with contextlib.suppress(K3Error):  # a container that was killed half-made may not start: make it anew
                    self.engine.start(rank)
                    return f"started {rank.name}"
            self.engine.remove(rank.container)
            self.engine.create(rank, image=reference, recipe=recipe, volumes=volumes)
            self.engine.start(rank)
            return f"created {rank.name}"

        # One after the other: podman takes its own locks, so threads gain nothing here.
        fresh = set()
        for rank in self.config.ranks:
            done = make(rank)
            if done:
                progress(done)
                changes.append(done)
                fresh.add(rank)
        return fresh

    def _volumes(self, rank: Rank) -> list[str]:
        cache = self.config.cache_dir
        volumes = [f"{self.config.state_dir / 'hosts'}:/etc/hosts:ro", f"{cache / 'models'}:/srv/models:ro"]
        if rank.is_builder:
            volumes += [f"{cache / 'src'}:/srv/src:ro", f"{cache / 'ccache'}:/var/cache/k3deploy/ccache:rw"]
        return volumes

    def _pin_host_keys(self, changes: list[str], fresh: Set[Rank]) -> None:
        """Wait for boot, let our key in, and fetch each rank's host key: through the engine, never over the network.

        A rank that booted just now (``fresh``) must have no failed unit; in an older one a user's service may have.
        """
        public = shlex.quote(self.config.private_key.with_suffix(".pub").read_text().strip())
        script = (
            f"umask 077; mkdir -p /root/.ssh; echo {public} > /root/.ssh/authorized_keys\n"
            f"{_WAIT_FOR_BOOT}cat /etc/ssh/ssh_host_ed25519_key.pub\n"
        )

        def settle(rank: Rank) -> tuple[str, str, str]:
            said = self.engine.execute(rank, script)
            state, failed, key = [*said.splitlines(), "", "", ""][:3]
            return state, failed, " ".join(key.split()[:2])

        with ThreadPoolExecutor(len(self.config.ranks)) as pool:
            settled = dict(zip(self.config.ranks, pool.map(settle, self.config.ranks), strict=True))
        bad = [
            f"{rank.name} is {state or 'not booting'}" + (f" (failed: {failed})" if failed else "")
            for rank, (state, failed, _) in settled.items()
            if state not in ("running", *(() if rank in fresh else ("degraded",)))
        ]
        if bad:
            raise K3Error(
                "systemd did not come up: " + "; ".join(bad),
                remedy="look with `k3deploy lab shell rank0`, or start afresh: `k3deploy lab down && k3deploy lab up`",
            )
        lines = [f"{rank.name},{rank.address} {key}\n" for rank, (_, _, key) in settled.items()]
        if _write_if_changed(self.config.known_hosts, "".join(lines)):
            self._close_connections()  # masters to the ranks that were
            changes.append("known_hosts")

    # -- down ----------------------------------------------------------------------------------------------------

    def down(self, progress: Progress = _silent, *, purge: bool = False) -> None:
        """Remove ranks, bridge, namespace and keys; with ``purge`` the image and its cache as well.

        Finds what to remove by name and label, so it also cleans up after an `up` that was killed.
        """
        config = self.config
        with self._locked():
            self._close_connections()
            image.discard_unfinished(config, self.engine)
            self.engine.end_calls()
            if self.engine.is_installed():
                self.engine.prepare()
                if purge and (others := self.engine.other_labs()):
                    raise LockedError(
                        f"other labs use the image: {', '.join(sorted(others))}", remedy="take those down first"
                    )
                containers = {*self.engine.containers(), *(rank.container for rank in config.ranks)}
                progress("removing the ranks and their bridge")
                self.engine.remove(*sorted(containers))
                self.engine.remove_network()
                if purge:
                    progress("removing the image and its cache")
                    image.purge_cache(config, self.engine)
                self.engine.clear()
                if purge:
                    self.engine.remove_storage()
            if config.state_dir.exists():
                shutil.rmtree(config.state_dir)
            progress("lab is down")

    def _close_connections(self) -> None:
        """End ssh masters that would outlive their rank, or keep pointing at the one before."""
        for socket in self.config.control_dir.glob("*"):
            run(["ssh", "-o", f"ControlPath={socket}", "-O", "exit", "rank"], check=False)
            socket.unlink(missing_ok=True)

    # -- looking -------------------------------------------------------------------------------------------------

    def status(self) -> LabStatus:
        """How the lab is now; quick, and without changing anything."""
        containers = self.engine.containers() if self.engine.is_usable() else {}

        def look(rank: Rank) -> RankStatus:
            container = containers.get(rank.container)
            state = container.state if container else "absent"
            said = self._ask(rank, "systemctl is-system-running") if state == "running" else None
            return RankStatus(rank.name, rank.address, rank.container, state, said is not None, said or "unknown")

        with ThreadPoolExecutor(len(self.config.ranks)) as pool:
            ranks = list(pool.map(look, self.config.ranks))
        return LabStatus(
            name=self.config.name,
            up=all(rank.ssh and rank.systemd in ("running", "degraded") for rank in ranks),
            engine=self.decision.engine,
            subnet=str(self.config.subnet),
            ssh_config=str(self.config.ssh_config),
            inventory=self.inventories(),
            because=list(self.decision.because),
            ranks=ranks,
        )

    def inventories(self) -> list[str]:
        """What to give to -i: inventory/lab, and a layer over it when this lab has other addresses."""
        standard = self.config.name == DEFAULT_NAME and str(self.config.subnet) == DEFAULT_SUBNET
        return ["inventory/lab"] if standard else ["inventory/lab", str(self.config.inventory_dir)]

    def shell_argv(self, rank: str) -> list[str]:
        """The command that opens a shell on ``rank`` (a name or a number). Raises K3Error for an unknown rank."""
        name = self.config.rank(rank).name
        if not self.config.ssh_config.exists():
            raise K3Error("the lab is not up", remedy="k3deploy lab up")
        return ["ssh", "-F", str(self.config.ssh_config), name]

    def _ask(self, rank: Rank, command: str) -> str | None:
        """What a command on the rank prints, over ssh; None when ssh itself fails (its exit code 255)."""
        argv = ["ssh", "-F", str(self.config.ssh_config), "-o", "BatchMode=yes", rank.name, command]
        try:
            done = run(argv, check=False, timeout_s=15)
        except K3Error:
            return None
        return None if done.returncode == 255 else done.stdout.strip()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One `up` or `down` of a lab at a time. The lock dies with its process, so a kill leaves none."""
        parent = self.config.state_dir.parent
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (parent / f"{self.config.name}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as held:
                raise LockedError(
                    f"another `k3deploy lab` works on {self.config.name} at this moment",
                    remedy="wait for it, or give this lab another name with K3DEPLOY_LAB",
                ) from held
            yield


def _write_if_changed(path: Path, text: str, mode: int = 0o600) -> bool:
    if path.exists() and path.read_text() == text:
        return False
    write_text(path, text, mode)
    return True


def _ssh_config(config: LabConfig) -> str:
    hosts = "".join(f"Host {rank.name}\n  HostName {rank.address}\n" for rank in config.ranks)
    return (
        f"{_TITLE} For people: ssh -F {config.ssh_config} rank0\n"
        "Host rank*\n"
        "  User root\n"
        f'  IdentityFile "{config.private_key}"\n'
        "  IdentitiesOnly yes\n"
        f'  UserKnownHostsFile "{config.known_hosts}"\n'
        "  GlobalKnownHostsFile /dev/null\n"
        "  StrictHostKeyChecking yes\n"
        "  ConnectTimeout 5\n"
        "  LogLevel ERROR\n" + hosts
    )


def _inventory_layer(config: LabConfig) -> str:
    """Addresses as an inventory of their own: inventory/lab holds those of the default lab."""
    lines = [_TITLE, "ranks:", "  hosts:"]
    for rank in config.ranks:
        lines += [
            f"    {rank.name}:",
            f"      ansible_host: {rank.address}",
            f"      k3_fabric_address: {rank.address}",
        ]
    return "\n".join(lines) + "\n"
