"""What a rank says about itself: memory, units, processes, listeners, files. Standard library only: runs on the rank."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

from ansible_collections.k3.deploy.plugins.module_utils import masking

# Environment names that describe how llama.cpp runs; anything else of a process' environment may hold a secret and is not read unasked.
ENVIRONMENT_PREFIXES = ("GGML_", "LLAMA_", "CUDA_", "NCCL_", "OMP_", "KMP_", "GOMP_", "LD_LIBRARY_PATH")

# Everything of a candidate on a rank, and what of that is the rank's own defence: it stays when the candidate is stopped.
CANDIDATE_UNITS = ("k3-candidate*",)
GUARD_UNITS = ("k3-candidate-guard.service",)
LIVE = ("active", "activating", "reloading", "deactivating")

UNIT_PROPERTIES = (
    "Id",
    "LoadState",
    "ActiveState",
    "SubState",
    "MainPID",
    "Result",
    "ExecMainStatus",
    "ExecMainCode",
    "ActiveEnterTimestamp",
    "NRestarts",
    "LimitMEMLOCK",
    "User",
    "FragmentPath",
)


def run(argv, timeout=20, stdin="", environment=None):
    """Run a command, with additions to the environment; return (rc, stdout, stderr). A missing program is rc 127, a hung one rc 124."""
    whole = {**os.environ, **environment} if environment else None
    try:
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=timeout, check=False, errors="replace", env=whole)
    except FileNotFoundError:
        return 127, "", f"{argv[0]}: not found"
    except subprocess.TimeoutExpired:
        return 124, "", f"{argv[0]}: no answer in {timeout} s"
    return done.returncode, done.stdout, done.stderr


def meminfo(path="/proc/meminfo"):
    """/proc/meminfo as {name: MiB}; fields without a unit (HugePages_*) are left out."""
    values = {}
    with open(path, encoding="ascii", errors="replace") as lines:
        for line in lines:
            parts = line.replace(":", " ").split()
            if len(parts) == 3 and parts[2] == "kB" and parts[1].isdigit():
                values[parts[0]] = int(parts[1]) // 1024
    return values


def units_matching(patterns):
    """Names of loaded units that match systemd globs, whatever their state."""
    rc, out, _err = run(["systemctl", "list-units", "--all", "--plain", "--no-legend", "--full", *patterns])
    return [line.split()[0] for line in out.splitlines() if line.strip()] if rc == 0 else []


def show_units(names):
    """systemctl show for several units in one call: {name: {property: value}}."""
    if not names:
        return {}
    rc, out, err = run(["systemctl", "show", "--property=" + ",".join(UNIT_PROPERTIES), "--", *names])
    if rc != 0:
        raise OSError(f"systemctl show failed: {err.strip()}")
    shown = {}
    for name, block in zip(names, out.strip().split("\n\n"), strict=False):
        shown[name] = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
    return shown


def seconds_active(shown):
    """Seconds since a unit became active by systemd's own clock; 0 when it is not."""
    stamp = shown.get("ActiveEnterTimestamp") or ""
    rc, out, _err = run(["date", "+%s", "-d", stamp]) if stamp else (1, "", "")
    return max(0.0, time.time() - float(out)) if rc == 0 and out.strip() else 0.0


def stop_units(patterns=CANDIDATE_UNITS, timeout=20, dry=False):
    """Stop what runs of the units that match; SIGKILL what does not listen to SIGTERM. The guard is left alone.

    Returns ``{stopped: [names that ran], killed: [names, those that systemd itself had to kill among them], left: {name: pid that even
    SIGKILL does not end}}``. With ``dry``, stops nothing.
    """
    names = [name for name in units_matching(patterns) if name not in GUARD_UNITS]
    shown = show_units(names)
    running = [name for name in names if shown[name].get("ActiveState") in LIVE]
    if dry:
        return {"stopped": running, "killed": [], "left": {}}
    stuck, left = [], {}
    if running:
        run(["systemctl", "stop", *running], timeout=timeout)
        shown.update(show_units(running))
        stuck = [name for name in running if shown[name].get("ActiveState") in LIVE]
    if stuck:
        run(["systemctl", "kill", "--signal=SIGKILL", *stuck])
        run(["systemctl", "stop", *stuck], timeout=timeout)
        shown.update(show_units(stuck))
        left = {name: int(shown[name].get("MainPID") or 0) for name in stuck if shown[name].get("ActiveState") in LIVE}
    killed = [name for name in running if name in stuck or shown[name].get("Result") == "timeout"]
    ended = [name for name in names if name not in left and (name in running or shown[name].get("ActiveState") == "failed")]
    if ended:
        run(["systemctl", "reset-failed", *ended])
    return {"stopped": running, "killed": killed, "left": left}


def left_words(left):
    """What to tell a person of units that even SIGKILL does not end."""
    pids = ", ".join("%s (pid %d)" % item for item in sorted(left.items()))
    return f"still running after SIGKILL: {pids}; a reboot of this rank is what is left"


