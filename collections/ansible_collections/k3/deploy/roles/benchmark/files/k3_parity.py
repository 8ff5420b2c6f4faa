"""What a server says, exactly: the material for the parity gates, taken from the server that is being measured.

Used by k3_bench.py, which lies beside it; nothing but the standard library. The head compares what is too large to travel (the
recurrent state); all else goes into the block's record as numbers and is judged on the controller.

positions     log-probabilities of the likeliest tokens after every n-th prefix of one prompt, each prefix evaluated from nothing:
              that is the prefill path itself, which a generated text would not go through.
state         the recurrent state after the whole prompt, through the server's slot save, against the other arm's.
suites        greedy continuations of texts, with the margin by which each token won.
continuation  one prompt in one piece, and the same tokens in chunks that continue what the slot holds.
reuse         the same prompt again after another one, after the slot was erased, and after a request that was broken off.
"""

from __future__ import annotations

import array
import contextlib
import mmap
import os
import struct
import sys

SEQUENCE_MAGIC = 0x67677371  # "ggsq": llama_state_seq_save_file
F32 = 0  # ggml_type of an FP32 tensor
SLICE = 1 << 16  # elements compared at once


class StateError(Exception):
    """The saved state has a form that is not understood; the message says which."""


def run(server, prompt_ids, request, tokens_sha256, refused, tell):
    """Ask ``server`` everything that ``request`` names and return the answers under the same names.

    prompt_ids(label, count) -> ids that both arms have alike. refused: what ``server`` raises when it declines one request; that
    part then holds ``error`` instead of answers. tell(words) shows progress.
    """
    parts = {"positions": _positions, "state": _state, "suites": _suites, "continuation": _continuation, "reuse": _reuse}
    answers = {}
    for name, ask in parts.items():
        if name in request:
            tell("parity: " + name)
            try:
                answers[name] = ask(Asked(server, prompt_ids, tokens_sha256), request[name])
            except refused as refusal:
                answers[name] = {"error": str(refusal)}
    return answers


class Asked:
    """The questions that the parts have in common."""

    def __init__(self, server, prompt_ids, tokens_sha256):
        self.server, self.prompt_ids, self.tokens_sha256 = server, prompt_ids, tokens_sha256

    def complete(self, ids, n_predict, cache_prompt=False, n_probs=0):
        body = {
            "prompt": ids,
            "n_predict": n_predict,
            "cache_prompt": cache_prompt,
            "id_slot": 0,
            "return_tokens": True,
            "temperature": 0.0,
            "seed": 1,
            "ignore_eos": True,
            "n_probs": n_probs,
        }
        return self.server.post("/completion", body, "parity")

    def tokens(self, ids, n_predict, cache_prompt=False):
        return self.complete(ids, n_predict, cache_prompt)["tokens"]

    def slot(self, action, document=None):
        return self.server.post("/slots/0?action=" + action, document or {}, "slot " + action)


def _positions(asked, request):
    """{n_prompt, every, n_probs} -> {prompt_sha256, positions: [{position, top: {id: logprob}}]}."""
    ids = asked.prompt_ids("parity/positions", request["n_prompt"])
    found = []
    for position in sorted({*range(request["every"], len(ids) + 1, request["every"]), len(ids)}):
        answer = asked.complete(ids[:position], 1, n_probs=request["n_probs"])
        likeliest = answer["completion_probabilities"][0]["top_logprobs"]
        found.append({"position": position, "top": {str(item["id"]): item["logprob"] for item in likeliest}})
    return {"prompt_sha256": asked.tokens_sha256(ids), "positions": found}


def _suites(asked, request):
    """{n_predict, texts: {suite: [{id, prompt}]}} -> {texts: {suite: [{id, prompt_sha256, prompt_n, tokens, margins}]}}."""
    found = {}
    for suite, texts in request["texts"].items():
        found[suite] = []
        for text in texts:
            ids = asked.server.post("/tokenize", {"content": text["prompt"], "add_special": True}, "tokenize")["tokens"]
            answer = asked.complete(ids, request["n_predict"], n_probs=2)
            steps = [step["top_logprobs"] for step in answer["completion_probabilities"]]
            margins = [round(step[0]["logprob"] - step[1]["logprob"], 6) if len(step) > 1 else None for step in steps]
            found[suite].append(
                {
                    "id": text["id"],
                    "prompt_sha256": asked.tokens_sha256(ids),
                    "prompt_n": len(ids),
                    "tokens": answer["tokens"],
                    "margins": margins,
                }
            )
    return {"texts": found}


def _continuation(asked, request):
    """{n_prompt, chunks: [sizes], n_predict} -> {whole: tokens, chunks: {size: {tokens, cache_n}}}."""
    ids = asked.prompt_ids("parity/continuation", request["n_prompt"])
    found = {"whole": asked.tokens(ids, request["n_predict"]), "chunks": {}}
    for size in request["chunks"]:
        asked.complete(ids[:size], 0)
        for end in range(2 * size, len(ids), size):
            asked.complete(ids[:end], 0, cache_prompt=True)
        answer = asked.complete(ids, request["n_predict"], cache_prompt=True)
        found["chunks"][str(size)] = {"tokens": answer["tokens"], "cache_n": answer["timings"].get("cache_n")}
    return found


