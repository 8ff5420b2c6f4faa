"""A Debian root file system made with mmdebstrap, from any Debian mirror and without a container registry."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from k3deploy.lab.process import kill_matching, one_at_a_time, run

RELEASE = "bookworm"
# What makes it, where that is missing.
TOOLS = ("mmdebstrap", "debian-archive-keyring", "zstd")
EXCLUDED = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*")


@dataclass(frozen=True, slots=True)
class RootRecipe:
    """What goes into a root file system. ``setup`` is a shell script that runs inside of it, at the end."""

    packages: tuple[str, ...]
    setup: str
    excluded: tuple[str, ...] = EXCLUDED


def make_root(
    recipe: RootRecipe,
    target: Path,
    *,
    form: Literal["tar", "directory"],
    root: Sequence[str],
    work: Path,
    packages_dir: Path,
) -> None:
    """Write the root file system to ``target``: a compressed tar file by its suffix, or a directory.

    ``root`` is the prefix that makes a command run as root; what is written belongs to root. Downloaded packages stay
    in ``packages_dir``, which one recipe at a time uses, for the next. The build runs in its own process and mount
    namespaces: when its first process goes, all of it goes, mounts too; ``discard`` finds one that lost its parent by
    ``work``. Raises K3Error.
    """
    mirror = os.environ.get("K3DEPLOY_DEBIAN_MIRROR", "")
    for folder in (work, packages_dir):
        folder.mkdir(parents=True, exist_ok=True)
    setup = work / "setup.sh"
    setup.write_text(recipe.setup)
    setup.chmod(0o755)
    argv = [
        *root,
        *("unshare", "--mount", "--pid", "--fork", "--kill-child", "env", f"TMPDIR={work}"),
        *("mmdebstrap", "--quiet", "--variant=minbase", "--mode=root", f"--format={form}"),
        "--keyring=/usr/share/keyrings/debian-archive-keyring.gpg",
        "--include=" + ",".join(recipe.packages),
        '--aptopt=Acquire::Languages "none"',
        '--aptopt=APT::Install-Recommends "false"',
        "--dpkgopt=force-unsafe-io",
        *(f"--dpkgopt=path-exclude={pattern}" for pattern in recipe.excluded),
        "--skip=download/empty,essential/unlink",
        '--setup-hook=mkdir -p "$1/var/cache/apt/archives"',
        f"--setup-hook=sync-in {packages_dir} /var/cache/apt/archives/",
        f"--customize-hook=sync-out /var/cache/apt/archives/ {packages_dir}",
        f"--customize-hook=copy-in {setup} /tmp",
        '--customize-hook=chroot "$1" /tmp/setup.sh',
        '--customize-hook=rm "$1/tmp/setup.sh"',
        *(RELEASE, str(target)),
        *((mirror,) if mirror else ()),
    ]
    with one_at_a_time(packages_dir.with_name(f"{packages_dir.name}.lock")):
        run(argv, timeout_s=1800)


def discard(work: Path, *, root: Sequence[str]) -> None:
    """Stop a build in ``work`` that lost its parent, and remove its files."""
    kill_matching(lambda argv: "mmdebstrap" in argv and f"TMPDIR={work}" in argv, root=root)
    if work.exists():
        run([*root, "rm", "-rf", "--one-file-system", str(work)])
