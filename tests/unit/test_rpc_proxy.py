"""The timing proxy: it passes every byte on, tells where each graph ends, and times nothing that it does not know."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from k3deploy.facts import parse_worker_log

FILE = Path(__file__).parents[2] / "collections/ansible_collections/k3/deploy/roles/worker/files/k3_rpc_proxy.py"
SPEC = importlib.util.spec_from_file_location("k3_rpc_proxy", FILE)
assert SPEC and SPEC.loader
proxy: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(proxy)

ALLOC, SET, GET, GRAPH, HELLO, COUNT, RECOMPUTE = 0, 6, 8, 10, 14, 15, 16
GREETING = bytes([7, 0, 0, 0]) + bytes(24)
COMPUTE_S = 0.15


def command(number: int, payload: bytes = b"") -> bytes:
    return struct.pack("<BQ", number, len(payload)) + payload


def graph(nodes: int, size: int = 5000) -> bytes:
    return command(GRAPH, struct.pack("<II", 0, nodes) + b"\1" * size)


class Worker(threading.Thread):
    """A server of the protocol: takes one command after the other, and computes for COMPUTE_S."""

    def __init__(self, sock: socket.socket, greeting: bytes) -> None:
        super().__init__(daemon=True)
        self.sock, self.greeting = sock, greeting
        self.seen: list[tuple[int, bytes]] = []

    def run(self) -> None:
        with contextlib.suppress(proxy.Closed, OSError), self.sock:
            while True:
                number, size = struct.unpack("<BQ", proxy.receive(self.sock, 9))
                payload = proxy.receive(self.sock, size)
                self.seen.append((number, payload))
                if number in (GRAPH, RECOMPUTE):
                    time.sleep(COMPUTE_S)
                answer = self.answer(number, payload)
                if answer is not None:
                    self.sock.sendall(struct.pack("<Q", len(answer)) + answer)

    def answer(self, number: int, payload: bytes) -> bytes | None:
        if number == GET:
            return bytes(reversed(payload)) * 1000
        return {HELLO: self.greeting, COUNT: struct.pack("<I", 1), ALLOC: b"buffer"}.get(number)


class Stand:
    """A head's socket, the proxy, and a worker behind it."""

    def __init__(self, greeting: bytes = GREETING) -> None:
        self.head, near = socket.socketpair()
        far, server = socket.socketpair()
        self.worker = Worker(server, greeting)
        self.worker.start()
        self.thread = threading.Thread(target=proxy.Connection(near, far).run, daemon=True)
        self.thread.start()
        self.head.settimeout(10)

    def ask(self, number: int, payload: bytes = b"") -> bytes:
        self.head.sendall(command(number, payload))
        return proxy.receive(self.head, struct.unpack("<Q", proxy.receive(self.head, 8))[0])  # type: ignore[no-any-return]

    def close(self) -> None:
        self.head.close()
        self.thread.join(5)
        assert not self.thread.is_alive()
        self.worker.join(5)


@pytest.fixture
def stand() -> Iterator[Stand]:
    made = Stand()
    assert made.ask(HELLO, bytes(24)) == GREETING
    yield made
    made.close()


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    text = capsys.readouterr().out
    assert "without timing" not in text
    return [dict(re.findall(r"(\w+)=(\S+)", line)) for line in text.splitlines() if line.startswith("K3_RPC_TIMING ")]


def test_both_ends_see_what_the_other_sent_and_nothing_else(stand: Stand) -> None:
    assert stand.ask(ALLOC, b"12") == b"buffer"
    sent = [(SET, bytes(range(256)) * 9000), (GRAPH, graph(3)[9:]), (GET, b"abc")]
    for number, payload in sent[:2]:
        stand.head.sendall(command(number, payload))
    assert stand.ask(GET, b"abc") == b"cba" * 1000
    assert stand.ask(COUNT) == struct.pack("<I", 1)  # the head's own question has its own answer
    seen = [entry for entry in stand.worker.seen if entry[0] != COUNT]
    assert seen == [(HELLO, bytes(24)), (ALLOC, b"12"), *sent]


