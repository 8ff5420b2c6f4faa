"""Commands and calls that cannot keep their caller: a hard timeout even where the process hangs in the kernel. Standard library only."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time


def run(argv, timeout):
    """Run a command under a hard timeout: (rc, stdout, stderr). rc 127: not installed; 124: no answer in time.

    A process that hangs in the kernel cannot be killed: it is left behind, never waited for. That is what sets this apart from
    subprocess.run, which waits for the process that it has killed.
    """
    try:
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    except OSError as error:
        return 127, "", str(error)
    with child.stdout, child.stderr:
        out, late = drain({child.stdout: b"", child.stderr: b""}, timeout)
    if late or not within(1.0, lambda: child.poll() is not None):
        kill_group(child.pid)
        within(1.0, lambda: child.poll() is not None)
        return 124, out[child.stdout], f"{argv[0]}: no answer in {timeout} s"
    return child.returncode, out[child.stdout], out[child.stderr]


def drain(streams, timeout):
    """Read pipes to their end or until the time is over: ({pipe: text}, whether the time was over)."""
    end, pending = time.monotonic() + timeout, set(streams)
    while pending:
        left = end - time.monotonic()
        ready = select.select(list(pending), [], [], max(0.0, left))[0] if left > 0 else []
        if not ready:
            break
        for stream in ready:
            piece = os.read(stream.fileno(), 65536)
            streams[stream] += piece
            if not piece:
                pending.discard(stream)
    return {stream: raw.decode("utf-8", "replace") for stream, raw in streams.items()}, bool(pending)


def within(seconds, done):
    """Whether `done()` comes true in time."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def kill_group(pid):
    """SIGKILL a process group that may be gone already."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def forked(work, timeout, meanwhile):
    """Call `work(begun)` in a child process, so that a driver that hangs hangs alone: (its result, None) or (None, why not).

    When the child calls `begun()`, or ends, `meanwhile` is called here.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        try:
            # A blank before a JSON text is part of no value.
            answer = {"result": work(lambda: os.write(writer, b" "))}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    end = time.monotonic() + timeout
    if select.select([reader], [], [], timeout)[0]:
        meanwhile()
    with os.fdopen(reader, "rb") as pipe:
        out, late = drain({pipe: b""}, max(0.1, end - time.monotonic()))
        text = out[pipe]
    if late:
        kill_group(pid)
    within(1.0, lambda: os.waitpid(pid, os.WNOHANG)[0] != 0)
    try:
        answer = json.loads(text)
    except ValueError:
        return None, f"no answer in {timeout} s" if late else "the probe died"
    return answer.get("result"), answer.get("error")
