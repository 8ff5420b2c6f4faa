"""What a host that Ansible cannot reach still answers: a wedged one needs another remedy than one that is off."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
from typing import Literal

TIMEOUT_S = 4.0
_ENDPOINT = re.compile(r"(?:connect to host|Connection to|Connection (?:closed|reset) by) (\S{1,253}) port (\d{1,5})\b")


def explain(said: str, host: str) -> str:
    """A sentence with its remedy about a host that ssh did not reach; takes a few seconds at most.

    said: ssh's own words, which name address and port. host: the inventory's name, where they do not.
    """
    if refused := _host_key(said, host):
        return refused
    found = _ENDPOINT.search(said)
    address, port = (found.group(1), int(found.group(2))) if found else (host, 22)
    answer = _ssh(address, port)
    if answer == "greets":
        return f"{address} answers ssh now: if it stays so, it is the login that fails; see its account and host key"
    pings = _pings(address)
    if answer == "accepts" or (answer == "nothing" and pings):
        # The kernel accepts connections and answers a ping by itself; nothing else gets to run.
        sign = "answers ping" if pings else "accepts the connection"
        return (
            f"{address} is up (it {sign}) and its ssh says nothing: it is wedged by memory or a hung driver, or far "
            "too busy. What ran on it may still hold memory. If a minute does not help, power it off and on; the "
            "journal of a wedged host says nothing of that time"
        )
    if answer == "refuses":
        return f"{address} is up and no ssh server listens on port {port}: start it from the console"
    if pings is None:
        return f"{address} does not answer ssh; whether it answers ping is not known, there is no ping on this machine"
    return f"{address} answers neither ping nor ssh: it is off, or the network to it is down"


def _host_key(said: str, host: str) -> str:
    """ssh's refusal of a host key, for people; nothing where it refused none."""
    if "Host key verification failed" not in said and "IDENTIFICATION HAS CHANGED" not in said:
        return ""
    named = re.search(r"Host key for (\S{1,253}) has changed|host key is known for (\S{1,253}) and you", said)
    name = next((part for part in named.groups() if part), host) if named else host
    name = name.rstrip(".")
    look = "compare the fingerprint at its console (ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub)"
    place = re.search(r"Offending \S{1,20} key in (.{1,400}?):(\d{1,9})\b", said)
    if place or "HAS CHANGED" in said:
        known = f" -f {shlex.quote(place[1])}" if place else ""
        return (
            f"the host key of {name} is not the one that is pinned for it: refused, and nothing was sent to it. "
            f"Another machine may answer there; if it was installed anew, {look}, then forget the old key: "
            f"ssh-keygen -R {name}{known}"
        )
    return f"no host key is pinned for {name}: refused. Connect once by hand (ssh {name}) and {look}"


def _pings(address: str) -> bool | None:
    """Whether one echo request is answered; ``None`` where there is no ping."""
    try:
        done = subprocess.run(
            ["ping", "-c", "1", "-W", str(int(TIMEOUT_S)), "--", address],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=TIMEOUT_S + 2,
        )
    except FileNotFoundError:
        return None
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _ssh(address: str, port: int) -> Literal["greets", "accepts", "refuses", "nothing"]:
    """How far an ssh connection gets; accepting it is the kernel's work alone and proves no living server."""
    try:
        connection = socket.create_connection((address, port), timeout=TIMEOUT_S)
    except ConnectionRefusedError:
        return "refuses"
    except (OSError, ValueError, OverflowError):
        return "nothing"
    with connection:
        try:
            return "greets" if connection.recv(4).startswith(b"SSH") else "accepts"
        except OSError:
            return "accepts"
