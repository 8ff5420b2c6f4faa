"""What every arm is asked so that its answers can be held against the baseline's: the harness' parity request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from k3deploy.errors import InputError, Problem
from k3deploy.inventory import Cluster
from k3deploy.plan.processes import PARITY_DIRECTORY

SUITES = ("short", "natural", "long-prefix")
EXACT_PROMPT = 256  # tokens of the exact-output and state test
CHUNKS = (256, 512, 1024)
CONTINUED_PROMPT = 2048  # more than the largest chunk, so that every size has something to continue
REUSED_PROMPT = 128
CONTINUATION = 16  # greedy tokens that show whether a state is the same


class Text(BaseModel):
    """One line of a suite."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: Annotated[str, Field(min_length=1)]
    prompt: Annotated[str, Field(min_length=1)]


def parity_request(cluster: Cluster) -> dict[str, Any]:
    """The request that all arms share; ``block.yml`` adds the arm's name to ``state``."""
    settings = cluster.parity
    exact = {"n_prompt": EXACT_PROMPT, "every": settings.every, "n_probs": settings.n_probs}
    return {
        "positions": exact,
        "state": {"n_prompt": EXACT_PROMPT, "directory": f"{cluster.root}/{PARITY_DIRECTORY}"},
        "suites": {"n_predict": settings.n_predict, "texts": read_suites(Path(settings.suites))},
        "continuation": {"n_prompt": CONTINUED_PROMPT, "chunks": list(CHUNKS), "n_predict": CONTINUATION},
        "reuse": {"n_prompt": REUSED_PROMPT, "n_predict": CONTINUATION},
    }


def read_suites(folder: Path) -> dict[str, list[dict[str, str]]]:
    """{suite: [{id, prompt}]} from ``<suite>.jsonl`` files; raises ``InputError`` with every line that is wrong."""
    problems: list[Problem] = []
    suites: dict[str, list[dict[str, str]]] = {}
    for suite in SUITES:
        path = folder / f"{suite}.jsonl"
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            problems.append(Problem(path, 0, f"{reason}: a suite is a text file with one {{id, prompt}} a line"))
            continue
        texts: dict[str, dict[str, str]] = {}
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                text = Text.model_validate(json.loads(line))
            except (ValueError, ValidationError, RecursionError):
                problems.append(Problem(path, number, 'must be {"id": "...", "prompt": "..."}, both not empty'))
                continue
            if text.id in texts:
                problems.append(Problem(path, number, f"the id {text.id!r} is there already"))
            texts[text.id] = text.model_dump()
        if not texts:
            problems.append(Problem(path, 0, "has no text"))
        suites[suite] = list(texts.values())
    if problems:
        raise InputError(problems)
    return suites