def _reuse(asked, request):
    """{n_prompt, n_predict} -> {first, other, again, after_erase, after_cancel: tokens}."""
    size, n_predict = request["n_prompt"], request["n_predict"]
    one, other = (asked.prompt_ids(f"parity/reuse/{name}", size) for name in ("one", "other"))
    found = {"first": asked.tokens(one, n_predict), "other": asked.tokens(other, n_predict), "again": asked.tokens(one, n_predict)}
    asked.slot("erase")
    found["after_erase"] = asked.tokens(one, n_predict)
    asked.server.break_off("/completion", {"prompt": other, "n_predict": 4096, "id_slot": 0, "stream": True, "ignore_eos": True})
    found["after_cancel"] = asked.tokens(one, n_predict)
    return found


def _state(asked, request):
    """{n_prompt, directory, run, arm, with} -> {prompt_sha256, tokens, bytes, states, max_abs, compared: {arm: difference}}.

    The arm's state is kept in ``directory`` for as long as the run's own files are wanted. ``with`` names the arms to compare it
    with: whichever of two is measured second finds the other's.
    """
    ids = asked.prompt_ids("parity/state", request["n_prompt"])
    asked.complete(ids, 0)
    directory, run = request["directory"], request["run"]
    for stale in os.listdir(directory):
        if stale.endswith(".state") and not stale.startswith(run):
            os.unlink(os.path.join(directory, stale))

    def path(arm):
        return os.path.join(directory, f"{run}.{arm}.state")

    saved = asked.slot("save", {"filename": os.path.basename(path(request["arm"]))})
    found = {"prompt_sha256": asked.tokens_sha256(ids), "tokens": saved.get("n_saved"), "compared": {}}
    try:
        with SavedState(path(request["arm"])) as own:
            found.update(bytes=len(own.bytes), states=len(own.states), max_abs=max(map(own.largest, own.states)))
            for arm in request["with"]:
                if os.path.exists(path(arm)):
                    with SavedState(path(arm)) as other:
                        found["compared"][arm] = difference(own, other)
    except (OSError, StateError) as error:
        found["error"] = str(error)
    return found


class SavedState:
    """The recurrent states in a file of llama-server's slot save: ``states`` has (offset, elements) for each layer that has one.

    The attention cache comes first and has another form for every model; the recurrent part is what the file ends with. It is
    found by its head (one cell, the last position, no sequence ids, not transposed) and accepted only if reading on from there
    ends exactly at the file's end.
    """

    def __init__(self, path):
        self.path = path
        with open(path, "rb") as file:
            self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            magic, _version, packed = self._numbers("<3I", 0)
            if magic != SEQUENCE_MAGIC:
                raise StateError("it is no saved sequence of llama.cpp")
            rows = self._recurrent(12 + 4 * packed)
            if {kind for kind, _at, _size in rows} != {F32}:
                raise StateError("its states are not FP32")
            self.states = [(at, size // 4) for _kind, at, size in rows]
        except StateError as error:
            self.bytes.close()
            raise StateError(f"{path}: {error}") from error

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self.bytes.close()

    def _numbers(self, layout, at):
        if at + struct.calcsize(layout) > len(self.bytes):
            raise StateError("it ends too early")
        return struct.unpack_from(layout, self.bytes, at)

    def _recurrent(self, start):
        """Where the states lie; the head is {1 cell, position, 0 ids, not transposed, layers}."""
        one_cell = struct.pack("<I", 1)
        at = self.bytes.find(one_cell, start)
        while at >= 0:
            with contextlib.suppress(StateError):
                _cells, _position, ids, transposed, layers = self._numbers("<5I", at)
                if ids == 0 and transposed == 0 and 0 < layers < 4096:
                    return self._tensors(at + 20)
            at = self.bytes.find(one_cell, at + 1)
        raise StateError("no recurrent state of one sequence is in it")

    def _tensors(self, at):
        """The rows from ``at`` to the end: first one R (convolution) per layer, then one S; the second half is the states."""
        rows = []
        while at < len(self.bytes):
            kind, size = self._numbers("<iQ", at)
            at += 12
            if not 0 <= kind < 64 or not 0 < size <= len(self.bytes) - at:
                raise StateError("a row that is none")
            rows.append((kind, at, size))
            at += size
        if not rows or len(rows) % 2:
            raise StateError("not one state for each convolution")
        return rows[len(rows) // 2 :]

    def slices(self, state):
        """The FP32 elements of one layer's state, some at a time."""
        start, count = state
        for first in range(0, count, SLICE):
            last = min(count, first + SLICE)
            part = array.array("f", self.bytes[start + 4 * first : start + 4 * last])
            if sys.byteorder == "big":
                part.byteswap()
            yield part

    def largest(self, state):
        """max|S| of one layer."""
        return max(max(max(part), -min(part)) for part in self.slices(state))


def difference(own, other):
    """{max_error, relative_error, worst_state} between two saved states; relative to the largest element of the same layer."""
    if [count for _at, count in own.states] != [count for _at, count in other.states]:
        raise StateError("the two states have other shapes")
    max_error, relative, worst = 0.0, 0.0, 0
    for number, (mine, theirs) in enumerate(zip(own.states, other.states)):
        error = 0.0
        for one, two in zip(own.slices(mine), other.slices(theirs)):
            if one != two:
                error = max(error, max(abs(a - b) for a, b in zip(one, two)))
        scale = other.largest(theirs)
        max_error = max(max_error, error)
        if error > relative * scale:
            relative, worst = (error / scale if scale else float("inf")), number
    return {"max_error": max_error, "relative_error": relative, "worst_state": worst}
