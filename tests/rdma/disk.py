"""The disk of the test machine: Debian with its own kernel and Soft-RoCE, kept in the user's cache.

Its name is a hash of everything that goes into it: made once, never changed, used by any number of machines at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from k3deploy.lab.bootstrap import EXCLUDED, RELEASE, RootRecipe, discard, make_root
from k3deploy.lab.process import one_at_a_time, run

# What this machine needs to make the disk and to run it.
TOOLS = ("qemu-system-x86", "qemu-utils", "seabios", "e2fsprogs", "util-linux", "openssh-client")
_PACKAGES = (
    *("linux-image-amd64", "tiny-initramfs", "systemd", "systemd-sysv", "dbus", "udev", "kmod"),
    *("openssh-server", "python3", "sudo", "iproute2", "procps"),
    *("libgomp1", "libibverbs1", "ibverbs-providers", "libssl3"),
    *("rdma-core", "ibverbs-utils", "perftest"),
)
# Most of the kernel's modules drive hardware that this machine does not have.
_NO_MODULES = tuple(
    f"/lib/modules/*/kernel/{folder}"
    for folder in ("sound/*", "drivers/[!bcinv]*", "drivers/net/[!nfv]*", "drivers/infiniband/hw/*", "fs/[!ejm]*")
)
_SIZE = "1200M"

_SETUP = """\
#!/bin/sh
set -eu
: > /etc/machine-id
echo k3rdma > /etc/hostname
echo "127.0.0.1 localhost k3rdma" > /etc/hosts
rm -f /etc/ssh/ssh_host_* /var/lib/dbus/machine-id
modules=virtio_pci,virtio_blk,ext4
mktirfs -o /boot/initrd --auto-modules=no --microcode=no --include-modules=$modules "$(ls /lib/modules)"
cp -L /vmlinuz /boot/kernel
printf '%s\\n' crc32_generic crc32-pclmul rdma_rxe virtio_net virtio_rng > /etc/modules-load.d/machine.conf
cat > /etc/ssh/sshd_config.d/machine.conf <<'SSHD'
HostKey /etc/ssh/ssh_host_ed25519_key
PasswordAuthentication no
PermitRootLogin prohibit-password
UsePAM no
UseDNS no
MaxSessions 64
SSHD
mkdir -p /etc/systemd/journald.conf.d
printf '[Journal]\\nStorage=volatile\\n' > /etc/systemd/journald.conf.d/machine.conf
cat > /usr/local/sbin/machine-network <<'SH'
#!/bin/sh
# Addresses of this machine. Number 0 boots with them; another number makes a second machine of a copy of the first.
#   eth0  the way in            no RDMA device
#   eth1  a second cable        rxe0, the first device that a program finds
#   eth2  the fabric            rxe1: sixteen addresses, each a rank's own
set -eu
number=$1
{
  echo link set lo up
  echo link set eth0 up
  echo addr replace 10.0.2.15/24 dev eth0
  for nic in 1 2; do
    echo "addr flush dev eth$nic"
    echo "link set eth$nic address 52:54:00:00:0$nic:0$number mtu 9000"
    echo "link set eth$nic up"
  done
  echo "addr add 10.98.0.$((number * 16 + 10))/24 dev eth1"
  for rank in $(seq 0 15); do echo "addr add 10.99.0.$((number * 16 + 10 + rank))/24 dev eth2"; done
} | ip -batch -
for nic in 1 2; do
  [ -e "/sys/class/infiniband/rxe$((nic - 1))" ] || rdma link add "rxe$((nic - 1))" type rxe netdev "eth$nic"
done
SH
chmod 755 /usr/local/sbin/machine-network
cat > /etc/systemd/system/machine-network.service <<'UNIT'
[Unit]
Description=Addresses, Soft-RoCE devices and the disk beside the system
DefaultDependencies=no
After=systemd-modules-load.service systemd-udevd.service
Before=network.target ssh.service
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/local/sbin/machine-network 0
ExecStart=/bin/mount -o ro /dev/vdb /srv
[Install]
WantedBy=multi-user.target
UNIT
# Candidates are bound to the rank's guard. Looking at memory several times a second takes this processor more than the
# candidates do, and its watchdog cannot tell busy cores from a hanging guard: here it is a process that does nothing.
mkdir -p /etc/systemd/system/k3-candidate-guard.service.d
cat > /etc/systemd/system/k3-candidate-guard.service.d/machine.conf <<'UNIT'
[Service]
Type=exec
WatchdogSec=0
ExecStart=
ExecStart=/bin/sleep infinity
UNIT
systemctl enable machine-network.service ssh.service
systemctl mask apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer \\
  e2scrub_reap.service fstrim.timer getty.target systemd-firstboot.service systemd-logind.service \\
  systemd-binfmt.service systemd-pstore.service systemd-update-utmp.service systemd-update-utmp-runlevel.service \\
  systemd-user-sessions.service systemd-timesyncd.service systemd-random-seed.service \\
  systemd-journal-flush.service systemd-sysusers.service modprobe@drm.service modprobe@fuse.service \\
  rdma-ndd.service systemd-udev-trigger.service systemd-remount-fs.service systemd-fsck-root.service \\
  sys-kernel-debug.mount sys-kernel-tracing.mount dev-hugepages.mount dev-mqueue.mount \\
  sys-fs-fuse-connections.mount
