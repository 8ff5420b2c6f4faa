"""The image of a rank: Debian 12 with systemd and ssh, and the toolchain that the builder rank needs.

Built FROM debian:12 where a registry answers, and with mmdebstrap where none does. The recipe's hash is the
image's tag, so a changed recipe is a new image and an unchanged one is never made twice.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from k3deploy.errors import K3Error
from k3deploy.lab.bootstrap import EXCLUDED, RELEASE, TOOLS, RootRecipe, discard, make_root
from k3deploy.lab.config import LabConfig
from k3deploy.lab.engine import Engine
from k3deploy.lab.process import one_at_a_time, run

BASE_IMAGE = "docker.io/library/debian:12"
RANK_PACKAGES = (
    "systemd",
    "systemd-sysv",
    "dbus",
    "python3",
    "python3-apt",
    "openssh-server",
    "iproute2",
    "sudo",
    "procps",
    "ca-certificates",
    "libgomp1",
    "libibverbs1",
    "libssl3",
)
BUILDER_PACKAGES = ("build-essential", "cmake", "ninja-build", "ccache", "libibverbs-dev", "patch", "git")

# Runs inside the new root. Host keys belong to a rank, not to the image: each makes its own before ssh starts.
_SETUP = """\
#!/bin/sh
set -eu
: > /etc/machine-id
rm -f /etc/ssh/ssh_host_* /var/lib/dbus/machine-id
cat > /etc/systemd/system/lab-host-keys.service <<'UNIT'
[Unit]
Description=Make this rank's ssh host keys
ConditionPathExists=!/etc/ssh/ssh_host_ed25519_key
Before=ssh.service
[Service]
Type=oneshot
ExecStart=/usr/bin/ssh-keygen -q -t ed25519 -N "" -f /etc/ssh/ssh_host_ed25519_key
[Install]
WantedBy=multi-user.target
UNIT
cat > /etc/ssh/sshd_config.d/lab.conf <<'SSHD'
HostKey /etc/ssh/ssh_host_ed25519_key
PasswordAuthentication no
PermitRootLogin prohibit-password
UseDNS no
MaxSessions 64
SSHD
systemctl enable lab-host-keys.service ssh.service
systemctl mask apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service \\
  fstrim.timer getty.target console-getty.service systemd-udevd.service systemd-firstboot.service
"""


def image_key() -> str:
    """Twelve hex digits that change with anything that goes into the image."""
    recipe = {
        "release": RELEASE,
        "arch": platform.machine(),
        "packages": [*RANK_PACKAGES, *BUILDER_PACKAGES],
        "excluded": EXCLUDED,
        "setup": _SETUP,
    }
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]


def image_reference() -> str:
    return f"localhost/k3deploy-lab:{image_key()}"


def work_dir(config: LabConfig) -> Path:
    """Where an image is being made; its path is also how a build that lost its parent is recognised."""
    return config.cache_dir / "images" / f"building-{config.name}"


def ensure_image(
    config: LabConfig, engine: Engine, *, progress: Callable[[str], None], install: Callable[[tuple[str, ...]], None]
) -> bool:
    """Make the engine have the image; True when it had to be made or loaded.

    ``install`` gets the packages for a build without a registry, and is called only when one is needed.
    """
    reference = image_reference()
    if engine.image_exists(reference):
        return False
    archive = config.cache_dir / "images" / f"{image_key()}.tar.zst"
    with one_at_a_time(archive.with_suffix(".lock"), lambda: progress("waiting for another lab that makes the image")):
        if engine.image_exists(reference):
            return False
        _make_image(archive, reference, config, engine, progress=progress, install=install)
    return True


def _make_image(
    archive: Path,
    reference: str,
    config: LabConfig,
    engine: Engine,
    *,
    progress: Callable[[str], None],
    install: Callable[[tuple[str, ...]], None],
) -> None:
    started = time.monotonic()
    if not archive.exists():
        if engine.pull(BASE_IMAGE):
            progress(f"building the image from {BASE_IMAGE}")
            _build_from_registry(engine, reference)
            progress(f"image built in {time.monotonic() - started:.0f} s")
            return
        progress("no container registry answers: making the image with mmdebstrap (half a minute to a few)")
        install(TOOLS)
        _bootstrap(config, engine, archive)
        progress(f"root file system made in {time.monotonic() - started:.0f} s")
    loading = time.monotonic()
    engine.import_archive(archive, reference)
    progress(f"image loaded in {time.monotonic() - loading:.0f} s")


def _build_from_registry(engine: Engine, reference: str) -> None:
    install = " ".join((*RANK_PACKAGES, *BUILDER_PACKAGES))
    excludes = " ".join(f"-o Dpkg::Options::=--path-exclude={pattern}" for pattern in EXCLUDED)
    recipe = f"""\
FROM {BASE_IMAGE}
COPY setup.sh /tmp/setup.sh
RUN apt-get -qq update \\
 && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends \\
    -o Dpkg::Options::=--force-unsafe-io {excludes} {install} \\
 && sh /tmp/setup.sh && rm -rf /tmp/setup.sh /var/lib/apt/lists/* /var/cache/apt/archives/*.deb
"""
    with tempfile.TemporaryDirectory(prefix="k3deploy-image-") as context:
        Path(context, "setup.sh").write_text(_SETUP)
        Path(context, "Containerfile").write_text(recipe)
        engine.build(Path(context), reference)


def _bootstrap(config: LabConfig, engine: Engine, archive: Path) -> None:
    """Write the root file system to ``archive``; downloaded packages stay in the cache for the next recipe."""
    work = work_dir(config)
    unfinished = work / "rootfs.tar.zst"
    try:
        make_root(
            RootRecipe((*RANK_PACKAGES, *BUILDER_PACKAGES), _SETUP),
            unfinished,
            form="tar",
            root=engine.root,
            work=work,
            packages_dir=config.cache_dir / "debs",
        )
    except K3Error as failed:
        raise K3Error(
            f"the image cannot be made: no registry has {BASE_IMAGE}, and mmdebstrap failed: {failed}",
            remedy="make a Debian mirror reachable (K3DEPLOY_DEBIAN_MIRROR=http://mirror/debian names another one)",
        ) from failed
    run([*engine.root, "chown", f"{os.getuid()}:{os.getgid()}", str(unfinished)])
    unfinished.rename(archive)
    discard_unfinished(config, engine)


def discard_unfinished(config: LabConfig, engine: Engine) -> None:
    """Stop an image build that lost its parent, and remove its files."""
    discard(work_dir(config), root=engine.root)


def purge_cache(config: LabConfig, engine: Engine) -> None:
    """Remove the image, the cached root file systems and the downloaded packages."""
    engine.remove_image(image_reference())
    for folder in (config.cache_dir / "images", config.cache_dir / "debs"):
        if folder.exists():
            run([*engine.root, "rm", "-rf", "--one-file-system", str(folder)])
