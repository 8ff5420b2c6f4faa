#!/usr/bin/env python3
"""Measure one llama-server: exact token-id prompts in, server timings and client times out.

Runs on the head itself with nothing but the standard library (Python 3.9 or newer)::

    k3_bench.py --request request.json --result result.json --progress progress.json

Three states of a request are kept apart and never mixed:

cold    ``cache_prompt: false``, a prompt that this server has not seen; counts only with ``cache_n == 0`` and
        ``prompt_n == n_prompt``.
warm    the same size again, after every cold cell of the same server, with another prompt and still no prefix hit.
cached  the first ``n_cached`` tokens are evaluated beforehand (not counted), then the whole prompt is sent with
        ``cache_prompt: true``; counts only with ``cache_n > 0`` and ``cache_n + prompt_n == n_prompt``.

A prompt is a function of (seed, cell, state, repeat) alone: two servers that are measured with the same request get
the same tokens, one server never gets the same prompt twice. A sample that does not count is kept and says why.

Times in the result are milliseconds. Exit codes: 0 every cell was measured (valid or not is in the data), 1 the server
failed, the deadline passed or the run was told to stop (the result holds what was measured, and ``error``), 2 the
request is wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import time
import urllib.parse

import k3_client
import k3_parity
from k3_client import Activity, Clock, Deadline, Refused, Server, ServerError, Stopped

STATES = ("cold", "warm", "cached")
PROBES = ("shifted_prefix", "graphs", "idle")
IDLE_S = 3  # a pause in which connections fall asleep: RDMA ones spin 0.1 s before
SHIFTED_CHUNK = 512  # tokens that the shifted prompt shares with the one before
SHIFTED_DROPPED = 96  # tokens before them that it has lost
SHIFTED_PREDICT = 24  # tokens to compare
SHIFTED_MIN_REUSE = 256  # fewer reused tokens than this is no reuse of the chunk
GRAPHS_PREDICT = 16  # decode steps whose graphs the probe counts
WARMUP_PREDICT = 8  # tokens to decode so that a decode graph of one size exists and was used again
LOG_SETTLE_S = 3.0  # the server writes its timings line a moment after the last byte of the answer

GRAPHS_REUSED = re.compile(r"graphs reused\s*=\s*(\d+)")


class RequestError(Exception):
    """The request document is wrong: what is wrong, and what is valid."""


# --- the request -----------------------------------------------------------------------------------------------------


def check_request(request):
    """Return all that is wrong with the request document, as one RequestError, or return nothing."""
    wrong = []

    def number(where, mapping, key, minimum, required=True):
        value = mapping.get(key)
        if value is None and not required:
            return
        kinds = (int, float) if key.endswith("_s") else int  # seconds may have fractions, counts have none
        if isinstance(value, bool) or not isinstance(value, kinds) or not minimum <= value < 1 << 53:
            wrong.append(f"{where}{key} must be a number of at least {minimum}, not {value!r}")

    if not isinstance(request, dict):
        raise RequestError("the request must be a JSON object")
    try:
        url = urllib.parse.urlsplit(str(request.get("url", "")))
        usable = url.scheme == "http" and bool(url.hostname) and url.port != 0
    except ValueError:
        usable = False
    if not usable:
        wrong.append("url must be http://HOST:PORT, not {!r}".format(request.get("url")))
    number("", request, "deadline_s", 1)
    number("", request, "request_timeout_s", 1, required=False)
    number("", request, "repeats", 1)
    if isinstance(request.get("seed"), bool) or not isinstance(request.get("seed"), int):
        wrong.append("seed must be an integer, not {!r}".format(request.get("seed")))
    vocab = request.get("vocab")
    if not isinstance(vocab, dict):
        wrong.append("vocab must be an object with first_id, last_id and, where the model has one, bos")
    else:
        number("vocab.", vocab, "first_id", 0)
        number("vocab.", vocab, "last_id", 0)
        number("vocab.", vocab, "bos", 0, required=False)
        if not wrong and vocab["last_id"] - vocab["first_id"] < 15:
            wrong.append("vocab.last_id must be at least 15 above first_id, or prompts repeat themselves")
    cells = request.get("cells")
    if not isinstance(cells, list) or not cells:
        wrong.append("cells must be a list with at least one cell")
        cells = []
    seen = set()
    for place, cell in enumerate(cells):
        where = f"cells[{place}]."
        if not isinstance(cell, dict) or not isinstance(cell.get("cell"), str) or not cell["cell"]:
            wrong.append(f"cells[{place}] must be an object with a name in cell")
            continue
        if cell.get("state") not in STATES:
            wrong.append("{}state must be one of {}, not {!r}".format(where, ", ".join(STATES), cell.get("state")))
        number(where, cell, "n_prompt", 2)
        number(where, cell, "n_predict", 1)
        number(where, cell, "n_cached", 1, required=False)
        if not wrong and (cell.get("n_cached") or 0) > cell["n_prompt"]:
            wrong.append(f"{where}n_cached must not be larger than n_prompt")
        key = (cell["cell"], str(cell.get("state")))
        if key in seen:
            wrong.append("cells[{}] repeats {} {}".format(place, cell["cell"], cell.get("state")))
        seen.add(key)
    warmup = request.get("warmup") or {}
    if not isinstance(warmup, dict) or set(warmup) - {"prefill", "decode"}:
        wrong.append("warmup may have prefill and decode only, each a list of sizes")
    else:
        for kind, sizes in warmup.items():
            if not isinstance(sizes, list) or not all(isinstance(n, int) and n >= 1 for n in sizes):
                wrong.append(f"warmup.{kind} must be a list of sizes of at least 1, not {sizes!r}")
    probes = request.get("probes") or []
    for probe in probes if isinstance(probes, list) else [probes]:
        if probe not in PROBES:
            wrong.append("probes: {!r} is unknown; valid: {}".format(probe, ", ".join(PROBES)))
    if wrong:
        raise RequestError("; ".join(wrong))


def prompt_ids(seed, label, count, vocab, bos=True):
    """Return ``count`` token ids of ``vocab`` that (seed, label) alone decide, led by the model's BOS if it has one.

    The ids come from SHA-256 over a counter and not from ``random``: the stream must be the same on every Python.
    """
    first, span = vocab["first_id"], vocab["last_id"] - vocab["first_id"] + 1
    ids = [vocab["bos"]] if bos and vocab.get("bos") is not None else []
    block = 0
    while len(ids) < count:
        digest = hashlib.sha256((f"{seed}/{label}/{block}").encode()).digest()
        ids.extend(first + int.from_bytes(digest[at : at + 4], "big") % span for at in range(0, 32, 4))
        block += 1
    return ids[:count]


def tokens_sha256(tokens):
    """Return the identity of a generated text: the hash of its token ids, independent of any detokenizer."""
    return hashlib.sha256(",".join(str(token) for token in tokens).encode()).hexdigest()


# --- files -----------------------------------------------------------------------------------------------------------


def write_json(path, document):
    """Write atomically: a reader sees the old document or the new one, never half of one."""
    scratch = f"{path}.{os.getpid()}.tmp"
    with open(scratch, "w") as file:
        json.dump(document, file, indent=1, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


def utc_now():
    """Return the time as ISO 8601 in UTC, to the millisecond."""
    now = time.time()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"


# --- measuring -------------------------------------------------------------------------------------------------------


class Bench:
    """One measurement of one server: warm-up, cells by state, probes; the document grows as it goes."""

    def __init__(self, request, server, progress_path):
        self.request = request
        self.server = server
        self.progress_path = progress_path
        self.seed, self.vocab = request["seed"], request["vocab"]
        self.repeats = int(request["repeats"])
        self.started = utc_now()
        self.order = 0
        self.done = 0
        self.phase = "starting"
        warmup = request.get("warmup") or {}
        self.steps = [(kind, size) for kind in ("prefill", "decode") for size in warmup.get(kind, [])]
        self.total = len(self.steps) + self.repeats * len(request["cells"]) + len(request.get("probes") or [])
        self.document = {
            "cells": [dict(cell, samples=[]) for cell in request["cells"]],
            "probes": {},
            "props": {},
            "warmup": [],
            "request": {key: request.get(key) for key in ("seed", "salt", "vocab", "repeats")},
            "foreign_check": "none",
            "foreign": [],
            "harness_sha256": own_sha256(),
            "python": sys.version.split()[0],
            "started": self.started,
            "ended": None,
            "error": None,
        }

    def progress(self, phase):
        """Tell what is being measured now."""
        self.phase = phase
        write_json(
            self.progress_path,
            {"done": self.done, "total": self.total, "cell": phase, "started": self.started, "time": utc_now()},
        )

    def step_done(self):
        self.done += 1
        self.progress(self.phase)

    def run(self):
        """Measure everything; raises ServerError, Deadline or Stopped with the document as far as it came."""
        self.progress("starting")
        self.document["props"] = self._props()
        self.activity = Activity(self.server)
        self.document["foreign_check"] = self.activity.source
        before, self.server.cost = self.activity.before, [0, 0]
        for kind, size in self.steps:
            self._warm_up(kind, size)
        for state in STATES:
            for repeat in range(self.repeats):
                for cell in self.document["cells"]:
                    if cell["state"] == state:
                        self._sample(cell, repeat)
        self._note_foreign(self.activity.foreign_since(before, self.server.cost))
        for probe in self.request.get("probes") or []:
            self.progress("probe " + probe)
            try:
                outcome = {"shifted_prefix": self._probe_shifted_prefix, "graphs": self._probe_graphs, "idle": self._probe_idle}[probe]()
            except Refused as refusal:
                outcome = {"error": str(refusal)}
            self.document["probes"][probe] = outcome
            self.step_done()
        if "parity" in self.request:
            self.document["parity"] = k3_parity.run(
                self.server,
                lambda label, count: prompt_ids(self.seed, label, count, self.vocab),
                self.request["parity"],
                tokens_sha256,
                Refused,
                self.progress,
            )

    def _note_foreign(self, text):
        """Keep what shows a request of somebody else: it took time from ours, whichever sample it fell into."""
        if text:
            self.document["foreign"].append(text)

    def _props(self):
        status, text = self.server.get("/props")
        if status != 200:
            raise ServerError(f"GET /props: HTTP {status}: {text:.200}")
        props = Server._parse(text, "GET /props")
        kept = (
            "build_info",
            "model_path",
            "model_alias",
            "model_ftype",
            "total_slots",
            "endpoint_metrics",
            "endpoint_slots",
        )
        found = {key: props[key] for key in kept if key in props}
        found["n_ctx"] = (props.get("default_generation_settings") or {}).get("n_ctx")
        return found

    def _warm_up(self, kind, size):
        """Run one size once so that its graphs exist; nothing of it is counted."""
        self.progress(f"warm-up {kind} {size}")
        entry = {"kind": kind, "size": size, "wall_ms": None, "skipped": ""}
        begin = time.perf_counter()
        label = f"warmup/{kind}/{size}"
        try:
            if kind == "prefill":
                ids = prompt_ids(self.seed, label, size, self.vocab)
                self.server.complete(ids, 1, False, self.phase)
            else:
                # a decode size is a number of parallel sequences (n_cmpl) where the server has that many slots
                parallel = size if self.document["props"].get("total_slots", 1) >= size else 1
                body = {
                    "prompt": prompt_ids(self.seed, label, 16, self.vocab),
                    "n_predict": max(size, WARMUP_PREDICT),
                    "cache_prompt": False,
                    "temperature": 0.0,
                    "ignore_eos": True,
                }
                self.server.post("/completion", dict(body, n_cmpl=parallel) if parallel > 1 else body, self.phase)
                entry["sequences"] = parallel
            entry["wall_ms"] = round((time.perf_counter() - begin) * 1e3, 3)
        except Refused as refusal:
            entry["skipped"] = str(refusal)
        self.document["warmup"].append(entry)
        self.activity.settle()
        self.step_done()

    def _sample(self, cell, repeat):
        """Measure one cell once and append the sample, whatever came of it."""
        name, state = cell["cell"], cell["state"]
        what = f"{name} {state}"
        self.progress(what)
        self.order += 1
        sample = {
            "repeat": repeat,
            "order": self.order,
            "at": utc_now(),
            "prompt_n": None,
            "cache_n": None,
            "prompt_ms": None,
            "predicted_n": None,
            "predicted_ms": None,
            "ttft_ms": None,
            "wall_ms": None,
            "tokens_sha256": None,
            "valid": False,
            "why": "not measured",
        }
        cell["samples"].append(sample)
        ids = prompt_ids(self.seed, f"{name}/{state}/{repeat}", cell["n_prompt"], self.vocab)
        cached = state == "cached"
        try:
            if cached:
                self.server.complete(ids[: self._n_cached(cell)], 0, False, what + " (prefix)")
                self.activity.settle()
            answer = self.server.complete(ids, cell["n_predict"], cached, what)
        except Refused as refusal:
            sample["why"] = str(refusal)
            self.step_done()
            return
        except (ServerError, Deadline, Stopped) as error:
            sample["why"] = str(error)
            raise
        timings = answer["timings"]
        for key in ("prompt_n", "cache_n", "prompt_ms", "predicted_n", "predicted_ms"):
            sample[key] = timings.get(key)
        for key in ("ttft_ms", "wall_ms"):
            sample[key] = None if answer[key] is None else round(answer[key], 3)
        sample["tokens_sha256"] = tokens_sha256(answer["tokens"])
        sample["batches"] = answer["batches"]
        wrong = sample_faults(cell, sample, len(answer["tokens"]))
        foreign = self.activity.foreign(timings)
        if foreign:
            wrong.append(foreign)
            self._note_foreign(f"{what}: {foreign}")
        sample["valid"], sample["why"] = not wrong, "; ".join(wrong)
        self.step_done()

    @staticmethod
    def _n_cached(cell):
        """Return how many leading tokens are evaluated beforehand: all but an eighth unless the cell says otherwise.

        A prompt that continues what the slot already holds needs no context checkpoint, so the cell works on
        recurrent models with and without them.
        """
        return int(cell.get("n_cached") or cell["n_prompt"] - max(1, cell["n_prompt"] // 8))

    def _probe_shifted_prefix(self):
        """Does the server reuse a chunk that moved (--cache-reuse), and is the answer still the same? Ask it.

        The prompt is what the slot holds without its first tokens, as when a client drops old turns: the one case
        that --cache-reuse is made for. The same prompt was evaluated from nothing before; a recurrent state cannot
        forget what was dropped, so reuse that takes effect can change the text.
        """
        dropped = prompt_ids(self.seed, "probe/dropped", SHIFTED_DROPPED, self.vocab, bos=False)
        chunk = prompt_ids(self.seed, "probe/chunk", SHIFTED_CHUNK, self.vocab, bos=False)
        prompt = chunk + prompt_ids(self.seed, "probe/tail", 16, self.vocab, bos=False)
        cold = self.server.complete(prompt, SHIFTED_PREDICT, False, self.phase)
        self.server.complete(dropped + chunk, 1, False, self.phase)
        shifted = self.server.complete(prompt, SHIFTED_PREDICT, True, self.phase)
        self.activity.settle()
        cache_n = int(shifted["timings"].get("cache_n", 0))
        return {
            "chunk": SHIFTED_CHUNK,
            "shift": -SHIFTED_DROPPED,
            "cache_n": cache_n,
            "prompt_n": shifted["timings"].get("prompt_n"),
            "effective": cache_n >= SHIFTED_MIN_REUSE,
            "identical": shifted["tokens"] == cold["tokens"],
            "wall_ms": {"cold": round(cold["wall_ms"], 3), "shifted": round(shifted["wall_ms"], 3)},
        }

    def _probe_graphs(self):
        """Count graphs that the head reused for one prefill of each warm-up size and for a short decode."""
        log = self.request.get("head_log")
        if not log:
            return {"error": "the request names no head_log to count in"}
        rows = []
        sizes = [size for kind, size in self.steps if kind == "prefill"] or [256]
        plan = [("prefill", size, 1) for size in sizes] + [("decode", 16, GRAPHS_PREDICT)]
        try:
            count = last_graphs_reused(log)
            for kind, n_prompt, n_predict in plan:
                ids = prompt_ids(self.seed, f"probe/graphs/{kind}/{n_prompt}", n_prompt, self.vocab)
                lines = count[1]
                self.server.complete(ids, n_predict, False, self.phase)
                after = self._await_log(log, lines)
                rows.append({"kind": kind, "n_prompt": n_prompt, "n_predict": n_predict, "reused": after[0] - count[0]})
                count = after
        except OSError as error:
            return {"error": f"{log}: {error.strerror or error}"}
        self.activity.settle()
        return {"requests": rows}

    def _probe_idle(self):
        """The same short request before and after a pause: connections must outlive it, and wake up with the same answer."""
        ids = prompt_ids(self.seed, "probe/idle", 64, self.vocab)
        before = self.server.complete(ids, 8, False, self.phase)
        time.sleep(IDLE_S)
        after = self.server.complete(ids, 8, False, self.phase)
        self.activity.settle()
        return {"idle_s": IDLE_S, "identical": before["tokens"] == after["tokens"]}

    def _await_log(self, log, lines):
        """Return the log's count once a new timings line is there; the last one if none comes."""
        end = time.monotonic() + LOG_SETTLE_S
        while True:
            found = last_graphs_reused(log)
            if found[1] > lines or time.monotonic() > end:
                return found
            time.sleep(0.05)


