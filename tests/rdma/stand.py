"""What a test machine is made of, and the machine with the project's roles applied to it, ready to wake.

``python tests/rdma/stand.py`` wakes one, opens a shell on it, and ends it with the shell.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cases
import pytest
from disk import TOOLS, Disk, digest, ensure_disk, made_once, make_image
from labkit import ROOT, Release, built_releases, kept_release, lab_build, lab_named, lab_up
from machine import Frozen, Machine, hardware_key

from k3deploy.errors import K3Error
from k3deploy.inventory import BuildSpec
from k3deploy.lab import bootstrap
from k3deploy.lab.config import lab_config
from k3deploy.lab.engine import Engine
from k3deploy.lab.host import decide, probe
from k3deploy.lab.model import SPECS
from k3deploy.lab.model_cache import ModelFile, ensure_model
from k3deploy.lab.packages import ensure_packages
from k3deploy.paths import write_json
from k3deploy.plan.transport import with_ring
from k3deploy.runner import run_playbook

HERE = Path(__file__).parent
LAB = "k3rdma"  # brought up only to compile what the cache lacks
COLLECTION = ROOT / "collections/ansible_collections/k3/deploy"
_APPLIED = ("base", "build", "install", "guard", "worker", "head", "benchmark")
_PAYLOAD_SIZE = "192M"
# Memory of frozen machines adds up; some are kept for those who go back and forth between two states of the tree.
_KEPT = 2


@dataclass(frozen=True, slots=True)
class Stand:
    """A disk, and the machine that was frozen with the roles applied to it."""

    disk: Disk
    frozen: Frozen
    layer: dict[str, Any]  # the inventory that was applied

    def wake(self, fabric: tuple[Path, Path] | None = None) -> Machine:
        return Machine(self.disk, self.frozen.payload, wake=self.frozen, fabric=fabric)


def cache_dir() -> Path:
    return lab_config(os.environ).cache_dir


def install_tools(progress: Callable[[str], None]) -> tuple[str, ...]:
    """Install what is missing; returns what makes a command run as root. Raises K3Error where no machine can run."""
    if platform.machine() != "x86_64":
        raise K3Error(f"it runs this machine's own builds on an x86_64 processor, and this is {platform.machine()}")
    decision = decide(probe())
    root = Engine(lab_config(os.environ), decision).root
    if decision.can_install:
        ensure_packages((*TOOLS, *bootstrap.TOOLS), root=root, progress=progress, confirm=lambda _: True)
    elif shutil.which("qemu-system-x86_64") is None:
        raise K3Error("QEMU is not installed, and there is no apt-get to install it with")
    return root


def prepare(root: Sequence[str], progress: Callable[[str], None]) -> Stand:
    """A machine that is ready to wake, made as far as it is not there yet. ``root`` makes a command run as root.

    From nothing: the disk (a minute or two), llama.cpp's builds (minutes without a compiler cache), a boot and the
    roles (two minutes).
    """
    place = cache_dir() / "rdma"
    disk = ensure_disk(place, root=root, progress=progress)
    releases = ensure_builds(progress)
    model = ensure_model(cache_dir() / "models", replace(SPECS["tiny"], name="rdma", n_layer=8), 7, "q8_0")
    layer = run_layer(releases, model)
    # Inside of the disk's folder: without the disk below it, it is nothing.
    final = disk.folder / f"applied-{digest(hardware_key(), layer, _recipe())}"
    with made_once(final) as folder:
        if folder is not None:
            _apply(folder, disk, releases, model, layer, progress)
    for kept, kind in ((final, "applied-*"), (disk.folder, "disk-*")):
        kept.touch()
        _drop_old(kept.parent, kind)
    return Stand(disk, Frozen(final), layer)


def ensure_builds(progress: Callable[[str], None]) -> dict[str, Release]:
    """The lab's own portable build, and one for each ring; only the RPC library differs."""
    specs = build_specs()
    kept = {name: kept_release(cache_dir(), spec) for name, spec in specs.items()}
    if all(kept.values()):
        return {name: release for name, release in kept.items() if release is not None}
    with lab_up(lab_named(LAB), progress) as lab:
        return built_releases(lab, specs, progress)


def build_specs() -> dict[str, BuildSpec]:
    stock = lab_build()[1]
    patched = stock.model_copy(update={"patch_sets": [*stock.patch_sets, "u5-rdma-chunk"]})
    rings = {ring: with_ring("u5", patched, {"rdma_ring": ring})[1] for ring in cases.RINGS}
    return {cases.STOCK: stock, **rings}


