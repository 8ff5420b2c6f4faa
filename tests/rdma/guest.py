"""Runs on the test machine: starts arms through their units, sends requests, reads what both ends of the transport say.

Reads a request as JSON on its standard input and answers with JSON. The project's own modules lie beside it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from ansible_collections.k3.deploy.plugins.module_utils import host, rdma, rdma_link

ROOT = Path("/opt/k3deploy/candidates")
# The processor is emulated and the cores may be shared: no limit here says anything about speed.
PATIENCE_S = 240


def log(slug, kind):
    return str(ROOT / slug / "log" / f"{kind}.log")


def systemctl(*arguments):
    return subprocess.run(["systemctl", *arguments], capture_output=True, text=True, check=False)


def running(unit):
    """What says whether a unit's process is still there, without a question to systemd each time."""
    pid = systemctl("show", "--property=MainPID", "--value", unit).stdout.strip()
    return lambda: pid != "0" and Path("/proc", pid).exists()


@contextlib.contextmanager
def one_moment():
    """What the kernel is asked in here is asked once: the ranks of this machine share it."""
    asked = host.run, rdma.read_devices, rdma.read_netdevs
    run = functools.cache(lambda argv: asked[0](argv))
    host.run = lambda argv, *_, **__: run(tuple(argv))
    rdma.read_devices, rdma.read_netdevs = functools.cache(asked[1]), functools.cache(asked[2])
    try:
        yield
    finally:
        host.run, rdma.read_devices, rdma.read_netdevs = asked


def read(arm):
    """What rdma_link reads, for the head and for every worker."""
    endpoints = [worker["endpoint"] for worker in arm["workers"].values()]
    ends = {"head": (arm["address"], {"head": log(arm["head"], "head")})}
    ends |= {slug: (worker["address"], {"worker": log(slug, "worker")}) for slug, worker in arm["workers"].items()}
    with one_moment():
        return {
            name: rdma_link.read_link(address, "k3deploy", endpoints, logs) for name, (address, logs) in ends.items()
        }


def wait_for(ready, gave_up, patience=PATIENCE_S):
    """Whether it became ready before it gave up or time was over. Asks seldom: to ask costs this processor a lot."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if ready():
            return True
        if gave_up():
            return False
        time.sleep(1.0)
    return False


def healthy(url):
    try:
        with urllib.request.urlopen(url + "/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def start(arm):
    """Workers first, then the head. Its requests after that. {links: {before, ready, after}, serves, tokens, head}."""
    systemctl("stop", "k3-candidate-head@*", "k3-candidate-worker@*")
    systemctl("reset-failed")
    for slug, text in arm["rdma_env"].items():
        (ROOT / slug / "rdma.env").write_text(text)
    units = [f"k3-candidate-worker@{slug}.service" for slug in arm["workers"]]
    started = systemctl("start", *units)
    up = [running(unit) for unit in units]
    wanted = {worker["endpoint"] for worker in arm["workers"].values()}
    listening = wait_for(
        lambda: wanted <= {f"{item['address']}:{item['port']}" for item in host.listeners()},
        lambda: not all(one() for one in up),
    )
    if not listening:
        said = systemctl("status", "--no-pager", "--lines=5", *units, "k3-candidate-guard.service").stdout
        return {"error": f"workers do not listen: {started.stderr}{said}"}
    before = read(arm)
    head = f"k3-candidate-head@{arm['head']}.service"
    systemctl("start", head)
    up = running(head)
    serves = wait_for(lambda: healthy(arm["url"]), lambda: not up())
    ready = read(arm)
    tokens = ask(arm) if serves else []
    links = {"before": before, "ready": ready, "after": read(arm) if serves else ready}
    return {"links": links, "serves": serves, "tokens": tokens, "head": host.tail(log(arm["head"], "head"), 2000)}


def complete(url, prompt, predict, timeout=PATIENCE_S):
    """Greedy tokens after a prompt of token ids."""
    body = {
        "prompt": prompt,
        "n_predict": predict,
        "temperature": 0,
        "seed": 1,
        "cache_prompt": False,
        "return_tokens": True,
    }
    asked = urllib.request.Request(url + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=timeout) as answer:
        return json.load(answer)["tokens"]


def ask(arm):
    """The tokens of some requests, and after a pause, if there is one, of one more."""
    tokens = [complete(arm["url"], arm["prompt"], arm["predict"]) for _ in range(arm["count"])]
    if arm["pause_s"]:
        time.sleep(arm["pause_s"])
        tokens.append(complete(arm["url"], arm["prompt"], arm["predict"]))
    return tokens


def breaks(arm):
    """Do something to a request on its way. {answered, head: how the head's unit ended, after}."""
    head = f"k3-candidate-head@{arm['head']}.service"
    asking = subprocess.Popen(
        [sys.executable, __file__, "complete", arm["url"]],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    asking.stdin.write(json.dumps([arm["prompt"], arm["predict"]]))
    asking.stdin.close()
    up = running(head)
    moved = _sent()
    wait_for(lambda: _sent() > moved + arm["packets"], lambda: asking.poll() is not None)
    midway = asking.poll() is None
    subprocess.run(["sh", "-c", arm["act"]], check=True)
    wait_for(lambda: not up(), lambda: False, patience=arm["patience_s"])
    asking.kill()
    ended = systemctl("show", "--property=Result,ExecMainStatus,ExecMainCode,ActiveState", head).stdout.split()
    return {"midway": midway, "ended": dict(line.split("=", 1) for line in ended), "after": read(arm)}


def _sent():
    """Packets that the fabric's device has sent."""
    return rdma.read_devices()["rxe1"]["ports"]["1"]["hw_counters"]["sent_pkts"]


def main():
    command = sys.argv[1]
    given = json.load(sys.stdin)
    if command == "complete":
        complete(sys.argv[2], *given)
        return 0
    answer = {"start": start, "read": read, "breaks": breaks}[command](given)
    json.dump(answer, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