def last_graphs_reused(path):
    """Return (the last "graphs reused" count of a head log, how many such lines it has)."""
    with open(path, errors="replace") as file:
        found = GRAPHS_REUSED.findall(file.read())
    return (int(found[-1]) if found else 0, len(found))


def sample_faults(cell, sample, n_tokens):
    """Return what keeps this sample from counting in its cell."""
    n_prompt, prompt_n, cache_n = cell["n_prompt"], sample["prompt_n"], sample["cache_n"]
    wrong = []
    if prompt_n is None or cache_n is None:
        return ["the server's timings lack prompt_n or cache_n"]
    if cell["state"] == "cached":
        if cache_n <= 0:
            wrong.append("no prefix hit: cache_n is 0")
        if cache_n + prompt_n != n_prompt:
            wrong.append(f"cache_n {cache_n} + prompt_n {prompt_n} is not {n_prompt}")
    else:
        if cache_n != 0:
            wrong.append(f"prefix hit: cache_n is {cache_n}, not 0")
        if prompt_n != n_prompt:
            wrong.append(f"prompt_n is {prompt_n}, not {n_prompt}")
    if sample["predicted_n"] != cell["n_predict"] or n_tokens != cell["n_predict"]:
        asked, done = cell["n_predict"], sample["predicted_n"]
        wrong.append(f"{done} tokens generated ({n_tokens} received), not {asked}")
    if sample["ttft_ms"] is None:
        wrong.append("no token came through the stream")
    return wrong


