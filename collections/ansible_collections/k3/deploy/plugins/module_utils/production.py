"""Production's head and the maintenance window over it: what brings production back, with a controller or without one.

Standard library only. The module k3.deploy.production uses it; on a rank it lies as ``libexec/k3_production.py``, beside a tree
``libexec/ansible_collections/k3/deploy/plugins/module_utils`` with what it imports. There, ``k3_production.py restore --root /opt/k3deploy`` brings
production back by what window.json says, prints the proof as JSON, and exits with 0, or with 1 and an ``error``.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import sys
import time
import urllib.parse

from ansible_collections.k3.deploy.plugins.module_utils import host

LIVE = ("active", "activating", "reloading")
# A unit that systemd has restarted this often since we started it will not come up by waiting.
RESTARTS = 3
JOURNAL = "see its journal on this rank"


class ProductionError(Exception):
    """Production cannot be had as wanted. ``facts`` says more than the sentence."""

    def __init__(self, message, **facts):
        super().__init__(message)
        self.facts = facts


# -- the window: one file on the head ---------------------------------------------------------------------------------


def path_of(root, name="window.json"):
    return os.path.join(root, "state", name)


@contextlib.contextmanager
def locked(root, taking=False):
    """What looks at the window and acts on it does so under this lock, so that nobody acts on a window that is just closing.

    Where nothing of k3deploy is on the rank there is no window and nothing is written, but by who is ``taking`` one.
    """
    if taking:
        os.makedirs(os.path.join(root, "state"), exist_ok=True)
    elif not os.path.isdir(os.path.join(root, "state")):
        yield
        return
    with open(path_of(root, "window.lock"), "w", encoding="ascii") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def read_window(root):
    """The window; None when it is closed, and ``{"damaged": True}`` when the file is there and cannot be read."""
    window = host.read_json(path_of(root))
    if isinstance(window, dict):
        return window
    return {"damaged": True} if os.path.lexists(path_of(root)) else None


def write_window(root, window):
    host.write_atomic(path_of(root), json.dumps(window).encode())


def holds(window, params):
    """Whether the window is this run's, or the hand work of the same owner. params: kind, run_id, owner."""
    if window.get("damaged"):
        return False
    by_hand = window.get("kind") == params["kind"] == "hand" and window.get("owner") == params["owner"]
    return by_hand or (params["kind"] == "run" and window.get("run_id") == params["run_id"])


def joins(window, kind, owner):
    """Whether a run works inside a window that its owner opened for hand work."""
    return window.get("kind") == "hand" and kind == "run" and bool(owner) and window.get("owner") == owner


def moment(seconds):
    """A time for people, by this rank's clock."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds or 0))


def held_words(window, now):
    """Who holds the window, since when, until when, and what somebody else can do."""
    if window.get("damaged"):
        return "the maintenance window's file cannot be read: rollback brings production back and puts the file aside"
    work = "work by hand" if window.get("kind") == "hand" else "run {}".format(window.get("run_id"))
    words = "the maintenance window is held by {} for {} since {}".format(window.get("owner") or "someone", work, moment(window.get("opened")))
    deadline = window.get("deadline") or 0
    words += f" until {moment(deadline)}" if deadline else ""
    words += " ({})".format(window.get("reason") or "no reason given")
    if window.get("closing"):
        return words + "; it is closing: production is on its way back"
    if deadline and deadline < now:
        return words + "; it is stale, its end has passed: rollback stops what is left of it and brings production back"
    return words + "; wait until then, ask its owner, or roll back if nobody works in it any more"


def outside_words(window, run_id, production_live, now):
    """Why a run may start nothing now; empty when it works inside its open window, or in its owner's, with production down."""
    if not window:
        return "no maintenance window is open; it was closed meanwhile"
    if run_id not in (window.get("run_id"), window.get("guest")):
        return held_words(window, now)
    if window.get("closing"):
        return "the maintenance window is closing: production is on its way back"
    if (window.get("deadline") or now + 1) <= now:
        return f"the maintenance window ended at {moment(window['deadline'])}"
    if production_live:
        return "production runs inside the window: this rank or its unit was restarted; resume the run, which drains it again, or roll back"
    return ""


