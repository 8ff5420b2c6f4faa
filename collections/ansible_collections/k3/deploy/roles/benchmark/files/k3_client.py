"""One llama-server as the harness sees it: requests that end in time, and whether anybody else asks.

Used by k3_bench.py, which lies beside it; nothing but the standard library.
"""

from __future__ import annotations

import http.client
import json
import re
import signal
import time
import urllib.parse
from contextlib import contextmanager

COUNTERS = ("llamacpp:prompt_tokens_total", "llamacpp:tokens_predicted_total")


class ServerError(Exception):
    """The server broke off, refused a request that it must serve, or answered something else than it should."""


class Refused(Exception):
    """The server refused this one request (4xx); it goes on serving."""


class Deadline(Exception):
    """The time given for the whole measurement, or for one request, has passed."""


class Stopped(Exception):
    """SIGTERM or SIGINT."""


# --- time and signals ------------------------------------------------------------------------------------------------


class Clock:
    """The deadline of everything and the wish to stop, both raised inside ``waiting`` and nowhere else.

    A frozen worker leaves llama-server answering /health and sending SSE pings while the request never ends, so no
    socket timeout is enough: an interval timer interrupts whatever system call is waiting.
    """

    def __init__(self, deadline_s, request_timeout_s):
        self.end = time.monotonic() + deadline_s
        self.deadline_s = deadline_s
        self.request_timeout_s = request_timeout_s
        self.stop_signal = None
        self._waiting = False
        self._limit = ""
        signal.signal(signal.SIGALRM, self._on_alarm)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop)

    def _on_alarm(self, _number, _frame):
        if self._waiting:
            raise Deadline(self._limit)

    def _on_stop(self, number, _frame):
        self.stop_signal = signal.Signals(number).name
        if self._waiting:
            raise Stopped("stopped by " + self.stop_signal)

    @contextmanager
    def waiting(self, what):
        """Bound what happens inside by the rest of the deadline and by the timeout of one request."""
        if self.stop_signal:
            raise Stopped("stopped by " + self.stop_signal)
        left = self.end - time.monotonic()
        self._limit = f"{what}: the deadline of {self.deadline_s:g} s for the whole measurement has passed"
        if left <= 0:
            raise Deadline(self._limit)
        if self.request_timeout_s and self.request_timeout_s < left:
            left = self.request_timeout_s
            self._limit = f"{what}: no complete answer within {left:g} s"
        self._waiting = True
        try:
            # The interval repeats the alarm, should the first one fall between two system calls.
            signal.setitimer(signal.ITIMER_REAL, left, 1.0)
            yield
        finally:
            self._waiting = False
            signal.setitimer(signal.ITIMER_REAL, 0)


# --- the server ------------------------------------------------------------------------------------------------------


class Server:
    """One llama-server over HTTP; every call is bounded by the clock."""

    def __init__(self, url, clock):
        parts = urllib.parse.urlsplit(url)
        self.host, self.port = parts.hostname, parts.port or 80
        self.cost = [0, 0]  # prompt and generated tokens of all answers, by the server's own count
        self.clock = clock

    @contextmanager
    def _exchange(self, method, path, body, what):
        """Send one request and yield (response, time of sending); broken connections become ServerError."""
        connection = http.client.HTTPConnection(self.host, self.port)
        headers = {"Content-Type": "application/json"} if body is not None else {}
        try:
            with self.clock.waiting(what):
                connection.connect()
                sent = time.perf_counter()
                connection.request(method, path, body=body, headers=headers)
                yield connection.getresponse(), sent
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{what}: {str(error) or type(error).__name__}") from error
        finally:
            connection.close()

    def get(self, path):
        """Return (status, body) of a GET."""
        with self._exchange("GET", path, None, "GET " + path) as (response, _sent):
            return response.status, response.read().decode("utf-8", "replace")

    def post(self, path, document, what):
        """Return the JSON answer of a POST that is not streamed."""
        with self._exchange("POST", path, json.dumps(document), what) as (response, _sent):
            text = response.read().decode("utf-8", "replace")
        self._check_status(response.status, text, what)
        answer = self._parse(text, what)
        self._count(answer)
        return answer

    def _count(self, answer):
        """Add up what an answer, or each of a list of answers, cost."""
        for one in answer if isinstance(answer, list) else [answer]:
            timings = one.get("timings") or {}
            self.cost[0] += int(timings.get("prompt_n", 0))
            self.cost[1] += int(timings.get("predicted_n", 0))

    def break_off(self, path, document):
        """Send a streamed request and hang up after its first line, as a client that goes away does."""
        with self._exchange("POST", path, json.dumps(document), "a request to break off") as (response, _sent):
            response.readline()

    def complete(self, ids, n_predict, cache_prompt, what):
        """Stream one completion; return {timings, tokens, ttft_ms, wall_ms}."""
        body = json.dumps(
            {
                "prompt": ids,
                "n_predict": n_predict,
                "cache_prompt": cache_prompt,
                "id_slot": 0,
                "stream": True,
                "return_tokens": True,
                "timings_per_token": False,
                "temperature": 0.0,
                "seed": 1,
                # n_predict tokens must come: a decode that ends early measures something else
                "ignore_eos": True,
                # how far the prompt is after each batch: the only word of the shapes in which it was evaluated
                "return_progress": True,
                "sse_ping_interval": -1,
            }
        )
        tokens, first, last_event, reached = [], None, None, []
        with self._exchange("POST", "/completion", body, what) as (response, sent):
            if response.status != 200:
                self._check_status(response.status, response.read().decode("utf-8", "replace"), what)
            for event in self._events(response, what):
                if event.get("prompt_progress"):
                    # Such a report names a token as well, which is none of the answer's.
                    reached.append(int(event["prompt_progress"]["processed"]))
                    continue
                if first is None and event.get("tokens"):
                    first = time.perf_counter()
                tokens.extend(event.get("tokens") or [])
                if event.get("stop"):
                    last_event = event
            done = time.perf_counter()
        if last_event is None or "timings" not in last_event:
            raise ServerError(f"{what}: the stream broke off: the server, or a worker behind it, died")
        self._count(last_event)
        return {
            "timings": last_event["timings"],
            "batches": batch_sizes(reached, last_event["timings"]),
            "tokens": tokens,
            "ttft_ms": None if first is None else (first - sent) * 1e3,
            "wall_ms": (done - sent) * 1e3,
        }

    def _events(self, response, what):
        while True:
            line = response.readline()
            if not line:
                return
            if not line.startswith(b"data:"):
                continue  # blank separators and SSE comments
            text = line[5:].strip().decode("utf-8", "replace")
            if text == "[DONE]":
                return
            event = self._parse(text, what)
            if "error" in event:
                raise ServerError(f"{what}: {error_message(event)}")
            yield event

    @staticmethod
    def _parse(text, what):
        try:
            document = json.loads(text)
        except ValueError as error:
            raise ServerError(f"{what}: the answer is not JSON: {text[:80]!r}") from error
        if not isinstance(document, (dict, list)):
            raise ServerError(f"{what}: the answer is neither an object nor a list: {text[:80]!r}")
        return document

    @staticmethod
    def _check_status(status, text, what):
        if status == 200:
            return
        try:
            message = error_message(json.loads(text))
        except ValueError:
            message = text[:200]
        if 400 <= status < 500:
            raise Refused(f"the server refused it ({status}): {message}")
        raise ServerError(f"{what}: HTTP {status}: {message}")


