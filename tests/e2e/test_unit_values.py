"""Values of every kind arrive exactly in the processes: nothing splits, expands or unescapes them on their way.

The run is killed in its first block and resumed without a rollback, so that what the dead one left behind shows.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from controllerkit import ROOT, Controller

pytestmark = pytest.mark.lab

MODELS = '/opt/odd "models"/50% of $HOME it\'s'
VALUES = {
    "ODD_SPACES": "  two  words ",
    "ODD_QUOTES": "\"double\" and 'single'",
    "ODD_PERCENT": "100% %i %n %%",
    "ODD_DOLLAR": "$HOME ${PATH} $$ $1",
    "ODD_BACKSLASH": "a\\b \\n \\",
    "ODD_SHELL": "`id` $(id) ; # | & * ~ !",
    "ODD_JINJA": "{{ 1 + 1 }} {% if %} {# not a comment #}",
    "ODD_UNICODE": "gr\N{LATIN SMALL LETTER U WITH DIAERESIS}n \N{SNOWMAN}",
    "ODD_EMPTY": "",
}
ROW = {
    "id": "T1",
    "title": "odd values",
    "hypothesis": "Values arrive as they were written.",
    "guard": "None.",
    "rejection": "None.",
    "kind": "runtime",
    "set": {"environment": VALUES},
    "gates": {"cold_prefill": {"cells": ["pp256"], "require": "not_slower"}},
}
# What the main process of a unit was really given, once stdbuf has become the program.
SEEN = """\
import json, subprocess, sys, time
unit = sys.argv[1]
pid = subprocess.check_output(["systemctl", "show", "--property=MainPID", "--value", unit], text=True).strip()
read = lambda name: [part.decode() for part in open(f"/proc/{pid}/{name}", "rb").read().split(b"\\0")[:-1]]
while "stdbuf" in read("cmdline")[0]:
    time.sleep(0.05)
print(json.dumps({"argv": read("cmdline"), "environment": dict(item.split("=", 1) for item in read("environ"))}))
"""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The run after its death and its second life."""

    run: Path
    kept: set[str]
    resumed_at: float


@pytest.fixture(scope="module")
def odd(controller: Controller, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    """An inventory whose model lies at an odd path, and a matrix with a row of odd values."""
    place = tmp_path_factory.mktemp("odd values")
    shutil.copytree(controller.inventory, place / "lab")
    shutil.copytree(ROOT / "inventory" / "matrix", place / "matrix")
    (place / "matrix" / "T1.yml").write_text(yaml.safe_dump(ROW))
    variables = place / "lab" / "group_vars" / "all" / "k3.yml"
    model = yaml.safe_load(variables.read_text())["k3_model"]
    odd_path = f"{MODELS}/{Path(model['path']).name}"
    (place / "lab" / "group_vars" / "all" / "model.yml").write_text(
        yaml.safe_dump({"k3_model": {**model, "path": odd_path}})
    )
    script = f"import os; os.makedirs({MODELS!r}); os.symlink({model['path']!r}, {odd_path!r})"
    controller.on("rank0", f"python3 - <<'END'\n{script}\nEND\n")
    yield replace(controller, inventory=place / "lab", place=place)
    controller.on("rank0", "rm -rf '/opt/odd \"models\"'")


@pytest.fixture(scope="module")
def resumed(odd: Controller) -> Resumed:
    with odd.ongoing("apply", "candidate-T1", "--cells", "pp256", "--yes") as going:
        going.until("block 1/")
        odd.on("rank0", "timeout 60 bash -c 'until pgrep --exact llama-server >/dev/null; do sleep 0.1; done'")
        going.process.send_signal(signal.SIGKILL)
        going.process.wait()
    run = (odd.runs / "latest").resolve()
    kept = {path.name for path in (run / "blocks").glob("*.json")}
    at = time.time()
    done = odd.k3deploy("apply", "--resume", "latest", "--yes")
    assert done.returncode == 11, done.stdout + done.stderr
    return Resumed(run, kept, at)


def guards(controller: Controller, state: str) -> None:
    """Arm or disarm every rank's guard, without which no candidate starts."""
    where = ("ranks", "-i", str(controller.inventory), "--become")
    done = controller.ansible("ansible", *where, "-m", "k3.deploy.guard", "-a", f"state={state}")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["worker", "head"])
def test_every_value_arrives_as_it_was_written(odd: Controller, resumed: Resumed, kind: str) -> None:
    plan = json.loads((resumed.run / "plan.json").read_text())
    planned = plan["arms"][1]["processes"]["rank0"][kind]
    unit = f"k3-candidate-{kind}@T1.service"
    guards(odd, "armed")
    odd.everywhere("systemctl start k3-candidate-worker@T1.service")
    try:
        script = f"systemctl start {unit}\npython3 - {unit} <<'END'\n{SEEN}END\n"
        seen: dict[str, Any] = json.loads(odd.on("rank0", script))
    finally:
        odd.everywhere("systemctl stop 'k3-candidate*'; systemctl reset-failed")
        guards(odd, "disarmed")
    assert seen["argv"][1:] == planned["argv"][1:]
    assert seen["argv"][0] == f"/opt/k3deploy/candidates/T1/release/{planned['argv'][0]}"
    assert VALUES.items() <= planned["environment"].items() <= seen["environment"].items()
    assert kind == "worker" or any(MODELS in word for word in seen["argv"])


def test_blocks_of_a_resumed_run_start_servers_of_their_own(resumed: Resumed) -> None:
    """What a killed run left running is not measured: it has seen requests, and had no machine of its own."""
    records = {path.name: json.loads(path.read_text()) for path in (resumed.run / "blocks").glob("*.json")}
    started = {name: datetime.fromisoformat(record["started"]).timestamp() for name, record in records.items()}
    assert len(records) == 2
    assert [name for name, at in started.items() if name not in resumed.kept and at < resumed.resumed_at] == []
