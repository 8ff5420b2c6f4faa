"""A whole apply on two machines that RDMA joins: production, window, blocks, proof, verdict, report.

    python tests/rdma/whole.py                                 candidate-U4, one pair: a quarter of an hour
    python tests/rdma/whole.py candidate-U4 --cells pp32 --pairs 2 --repeats 2

Everything behind the first word goes to `k3deploy apply`. The processors are emulated: tokens take them up to a second,
so that the cells are tiny, and no speed that is measured here means anything. What counts is what carries each arm.
Exit code and records are the run's own; it lies in `runs/` of the directory that is named at the end.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "collections"))

import cases
from machine import Machine, scratch
from stand import ROOT, Stand, install_tools, prepare

from k3deploy.commands.lab_production import bring_up

HEAD, WORKER = cases.HEAD_ADDRESS, cases.PAIR.workers[0].address
DEFAULT = ["candidate-U4", "--cells", "pp8,pp16", "--pairs", "1", "--repeats", "1"]
# The snapshot's guard does nothing, and has been armed for as long as it may be kept.
GUARD = """\
systemctl stop 'k3-*'
rm -rf /opt/k3deploy/state/*
printf '[Service]\\nWatchdogSec=0\\n' > /etc/systemd/system/k3-candidate-guard.service.d/machine.conf
systemctl daemon-reload
"""


def say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def inventory(place: Path, stand: Stand, ways: dict[str, Machine]) -> Path:
    """An operator's inventory of the two machines below ``place``."""
    lab = ROOT / "inventory/lab"
    held: dict[str, Any] = yaml.safe_load((lab / "group_vars/all/k3.yml").read_text())
    build = dict(held["k3_builds"]["default"])
    (release,) = {value["source"]["path"] for value in _builds(stand) if value["name"] == cases.STOCK}
    model = next(Path(word) for word in _argv(stand) if word.endswith(".gguf"))
    sidecar = next((Path.home() / ".cache/k3deploy/models").glob(f"{model.stem}.json"))
    held |= {
        "ansible_user": "root",
        "ansible_python_interpreter": "/usr/bin/python3",
        "ansible_become": False,
        "ansible_ssh_args": "-o ControlMaster=auto -o ControlPersist=600s",
        "k3_cluster": "lab-rdma",
        "k3_model": {"name": model.stem, "path": str(model), "arch": "kimi-k3", "sidecar": str(sidecar)},
        "k3_builds": {"default": {**build, "source": {"kind": "prebuilt", "path": release}}},
        "k3_devices": ["char-infiniband_verbs"],
        "k3_transport": {"require": "rdma"},
        "k3_parity": {"every": 256, "n_predict": 1},
        "k3_health": {"probe_s": 0},
        "k3_guard": {"warn_mib": 64, "orphan_s": 3600},
        "k3_production": {**held["k3_production"], "head_url": f"http://{HEAD}:8080", "memory_slack_mib": 1024},
        "lab_production_model": str(model),
        "k3_load_timeout_s": 600,
        "k3_scale": {"ctx_size": 1024, "ubatch_size": 256, "tensor_split": [1, 1], "threads": 1, "threads_batch": 1},
        "k3_settings": {"worker_threads": 1, "environment": {"OMP_WAIT_POLICY": "passive"}},
        "k3_matrix": "../matrix",
    }
    ranks = {
        name: {
            "ansible_host": "machine",
            "ansible_ssh_common_args": f"-F {at.ssh_config}",
            "ansible_control_path_dir": str(at.place),
            "k3_fabric_address": address,
        }
        for (name, at), address in zip(ways.items(), (HEAD, WORKER), strict=True)
    }
    ranks["rank0"]["k3_local_worker"] = True
    groups = {"head": {"hosts": {"rank0": ranks["rank0"]}}, "workers": {"hosts": {"rank1": ranks["rank1"]}}}
    hosts = {"all": {"children": {"ranks": {"children": groups}, "builder": {"hosts": {"rank0": {}}}}}}
    for name in ("matrix", "suites"):
        shutil.copytree(ROOT / "inventory" / name, place / name)
    made = place / "rdma"
    (made / "group_vars/all").mkdir(parents=True)
    (made / "hosts.yml").write_text(yaml.safe_dump(hosts))
    (made / "group_vars/all/k3.yml").write_text(yaml.safe_dump(held))
    return made


def _builds(stand: Stand) -> list[dict[str, Any]]:
    return list(stand.layer["all"]["vars"]["k3_run_builds"].values())


def _argv(stand: Stand) -> list[str]:
    processes = stand.layer["all"]["hosts"]["rank0"]["k3_run_processes"]
    argv: list[str] = processes[cases.PAIR.slug]["head"]["argv"]
    return argv


def main() -> int:
    wanted = sys.argv[1:] or DEFAULT
    stand = prepare(install_tools(say), say)
    wires = scratch()
    near, far = wires / "0", wires / "1"
    place = Path(tempfile.mkdtemp(prefix="k3rdma-whole-"))
    try:
        with stand.wake((near, far)) as first, stand.wake((far, near)) as second:
            second.sh("machine-network 1")
            for machine in (first, second):
                machine.sh(GUARD)
            made = inventory(place / "inventory", stand, {"rank0": first, "rank1": second})
            say(f"inventory: {made}")
            os.environ.update(K3DEPLOY_INVENTORY=str(made), K3DEPLOY_RUNS=str(place / "runs"))
            os.environ["K3DEPLOY_STATE"] = str(place / "state")
            bring_up(made, None)
            return subprocess.run(["k3deploy", "apply", *wanted, "--yes", "--anyway"], cwd=ROOT, check=False).returncode
    finally:
        say(f"records: {place}")
        shutil.rmtree(wires)


if __name__ == "__main__":
    sys.exit(main())