# -- production's head ------------------------------------------------------------------------------------------------


class Head:
    """Production's head: its unit, which is started and stopped and never written, and its API.

    key_file: a file on this rank with the API key that requests need. It is read here and goes nowhere but into the request.
    """

    def __init__(self, unit, url, key_file=None):
        self.unit, self.url, self.key_file = unit, (url or "").rstrip("/"), key_file

    def ask(self, path, payload=None, timeout=10):
        """(status, parsed JSON or text) of a request that may need the key; status 0 with the reason where there was no answer."""
        try:
            key = ""
            if self.key_file:
                with open(self.key_file, encoding="ascii") as raw:
                    key = raw.readline().strip()
        except (OSError, ValueError) as error:
            return 0, "the API key cannot be read: {}".format(error if isinstance(error, OSError) else f"{self.key_file} is not ASCII text")
        return host.http_json(self.url + path, payload, timeout=timeout, key=key)

    def shown(self):
        return host.show_units([self.unit])[self.unit]

    def exists(self):
        return self.shown().get("LoadState") != "not-found"

    def live(self):
        return self.shown().get("ActiveState") in LIVE

    def healthy(self):
        return host.http_json(self.url + "/health", timeout=3)[0] == 200

    def probe(self, prompt, tokens, timeout=30):
        """Greedy tokens of a prompt and "", or None and the reason why production does not answer."""
        payload = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "cache_prompt": False, "return_tokens": True}
        status, body = self.ask("/completion", payload, timeout)
        if status == 401:
            return None, "it wants an API key: k3_production.api_key_file names the file on this rank that holds it"
        if status != 200 or not isinstance(body, dict):
            return None, f"{status}: {str(body)[:200]}"
        return body.get("tokens") or body.get("content"), ""

    def busy_slots(self):
        """Number of requests in flight; None when production does not say."""
        status, body = self.ask("/slots", timeout=5)
        if status == 200 and isinstance(body, list):
            return sum(1 for slot in body if slot.get("is_processing"))
        return None

    def squatters(self):
        """Who else holds the port of production's API, in words; empty when nobody does."""
        words = host.holders_of(urllib.parse.urlsplit(self.url).port, but=int(self.shown().get("MainPID") or 0))
        return words and words + ": end that, then roll back"

    def start(self):
        host.run(["systemctl", "reset-failed", self.unit])
        rc, _out, err = host.run(["systemctl", "start", self.unit], timeout=120)
        if rc != 0:
            raise ProductionError(f"production's {self.unit} does not start: {err.strip()}")


# -- bringing it back -------------------------------------------------------------------------------------------------


