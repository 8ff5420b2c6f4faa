"""Faults before the window: what is installed is damaged, does not fit or does not arrive, and so is the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from faultkit import Fault, Rig

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("installed")]

BUILD = "f00dfeedf00dfeed-00000000"
RELEASES = "/opt/k3deploy/releases"
# What a rank runs from, and what an install that failed must not leave: its archive, or half a release.
INSTALLED = """\
readlink /opt/k3deploy/candidates/*/release
ls -A /opt/k3deploy/work | grep f00dfeed || true
ls -A /opt/k3deploy/releases | grep '^[.]f00dfeed' || true
"""
# A build of the test's own on the builder: a manifest of what is in bin/, printed.
MANIFEST = f"""
import hashlib, json, pathlib
root = pathlib.Path("/opt/k3deploy/builds/{BUILD}")
names = {{str(path.relative_to(root)): path.read_bytes() for path in root.glob("bin/*")}}
files = {{name: {{"sha256": hashlib.sha256(data).hexdigest(), "mode": "0755"}} for name, data in names.items()}}
print(json.dumps({{"build_id": "{BUILD}", "files": files}}))
"""


@contextmanager
def build(rig: Rig, make: str) -> Iterator[dict[str, Any]]:
    """Extra variables that install a build of the test's own: ``make`` fills bin/ on the builder, in that directory."""
    place = f"/opt/k3deploy/builds/{BUILD}"
    fill = f"set -e\nmkdir -p {place}/bin\ncd {place}/bin\n{make}\n"
    manifest = json.loads(rig.controller.on("rank0", f"{fill}python3 - <<'E'\n{MANIFEST}E\n"))
    try:
        yield {"install_manifests": {rig.layer["k3_run_arms"][0]["build_key"]: manifest}}
    finally:
        rig.controller.everywhere(f"rm -rf {place} {RELEASES}/{BUILD}")


def refused(fault: Fault, extra: dict[str, Any], *words: str) -> None:
    """An install that fails on a rank switches none, leaves nothing half behind and says why."""
    before = fault.rig.controller.everywhere(INSTALLED)
    done = fault.rig.apply("install", extra=extra)
    assert done.code == 1, done.said
    assert fault.rig.controller.everywhere(INSTALLED) == before
    fault.holds(done.code, done.said, *words)


@pytest.mark.parametrize(
    ("content", "mount", "why"),
    [
        pytest.param(
            *(
                "head -c 3000000 /dev/urandom",
                f"-t tmpfs -o size=1m,mode=755 none {RELEASES}",
                "No space left on device",
            ),
            marks=pytest.mark.fault("the disk of a rank is full", "install"),
            id="full",
        ),
        pytest.param(
            *("echo program", f"-o bind,ro {RELEASES} {RELEASES}", "Read-only file system"),
            marks=pytest.mark.fault("the target is read-only", "install"),
            id="read-only",
        ),
    ],
)
def test_disk_that_takes_nothing(fault: Fault, content: str, mount: str, why: str) -> None:
    lead = "rank1: Assemble and verify the release: release f00dfeedf00dfeed-00000000 was not installed"
    with build(fault.rig, f"{content} > llama-server") as extra, fault.rig.mounted("rank1", mount, RELEASES):
        refused(fault, extra, lead, why)


@pytest.mark.fault("an archive whose content is damaged", "install")
def test_damaged_archive(fault: Fault) -> None:
    with build(fault.rig, "echo program > llama-server") as extra:
        fault.rig.controller.on("rank0", f"echo damaged > /opt/k3deploy/builds/{BUILD}/bin/llama-server")
        refused(fault, extra, "after the transfer, its manifest says")


@pytest.mark.fault("a program for another processor", "install")
def test_another_processor(fault: Fault) -> None:
    foreign = (
        "cp /bin/true llama-server && printf '\\363\\0' | dd of=llama-server bs=1 seek=18 conv=notrunc status=none"
    )
    with build(fault.rig, foreign) as extra:
        refused(fault, extra, "bin/llama-server is for another processor (ELF machine 243")


@pytest.mark.fault("a program whose library is missing", "install")
def test_missing_library(fault: Fault) -> None:
    with build(fault.rig, "cp /opt/k3deploy/candidates/F1/release/bin/ggml-rpc-server .") as extra:
        refused(fault, extra, "bin/ggml-rpc-server needs ", "which this rank does not have")


@pytest.mark.fault("an installed file is damaged later", "the next install")
def test_damaged_after_install(fault: Fault) -> None:
    rig = fault.rig
    program = "/opt/k3deploy/candidates/F1/release/bin/ggml-rpc-server"
    whole = rig.controller.on("rank1", f"sha256sum {program}")
    rig.controller.on("rank1", f"printf X | dd of={program} bs=1 seek=4096 conv=notrunc status=none")
    assert rig.controller.on("rank1", f"sha256sum {program}") != whole
    said = rig.install()
    assert rig.controller.on("rank1", f"sha256sum {program}") == whole
    fault.holds(0, said, "changed: [rank1]")


# --- the model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(
            "printf X | dd of=$copy bs=1 seek=9000000 conv=notrunc status=none",
            marks=pytest.mark.fault("a model whose hash is wrong", "preflight"),
            id="one byte",
        ),
        pytest.param(
            "truncate -s 9000000 $copy", marks=pytest.mark.fault("a truncated GGUF", "preflight"), id="truncated"
        ),
    ],
)
def test_damaged_model(fault: Fault, damage: str) -> None:
    rig = fault.rig
    model = rig.layer["k3_model"]
    copy = "/opt/k3deploy/work/damaged.gguf"
    rig.controller.on("rank0", f"copy={copy}; cp {model['path']} $copy; {damage}")
    with rig.mounted("rank0", f"--bind {copy} {model['path']}", model["path"]):
        done = rig.apply("preflight")
    rig.controller.on("rank0", f"rm {copy}")
    assert done.code == 4, done.said
    fault.holds(done.code, done.said, f"the model {model['path']} has sha256", f"the inventory pins {model['sha256']}")
