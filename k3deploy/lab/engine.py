"""Podman or docker, on an ordinary host or inside the lab's private cgroup2 namespace: the same few verbs."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from k3deploy.errors import K3Error
from k3deploy.lab.config import LabConfig, Rank
from k3deploy.lab.host import Decision
from k3deploy.lab.process import kill_matching, run

LABEL = "k3deploy.lab"
RECIPE_LABEL = "k3deploy.lab.recipe"

ContainerState = Literal["running", "stopped", "absent"]


@dataclass(frozen=True, slots=True)
class Container:
    """One container as the engine sees it; ``recipe`` is what it was made from."""

    name: str
    state: ContainerState
    recipe: str


class Engine:
    """Runs the chosen engine as root. Every method is one or a few calls; none keeps state between them."""

    def __init__(self, config: LabConfig, decision: Decision) -> None:
        self.config = config
        self.decision = decision
        self.root: tuple[str, ...] = () if decision.privilege == "root" else ("sudo", "-n")

    @property
    def _namespace(self) -> Path:
        """The file that keeps the private mount namespace alive."""
        return self.config.run_dir / "ns" / "mnt"

    @property
    def _containers_conf(self) -> Path:
        return self.config.state_dir / "containers.conf"

    def argv(self, *arguments: str) -> list[str]:
        """The full command line of an engine call."""
        prefix = [*self.root]
        if self.decision.private_cgroup:
            prefix += ["nsenter", f"--mount={self._namespace}", "--wd=/"]
        if containers_conf(self.decision):
            prefix += ["env", f"CONTAINERS_CONF={self._containers_conf}"]
        return [*prefix, self.decision.engine, *self._own_storage(), *arguments]

    def _own_storage(self) -> list[str]:
        """Storage apart from the host's podman: what is mounted in the private namespace is not, to that one."""
        if not self.decision.private_cgroup:
            return []
        data, runtime = self.config.data_dir, self.config.run_dir
        return [
            *("--root", str(data / "storage"), "--runroot", str(runtime / "storage")),
            *("--tmpdir", str(runtime / "libpod"), "--network-config-dir", str(data / "networks")),
        ]

    def call(self, *arguments: str, check: bool = True, stdin: str = "", timeout_s: float = 120.0) -> str:
        return run(self.argv(*arguments), check=check, stdin=stdin, timeout_s=timeout_s).stdout

    def succeeds(self, *arguments: str, timeout_s: float = 60.0) -> bool:
        return run(self.argv(*arguments), check=False, timeout_s=timeout_s).returncode == 0

    # -- the ground that containers stand on ---------------------------------------------------------------------

    def is_installed(self) -> bool:
        """Whether the engine is there at all: `decide` may have chosen one that `up` will install."""
        return shutil.which(self.decision.engine) is not None

    def is_usable(self) -> bool:
        """Whether the engine can be called as things stand, without preparing anything."""
        conf_missing = containers_conf(self.decision) and not self._containers_conf.exists()
        return self.is_installed() and not conf_missing and self._has_namespace()

    def prepare(self) -> None:
        """Write containers.conf and make the private namespace, where this host needs them."""
        conf = containers_conf(self.decision)
        if conf:
            self.config.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._containers_conf.write_text(conf)
        if self.decision.private_cgroup and not self._has_namespace():
            self._clear_namespace()
            folder = str(self._namespace.parent)
            run([*self.root, "mkdir", "-p", folder])
            # The handle of a mount namespace may only lie under a private mount.
            run([*self.root, "mount", "--bind", folder, folder])
            run([*self.root, "mount", "--make-private", folder])
            run([*self.root, "touch", str(self._namespace)])
            within = ("unshare", f"--mount={self._namespace}", "--propagation", "private")
            run([*self.root, *within, "mount", "-t", "cgroup2", "cgroup2", "/sys/fs/cgroup"])

    def _has_namespace(self) -> bool:
        """Whether the private namespace exists, where one is needed."""
        if not self.decision.private_cgroup:
            return True
        enter = [*self.root, "nsenter", f"--mount={self._namespace}", "--wd=/"]
        return run([*enter, "test", "-e", "/sys/fs/cgroup/cgroup.controllers"], check=False).returncode == 0

    def end_calls(self) -> None:
        """Kill engine calls that a killed `up` left running: they would make what `down` is about to remove."""
        names = {self.config.name, *(rank.container for rank in self.config.ranks)}

        def is_ours(argv: list[str]) -> bool:
            return Path(argv[0]).name == self.decision.engine and not names.isdisjoint(argv)

        kill_matching(is_ours, root=self.root)

    def clear(self) -> None:
        """Take the ground away again: leaves no mount, no namespace, no process in it."""
        if self.decision.private_cgroup:
            self._clear_namespace()

    def _clear_namespace(self) -> None:
        # A process left in the namespace would keep it, and its mounts, alive after the handle is gone.
        with contextlib.suppress(OSError):
            inode = self._namespace.stat().st_ino
            for process in self._processes_in_namespace(inode):
                run([*self.root, "kill", "-9", process], check=False)
        mounts = Path("/proc/self/mountinfo").read_text().split()
        for mounted in (self._namespace, self._namespace.parent):
            # Each failed start may have left one more mount on top.
            for _ in range(mounts.count(str(mounted))):
                run([*self.root, "umount", str(mounted)], check=False)
        if self.config.run_dir.exists():
            run([*self.root, "rm", "-rf", "--one-file-system", str(self.config.run_dir)])
        run([*self.root, "rmdir", "--ignore-fail-on-non-empty", str(self.config.run_dir.parent)], check=False)

    def _processes_in_namespace(self, inode: int) -> list[str]:
        listed = run(
            [*self.root, "find", "/proc", "-maxdepth", "3", "-path", "/proc/[0-9]*/ns/mnt", "-lname", f"mnt:?{inode}?"],
            check=False,
        )
        return [line.split("/")[2] for line in listed.stdout.splitlines()]

    # -- images --------------------------------------------------------------------------------------------------

    def image_exists(self, reference: str) -> bool:
        return self.succeeds("image", "inspect", reference)

    def pull(self, reference: str) -> bool:
        """Try to get ``reference`` from its registry: the honest way to find out whether there is one."""
        try:
            return self.succeeds("pull", "--quiet", reference, timeout_s=300)
        except K3Error:  # passed its deadline
            return False

    def build(self, context: Path, reference: str) -> None:
        file = str(context / "Containerfile")
        self.call("build", "--tag", reference, "--file", file, str(context), timeout_s=1800)

    def import_archive(self, archive: Path, reference: str) -> None:
        """Make an image of a root file system (a tar file compressed with zstd)."""
        if self.decision.engine == "podman":
            self.call("import", str(archive), reference, timeout_s=600)
            return
        # Not every docker reads zstd.
        with tempfile.NamedTemporaryFile(suffix=".tar", dir=archive.parent) as plain:
            run(["zstd", "-dqf", str(archive), "-o", plain.name], timeout_s=300)
            self.call("import", plain.name, reference, timeout_s=600)

    def remove_image(self, reference: str) -> None:
        self.succeeds("rmi", reference)

    # -- the network ---------------------------------------------------------------------------------------------

    def network_exists(self) -> bool:
        return self.succeeds("network", "inspect", self.config.name)

    def create_network(self) -> None:
        # Names come from /etc/hosts, so podman's own name server (one more process) is not needed.
        quiet = ("--disable-dns",) if self.decision.engine == "podman" else ()
        labels = ("--label", f"{LABEL}={self.config.name}")
        self.call("network", "create", *quiet, *labels, "--subnet", str(self.config.subnet), self.config.name)
        if self.decision.private_cgroup:
            # Podman names bridges by counting those that it knows: two storages can count to the same name.
            description = self.config.data_dir / "networks" / f"{self.config.name}.json"
            name = f's/"network_interface": "[^"]*"/"network_interface": "{self.config.bridge}"/'
            run([*self.root, "sed", "-i", name, str(description)])

    def remove_storage(self) -> None:
        """Remove what the lab's own podman keeps, image included; the host's storage is left alone."""
        if self.decision.private_cgroup:
            run([*self.root, "rm", "-rf", "--one-file-system", str(self.config.data_dir)])
            parent = str(self.config.data_dir.parent)
            run([*self.root, "rmdir", "--ignore-fail-on-non-empty", parent], check=False)

    def remove_network(self) -> None:
        if self.network_exists():
            self.call("network", "rm", self.config.name)

    # -- containers ----------------------------------------------------------------------------------------------

    def containers(self) -> dict[str, Container]:
        """All containers of this lab by name, also half-made ones."""
        listed = self.call(
            *("ps", "--all", "--filter", f"label={LABEL}={self.config.name}"),
            *("--format", "{{.Names}}\t{{.State}}\t" + self._label_template(RECIPE_LABEL)),
        )
        found = {}
        for line in listed.splitlines():
            name, state, recipe = (*line.split("\t"), "", "")[:3]
            # Docker says "running"; podman says "Up 5 minutes" here, whatever the column is called.
            running = state.lower().startswith(("running", "up"))
            found[name] = Container(name, "running" if running else "stopped", recipe)
        return found

    def _label_template(self, label: str) -> str:
        verb = ".Label" if self.decision.engine == "docker" else "index .Labels"
        return f'{{{{{verb} "{label}"}}}}'

    def create(self, rank: Rank, *, image: str, recipe: str, volumes: Sequence[str]) -> None:
        """Create the container of ``rank`` with systemd as PID 1; ``volumes`` are source:target:mode."""
        mounts = [part for volume in volumes for part in ("--volume", volume)]
        self.call(
            *("create", "--name", rank.container, "--hostname", rank.name),
            *("--network", self.config.name, "--ip", rank.address, "--mac-address", rank.mac),
            *("--label", f"{LABEL}={self.config.name}", "--label", f"{RECIPE_LABEL}={recipe}"),
            *("--stop-signal", "SIGRTMIN+3"),
            *self._systemd_options(),
            *mounts,
            *(image, *self._init()),
        )

    def _systemd_options(self) -> list[str]:
        # SYS_ADMIN lets systemd sandbox units (ProtectSystem= and the like), SYS_PTRACE lets root see what another
        # user's process runs, NET_ADMIN (of the container's own network) and IPC_LOCK are what a rank's root has.
        # All of it is less than --privileged, which would hand out the host's devices and kernel settings.
        capabilities = ["SYS_ADMIN", "SYS_PTRACE", "DAC_READ_SEARCH", "SYS_NICE", "NET_ADMIN", "IPC_LOCK"]
        if self.decision.grant_sys_resource:
            capabilities.append("SYS_RESOURCE")
        options = [part for capability in capabilities for part in ("--cap-add", capability)]
        options += ["--env", f"container={self.decision.engine}", "--security-opt", "label=disable"]
        if self.decision.apparmor:
            options += ["--security-opt", "apparmor=unconfined"]
        if self.decision.engine == "podman":
            return [*options, "--systemd=always"]
        tmpfs = [part for folder in ("/run", "/run/lock", "/tmp") for part in ("--tmpfs", f"{folder}:exec")]
        return [*options, "--cgroupns=private", *tmpfs]

    def _init(self) -> list[str]:
        """What the container runs as PID 1."""
        if self.decision.engine == "podman":
            return ["/sbin/init"]
        # Docker mounts the container's own cgroup tree read-only; systemd must write there.
        return ["sh", "-c", "mount -o remount,bind,rw /sys/fs/cgroup && exec /sbin/init"]

    def start(self, rank: Rank) -> None:
        self.call("start", rank.container)

    def remove(self, *containers: str) -> None:
        """Kill and remove containers by name; those that do not exist are fine."""
        patience = ("--time", "0") if self.decision.engine == "podman" else ()
        for container in containers:
            gone = run(self.argv("rm", "--force", "--volumes", *patience, container), check=False)
            if gone.returncode != 0 and "no such container" not in gone.stderr.lower():
                raise K3Error(f"{container} cannot be removed: {gone.stderr.strip()}")

    def execute(self, rank: Rank, script: str, *, timeout_s: float = 60.0) -> str:
        """Run a shell script as root in the rank, through the engine (not over the network)."""
        return self.call("exec", "--interactive", rank.container, "sh", "-eu", stdin=script, timeout_s=timeout_s)

    def other_labs(self) -> set[str]:
        """Names of other labs that have containers on this host."""
        listed = self.call("ps", "--all", "--filter", f"label={LABEL}", "--format", self._label_template(LABEL))
        return set(listed.split()) - {self.config.name}


