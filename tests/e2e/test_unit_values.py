"""Values of every kind arrive exactly in the processes: nothing splits, expands or unescapes them on their way.

The run is killed in its first block and resumed without a rollback, so that what the dead one left behind shows.
Secrets are planted wherever an operator could have one; none may be found in what stays, or on any command line.
"""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import pytest
import yaml
from controllerkit import ROOT, Controller

pytestmark = pytest.mark.lab

SECRET = "s3cr3t-Value-41"  # in each place with a tail of its own, so that a find tells where it leaked
REASON = 'try {{ 1 + 1 }} 100% $HOME "quoted" it\'s -x'
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


@dataclass(frozen=True, slots=True)
class Resumed:
    """The run after its death and its second life, what was said meanwhile, and every process that was seen.

    ``processes``: command line to environment, as the kernel has them; the environment of candidates alone.
    """

    run: Path
    kept: set[str]
    resumed_at: float
    said: str
    processes: dict[bytes, bytes]


@contextmanager
def watched(found: dict[bytes, bytes]) -> Iterator[None]:
    """Collect all processes, the ranks' among them, until the end of the block."""
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(0.2):
            for process in Path("/proc").glob("[0-9]*"):
                with suppress(OSError):
                    line = (process / "cmdline").read_bytes()
                    candidate = line.startswith(b"/opt/k3deploy/candidates/")
                    found[line] = (process / "environ").read_bytes() if candidate else b""

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.fixture(scope="module")
def odd(controller: Controller, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    """An inventory whose model lies at an odd path, and a matrix with a row of odd values."""
    place = tmp_path_factory.mktemp("odd values")
    shutil.copytree(controller.inventory, place / "lab")
    for name in ("matrix", "suites"):
        shutil.copytree(ROOT / "inventory" / name, place / name)
    (place / "matrix" / "T1.yml").write_text(yaml.safe_dump(ROW))
    variables = place / "lab" / "group_vars" / "all" / "k3.yml"
    model = yaml.safe_load(variables.read_text())["k3_model"]
    odd_path = f"{MODELS}/{Path(model['path']).name}"
    (place / "lab" / "group_vars" / "all" / "model.yml").write_text(
        yaml.safe_dump({"k3_model": {**model, "path": odd_path}})
    )
    (place / "lab" / "group_vars" / "all" / "secrets.yml").write_text(
        yaml.safe_dump({"ansible_become_password": f"{SECRET}-become", "operators_api_key": f"{SECRET}-inventory"})
    )
    script = f"import os; os.makedirs({MODELS!r}); os.symlink({model['path']!r}, {odd_path!r})"
    controller.on("rank0", f"python3 - <<'END'\n{script}\nEND\n")
    # As an operator's systemd would hand it to every service.
    controller.everywhere(f"systemctl set-environment LLAMA_PLANTED_TOKEN={SECRET}-manager")
    yield replace(controller, inventory=place / "lab", place=place)
    controller.everywhere("systemctl unset-environment LLAMA_PLANTED_TOKEN")
    controller.on("rank0", "rm -rf '/opt/odd \"models\"'")


@pytest.fixture(scope="module")
def resumed(odd: Controller) -> Iterator[Resumed]:
    seen: dict[bytes, bytes] = {}
    reason = f"{REASON} password={SECRET}-reason"
    with pytest.MonkeyPatch.context() as environment, watched(seen):
        environment.setenv("HF_TOKEN", f"{SECRET}-environment")
        with odd.ongoing("apply", "candidate-T1", "--cells", "pp256", "--yes", "--reason", reason) as going:
            going.until("block 1/")
            odd.on("rank0", "timeout 60 bash -c 'until pgrep --exact llama-server >/dev/null; do sleep 0.1; done'")
            going.process.send_signal(signal.SIGKILL)
            going.process.wait()
        run = (odd.runs / "latest").resolve()
        kept = {path.name for path in (run / "blocks").glob("*.json")}
        at = time.time()
        done = odd.k3deploy("apply", "--resume", "latest", "--yes")
        said = going.said + done.stdout + done.stderr
    assert done.returncode == 11, said
    yield Resumed(run, kept, at, said, seen)


def guards(controller: Controller, state: str) -> None:
    """Arm or disarm every rank's guard, without which no candidate starts."""
    where = ("ranks", "-i", str(controller.inventory), "--become")
    done = controller.ansible("ansible", *where, "-m", "k3.deploy.guard", "-a", f"state={state}")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["worker", "head"])
