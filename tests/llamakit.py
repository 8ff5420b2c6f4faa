"""Real llama.cpp on this machine for tests: RPC workers and a head with a tiny kimi-k3 model, and the harness.

The lab's own build runs here with the loader and the libraries of the rank that compiled it, whatever this host has.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit import Release

from k3deploy.lab.cluster import Lab
from k3deploy.lab.model import SPECS
from k3deploy.lab.model_cache import default_directory, ensure_model

ROLES = (Path(__file__).parents[1] / "collections/ansible_collections/k3/deploy/roles").resolve()
HARNESS = ROLES / "benchmark/files/k3_bench.py"
PROXY = ROLES / "worker/files/k3_rpc_proxy.py"
VOCAB = {"first_id": 300, "last_id": 2000, "bos": 1}


@dataclass(frozen=True, slots=True)
class Llama:
    """A llama.cpp release with everything that its programs load. front: what stands before each command line."""

    release: Path
    libraries: Path
    front: tuple[str, ...] = ()

    def argv(self, program: str) -> list[str]:
        (loader,) = self.libraries.glob("ld-linux*")
        path = f"{self.release / 'lib'}:{self.libraries}"
        return [*self.front, str(loader), "--library-path", path, str(self.release / "bin" / program)]


def llama_of(lab: Lab, release: Release, libraries: Path) -> Llama:
    """``release`` as programs that run on this machine; ``libraries``: a folder for what they load."""
    builder = next(rank.name for rank in lab.config.ranks if rank.is_builder)
    needed = "ldd bin/* | grep -o '[[:space:]]/lib[^ ]*' | sort -u"
    command = f"cd {release.rank_path}; export LD_LIBRARY_PATH=lib; tar --create --dereference $({needed})"
    ssh = ["ssh", "-F", str(lab.config.ssh_config), builder, command]
    archive = subprocess.run(ssh, capture_output=True, check=True).stdout
    unpack = ["tar", "--extract", "--directory", str(libraries), "--transform", "s,.*/,,"]
    subprocess.run(unpack, input=archive, check=True)
    return Llama(release.directory, libraries)


def model_path(seed: int = 7) -> Path:
    return ensure_model(default_directory(), SPECS["tiny"], seed, "f16").path


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


@dataclass
class Workers:
    """RPC workers, one thread each, and where a head reaches them."""

    endpoints: list[str]
    processes: list[subprocess.Popen[bytes]]
    logs: list[Path]

    @property
    def flags(self) -> list[str]:
        """How llama.cpp's programs name them."""
        return ["--rpc", ",".join(self.endpoints)]


