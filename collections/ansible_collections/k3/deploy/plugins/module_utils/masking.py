"""The one rule for secrets: which names hold one, and how text and data are written without it. Standard library only.

Ranks use it for what they report, the controller for everything that it writes into a run directory or shows (k3deploy/secrets.py loads this file).
"""

from __future__ import annotations

import re

MASK = "********"

# The last word of a name decides: HF_TOKEN and api_key hold a secret; TOKENIZERS_PARALLELISM, bos_token_id and API_KEY_FILE do not.
_WORDS = "|".join(
    (
        r"pass(?:word|wd|phrase|code)?",
        r"secret",
        r"credentials?",
        r"(?:api|private|access|secret|signing|encryption)[_-]?key",
        r"(?:auth|access|bearer)[_-]?token",
    )
)
_NAME = re.compile(rf"(?:^|[_.-])(?:{_WORDS})$|[_-](?:token|key|pat)$", re.IGNORECASE)
# Names of this project's own and of llama.cpp's that end like a secret and are none.
_HARMLESS = frozenset(("build_key", "eos_token", "bos_token", "pad_token", "unk_token", "sep_token", "eot_token"))

_PEM = re.compile(r"-----BEGIN ([A-Z ]{0,30}PRIVATE KEY)-----.*?(?:-----END \1-----|\Z)", re.DOTALL)
_URL = re.compile(r"(?P<lead>\b[a-z][a-z0-9+.-]{1,20}://[^\s/@:]{0,100}):[^\s/@]{1,200}@", re.IGNORECASE)
_BEARER = re.compile(r"(?P<lead>\bauthorization[\"']?\s{0,3}[:=]\s{0,3}[\"']?(?:bearer|basic|token)\s{1,3})[^\s\"',]{4,}", re.IGNORECASE)
_WELL_KNOWN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9_-]{20,})"
    r"|\$ANSIBLE_VAULT;[0-9.]{1,5};AES256[^\n]{0,40}(?:\s{1,20}[0-9a-f]{2,80})+"
)
# NAME=value, name: value, "name": "value", --name value.
_ASSIGNED = re.compile(
    rf"(?P<name>(?<![A-Za-z0-9_.-])[A-Za-z0-9_.-]{{0,80}}?(?:{_WORDS}|[_-](?:token|key|pat)))"
    r"(?P<between>[\"']?\s{0,3}[=:]\s{0,3}|[ ])"
    r"(?P<value>\"[^\"\n]{1,4000}\"|'[^'\n]{1,4000}'|[^\s\"',;}\]]{1,4000})",
    re.IGNORECASE,
)


def is_secret_name(name):
    """Whether a variable, an option or a key of this name holds a secret."""
    text = str(name).lstrip("-")
    return bool(_NAME.search(text)) and text.lower() not in _HARMLESS


def mask_text(text, values=()):
    """The text without private keys, credentials in URLs, values assigned to secret names, and the given values themselves."""
    for value in sorted({value for value in values if len(value) >= 4}, key=len, reverse=True):
        text = text.replace(value, MASK)
    text = _PEM.sub(rf"-----BEGIN \1-----{MASK}-----END \1-----", text)
    text = _URL.sub(rf"\g<lead>:{MASK}@", text)
    text = _BEARER.sub(rf"\g<lead>{MASK}", text)
    text = _WELL_KNOWN.sub(MASK, text)
    return _ASSIGNED.sub(_assignment, text)


def _assignment(found):
    name, between, value = found["name"], found["between"], found["value"]
    if not is_secret_name(name) or (between == " " and not name.startswith("--")) or value.strip("\"'") in ("", "null", "None", "true", "false"):
        return found[0]
    quote = value[0] if value[0] in "\"'" else ""
    return f"{name}{between}{quote}{MASK}{quote}"


def mask(value, values=()):
    """Data without secrets: by the name of a key, and in every text."""
    if isinstance(value, dict):
        return {key: _masked_item(key, item, values) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return mask_argv([mask(item, values) for item in value])
    return mask_text(value, values) if isinstance(value, str) else value


def _masked_item(key, item, values):
    if isinstance(item, str) and item and is_secret_name(key):
        return MASK
    return mask(item, values)


def mask_argv(argv):
    """A command line without the word that follows an option such as --api-key."""
    masked = list(argv)
    for index, word in enumerate(masked[1:], 1):
        before = masked[index - 1]
        if isinstance(before, str) and isinstance(word, str) and before.startswith("--") and is_secret_name(before):
            masked[index] = MASK
    return masked


def secret_values(values):
    """The texts that a mapping holds under secret names, nested mappings included."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from secret_values(value)
        elif isinstance(value, str) and len(value) >= 4 and is_secret_name(key):
            yield value