def _recipe() -> str:
    """A hash of what Ansible applies."""
    folders = [*(COLLECTION / "roles" / name for name in _APPLIED), COLLECTION / "plugins"]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix not in (".pyc", ".md")]
    files += [ROOT / "playbooks/build.yml", ROOT / "playbooks/install.yml", HERE / "apply.yml"]
    whole = hashlib.sha256()
    for path in sorted(path for path in files if path.is_file()):
        whole.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return whole.hexdigest()


def run_layer(releases: Mapping[str, Release], model: ModelFile) -> dict[str, Any]:
    """The inventory: one machine that is head and workers at once, with an arm for every process of every case."""
    keys = {name: digest(name) for name in releases}
    builds = {
        keys[name]: {
            "name": name.replace("x", "_"),
            "source": {"kind": "prebuilt", "path": f"/srv/builds/{release.build_id}"},
            "backend": "cpu",
            "targets": ["ggml-rpc-server", "llama-server"],
        }
        for name, release in releases.items()
    }
    host = {
        "k3_fabric_address": cases.HEAD_ADDRESS,
        "k3_local_worker": True,
        "k3_run_processes": cases.processes(f"/srv/models/{model.path.name}"),
    }
    groups = ("head", "workers", "builder", "ranks")
    return {
        "all": {
            "vars": {
                "ansible_host": "machine",
                "ansible_python_interpreter": "/usr/bin/python3",
                "k3_cluster": "soft-roce",
                "k3_devices": ["char-infiniband_verbs"],
                "k3_transport": {"require": "rdma"},
                "k3_run_id": "soft-roce",
                "k3_run_arms": [
                    {"name": slug, "slug": slug, "build_key": keys[build]} for slug, build in cases.arms().items()
                ],
                "k3_run_builds": builds,
            },
            "hosts": {"rank0": host},
            "children": {group: {"hosts": {"rank0": {}}} for group in groups},
        }
    }


def _apply(
    folder: Path,
    disk: Disk,
    releases: Mapping[str, Release],
    model: ModelFile,
    layer: dict[str, Any],
    progress: Callable[[str], None],
) -> None:
    """Boot, apply build and install as an operator would, arm the guard, freeze."""
    frozen = Frozen(folder)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        tree = Path(scratch) / "srv"
        for release in releases.values():
            shutil.copytree(release.directory, tree / "builds" / release.build_id)
        (tree / "models").mkdir()
        shutil.copy(model.path, tree / "models")
        make_image(frozen.payload, tree, _PAYLOAD_SIZE)
    progress("booting the test machine")
    with Machine(disk, frozen.payload) as machine, tempfile.TemporaryDirectory() as scratch:
        progress("applying the roles")
        play(HERE / "apply.yml", {"rank0": machine}, layer, Path(scratch))
        machine.freeze(folder)


def play(playbook: Path, machines: Mapping[str, Machine], layer: Mapping[str, Any], place: Path) -> None:
    """Run a playbook against machines by their names in the inventory, with the project's own settings of Ansible."""
    inventory = place / "inventory.yml"
    ways = {
        name: {
            "ansible_ssh_common_args": f"-F {at.ssh_config}",
            # Apart: Ansible names control sockets by host, and every machine is called the same.
            "ansible_control_path_dir": str(at.place),
            # A machine on busy cores may take minutes to answer what asks whether it is alive.
            "ansible_ssh_args": "-o ControlMaster=auto -o ControlPersist=600s",
            "ansible_become": False,  # root already, and sudo costs this processor half a second
        }
        for name, at in machines.items()
    }
    write_json(inventory, layer)  # JSON is YAML
    write_json(place / "ways.yml", {"all": {"hosts": ways}})
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ANSIBLE_CONFIG", str(ROOT / "ansible.cfg"))
        layers = [inventory, place / "ways.yml"]
        result = run_playbook(playbook, layers, {"k3_run_dir": str(place)}, artifacts_dir=place)
    assert result.ok, "\n".join(str(failure) for failure in [*result.unreachable, *result.failures])


def _drop_old(place: Path, kind: str) -> None:
    """Remove all but the newest few; a machine that still runs keeps its open files."""
    made = sorted(place.glob(kind), key=lambda folder: folder.stat().st_mtime)
    for folder in made[:-_KEPT]:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    def say(line: str) -> None:
        sys.stderr.write(f"{line}\n")

    with prepare(install_tools(say), say).wake() as machine:
        return subprocess.run(machine.ssh, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
