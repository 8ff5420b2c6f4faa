#!/usr/bin/env python3
"""Time a worker that knows nothing of it: stand between the head and an RPC server, and write one line a graph.

Runs on the worker's rank with nothing but the standard library (Python 3.9 or newer)::

    k3_rpc_proxy.py --listen 10.0.0.2:50053 --server 127.0.0.1:50053 -- bin/ggml-rpc-server --host 127.0.0.1 --port 50053

The program becomes the server (its process is the server's, a child of it is the proxy), and listens once the server does.
One connection is served at a time, as the server does.

The head sees every byte as the server sent it, and the server every byte as the head did, but for this: a graph is answered
with nothing, so that a stream that is only watched does not tell when one ends (the last rank's graphs of a long prompt have
no answer but the last one's). So the proxy asks the server for its number of devices before and after each graph and keeps
the answers for itself. The server takes its commands one after the other: the two answers bound the graph.

The lines are those of the patch set u8-rpc-timing, with ``by=proxy``. Times are in microseconds by this rank's clock:

prepare_us   the graph's own bytes, from the first one that the server could have read to the last one
compute_us   until the server answers again; the server's reading of the graph's nodes is in it, and the way to it and back
set_us       bytes of SET_TENSOR on their way to the server since the graph before
get_us       answers of GET_TENSOR until the head has them, since the line before; waiting for a graph is not in it

What it cannot time it forwards and says so once: another protocol version, commands that it does not know, and a connection
that goes over to RDMA, whose bytes do not come by. It costs two copies in memory of every byte: a speed measured through it
is not the cluster's.
"""

from __future__ import annotations

import argparse
import os
import socket
import struct
import sys
import threading
import time
from collections import deque
from contextlib import suppress

PROTOCOL = 7  # the major version that these numbers and sizes are of
SET_TENSOR, GET_TENSOR, GRAPH_COMPUTE, HELLO, DEVICE_COUNT, GRAPH_RECOMPUTE = 6, 8, 10, 14, 15, 16
ANSWERED = {0, 1, 2, 3, 7, GET_TENSOR, 9, 11, 13, HELLO, DEVICE_COUNT}
UNANSWERED = {4, 5, SET_TENSOR, GRAPH_COMPUTE, 12, GRAPH_RECOMPUTE, 17}
PROBE = struct.pack("<BQ", DEVICE_COUNT, 0)
CHUNK = 1 << 20  # bytes forwarded at once
PEEKED = 64  # bytes of a message that are looked at
LISTENING = "0A"


def now_us():
    return time.monotonic_ns() // 1000


def say(text):
    print(text, flush=True)


class Closed(Exception):
    """One of the two ends is gone."""


def receive(source, count):
    """Exactly ``count`` bytes."""
    found = b""
    while len(found) < count:
        part = source.recv(count - len(found))
        if not part:
            raise Closed
        found += part
    return found


def forward(source, target, count, buffer):
    """``count`` bytes from one end to the other."""
    while count:
        got = source.recv_into(buffer, min(count, len(buffer)))
        if not got:
            raise Closed
        target.sendall(buffer[:got])
        count -= got


class Graph:
    """One graph on its way: what it is, when its first and last byte passed, and what was sent for it."""

    def __init__(self, kind, device, nodes, sent, seen):
        self.kind, self.device, self.nodes, self.sent, self.seen = kind, device, nodes, sent, seen
        self.forwarded = self.ready = None


