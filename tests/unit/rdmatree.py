"""Sysfs trees of hosts that are not at hand, made from manifests."""

from __future__ import annotations

import re
from pathlib import Path, PurePath

FIXTURES = Path(__file__).parents[1] / "fixtures/rdma"
SHAPES = sorted(path.stem for path in (FIXTURES / "sysfs").glob("*.manifest"))
MAX_INDEX = 7  # a GID table has 256 entries, nearly all of them unset


def make_tree(shape: str, folder: Path) -> Path:
    """Build a manifest's tree below ``folder``; returns its ``sys``. What the kernel refuses to read is a directory."""
    for line in (FIXTURES / f"sysfs/{shape}.manifest").read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#@"):
            continue
        name, value = line.split("\t", 1)
        span = re.search(r"(\d+)\.\.(\d+)$", name)
        numbers = range(int(span[1]), min(int(span[2]), MAX_INDEX) + 1) if span else [None]
        for number in numbers:
            _entry(folder, name if span is None else f"{name[: span.start()]}{number}", value)
    (folder / "sys").mkdir(exist_ok=True)
    return folder / "sys"


def _entry(folder: Path, name: str, value: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if value in ("dir", "!EINVAL"):
        path.mkdir(exist_ok=True)
    elif value.startswith("-> "):
        target = folder / re.sub(r"^(\.\./)+", "sys/", value[3:])
        target.mkdir(parents=True, exist_ok=True)
        path.symlink_to("../" * (len(PurePath(name).parts) - 1) + str(target.relative_to(folder)))
    else:
        path.write_text(value + "\n", encoding="utf-8")