def own_sha256():
    """Return the hash of the harness' files: both arms must be measured by the same one."""
    digest = hashlib.sha256()
    for path in (__file__, k3_client.__file__, k3_parity.__file__):
        with open(os.path.abspath(path), "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()


def main(argv=None):
    parser = argparse.ArgumentParser(description="Measure one llama-server with exact token-id prompts.")
    parser.add_argument("--request", required=True, help="JSON: url, deadline_s, seed, vocab, warmup, repeats, cells, probes")
    parser.add_argument("--result", required=True, help="where the result goes (JSON, written atomically)")
    parser.add_argument("--progress", required=True, help="where progress goes after each request (JSON, written atomically)")
    options = parser.parse_args(argv)
    try:
        with open(options.request) as file:
            request = json.load(file)
        check_request(request)
    except (OSError, ValueError, RequestError) as error:
        print(f"{options.request}: {error}", file=sys.stderr)
        return 2
    clock = Clock(request["deadline_s"], request.get("request_timeout_s"))
    bench = Bench(request, Server(request["url"], clock), options.progress)
    try:
        bench.run()
    except (ServerError, Refused, Deadline, Stopped) as error:
        bench.document["error"] = str(error)
        print(error, file=sys.stderr)
    bench.document["ended"] = utc_now()
    write_json(options.result, bench.document)
    return 1 if bench.document["error"] else 0


if __name__ == "__main__":
    sys.exit(main())