systemctl set-default multi-user.target
"""


@dataclass(frozen=True, slots=True)
class Disk:
    """A system to boot: its files, and the keys that its ssh knows."""

    folder: Path

    @property
    def image(self) -> Path:
        return self.folder / "disk.img"

    @property
    def kernel(self) -> Path:
        return self.folder / "kernel"

    @property
    def initrd(self) -> Path:
        return self.folder / "initrd"

    @property
    def private_key(self) -> Path:
        return self.folder / "id_ed25519"

    @property
    def host_key(self) -> str:
        """The machine's public key, made with the disk: pinned, never learnt over the network."""
        return (self.folder / "ssh_host_ed25519_key.pub").read_text(encoding="ascii").strip()


def digest(*parts: object) -> str:
    """Sixteen hex digits of what JSON can hold."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


@contextlib.contextmanager
def made_once(final: Path) -> Iterator[Path | None]:
    """A folder to fill, which takes its final name when the block ends well; None when ``final`` is there already.

    Two processes that want the same one: the second waits, and finds it made.
    """
    with one_at_a_time(final.parent / f".{final.name}.lock"):
        if final.exists():
            yield None
            return
        for leftover in final.parent.glob(f".{final.name}-*"):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
        try:
            yield unfinished
            unfinished.rename(final)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def ensure_disk(cache: Path, *, root: Sequence[str], progress: Callable[[str], None]) -> Disk:
    """The disk of this recipe; making it takes a minute, most of it dpkg's. ``root`` makes a command run as root."""
    recipe = RootRecipe(_PACKAGES, _SETUP, (*EXCLUDED, *_NO_MODULES))
    final = cache / f"disk-{digest(RELEASE, recipe.packages, recipe.setup, recipe.excluded, _SIZE)}"
    with made_once(final) as folder:
        if folder is not None:
            progress("making the test machine's disk (a minute or two)")
            _make(folder, recipe, cache / f"building-{final.name}", cache / "debs", root)
    return Disk(final)


def _make(folder: Path, recipe: RootRecipe, work: Path, debs: Path, root: Sequence[str]) -> None:
    tree = work / "root"
    discard(work, root=root)  # of a run that was killed
    for name in ("id_ed25519", "ssh_host_ed25519_key"):
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "k3deploy test machine", "-f", str(folder / name)])
    try:
        make_root(recipe, tree, form="directory", root=root, work=work, packages_dir=debs)
        run([*root, "mkdir", "-p", "-m", "700", str(tree / "root/.ssh")])
        owner = ("-o", "root", "-g", "root", "-m", "600")
        run([*root, "install", *owner, str(folder / "id_ed25519.pub"), str(tree / "root/.ssh/authorized_keys")])
        run([*root, "install", *owner, str(folder / "ssh_host_ed25519_key"), str(tree / "etc/ssh")])
        for name in ("kernel", "initrd"):
            run([*root, "install", "-m", "644", str(tree / "boot" / name), str(folder)])
        run([*root, "rm", "-rf", str(tree / "boot"), str(tree / "var/lib/apt/lists"), str(tree / "var/cache/apt")])
        make_image(folder / "disk.img", tree, _SIZE, root=root)
        run([*root, "chown", "-R", f"{os.getuid()}:{os.getgid()}", str(folder)])
    finally:
        discard(work, root=root)


def make_image(image: Path, tree: Path, size: str, *, root: Sequence[str] = ()) -> None:
    """An ext4 file system of ``size`` that holds ``tree``; needs no mount."""
    mke2fs = ["mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-E", "lazy_itable_init=0", "-d", str(tree)]
    run([*root, *mke2fs, str(image), size])