class Connection:
    """One head at one server. ``expected``: what each answer to come belongs to, in order."""

    def __init__(self, head, server):
        self.head, self.server = head, server
        self.expected = deque()
        self.timed = True
        self.graphs = 0
        self.nodes = {}
        self.sets = [0, 0, 0]  # commands, bytes, microseconds
        self.gets = [0, 0, 0]
        self.free_at = 0  # when the server last said that it had done everything before
        self.asks_rdma = False

    def give_up(self, why):
        if self.timed:
            self.timed = False
            say(f"K3_RPC_PROXY forwards without timing: {why}")

    def run(self):
        """Forward both ways until either end is gone."""
        answers = threading.Thread(target=self.guarded, args=(self.answers,), daemon=True)
        answers.start()
        self.guarded(self.requests)
        answers.join()

    def guarded(self, direction):
        with suppress(Closed, OSError):
            direction()
        for end in (self.head, self.server):
            with suppress(OSError):  # it is gone
                end.shutdown(socket.SHUT_RDWR)

    # --- from the head to the server ---

    def requests(self):
        buffer = memoryview(bytearray(CHUNK))
        while self.timed:
            command = receive(self.head, 1)
            seen = now_us()
            size = receive(self.head, 8)
            count = struct.unpack("<Q", size)[0]
            begun = receive(self.head, min(count, PEEKED))
            if command[0] not in ANSWERED | UNANSWERED:
                self.give_up(f"command {command[0]} is not known")
            graph = self.before(command[0], seen, begun) if self.timed else None
            self.server.sendall((PROBE if graph else b"") + command + size + begun)
            forward(self.head, self.server, count - len(begun), buffer)
            if graph:
                graph.forwarded = now_us()
                self.expected.append(("end", graph, 0))
                self.server.sendall(PROBE)
            elif command[0] == SET_TENSOR:
                self.add(self.sets, count, seen)
        self.pass_on(self.head, self.server, buffer)

    def before(self, command, seen, begun):
        """Note what a command will be answered with, before it is sent. A ``Graph`` where it is one."""
        if command in ANSWERED:
            self.asks_rdma = command == HELLO and any(begun)
            self.expected.append(("head", command, seen))
            return None
        if command not in (GRAPH_COMPUTE, GRAPH_RECOMPUTE):
            return None
        device = struct.unpack_from("<I", begun)[0]
        if command == GRAPH_COMPUTE:
            self.nodes[device] = struct.unpack_from("<I", begun, 4)[0]
        graph = Graph("compute" if command == GRAPH_COMPUTE else "recompute", device, self.nodes.get(device, 0), self.sets, seen)
        self.sets = [0, 0, 0]
        self.expected.append(("start", graph, 0))
        return graph

    def add(self, what, size, seen):
        """A transfer that has ended. The server does one thing after the other: before it was free, nothing was under way."""
        what[0] += 1
        what[1] += size
        what[2] += max(0, now_us() - max(seen, self.free_at))

    # --- from the server to the head ---

    def answers(self):
        buffer = memoryview(bytearray(CHUNK))
        while True:
            size = receive(self.server, 8)
            if not self.expected:
                break  # not timed any more, or a server that answers what nobody asked
            owner, what, seen = self.expected.popleft()
            count = struct.unpack("<Q", size)[0]
            if owner != "head":
                receive(self.server, count)
                self.bound(owner, what)
                continue
            begun = receive(self.server, min(count, PEEKED))
            if what == HELLO:
                self.greeted(begun)  # before the head sees it: what it sends next must not be timed where nothing can be
            self.head.sendall(size + begun)
            forward(self.server, self.head, count - len(begun), buffer)
            if what == GET_TENSOR:
                self.add(self.gets, count, seen)
        self.give_up("the server answers what it was not asked")
        self.head.sendall(size)
        self.pass_on(self.server, self.head, buffer)

    def greeted(self, answer):
        if not answer or answer[0] != PROTOCOL:
            self.give_up(f"protocol version {'.'.join(map(str, answer[:3]))}, this is written for {PROTOCOL}")
        elif self.asks_rdma and any(answer[4:]):
            self.give_up("the connection goes over to RDMA")

    def bound(self, owner, graph):
        """An answer to a question of our own: the graph can begin, or has ended."""
        self.free_at = now_us()
        if owner == "start":
            graph.ready = self.free_at
            return
        begun = max(graph.ready, graph.forwarded)
        prepare = max(0, graph.forwarded - max(graph.seen, graph.ready))
        sets, gets = graph.sent, self.gets
        self.gets = [0, 0, 0]
        say(
            f"K3_RPC_TIMING graph={self.graphs} kind={graph.kind} device={graph.device} nodes={graph.nodes} end_us={self.free_at} "
            f"prepare_us={prepare} compute_us={self.free_at - begun} set={sets[0]} set_bytes={sets[1]} set_us={sets[2]} "
            f"get={gets[0]} get_bytes={gets[1]} get_us={gets[2]} by=proxy"
        )
        self.graphs += 1

    @staticmethod
    def pass_on(source, target, buffer):
        while got := source.recv_into(buffer):
            target.sendall(buffer[:got])


def listens(address, port):
    """Whether anything listens there: read from the kernel, since a connection would be a client to the server."""
    wanted = f"{struct.unpack('<I', socket.inet_aton(address))[0]:08X}:{port:04X}"
    with open("/proc/net/tcp", encoding="ascii") as table:
        return any(line.split()[1] == wanted and line.split()[3] == LISTENING for line in table)


def serve(listen, server):
    """Wait for the server, then forward one connection after the other; never returns."""
    while not listens(*server):
        time.sleep(0.05)
    family = socket.AF_INET6 if ":" in listen[0] else socket.AF_INET
    with socket.create_server(listen, family=family) as door:
        while True:
            head, _address = door.accept()
            with head, socket.create_connection(server) as far:
                for end in (head, far):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                Connection(head, far).run()


def endpoint(text):
    """``10.0.0.2:50053`` as (address, port)."""
    address, _colon, port = text.rpartition(":")
    if not address or not port.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not ADDRESS:PORT")
    return address.strip("[]"), int(port)


def main(argv):
    parser = argparse.ArgumentParser(description="Time an RPC server from outside.")
    parser.add_argument("--listen", type=endpoint, required=True, help="address:port where the head connects")
    parser.add_argument("--server", type=endpoint, required=True, help="IPv4 address:port where the server listens")
    parser.add_argument("command", nargs="+", help="the server and its arguments, after --")
    given = parser.parse_args(argv)
    if os.fork():
        os.execv(given.command[0], given.command)
    serve(given.listen, given.server)


if __name__ == "__main__":
    main(sys.argv[1:])