def batch_sizes(reached, timings):
    """Return how many tokens each batch of the prompt had, from how far it was after each; None if the server does not say.

    The first report may come before anything is evaluated, and the last batch need not be reported.
    """
    start = int(timings.get("cache_n", 0))
    end = start + int(timings.get("prompt_n", 0))
    if not reached:
        return None
    sizes, last = [], start
    for point in [*(point for point in reached if start < point < end), end]:
        if point > last:
            sizes.append(point - last)
            last = point
    return sizes


def error_message(document):
    """Return the message of llama-server's error object, or the object itself if it has another shape."""
    error = document.get("error", document) if isinstance(document, dict) else document
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


class Activity:
    """Sees requests of others: between two looks, nothing but our own request may have happened.

    With ``--metrics`` the server's token counters must grow by exactly what our request cost. Without it, no slot may
    be busy, no other slot may have served anything, and slot 0 must hold our tokens; that misses a request that came
    and went on slot 0 between two of ours, which leaves no mark on our times.
    """

    def __init__(self, server):
        self.server = server
        self.source = "none"
        for source, path in (("metrics", "/metrics"), ("slots", "/slots")):
            if server.get(path)[0] == 200:
                self.source = source
                break
        self.before = self._look()

    def _look(self):
        if self.source == "metrics":
            text = self.server.get("/metrics")[1]
            found = dict(re.findall(r"^(llamacpp:\w+) ([0-9.eE+]+)$", text, re.MULTILINE))
            busy = float(found.get("llamacpp:requests_processing", 0)) + float(found.get("llamacpp:requests_deferred", 0))
            return {"busy": busy > 0, "counters": tuple(int(float(found.get(name, 0))) for name in COUNTERS)}
        if self.source == "slots":
            slots = json.loads(self.server.get("/slots")[1])
            return {
                "busy": any(slot.get("is_processing") for slot in slots),
                "tasks": {slot["id"]: slot.get("id_task") for slot in slots if slot["id"] != 0},
                "held": [slot.get("n_prompt_tokens") for slot in slots if slot["id"] == 0],
            }
        return {"busy": False}

    def settle(self):
        """Take the present state as known, after requests that are not samples (warm-up, priming, probes)."""
        self.before = self._look()

    def foreign(self, timings):
        """Return what shows that another request ran since the last look, or "" if nothing does."""
        before, now = self.before, self._look()
        self.before = now
        if now["busy"]:
            return "another request is being served"
        cost = (int(timings.get("prompt_n", 0)), int(timings.get("predicted_n", 0)))
        if self.source == "metrics":
            grown = (now["counters"][0] - before["counters"][0], now["counters"][1] - before["counters"][1])
            if grown != cost:
                return f"another request ran: the server counted {grown[0]} prompt and {grown[1]} generated tokens, ours were {cost[0]} and {cost[1]}"
        if self.source == "slots":
            moved = [slot for slot, task in now["tasks"].items() if task != before["tasks"].get(slot)]
            if moved:
                return f"another request ran on slots {moved}"
            # the last generated token is never evaluated, so the slot does not hold it
            ours = int(timings.get("cache_n", 0)) + cost[0] + cost[1] - 1
            if now["held"] != [ours]:
                return f"another request ran: slot 0 holds {now['held']} tokens, ours were {ours}"
        return ""

    def foreign_since(self, before, cost):
        """Return what shows that others asked since ``before``, given what all our own requests cost; "" if nothing does.

        This sees also what came and went between two samples, while the server was warmed up or a prefix was evaluated.
        """
        if self.source != "metrics":
            return ""
        now = self._look()
        grown = [after - earlier for earlier, after in zip(before["counters"], now["counters"])]
        if grown == list(cost):
            return ""
        return f"others asked: the server counted {grown[0]} prompt and {grown[1]} generated tokens in all, ours were {cost[0]} and {cost[1]}"