@contextlib.contextmanager
def started(log: Path, argv: list[str], **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of its own group, with its log; all of the group is gone afterwards."""
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "GGML_NO_BACKTRACE": "1", **variables}
    with log.open("wb") as said:
        process = subprocess.Popen(argv, stdout=said, stderr=subprocess.STDOUT, env=environment, process_group=0)
    try:
        yield process
    finally:
        for number in (signal.SIGCONT, signal.SIGTERM):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def workers(folder: Path, *programs: Llama, proxied: bool = False) -> Iterator[Workers]:
    """A worker of each of ``programs``. proxied: behind the timing proxy, whose lines are in the worker's log."""
    made = Workers([], [], [folder / f"worker{number}.log" for number in range(len(programs))])
    with contextlib.ExitStack() as running:
        for llama, log in zip(programs, made.logs, strict=True):
            own, near = free_ports(2)
            argv = [*llama.argv("ggml-rpc-server"), "-H", "127.0.0.1", "-p", str(own), "-t", "1"]
            if proxied:
                front = [sys.executable, "-B", str(PROXY), "--listen", f"127.0.0.1:{near}"]
                argv = [*front, "--server", f"127.0.0.1:{own}", "--", *argv]
            made.processes.append(running.enter_context(started(log, argv, GGML_RPC_NO_RDMA="1")))
            made.endpoints.append(f"127.0.0.1:{near if proxied else own}")
        time.sleep(1.0 if proxied else 0.5)  # a worker is never asked over its port: it serves one client at a time
        yield made


@dataclass
class Cluster:
    url: str
    workers: list[subprocess.Popen[bytes]]
    head_log: Path


@contextlib.contextmanager
def head(llama: Llama, folder: Path, at: Workers, *flags: str, model: Path | None = None) -> Iterator[Cluster]:
    """A head on ``at`` that answers."""
    (port,) = free_ports(1)
    names = ",".join(f"RPC{number}" for number in range(len(at.endpoints)))
    argv = [*llama.argv("llama-server"), "-m", str(model or model_path()), "--host", "127.0.0.1", "--port", str(port)]
    argv += [*at.flags, "--device", names, "--tensor-split", ",".join("1" for _ in at.endpoints)]
    argv += ["-ngl", "99", "-c", "4096", "-b", "2048", "-ub", "512", "-np", "1", "-t", "1", "-tb", "1"]
    argv += ["-fa", "on", "-ctk", "f16", "-ctv", "f16", "-lv", "4", "--cache-ram", "0"]
    log = folder / "head.log"
    with started(log, [*argv, *flags], GGML_RPC_NO_RDMA="1") as process:
        url = f"http://127.0.0.1:{port}"
        _await_health(url, process, log)
        yield Cluster(url, at.processes, log)


@contextlib.contextmanager
def cluster(llama: Llama, folder: Path, *flags: str) -> Iterator[Cluster]:
    """Two workers and a head that answers; all of them are gone afterwards."""
    with workers(folder, llama, llama) as at, head(llama, folder, at, *flags) as made:
        yield made


def _await_health(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text(errors="replace")[-2000:]
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            if answer.status == 200:
                return
        time.sleep(0.1)
    raise AssertionError(f"no answer: {log.read_text(errors='replace')[-2000:]}")


def start_harness(folder: Path, made: Cluster, **changes: Any) -> subprocess.Popen[str]:
    request = {"url": made.url, "deadline_s": 120, "seed": 7, "vocab": VOCAB, "repeats": 1, **changes}
    (folder / "request.json").write_text(json.dumps(request))
    (folder / "result.json").unlink(missing_ok=True)
    argv = [sys.executable, "-B", str(HARNESS), "--request", str(folder / "request.json")]
    argv += ["--result", str(folder / "result.json"), "--progress", str(folder / "progress.json")]
    return subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)


def measure(folder: Path, made: Cluster, **changes: Any) -> dict[str, Any]:
    process = start_harness(folder, made, **changes)
    _, said = process.communicate(timeout=180)
    assert process.returncode in (0, 1), said
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    assert (process.returncode == 0) == (result["error"] is None)
    return result


def undisturbed() -> tuple[str, ...]:
    """What makes a program run before all others; nothing where that is not allowed."""
    front = ("chrt", "--rr", "1")
    try:
        return front if subprocess.run([*front, "true"], capture_output=True).returncode == 0 else ()
    except OSError:
        return ()


def llama_bench(llama: Llama, at: Workers, *flags: str) -> list[dict[str, Any]]:
    """What llama-bench says of prefill with the settings of ``head``; it warms up with the sizes that it measures."""
    devices = "/".join(f"RPC{number}" for number in range(len(at.endpoints)))
    argv = [*llama.argv("llama-bench"), "-m", str(model_path()), *at.flags, "-dev", devices]
    argv += ["-ts", "/".join("1" for _ in at.endpoints), "-ngl", "99", "-b", "2048", "-t", "1"]
    argv += ["-fa", "on", "-ctk", "f16", "-ctv", "f16", "-n", "0", "-o", "json", *flags]
    said = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stderr[-2000:]
    rows: list[dict[str, Any]] = json.loads(said.stdout)
    return rows