def containers_conf(decision: Decision) -> str:
    """containers.conf for a host whose defaults cannot work; empty where podman's own defaults do."""
    if decision.engine != "podman" or not (decision.private_cgroup or decision.nofile_cap is not None):
        return ""
    limits = ""
    if decision.nofile_cap is not None:
        caps = {"nofile": decision.nofile_cap, "nproc": decision.nproc_cap}
        limits = "default_ulimits = " + json.dumps([f"{name}={cap}:{cap}" for name, cap in caps.items()]) + "\n"
    private = 'cgroupns = "private"\n' if decision.private_cgroup else ""
    manager = 'cgroup_manager = "cgroupfs"\n' if decision.private_cgroup else ""
    return (
        # Confined hosts often lack the pids controller, and a rank needs no such limit.
        f"[containers]\npids_limit = 0\n{limits}{private}"
        f'[engine]\nruntime = "runc"\nevents_logger = "file"\n{manager}'
        '[network]\nnetwork_backend = "netavark"\n'
    )


def subnet_conflicts(config: LabConfig) -> list[str]:
    """Routes of this host that overlap the lab's subnet, as text."""
    routes = json.loads(run(["ip", "-json", "-4", "route"]).stdout or "[]")
    found = []
    for route in routes:
        if route["dst"] != "default" and ipaddress.ip_network(route["dst"], strict=False).overlaps(config.subnet):
            found.append(f"{route['dst']} dev {route.get('dev', '?')}")
    return found
