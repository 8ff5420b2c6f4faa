"""What people write wrong is named with file and line, all of it at once, before anything is touched. Needs no lab."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name in ("lab", "matrix"):
        shutil.copytree(ROOT / "inventory" / name, tmp_path / name)
    return tmp_path


def spoil(path: Path, old: str, new: str) -> str:
    """Replace a piece of a file; ``file:line`` of where it stands."""
    text = path.read_text()
    assert text.count(old) == 1, f"{old!r} in {path}"
    path.write_text(text.replace(old, new))
    return f"{path}:{text[: text.index(old)].count(chr(10)) + 1}"


def apply(place: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("k3deploy")), "apply", "candidate-U2", "--yes"]
    environment = {**os.environ, "K3DEPLOY_STATE": str(place / "state"), "K3DEPLOY_RUNS": str(place / "runs")}
    command += ["--inventory", str(place / "lab")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, check=False)


def test_a_broken_inventory_ends_with_3_and_every_place(place: Path) -> None:
    variables, hosts = place / "lab/group_vars/all/k3.yml", place / "lab/hosts.yml"
    expected = [
        (spoil(variables, "k3_load_timeout_s: 180", "k3_load_timeuot_s: 180"), "k3_load_timeout_s"),
        (spoil(variables, "k3_candidate_head_port: 8081", "k3_candidate_head_port: many"), "k3_candidate_head_port"),
        (spoil(hosts, "k3_fabric_address: 10.77.53.12", "k3_fabric_address: 0.0.0.0"), "k3_fabric_address"),
    ]
    done = apply(place)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for where, name in expected:
        assert any(where in line and name in line for line in done.stderr.splitlines()), (where, done.stderr)
    assert not (place / "runs").exists()


def test_a_broken_matrix_ends_with_3_and_every_place(place: Path) -> None:
    expected = [
        (spoil(place / "matrix/U2.yml", "sweep: {ubatch_size:", "sweep: {ubatch_sizes:"), "ubatch_size"),
        (spoil(place / "matrix/U9.yml", "cache_type_k: f16", "cache_type_k: f17"), "cache_type_k"),
        (spoil(place / "matrix/baseline.yml", "threads: 20", "threads: twenty"), "threads"),
    ]
    done = apply(place)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for where, name in expected:
        assert any(where in line and name in line for line in done.stderr.splitlines()), (where, done.stderr)