def test_every_value_arrives_as_it_was_written(resumed: Resumed, kind: str) -> None:
    plan = json.loads((resumed.run / "plan.json").read_text())
    planned = plan["arms"][1]["processes"]["rank0"][kind]
    argv = [f"/opt/k3deploy/candidates/T1/release/{planned['argv'][0]}", *planned["argv"][1:]]
    line = b"".join(word.encode() + b"\0" for word in argv)
    assert line in resumed.processes
    environment = dict(item.split("=", 1) for item in resumed.processes[line].decode().split("\0")[:-1])
    assert VALUES.items() <= planned["environment"].items() <= environment.items()
    assert kind == "worker" or any(MODELS in word for word in argv)


@pytest.mark.usefixtures("resumed")
def test_a_reason_arrives_as_it_was_written(odd: Controller) -> None:
    window = json.loads(odd.on("rank0", "cat /opt/k3deploy/state/window-last.json"))
    assert window["reason"] == f"{REASON} password=********"


def test_no_secret_stays_anywhere_and_none_is_on_a_command_line(odd: Controller, resumed: Resumed) -> None:
    kept = [path for place in (resumed.run, odd.place / "state") for path in place.rglob("*") if path.is_file()]
    assert any(path.name == "ansible-apply.log" for path in kept)
    assert [path for path in kept if SECRET.encode() in path.read_bytes()] == []
    assert SECRET not in resumed.said
    # Whoever types a secret into a reason has put it on that one command line.
    lines = {line for line in resumed.processes if b"--reason" not in line}
    assert any(b"llama-server" in line for line in lines) and any(b"ansible-playbook" in line for line in lines)
    assert [line for line in lines if SECRET.encode() in line] == []
    records = [json.loads(path.read_text()) for path in (resumed.run / "blocks").glob("*.json")]
    units = [
        unit for record in records for rank in record["ranks"].values() for unit in rank["state"]["units"].values()
    ]
    assert "********" in {(unit.get("environment") or {}).get("LLAMA_PLANTED_TOKEN") for unit in units}
    odd.everywhere(f"! grep --recursive --files-with-matches --no-messages {SECRET} /opt/k3deploy /etc/systemd/system")
    odd.everywhere(f"! journalctl --no-pager --boot | grep {SECRET}-[eibr] | grep --invert-match reason")


def test_a_run_directory_is_its_owners_alone(odd: Controller, resumed: Resumed) -> None:
    for path in (resumed.run, *resumed.run.rglob("*"), odd.place / "state"):
        assert path.is_symlink() or path.lstat().st_mode & 0o077 == 0, path


def test_candidate_units_are_unprivileged_and_confined(resumed: Resumed) -> None:
    seen = {}
    for path in (resumed.run / "blocks").glob("*.json"):
        for rank in json.loads(path.read_text())["ranks"].values():
            seen |= {name: unit for name, unit in rank["state"]["units"].items() if unit["active"] == "active"}
    services = {name: unit for name, unit in seen.items() if name.endswith(".service")}
    assert {name.partition("@")[0] for name in services} >= {"k3-candidate-worker", "k3-candidate-head"}
    assert {name: unit["exposure"] for name, unit in services.items() if not 0 < unit["exposure"] <= 4.0} == {}
    # The guard alone stops units and processes of others.
    assert {name for name, unit in services.items() if unit["user"] != "k3deploy"} <= {"k3-candidate-guard.service"}


def test_blocks_of_a_resumed_run_start_servers_of_their_own(resumed: Resumed) -> None:
    """What a killed run left running is not measured: it has seen requests, and had no machine of its own."""
    records = {path.name: json.loads(path.read_text()) for path in (resumed.run / "blocks").glob("*.json")}
    started = {name: datetime.fromisoformat(record["started"]).timestamp() for name, record in records.items()}
    assert len(records) == 2
    assert [name for name, at in started.items() if name not in resumed.kept and at < resumed.resumed_at] == []
