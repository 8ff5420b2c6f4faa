"""Production's head behind an API key: asked with it, never without, and the key is in no word that is said."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "collections"))

from ansible_collections.k3.deploy.plugins.module_utils.production import Head

KEY = "sk-very-secret"


class Guarded(BaseHTTPRequestHandler):
    """Answers as llama-server does with --api-key."""

    def do_GET(self) -> None:
        self.answer([{"is_processing": True}, {"is_processing": False}])

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({"tokens": [7, 8]})

    def answer(self, body: object) -> None:
        allowed = self.headers["Authorization"] == f"Bearer {KEY}"
        text = json.dumps(body if allowed else {"error": {"message": "Invalid API Key", "code": 401}}).encode()
        self.send_response(200 if allowed else 401)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on the terminal."""


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Guarded)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_requests_carry_the_key_of_the_file(url: str, tmp_path: Path) -> None:
    held = tmp_path / "key"
    held.write_text(f"{KEY}\n")
    head = Head("llama.service", url, str(held))
    assert head.probe("a", 2) == ([7, 8], "")
    assert head.busy_slots() == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(None, "No such file", id="no file"),
        pytest.param("schlüssel", "is not ASCII text", id="not ASCII"),
        pytest.param("another", "it wants an API key", id="another key"),
    ],
)
def test_a_key_that_does_not_open_is_named_by_its_file_and_never_said(
    url: str, tmp_path: Path, content: str | None, words: str
) -> None:
    held = tmp_path / "key"
    if content is not None:
        held.write_text(content, encoding="utf-8")
    tokens, why = Head("llama.service", url, str(held)).probe("a", 2)
    assert tokens is None and words in why
    assert not content or content not in why


def test_production_that_wants_a_key_says_which_variable_names_it(url: str) -> None:
    tokens, why = Head("llama.service", url).probe("a", 2)
    assert tokens is None and "k3_production.api_key_file" in why