def test_a_graph_that_nothing_follows_is_timed_and_waiting_for_one_is_no_transfer(
    stand: Stand, capsys: pytest.CaptureFixture[str]
) -> None:
    stand.head.sendall(command(SET, b"x" * 70000) + graph(5))
    time.sleep(COMPUTE_S * 6)  # the head has nothing to fetch, as for the last rank's first microbatches
    stand.head.sendall(command(RECOMPUTE, struct.pack("<I", 0)))
    stand.ask(GET, b"abc")
    stand.head.sendall(graph(2))
    stand.ask(COUNT)
    one, two, three = lines_of(capsys)
    assert [(line["kind"], line["nodes"]) for line in (one, two, three)] == [
        ("compute", "5"),
        ("recompute", "5"),
        ("compute", "2"),
    ]
    for line in (one, two, three):
        assert COMPUTE_S * 0.5 <= int(line["compute_us"]) / 1e6 < COMPUTE_S * 4
    assert (one["set"], one["set_bytes"], two["set"]) == ("1", "70000", "0")
    assert (two["get"], three["get"], three["get_bytes"]) == ("0", "1", "3000")
    assert int(three["get_us"]) < COMPUTE_S * 0.9e6
    assert int(two["end_us"]) - int(one["end_us"]) >= COMPUTE_S * 4e6  # what it waited for the head is in no graph


def test_its_lines_are_read_as_those_of_a_patched_server(stand: Stand, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        stand.head.sendall(graph(5))
        stand.ask(GET, b"abc")
    stand.ask(COUNT)
    found = parse_worker_log(capsys.readouterr().out, "rank1")
    assert found.rank_forward_ms["rank1"] == pytest.approx(2 * COMPUTE_S * 1000, rel=0.5)
    assert found.rank_rpc_ms["rank1"] >= 0 and 0 <= found.rank_idle_share["rank1"] < 0.5


@pytest.mark.parametrize(
    ("greeting", "caps", "then", "why"),
    [
        (bytes([8, 1, 0, 0]) + bytes(24), bytes(24), GET, r"protocol version 8\.1\.0"),
        (bytes([7, 0, 0, 0]) + b"\1" * 24, b"\1" * 24, GET, "goes over to RDMA"),
        (GREETING, bytes(24), 99, "command 99 is not known"),
    ],
)
def test_what_it_does_not_know_is_forwarded_without_a_time(
    capsys: pytest.CaptureFixture[str], greeting: bytes, caps: bytes, then: int, why: str
) -> None:
    stand = Stand(greeting)
    assert stand.ask(HELLO, caps) == greeting
    stand.head.sendall(command(then, b"q"))
    if then == GET:
        proxy.receive(stand.head, 8 + 1000)
    stand.head.sendall(graph(3))
    stand.head.sendall(command(GET, b"abc"))
    assert proxy.receive(stand.head, 8 + 3000)[8:] == b"cba" * 1000
    seen = [number for number, _ in stand.worker.seen]
    stand.close()
    text = capsys.readouterr().out
    assert len(re.findall(f"K3_RPC_PROXY forwards without timing: .*{why}", text)) == 1
    assert "K3_RPC_TIMING" not in text
    assert seen == [HELLO, then, GRAPH, GET]


@pytest.mark.parametrize("end", ["head", "worker"])
def test_when_one_end_goes_the_other_is_told(end: str) -> None:
    stand = Stand()
    stand.ask(HELLO, bytes(24))
    gone: Callable[[], None] = stand.head.close if end == "head" else lambda: stand.worker.sock.shutdown(2)
    gone()
    stand.thread.join(5)
    stand.worker.join(5)
    assert not stand.thread.is_alive() and not stand.worker.is_alive()
    stand.head.close()


def test_it_sees_who_listens_without_connecting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        assert proxy.listens("127.0.0.1", port) and not proxy.listens("127.0.0.2", port)
    assert not proxy.listens("127.0.0.1", port)


def test_the_servers_own_process_is_the_one_that_was_started() -> None:
    """So that what systemd calls the main process is the program that was planned."""
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as free:
        ports = [door.getsockname()[1] for door in (taken, free)]
    server = (
        "import os, socket, time; print(os.getpid(), flush=True); "
        f"door = socket.create_server(('127.0.0.1', {ports[0]})); time.sleep(30)"
    )
    argv = ["--listen", f"127.0.0.1:{ports[1]}", "--server", f"127.0.0.1:{ports[0]}", "--"]
    started = subprocess.Popen(
        [sys.executable, str(FILE), *argv, sys.executable, "-c", server],
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    try:
        assert started.stdout is not None and int(started.stdout.readline()) == started.pid
        for _ in range(100):
            if proxy.listens("127.0.0.1", ports[1]):
                break
            time.sleep(0.05)
        assert proxy.listens("127.0.0.1", ports[1])
    finally:
        os.killpg(started.pid, signal.SIGKILL)
        started.wait(5)
        started.stdout.close()  # type: ignore[union-attr]
