#!/usr/bin/env python3
"""The rank's own guard while a maintenance window is open: memory floor, orphaned worker, deadline. Standard library only.

    k3_guard.py ROOT

ROOT/state/guard.json says what to watch; it is read again when it changes, and without it the guard ends. Sizes are MiB.
Memory is read five times a second; units, connections and the deadline once a second, through files alone: a program is
started only to act. Nobody is ever connected to. ROOT/state/memory/SLUG.tsv holds the memory of an arm's last start, a bounded
number of lines, each the moment of least MemAvailable in its time: seconds since the epoch, MemAvailable, MemFree, CmaFree
(0: none), Cached, and the averages of 10 s of /proc/pressure/memory (some, full; -1: not known).
"""

import json
import os
import signal
import sys
import time

INTERVAL_S = 0.2
SLOW_S = 1.0  # how often what changes slowly is looked at
TABLE_S = 15.0  # how often the table of connections is read when no socket came or went: for a worker too stuck to close its own
BLIND_S = 2.0  # memory that cannot be read for so long counts as a crossed floor
GRACE_S = 1.0  # what SIGTERM did not end by then gets SIGKILL: the floor is seconds away from a wedge
RETRY_S = 30.0
DISABLE_S = 10.0
MAX_ROWS = 1800
UNIT = "k3-candidate-guard.service"
TARGET = "k3-candidate.target"  # of which all servers of a candidate are part
PREFIX = "k3-candidate-"
SERVERS = ("k3-candidate-worker@", "k3-candidate-head@")
FIELDS = (b"MemAvailable:", b"MemFree:", b"CmaFree:", b"\nCached:")
ESTABLISHED = "01"


def say(text):
    print(text, flush=True)


def read(path):
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(handle, 1 << 16)
    finally:
        os.close(handle)


