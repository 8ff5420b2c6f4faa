"""A host that Ansible does not reach: wedged, off, or only refusing the login."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3deploy import reach


@contextlib.contextmanager
def server(greeting: bytes | None) -> Iterator[int]:
    """A listener that accepts and says ``greeting``, or accepts and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _peer = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(greeting or b"")
                connection.recv(1)

        if greeting is not None:
            threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "TIMEOUT_S", 0.3)


def said(port: int) -> str:
    return f"Failed to connect to the host via ssh: ssh: connect to host 127.0.0.1 port {port}: Connection timed out"


def test_a_host_whose_kernel_accepts_and_whose_ssh_is_silent_is_wedged() -> None:
    with server(None) as port:  # the kernel completes the handshake; nobody ever accepts
        words = reach.explain(said(port), "rank2")
    assert "wedged" in words and "power it off and on" in words


def test_a_host_that_answers_ping_and_not_ssh_is_wedged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "_ssh", lambda *_: "nothing")
    monkeypatch.setattr(reach, "_pings", lambda _: True)
    assert "wedged" in reach.explain("", "rank2")
    monkeypatch.setattr(reach, "_pings", lambda _: False)
    assert "neither ping nor ssh" in reach.explain("", "rank2")


def test_a_host_whose_ssh_greets_only_refuses_the_login() -> None:
    with server(b"SSH-2.0-x\r\n") as port:
        assert "login" in reach.explain(said(port), "rank2")


def test_a_host_without_an_ssh_server_is_up(unused_port: int) -> None:
    assert "no ssh server" in reach.explain(said(unused_port), "rank2")


@pytest.fixture
def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def test_ssh_s_words_name_the_address_and_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(reach, "_ssh", lambda address, port: asked.append((address, port)) or "greets")
    reach.explain("Connection timed out during banner exchange\r\nConnection to 10.0.0.2 port 2222 timed out", "rank2")
    reach.explain("Permission denied (publickey).", "rank2")
    assert asked == [("10.0.0.2", 2222), ("rank2", 22)]


@given(st.text(max_size=60))
@settings(max_examples=30)
def test_any_words_of_ssh_give_a_sentence(words: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reach, "_ssh", lambda *_: "nothing")
        patch.setattr(reach, "_pings", lambda _: None)
        assert "rank2" in reach.explain(words, "rank2")


CHANGED = """\
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@\r
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\r
Offending ED25519 key in /home/me/known hosts:3\r
Host key for 10.0.0.2 has changed and you have requested strict checking.\r
Host key verification failed."""
UNKNOWN = (
    "No ED25519 host key is known for 10.0.0.2 and you have requested strict checking.\r\nHost key verification failed."
)


def test_a_changed_host_key_is_told_with_what_to_compare_and_what_to_forget() -> None:
    told = reach.explain(CHANGED, "rank2")
    assert "not the one that is pinned" in told and "ssh-keygen -R 10.0.0.2 -f '/home/me/known hosts'" in told
    assert "nothing was sent" in told


def test_an_unknown_host_key_is_told_with_what_to_compare() -> None:
    assert "no host key is pinned for 10.0.0.2" in reach.explain(UNKNOWN, "rank2")
    assert "rank2" in reach.explain("Host key verification failed.", "rank2")
