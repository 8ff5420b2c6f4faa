"""A test machine: QEMU with an emulated processor, driven over its monitor and ssh, gone with whoever started it.

The processor is always emulated: /dev/kvm exists on many machines where it cannot be used, and emulation is alike
on all.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disk import Disk

from k3deploy.errors import K3Error
from k3deploy.lab.process import run

_MEMORY_MIB = 2048
_BOOT_S = 180.0
# Fixed: a frozen machine only wakes in the same hardware. A model number newer than any QEMU in use would not start.
_HARDWARE = ("-M", "pc-q35-7.2", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", str(_MEMORY_MIB))
_KERNEL = "console=ttyS0 root=/dev/vda rw net.ifnames=0 mitigations=off nokaslr random.trust_cpu=on nowatchdog quiet"


def scratch() -> Path:
    """A new directory with a short path, for sockets. Removes those of processes that were killed."""
    base = Path(tempfile.gettempdir())
    for left in base.glob("k3rdma-*-*"):
        if not Path("/proc", left.name.split("-")[1]).exists():
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"k3rdma-{os.getpid()}-", dir=base))


def qemu_version() -> str:
    return run(["qemu-system-x86_64", "--version"]).stdout.splitlines()[0]


def hardware_key() -> list[str]:
    """What a frozen machine depends on beside its disks."""
    return [qemu_version(), *_HARDWARE, _KERNEL]


@dataclass(frozen=True, slots=True)
class Frozen:
    """A machine as it was at one moment: what it had written on its disk, its memory, and the disk beside it."""

    folder: Path

    @property
    def overlay(self) -> Path:
        return self.folder / "overlay.qcow2"

    @property
    def memory(self) -> Path:
        return self.folder / "memory"

    @property
    def payload(self) -> Path:
        return self.folder / "payload.img"


class Machine:
    """One running machine. A context manager: killed at the end, and by the kernel if this process dies first.

    ``payload`` is a read-only disk that the machine mounts at /srv. ``fabric`` is the path of a socket that joins two
    machines' fabrics: (own, the other's).
    """

    def __init__(
        self,
        disk: Disk,
        payload: Path,
        *,
        wake: Frozen | None = None,
        fabric: tuple[Path, Path] | None = None,
    ) -> None:
        self.disk = disk
        self.place = scratch()
        self._wake = wake
        self._process: subprocess.Popen[bytes] | None = None
        self._monitor: Monitor | None = None
        self._overlay = self.place / "overlay.qcow2"
        self._argv = self._command(payload, fabric)

    def _command(self, payload: Path, fabric: tuple[Path, Path] | None) -> list[str]:
        wire = "hubport,id=n2,hubid=2"
        if fabric is not None:
            own, other = fabric
            wire = f"dgram,id=n2,local.type=unix,local.path={own},remote.type=unix,remote.path={other}"
        argv = [
            # The kernel kills QEMU with its parent, however that ends.
            *("setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64"),
            *(*_HARDWARE, "-nodefaults", "-no-user-config", "-display", "none"),
            *("-kernel", str(self.disk.kernel), "-initrd", str(self.disk.initrd), "-append", _KERNEL),
            *("-drive", f"file={self._overlay},format=qcow2,if=virtio,cache=unsafe"),
            *("-drive", f"file={payload},format=raw,if=virtio,readonly=on"),
            *("-netdev", "user,id=n0,ipv6=off,restrict=on,hostfwd=tcp:127.0.0.1:0-:22"),
            *("-netdev", "hubport,id=n1,hubid=1", "-netdev", wire),
            *(part for nic in range(3) for part in ("-device", f"virtio-net-pci,id=nic{nic},netdev=n{nic},romfile=")),
            *("-device", "virtio-rng-pci"),
            *("-serial", f"file:{self.place / 'console'}"),
            *("-qmp", f"unix:{self.place / 'qmp'},server=on,wait=off"),
        ]
        if self._wake is not None:
            argv += ["-incoming", f"exec:cat {self._wake.memory}"]
        return argv

    # -- life ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Machine:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Boot, or wake; returns when the machine answers over ssh."""
        base, form = (self._wake.overlay, "qcow2") if self._wake else (self.disk.image, "raw")
        run(["qemu-img", "create", "-q", "-f", "qcow2", "-b", str(base), "-F", form, str(self._overlay)])
        with (self.place / "qemu.log").open("wb") as log:
            # A session of its own: Ctrl-C is for pytest, which then closes the machine in order.
            self._process = subprocess.Popen(self._argv, stdout=log, stderr=log, start_new_session=True)
        self._monitor = Monitor(self.place / "qmp", self._alive)
        self._write_ssh_config(self._forwarded_port())
        if self._wake is not None:
            while self._monitor.ask("query-status")["status"] == "inmigrate":
                self._alive()
                time.sleep(0.05)
            self._monitor.ask("cont")
        self._wait_for_ssh()
        if self._wake is not None:
            self.sh(f"date -s @{time.time():.0f} >/dev/null")

    def close(self) -> None:
        """Kill the machine and remove its files; safe at any time and twice."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(timeout=30)
        if self._monitor is not None:
            self._monitor.close()
        if (self.place / "ssh").exists():
            run([*self.ssh, "-O", "exit"], check=False)
        shutil.rmtree(self.place, ignore_errors=True)

    def freeze(self, folder: Path) -> None:
        """Write what `wake` needs to ``folder`` and end the machine. The payload is the caller's to put beside it."""
        assert self._monitor is not None and self._process is not None
        frozen = Frozen(folder)
        self.sh("sync; echo 3 > /proc/sys/vm/drop_caches")
        self._monitor.ask("stop")
        self._monitor.ask("migrate-set-parameters", **{"max-bandwidth": 0})
        self._monitor.ask("migrate", uri=f"exec:cat > {frozen.memory}")
        deadline = time.monotonic() + 120
        while (state := self._monitor.ask("query-migrate")["status"]) != "completed":
            if state in ("failed", "cancelled") or time.monotonic() > deadline:
                raise K3Error(f"the test machine could not be frozen: {state}")
            time.sleep(0.1)
        self._monitor.ask("quit")
        self._process.wait(timeout=30)
        shutil.move(self._overlay, frozen.overlay)

    # -- reaching it ---------------------------------------------------------------------------------------------

    @property
    def ssh(self) -> list[str]:
        return ["ssh", "-F", str(self.place / "ssh"), "machine"]

    @property
    def ssh_config(self) -> Path:
        return self.place / "ssh"

    def sh(self, script: str, *, timeout_s: float = 60.0, check: bool = True) -> str:
        """Run a shell script as root; what it prints. Raises K3Error with the end of what it said."""
        return run([*self.ssh, "sh -eu"], stdin=script, timeout_s=timeout_s, check=check).stdout

    def put(self, folder: str, archive: bytes) -> None:
        """Unpack a compressed tar archive in ``folder``."""
        command = f"mkdir -p {folder} && tar --extract --gzip --directory {folder}"
        subprocess.run([*self.ssh, command], input=archive, check=True, timeout=120)

    def _alive(self) -> None:
        if self._process is None or self._process.poll() is not None:
            said = (self.place / "qemu.log").read_text(errors="replace").strip()[-500:]
            raise K3Error(f"QEMU ended: {said or 'without a word'}")

    def _forwarded_port(self) -> int:
        """The port that QEMU chose: asked for, so that no two machines can want the same."""
        assert self._monitor is not None
        said = self._monitor.ask("human-monitor-command", **{"command-line": "info usernet"})
        found = re.search(r"HOST_FORWARD\]\s+\d+\s+127\.0\.0\.1\s+(\d+)", said)
        assert found, said
        return int(found[1])

    def _write_ssh_config(self, port: int) -> None:
        (self.place / "known_hosts").write_text(f"[127.0.0.1]:{port} {self.disk.host_key}\n")
        self.ssh_config.write_text(
            f"Host machine\n  HostName 127.0.0.1\n  Port {port}\n  User root\n  IdentitiesOnly yes\n"
            f"  IdentityFile {self.disk.private_key}\n  UserKnownHostsFile {self.place / 'known_hosts'}\n"
            "  GlobalKnownHostsFile /dev/null\n  StrictHostKeyChecking yes\n  BatchMode yes\n"
            # One key exchange of the newest kind takes this processor seconds, and on busy cores a minute.
            "  ConnectTimeout 120\n  KexAlgorithms curve25519-sha256\n"
            f"  LogLevel ERROR\n  ControlMaster auto\n  ControlPath {self.place / 'cm'}\n  ControlPersist 600\n"
        )

    def _wait_for_ssh(self) -> None:
        deadline = time.monotonic() + _BOOT_S
        while True:
            self._alive()
            try:
                if run([*self.ssh, "true"], check=False, timeout_s=150).returncode == 0:
                    return
            except K3Error:
                pass  # no answer yet
            if time.monotonic() > deadline:
                console = (self.place / "console").read_text(errors="replace")[-1500:]
                raise K3Error(f"no ssh after {_BOOT_S:.0f} s; the console's end:\n{console}")
            time.sleep(0.2)


class Monitor:
    """QEMU's machine protocol: one JSON question, one answer; events in between are nobody's concern here."""

    def __init__(self, path: Path, alive: Callable[[], None], patience_s: float = 20.0) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(patience_s)
        deadline = time.monotonic() + patience_s
        while True:
            alive()
            try:
                self._socket.connect(str(path))
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        self._lines = self._socket.makefile("r")
        self._lines.readline()  # its greeting
        self.ask("qmp_capabilities")

    def ask(self, command: str, **arguments: Any) -> Any:
        """What QEMU returns. Raises K3Error with QEMU's words when it refuses."""
        self._socket.sendall(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
        for line in self._lines:
            answer = json.loads(line)
            if "error" in answer:
                raise K3Error(f"QEMU: {command}: {answer['error']['desc']}")
            if "return" in answer:
                return answer["return"]
        if command == "quit":
            return None
        raise K3Error(f"QEMU: {command}: it ended before it answered")

    def close(self) -> None:
        self._lines.close()
        self._socket.close()