def sample(path):
    """(MemAvailable, MemFree, CmaFree, Cached) in MiB; a field that the kernel does not have is 0."""
    text, values = read(path), []
    for name in FIELDS:
        place = text.find(name)
        values.append(int(text[place + len(name) :].split(None, 1)[0]) // 1024 if place >= 0 else 0)
    if text.find(FIELDS[0]) < 0:
        raise ValueError(f"{path} has no MemAvailable")
    return tuple(values)


def pressure(path="/proc/pressure/memory"):
    """(some, full): the share of the last 10 s that waited for memory, in percent; -1 where the kernel does not say."""
    try:
        words = read(path).split()
        found = [float(word[6:]) for word in words if word.startswith(b"avg10=")]
    except (OSError, ValueError):
        found = []
    return tuple(found) if len(found) == 2 else (-1.0, -1.0)


def write_json(path, data, durable=True):
    """The old content or the new one, never half of it. durable: on the disk when this returns, which a full disk queue can delay."""
    os.makedirs(os.path.dirname(path), mode=0o750, exist_ok=True)
    with open(path + ".new", "w", encoding="utf-8") as sink:
        json.dump(data, sink)
        if durable:
            sink.flush()
            os.fsync(sink.fileno())
    os.replace(path + ".new", path)


def boot_id():
    return read("/proc/sys/kernel/random/boot_id").decode().strip()


def uptime():
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def seconds_left(config, boot, up, wall):
    """Seconds to the deadline. A clock that is set in the window changes nothing until a reboot; after one the wall clock
    counts, but never for more than the window's length less the time since boot."""
    if config.get("boot_id") == boot:
        return config["deadline_uptime"] - up
    return min(config["deadline"] - wall, config["seconds"] - up)


class Series:
    """An arm's memory over one start: at most MAX_ROWS lines, coarser the longer it runs; every least value is kept."""

    def __init__(self, path):
        self.path, self.step, self.rows = path, SLOW_S, 0
        self.pending, self.flushed, self.least = None, time.time(), 1 << 62
        os.makedirs(os.path.dirname(path), mode=0o750, exist_ok=True)
        self.sink = open(path, "w", encoding="ascii", buffering=1)  # noqa: SIM115 (open as long as the arm runs)

    def add(self, wall, values, psi):
        """Take one sample in. A new least value of the whole start is on disk within a second, however coarse the lines are."""
        if self.pending is None or values[0] < self.pending[1]:
            self.pending = (wall, *values, *psi)
        since = wall - self.flushed
        if since >= self.step or since < 0 or (since >= SLOW_S and self.pending[1] < self.least):
            self.flush()
            self.flushed = wall

    def flush(self):
        if self.pending is None:
            return
        self.sink.write("%.2f %d %d %d %d %.2f %.2f\n" % self.pending)
        self.least = min(self.least, self.pending[1])
        self.pending, self.rows = None, self.rows + 1
        if self.rows >= MAX_ROWS:
            self.halve()

    def halve(self):
        """Of every two lines the one with less memory stays; from now on a line stands for twice the time."""
        with open(self.path, encoding="ascii") as lines:
            old = lines.readlines()
        kept = [min(old[place : place + 2], key=lambda line: int(line.split()[1])) for place in range(0, len(old), 2)]
        with open(self.path + ".new", "w", encoding="ascii") as sink:
            sink.writelines(kept)
        os.replace(self.path + ".new", self.path)
        self.sink.close()
        self.sink = open(self.path, "a", encoding="ascii", buffering=1)  # noqa: SIM115
        self.rows, self.step = len(kept), self.step * 2

    def close(self):
        self.flush()
        self.sink.close()


class Units:
    """The candidate's units on this rank, as their control groups show them: no program is started to look."""

    def __init__(self, folder=None):
        self.folder = folder or self.own_parent()

    @staticmethod
    def own_parent():
        """The control group that holds this service: its neighbours are the other system services."""
        path = read("/proc/self/cgroup").decode().strip().splitlines()[-1].split(":", 2)[2]
        return os.path.dirname("/sys/fs/cgroup" + path)

    def running(self):
        """{unit: its control group} of the candidate's units that hold a process; the guard itself is none of them."""
        found = {}
        for name in os.listdir(self.folder):
            if name.startswith("system-k3\\x2dcandidate") and name.endswith(".slice"):
                inner = os.path.join(self.folder, name)
                found.update({unit: os.path.join(inner, unit) for unit in self.names(inner)})
            elif name.startswith(PREFIX) and name != UNIT:
                found[name] = os.path.join(self.folder, name)
        return {unit: path for unit, path in found.items() if unit.endswith(".service") and self.pids(path)}

    @staticmethod
    def names(folder):
        try:
            return [name for name in os.listdir(folder) if name.startswith(PREFIX)]
        except OSError:
            return []

    @staticmethod
    def pids(path):
        try:
            return [int(pid) for pid in read(os.path.join(path, "cgroup.procs")).split()]
        except OSError:
            return []


def signal_all(units, number):
    """Send a signal to every process of these units; the units that had one."""
    hit = []
    for name, path in units.items():
        for pid in Units.pids(path):
            try:
                os.kill(pid, number)
                hit.append(name)
            except ProcessLookupError:
                pass
    return sorted(set(hit))


def spawn(argv):
    """Start a program without waiting; its pid, or None when it cannot be started."""
    try:
        return os.posix_spawnp(argv[0], argv, os.environ)
    except OSError as error:
        say(f"cannot start {argv[0]}: {error}")
        return None


def reap():
    """{pid: exit status} of the children that ended since the last time."""
    ended = {}
    try:
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended[child[0]] = os.waitstatus_to_exitcode(child[1])
    except ChildProcessError:
        pass
    return ended


def sockets(pids):
    """The sockets that these processes hold, by inode."""
    found = set()
    for pid in pids:
        folder = f"/proc/{pid}/fd"
        try:
            targets = [os.readlink(f"{folder}/{name}") for name in os.listdir(folder)]
        except OSError:
            continue  # it ended, or closed one while we looked
        found.update(target[8:-1] for target in targets if target.startswith("socket:["))
    return found


def established():
    """Inodes of the sockets with an established TCP connection. The kernel walks a large table for it: milliseconds."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table, encoding="ascii") as lines:
                rows = [line.split() for line in lines]
        except OSError:
            continue
        found.update(row[9] for row in rows if len(row) > 9 and row[3] == ESTABLISHED)
    return found


class Links:
    """Whether each worker still has its head: by the kernel's tables, never by connecting."""

    def __init__(self):
        self.held, self.read_at, self.open = {}, 0.0, set()
        self.had, self.lost = set(), {}

    def longest_loss(self, workers, now):
        """(worker, seconds) of the one that is without its head for longest; (None, 0.0) when none had and lost one."""
        held = {name: sockets(Units.pids(path)) for name, path in workers.items()}
        if held != self.held or now - self.read_at >= TABLE_S:
            self.held, self.read_at, self.open = held, now, established()
        for name, inodes in held.items():
            if inodes & self.open:
                self.had.add(name)
                self.lost.pop(name, None)
            elif name in self.had:
                self.lost.setdefault(name, now)
        gone = [(now - since, name) for name, since in self.lost.items() if name in held]
        return (max(gone)[1], max(gone)[0]) if gone else (None, 0.0)


def top_processes(count=5):
    """The processes with most resident memory. Memory that a GPU driver holds is in none of them."""
    page = os.sysconf("SC_PAGE_SIZE")
    sizes = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                sizes.append((int(read(f"/proc/{name}/statm").split()[1]) * page >> 20, int(name)))
            except (OSError, ValueError, IndexError):
                continue
    top = []
    for size, pid in sorted(sizes, reverse=True)[:count]:
        try:
            top.append({"pid": pid, "name": read(f"/proc/{pid}/comm").decode("utf-8", "replace").strip(), "rss_mib": size})
        except OSError:
            continue
    return top


class Guard:
    """What is watched, and what was seen so far. ``step`` looks once."""

    def __init__(self, root, units=None):
        self.state = os.path.join(root, "state")
        self.path = os.path.join(self.state, "guard.json")
        self.root, self.units = root, units or Units()
        self.config, self.stamp, self.boot = None, None, boot_id()
        self.series, self.arm, self.members, self.workers = None, None, set(), {}
        self.acted, self.warned, self.blind = False, False, None
        self.links = Links()
        self.psi, self.slow_at = (-1.0, -1.0), 0.0
        self.restoring, self.retry_at, self.expired = None, 0.0, False

    # -- what is to be watched ---------------------------------------------------------------------------------

    def reload(self):
        """Read guard.json when it changed; False when it is gone, which means that the window is closed."""
        try:
            info = os.stat(self.path)
            if (info.st_mtime_ns, info.st_ino) == self.stamp:
                return True
            self.stamp = (info.st_mtime_ns, info.st_ino)
            self.config = json.loads(read(self.path))
            self.expired = False
        except FileNotFoundError:
            return False
        except ValueError as error:
            say(f"{self.path} is not whole ({error}): going on as before")
            return self.config is not None
        left = seconds_left(self.config, self.boot, uptime(), time.time())
        say("floor %d MiB, %.0f s left (run %s)" % (self.config["floor_mib"], left, self.config["run_id"]))
        return True

    def floor(self):
        return self.config.get("floors", {}).get(self.arm, self.config["floor_mib"])

    # -- one look ----------------------------------------------------------------------------------------------

    def step(self, now):
        """Look once; ``now`` is monotonic. False when there is nothing to guard any more."""
        slow = now >= self.slow_at
        if slow:
            self.slow_at = now + SLOW_S
            ended = reap()
            if not self.reload():
                return False
            self.psi = pressure()
            running = self.units.running()
            self.follow(running)
        self.look(now)
        # A head that lived for less than a second had its worker too: until that was seen, every look asks.
        if slow or not self.workers.keys() <= self.links.had:
            self.orphans(now)
        return self.deadline(now, ended) if slow else True

    def follow(self, running):
        """Which arm runs; a new start of one begins a new series and forgets what was seen of the last."""
        servers = {name: path for name, path in running.items() if name.startswith(SERVERS)}
        self.workers = {name: path for name, path in servers.items() if name.startswith(SERVERS[0])}
        members = set()
        for name, path in servers.items():
            try:
                members.add((name, os.stat(path).st_ino))  # a control group is made anew at each start
            except OSError:
                continue
        if members and not members & self.members:
            self.end_arm()
            self.arm = sorted(members)[0][0].split("@", 1)[1].removesuffix(".service")
            self.series = Series(os.path.join(self.state, "memory", self.arm + ".tsv"))
            self.acted, self.warned = False, False
            self.links = Links()
        elif not members:
            self.end_arm()
        self.members = members

    def end_arm(self):
        if self.series:
            self.series.close()
        self.series, self.arm = None, None

    def look(self, now):
        """Read memory, note it, and act where a floor is crossed."""
        try:
            values = sample(self.config.get("meminfo") or "/proc/meminfo")
            self.blind = None
        except (OSError, ValueError) as error:
            self.blind = self.blind or now
            if self.arm and now - self.blind > BLIND_S:
                self.act("blind", f"memory cannot be read: {error}", None)
            return
        if not self.arm:
            return
        self.series.add(time.time(), values, self.psi)
        available, driver_free, floor = values[0], values[1] - values[2], self.floor()
        if available < floor:
            self.act("memory", f"MemAvailable {available} MiB is below the floor of {floor} MiB", values)
        elif driver_free < self.config.get("free_floor_mib", 0):
            least = self.config["free_floor_mib"]
            self.act("free", f"MemFree less CmaFree {driver_free} MiB is below the floor of {least} MiB", values)
        elif available < self.config.get("warn_mib", 0) and not self.warned:
            self.warned = True
            say("warning: MemAvailable %d MiB, floor %d MiB (arm %s)" % (available, floor, self.arm))

    def orphans(self, now):
        """A worker that had a head and lost it is stopped: nobody will ever ask it again, and its memory is needed."""
        name, seconds = self.links.longest_loss(self.workers, now)
        if name and seconds >= self.config.get("orphan_s", 20):
            self.act("orphan", "the head's connection to %s is gone for %.0f s" % (name, seconds), None)

    def act(self, what, text, values):
        """Stop the candidate on this rank and leave the record; once for each start of an arm, unless something survives."""
        units = {name: path for name, path in self.units.running().items() if name.startswith(SERVERS)}
        if not units:
            return
        if self.acted:
            signal_all(units, signal.SIGKILL)
            return
        self.acted = True
        wall, top = time.time(), top_processes()
        stopped = self.terminate(units)
        names = ("available_mib", "free_mib", "cma_free_mib", "cached_mib")
        record = {"what": what, "text": text, "at": wall, "arm": self.arm, "run_id": self.config["run_id"], "floor_mib": self.floor()}
        record.update(zip(names, values or (), strict=False))
        record.update(psi_some=self.psi[0], psi_full=self.psi[1], top=top, stopped=stopped, killed=[])
        path = os.path.join(self.state, "guard-tripped.json")
        # The controller sees the worker end, and asks why, before the last process is gone.
        if self.series:
            self.series.flush()
        write_json(path, record, durable=False)
        write_json(path, {**record, "killed": self.outlive(units)})
        say(f"{text}: stopped {', '.join(stopped)} of arm {self.arm}")

    @staticmethod
    def terminate(units):
        """SIGTERM; systemd is told, so that it counts as a stop. The units that had a process."""
        stopped = signal_all(units, signal.SIGTERM)
        spawn(["systemctl", "stop", "--no-block", *units])
        return stopped

    @staticmethod
    def outlive(units):
        """SIGKILL for what is slow to end; the units that were killed."""
        end = time.monotonic() + GRACE_S
        while time.monotonic() < end and any(Units.pids(path) for path in units.values()):
            time.sleep(0.05)
        return signal_all(units, signal.SIGKILL)

    # -- the window's end --------------------------------------------------------------------------------------

    def deadline(self, now, ended):
        """At the deadline: stop the candidate, on the head bring production back. False when all of it is done.

        ended: children that ended, with their exit status.
        """
        if seconds_left(self.config, self.boot, uptime(), time.time()) > 0:
            return True
        running = self.units.running()
        if running or not self.expired:
            stopped, killed = (self.terminate(running), self.outlive(running)) if running else ([], [])
            if not self.expired:
                record = {"at": time.time(), "run_id": self.config["run_id"], "stopped": stopped, "killed": killed}
                write_json(os.path.join(self.state, "guard-deadline.json"), record)
                say("the window of run %s is over: stopped %s" % (self.config["run_id"], ", ".join(stopped) or "nothing"))
            self.expired = True
            return True
        if self.config.get("is_head") and not self.restored(now, ended):
            return True
        self.disarm()
        return False

    def restored(self, now, ended):
        """Whether production is back: the controller's own code does that, as a child, and is sent again when it could not."""
        if self.restoring is None:
            if now >= self.retry_at:
                program = os.path.join(self.root, "libexec", "k3_production.py")
                self.restoring = spawn([sys.executable, "-E", "-s", program, "restore", "--root", self.root])
            return False
        if self.restoring not in ended:
            return False
        status = ended[self.restoring]
        self.restoring, self.retry_at = None, now + RETRY_S
        return status == 0

    def disarm(self):
        """The window is over and all is done: nothing of a candidate stays active, nothing to guard, now or after a reboot."""
        children = {spawn(["systemctl", "disable", UNIT]), spawn(["systemctl", "stop", "--no-block", TARGET])} - {None}
        end = time.monotonic() + DISABLE_S
        # The service's end takes its children with it.
        while children and time.monotonic() < end:
            time.sleep(0.05)
            children -= reap().keys()
        os.unlink(self.path)


def lock_memory():
    """Keep what was touched in memory: a guard that must be read from disk under pressure comes too late."""
    try:
        import ctypes

        current, future, on_fault = 1, 2, 4
        if ctypes.CDLL(None, use_errno=True).mlockall(current | future | on_fault):
            say("memory is not locked: " + os.strerror(ctypes.get_errno()))
    except (ImportError, OSError, MemoryError) as error:
        say(f"memory is not locked: {error}")


def notify(text):
    """Tell systemd: ready, and alive (WatchdogSec=)."""
    path = os.environ.get("NOTIFY_SOCKET")
    if path:
        import socket

        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
            channel.sendto(text.encode(), "\0" + path[1:] if path[0] == "@" else path)


def watch(guard):
    due, alive_at, ready = time.monotonic(), 0.0, "READY=1\n"
    while guard.step(time.monotonic()):
        if time.monotonic() >= alive_at:
            notify(ready + "WATCHDOG=1")
            alive_at, ready = time.monotonic() + SLOW_S, ""
        due = max(due + INTERVAL_S, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
    say("nothing to guard any more")


def main(argv):
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(0))
    lock_memory()
    guard = Guard(argv[1])
    try:
        watch(guard)
    finally:
        guard.end_arm()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