def exposures(names):
    """What ``systemd-analyze security`` says of units, 0 (confined) to 10: {name: figure}; empty where it cannot say."""
    if not names:
        return {}
    _rc, out, _err = run(["systemd-analyze", "security", "--no-pager", "--", *names])
    return {name: float(figure) for name, figure in re.findall(r"Overall exposure level for (\S+): (\d+(?:\.\d+)?)", out)}


def process(pid, variables=()):
    """exe, argv and environment of a process as it really runs; None when it is gone.

    Of the environment: what is llama.cpp's, and ``variables``.
    """
    base = "/proc/%d" % pid
    try:
        with open(base + "/cmdline", "rb") as raw:
            argv = [part.decode("utf-8", "replace") for part in raw.read().split(b"\0")[:-1]]
        with open(base + "/environ", "rb") as raw:
            pairs = [part.decode("utf-8", "replace").split("=", 1) for part in raw.read().split(b"\0") if b"=" in part]
        exe = os.readlink(base + "/exe")
        affinity = sorted(os.sched_getaffinity(pid))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    environment = {name: value for name, value in pairs if name.startswith(ENVIRONMENT_PREFIXES) or name in variables}
    return {"pid": pid, "exe": exe, "argv": masking.mask_argv(argv), "environment": masking.mask(environment), "affinity": affinity}


def listeners():
    """Listening TCP sockets: [{address, port, pid}]. Read from the kernel, never by connecting."""
    rc, out, _err = run(["ss", "-Hltnp"])
    found = []
    for line in out.splitlines() if rc == 0 else []:
        parts = line.split()
        if len(parts) < 4:
            continue
        address, _colon, port = parts[3].rpartition(":")
        pid = line.split("pid=", 1)[1].split(",", 1)[0] if "pid=" in line else ""
        if port.isdigit():
            found.append({"address": address.strip("[]"), "port": int(port), "pid": int(pid) if pid.isdigit() else None})
    return found


def unit_of(pid):
    """The service that a process belongs to, by its control group; None when it is in none, or gone."""
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8", errors="replace") as groups:
            names = [os.path.basename(line.strip()) for line in groups]
    except OSError:
        return None
    return next((name for name in names if name.endswith(".service")), None)


def holders_of(port, but=0):
    """Which processes, other than the pid ``but``, listen on a TCP port, in words; empty when none does."""
    pids = sorted({item["pid"] or 0 for item in listeners() if item["port"] == port and item["pid"] != but})
    names = ["pid {} ({})".format(pid, (process(pid) or {}).get("exe") or "not known") if pid else "a process that is not shown" for pid in pids]
    return "port {} is held by {}".format(port, ", ".join(names)) if names else ""


def sha256_file(path):
    """Hex sha256 of a file, or None when it cannot be read."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as raw:
            for chunk in iter(lambda: raw.read(1 << 20), b""):
                digest.update(chunk)
    except OSError:
        return None
    return digest.hexdigest()


def tail(path, limit=262144):
    """The last `limit` bytes of a text file; an empty string when there is none."""
    try:
        with open(path, "rb") as raw:
            raw.seek(0, os.SEEK_END)
            size = raw.tell()
            raw.seek(max(0, size - limit))
            return raw.read().decode("utf-8", "replace")
    except OSError:
        return ""


def read_json(path):
    """A JSON file's content; None when it is missing or not (yet) whole."""
    try:
        with open(path, encoding="utf-8") as text:
            return json.load(text)
    except (OSError, ValueError):
        return None


def write_atomic(path, content, mode=0o644):
    """Write bytes so that a reader, or a crash, sees the old content or the new one and nothing between."""
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".k3-")
    try:
        with os.fdopen(handle, "wb") as raw:
            raw.write(content)
            raw.flush()
            os.fsync(raw.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    # The rename itself lasts through a power cut only once its directory is on the disk.
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def http_json(url, payload=None, timeout=10, key=""):
    """GET, or POST with a payload: (status, parsed JSON or text). Connection failures are status 0 with the reason. key: an API key."""
    data = None if payload is None else json.dumps(payload).encode()
    authorization = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json", **authorization})
    # A proxy in the environment must never carry a request to a rank's own address.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout) as answer:
            body, status = answer.read().decode("utf-8", "replace"), answer.status
    except urllib.error.HTTPError as error:
        body, status = error.read().decode("utf-8", "replace"), error.code
    except (urllib.error.URLError, OSError, ValueError) as error:
        return 0, str(getattr(error, "reason", error))
    try:
        return status, json.loads(body)
    except ValueError:
        return status, body


def utc_now():
    """Seconds since the epoch, as the rank's clock has it."""
    return time.time()


def release_of(exe, root):
    """The build id of a program under <root>/releases/<build-id>/, else None."""
    prefix = os.path.join(os.path.realpath(root), "releases") + "/"
    real = os.path.realpath(exe)
    return real[len(prefix) :].split("/", 1)[0] if real.startswith(prefix) else None
