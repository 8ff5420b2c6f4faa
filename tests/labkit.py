"""What tests on a lab share: a lab of a given name, and a real llama.cpp release for its ranks.

As a program (`python tests/labkit.py`), brings the lab up that K3DEPLOY_LAB names and prints what is in it as JSON; for
Molecule's create step.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from k3deploy import inventory as inventories
from k3deploy.build_key import build_key
from k3deploy.inventory import BuildSpec
from k3deploy.lab.cluster import Lab
from k3deploy.lab.model import SPECS
from k3deploy.lab.model_cache import ensure_model
from k3deploy.lab.process import one_at_a_time
from k3deploy.lab.source import ensure_source
from k3deploy.paths import write_json
from k3deploy.runner import run_playbook

ROOT = Path(__file__).resolve().parents[1]
LAB_INVENTORY = ROOT / "inventory" / "lab"
_RANK_SOURCES = "/srv/src"  # where the builder sees the cache's src/


@dataclass(frozen=True, slots=True)
class Release:
    """A build of the lab inventory's llama.cpp: bin/, lib/ and manifest.json."""

    build_id: str
    directory: Path  # on this machine
    rank_path: str  # the same files as the builder rank sees them, read-only: fit for a source of kind prebuilt


def lab_named(name: str, environ: Mapping[str, str] = os.environ) -> Lab:
    """A lab apart from the one that the environment names; its subnet follows from its name."""
    kept = {key: value for key, value in environ.items() if key != "K3DEPLOY_LAB_SUBNET"}
    return Lab.from_environment({**kept, "K3DEPLOY_LAB": name})


@contextmanager
def lab_up(lab: Lab, progress: Callable[[str], None] = print) -> Iterator[Lab]:
    """The lab, up; taken down at the end, failure and Ctrl-C included."""
    try:
        lab.up(progress=progress)
        yield lab
    finally:
        lab.down()


@contextmanager
def one_compiler(lab: Lab) -> Iterator[None]:
    """Only one test process at a time compiles llama.cpp: the next one finds all of it in the compiler's cache."""
    with one_at_a_time(lab.config.cache_dir / "ccache/one-at-a-time.lock"):
        yield


def lab_build() -> tuple[str, BuildSpec]:
    """Name and spec of the lab inventory's own build."""
    cluster = inventories.load(LAB_INVENTORY)
    return cluster.build, cluster.builds[cluster.build]


def kept_release(cache_dir: Path, spec: BuildSpec) -> Release | None:
    """The release of a build, where the user's cache has it whole."""
    for folder in sorted((cache_dir / "src" / "builds").glob(f"{build_key(spec)}-*")):
        if _intact(folder):
            return Release(folder.name, folder, f"{_RANK_SOURCES}/builds/{folder.name}")
    return None


def built_release(lab: Lab, progress: Callable[[str], None] = print) -> Release:
    """The release of the lab inventory's own build, compiled in ``lab`` (which must be up) where the cache lacks it."""
    name, spec = lab_build()
    return built_releases(lab, {name: spec}, progress)[name]


def built_releases(
    lab: Lab, specs: Mapping[str, BuildSpec], progress: Callable[[str], None] = print
) -> dict[str, Release]:
    """A release of each build by name, compiled by playbooks/build.yml in ``lab``.

    Kept in the user's cache under its build id: compiled once for all labs, and again only when the build's key changes
    or a kept file was damaged. Minutes without a compiler cache, well under one with it.
    """
    cache = lab.config.cache_dir
    lacking = {name: spec for name, spec in specs.items() if kept_release(cache, spec) is None}
    if lacking:
        with one_compiler(lab):
            ensure_source(cache / "src", progress=progress)
            progress(f"compiling llama.cpp in the lab: {', '.join(lacking)}")
            builds = {
                build_key(spec): {"name": name, **spec.model_dump(mode="json", exclude_none=True)}
                for name, spec in lacking.items()
            }
            _build(lab, builds)
            for key in builds:
                _fetch_build(lab, key, cache / "src" / "builds")
    found = {name: kept_release(cache, spec) for name, spec in specs.items()}
    return {name: release for name, release in found.items() if release is not None}


def _intact(folder: Path) -> bool:
    """Whether a kept release holds every file as its manifest has it."""
    try:
        files = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["files"]
        return all(_sha256(folder / name) == item["sha256"] for name, item in files.items())
    except (OSError, ValueError, KeyError):
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as raw:
        return hashlib.file_digest(raw, "sha256").hexdigest()


def _build(lab: Lab, builds: dict[str, Any]) -> None:
    """Run playbooks/build.yml for ``builds`` on the lab's builder, through the lab's own connection."""
    with tempfile.TemporaryDirectory(prefix="k3deploy-build-") as place:
        layer = Path(place) / "run.yml"
        write_json(layer, {"all": {"vars": {"k3_run_builds": builds}}})  # JSON is YAML
        # Extra variables: inventory/lab reads the lab's name from the environment, which may name another.
        connection = {"lab_name": lab.config.name, "lab_state_dir": str(lab.config.state_dir)}
        layers = [LAB_INVENTORY, lab.config.inventory_dir, layer]
        result = run_playbook("build", layers, connection, artifacts_dir=Path(place))
        if not result.ok:
            failures = "\n".join(str(failure) for failure in [*result.unreachable, *result.failures])
            raise AssertionError(f"the build failed\n{failures}")


def _fetch_build(lab: Lab, key: str, kept: Path) -> str:
    """Copy the build with ``key`` from the builder into ``kept``; whole under its name or not there. Returns its id."""
    ssh = ["ssh", "-F", str(lab.config.ssh_config), next(rank.name for rank in lab.config.ranks if rank.is_builder)]
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept, prefix=".fetch-") as place:
        archive = Path(place) / "build.tar"
        with archive.open("wb") as sink:
            command = f"cd /opt/k3deploy/builds && tar --create --dereference {key}-*"
            subprocess.run([*ssh, command], stdout=sink, check=True, timeout=120)
        subprocess.run(
            ["tar", "--extract", "--file", str(archive), "--directory", place, "--no-same-owner"], check=True
        )
        (folder,) = Path(place).glob(f"{key}-*")
        assert _intact(folder), f"{folder.name} was damaged on its way"
        shutil.rmtree(kept / folder.name, ignore_errors=True)
        folder.rename(kept / folder.name)
        return folder.name


def main() -> int:
    """Bring the lab up with a tiny model and a release; say where they are."""

    def say(line: str) -> None:
        sys.stderr.write(f"{line}\n")

    lab = lab_named(os.environ["K3DEPLOY_LAB"])
    lab.up(progress=say)
    release = built_release(lab, progress=say)
    model = ensure_model(lab.config.cache_dir / "models", SPECS["tiny"], 7, "f16")
    facts = {
        "release": {**asdict(release), "directory": str(release.directory)},
        "model": {"path": f"/srv/models/{model.path.name}", "sha256": model.sha256},
        "inventory": str(lab.config.inventory_dir),
        "ssh_config": str(lab.config.ssh_config),
    }
    sys.stdout.write(json.dumps(facts, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
