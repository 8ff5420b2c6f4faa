"""No secret stays in what is written: one rule, for names and for texts, on the controller and on the ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from k3deploy import secrets
from k3deploy.inventory import BuildSpec, Production
from k3deploy.settings import Settings

sys.path.insert(0, str(Path(__file__).parents[2] / "collections"))
SECRET = "s3cr3t-Value/9+x="
KEY = f"-----BEGIN OPENSSH PRIVATE KEY-----\n{SECRET}\nmore\n-----END OPENSSH PRIVATE KEY-----"
NAMES = ["HF_TOKEN", "LLAMA_API_KEY", "LLAMA_ARG_API_KEY", "DB_PASSWORD", "AWS_SECRET_ACCESS_KEY", "CLIENT_SECRET"]
NAMES += [
    "ansible_become_password",
    "ansible_become_pass",
    "ansible_ssh_pass",
    "api-key",
    "password",
    "SSH_PRIVATE_KEY",
]
HARMLESS = ["GGML_CUDA_K3_FLASHKDA", "TOKENIZERS_PARALLELISM", "bos_token_id", "LLAMA_ARG_API_KEY_FILE", "build_key"]
HARMLESS += ["key_length", "n_tokens", "predicted_n", "probe_tokens", "tokens_sha256", "PASSTHROUGH", "keep"]


@pytest.mark.parametrize("name", NAMES)
def test_names_that_hold_secrets(name: str) -> None:
    assert secrets.is_secret_name(name)
    assert SECRET not in str(secrets.mask({name: SECRET, "inner": [{name: SECRET}]}))


@pytest.mark.parametrize("name", HARMLESS)
def test_names_that_hold_none_keep_their_values(name: str) -> None:
    assert not secrets.is_secret_name(name)
    assert secrets.mask({name: SECRET}) == {name: SECRET}
    assert secrets.mask_text(f"{name} = {SECRET}") == f"{name} = {SECRET}"


@pytest.mark.parametrize(
    "text",
    [
        f"env: HF_TOKEN={SECRET} and more",
        f"ansible_become_password: {SECRET}",
        f'{{"api_key": "{SECRET}", "n": 1}}',
        f"llama-server --api-key {SECRET} --port 1",
        f"git clone https://me:{SECRET.replace('/', '_')}@host/x".replace(SECRET.replace("/", "_"), "s3cr3t-Value"),
        "Authorization: Bearer s3cr3t-Value.9",
        f"key follows\n{KEY}\nend",
        f"cut off\n{KEY[:60]}",
        "hf_s3cr3tValueabcdefghijklmnopqrstuv",
    ],
)
def test_texts_lose_their_secrets_and_nothing_else_is_lost(text: str) -> None:
    masked = secrets.mask_text(text)
    assert "s3cr3t" not in masked and secrets.mask_text(masked) == masked
    assert masked.splitlines()[0].split()[0][:4] == text.splitlines()[0].split()[0][:4] or text.startswith("hf_")


def test_what_logs_are_read_for_survives() -> None:
    fixtures = sorted((Path(__file__).parents[1] / "fixtures").rglob("*.log"))
    assert fixtures
    for path in fixtures:
        text = path.read_text(errors="replace")
        assert secrets.mask_text(text) == text, path


@given(st.text(max_size=200), st.text(max_size=50), st.text("abcdefgh0123", min_size=4, max_size=20))
def test_known_values_go_whatever_stands_around_them(before: str, after: str, value: str) -> None:
    assert value not in secrets.mask_text(f"{before}{value}{after}", [value])


def test_an_environment_with_a_secret_is_refused_by_its_name_without_its_value() -> None:
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate({"environment": {"HF_TOKEN": SECRET}})
    message = caught.value.errors()[0]["msg"]
    assert "HF_TOKEN holds a secret" in message and SECRET not in message


@pytest.mark.parametrize(
    ("model", "data"),
    [
        (BuildSpec, {"source": {"kind": "tree", "path": "/x"}, "backend": "cpu", "cmake": {"UI_TOKEN": SECRET}}),
        (BuildSpec, {"source": {"kind": "git", "url": "https://me:pw12@host/x", "ref": "main"}, "backend": "cpu"}),
        (
            Production,
            {"head_unit": "a.service", "worker_unit": "b.service", "head_url": "http://u:pw12@h:1", "worker_port": 1},
        ),
    ],
)
def test_credentials_have_no_place_in_builds_and_addresses(model: Any, data: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        model.model_validate(data)


def test_a_process_reports_no_secret_of_its_environment_or_command_line() -> None:
    from ansible_collections.k3.deploy.plugins.module_utils import host

    argv = [sys.executable, "-c", "import sys; print(1, flush=True); sys.stdin.read()", "--api-key", SECRET]
    environment = {"LLAMA_API_KEY": SECRET, "GGML_X": "1", "PATH": os.environ["PATH"]}
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as child:
        assert child.stdout is not None
        child.stdout.readline()
        seen = host.process(child.pid)
        child.communicate()
    assert seen["environment"] == {"GGML_X": "1", "LLAMA_API_KEY": "********"}
    assert seen["argv"][-2:] == ["--api-key", "********"]