class Return:
    """Production on its way back: stop this rank's candidate, start the head, wait, compare the recorded prompt, release the window.

    What the open window says of production goes before ``unit``, ``url``, ``start_timeout`` and ``key_file``, which are for a rank without one.
    Each step may be taken again, by another process too.
    """

    def __init__(self, root, unit=None, url=None, start_timeout=1200, key_file=None):
        self.root = root
        self.window = read_window(root)
        known = self.window or {}
        self.head = Head(known.get("head_unit") or unit, known.get("head_url") or url, known.get("api_key_file") or key_file)
        self.start_timeout = known.get("start_timeout") or start_timeout
        self.changed = False

    def needed(self):
        """Whether anything would be changed."""
        return bool(self.window) or (self.head.exists() and not self.head.live())

    def begin(self):
        """Stop what must not run beside production, and start it; a proof when nothing is to be started, else None."""
        if not self.head.unit:
            if self.window:
                raise ProductionError("the window does not say what production is: roll back with the inventory")
            return {"note": "no window is open on this rank"}
        if not self.head.exists():
            if self.window:
                raise ProductionError(f"production's unit {self.head.unit} is gone: bring it back by hand")
            return {"note": "no production unit on this rank"}
        self.close()
        if self.head.live():
            return None
        if self.window and self.window.get("was_active") is False:
            self.release({"note": "production did not run before"})
            return {"note": "production did not run before", **self.about()}
        self.changed = True
        self.head.start()
        return None

    def close(self):
        """From here on no unit of a candidate starts in this window; what runs is stopped before production needs its memory."""
        with locked(self.root):
            window = read_window(self.root)
            if window and not window.get("damaged") and not window.get("closing"):
                write_window(self.root, dict(window, closing=time.time()))
        stopped = host.stop_units()
        if stopped["left"]:
            raise ProductionError(host.left_words(stopped["left"]), left=stopped["left"])
        self.changed = self.changed or bool(stopped["stopped"])

    def waiting(self):
        """None when production answers, else ``(what is waited for, seconds waited)``."""
        if self.head.healthy():
            return None
        now = read_window(self.root)
        if self.window and now and not now.get("damaged") and not now.get("closing"):
            raise ProductionError("the window was taken again while production was on its way back")
        shown = self.head.shown()
        if shown.get("ActiveState") == "failed":
            raise ProductionError(f"production's {self.head.unit} failed: {self.head.squatters() or JOURNAL}")
        if shown.get("SubState") == "auto-restart" and int(shown.get("NRestarts") or 0) >= RESTARTS:
            raise ProductionError(
                "production's {} ends as often as it is started (exit status {}): {}".format(
                    self.head.unit, shown.get("ExecMainStatus"), self.head.squatters() or JOURNAL
                )
            )
        waited = host.seconds_active(shown)
        if waited > self.start_timeout:
            raise ProductionError("production does not answer %d s after its start" % waited)
        return "waiting for production to answer", waited

    def prove(self):
        """The recorded prompt must give the recorded tokens; then the window is released. Returns the proof."""
        window = self.window or {}
        tokens, why = self.head.probe(window.get("probe_prompt") or "The quick brown fox", window.get("probe_tokens") or 16)
        if tokens is None:
            raise ProductionError(f"production answers /health but not a prompt: {why}")
        expected = window.get("tokens")
        if expected is not None and tokens != expected:
            raise ProductionError("production answers, but not as recorded before the window", tokens=tokens, recorded=expected)
        proof = {"answers": True, "as_recorded": None if expected is None else True, "tokens": tokens}
        self.release(proof)
        return {**proof, **self.about()}

    def release(self, proof):
        """Keep the last window as a record and free the place for the next one."""
        if not self.window:
            return
        self.changed = True
        with locked(self.root):
            now = read_window(self.root) or {}
            if any(now.get(key) != self.window.get(key) for key in ("run_id", "opened", "damaged")):
                return  # released meanwhile by another process that proved it too
            if now.get("damaged"):
                os.replace(path_of(self.root), path_of(self.root, "window-damaged.json"))
                return
            host.write_atomic(path_of(self.root, "window-last.json"), json.dumps(dict(now, closed=time.time(), proof=proof)).encode())
            os.unlink(path_of(self.root))

    def about(self):
        """Whose window it was, and the ranks that took part in it."""
        if not self.window:
            return {}
        keys = ("run_id", "owner", "opened", "deadline", "ranks", "damaged")
        return {"window": {key: self.window[key] for key in keys if key in self.window}}


def restore(root, log=lambda _line: None):
    """Bring production back by what window.json alone says; the proof. Raises ProductionError; OSError without a usable systemd."""
    back = Return(root)
    done = back.begin()
    said = None
    # A unit between two attempts to start has no running time: bound by our own clock too.
    end = time.monotonic() + back.start_timeout + 60
    while done is None:
        waiting = back.waiting()
        if waiting is None:
            done = back.prove()
        elif time.monotonic() > end:
            raise ProductionError("production does not answer within %d s" % back.start_timeout)
        else:
            if waiting[0] != said:
                said = waiting[0]
                log(said)
            time.sleep(0.5)
    log("production is back" if done.get("answers") else done["note"])
    return done


def main():
    parser = argparse.ArgumentParser(description="Bring production back by what the open window says.")
    parser.add_argument("action", choices=["restore"])
    parser.add_argument("--root", default="/opt/k3deploy")
    arguments = parser.parse_args()
    try:
        proof = restore(arguments.root, lambda line: sys.stderr.write(line + "\n"))
    except (ProductionError, OSError) as error:
        proof = {"error": str(error), **getattr(error, "facts", {})}
    sys.stdout.write(json.dumps(proof) + "\n")
    return 1 if "error" in proof else 0


if __name__ == "__main__":
    sys.exit(main())
