#!/usr/bin/env python3
"""Sample MemAvailable and MemFree four times a second; write each second's least as one line. Standard library only.

Line: seconds since the epoch, least MemAvailable (MiB), least MemFree (MiB). The file is truncated at start.
"""

import sys
import time

INTERVAL_S = 0.25


def sample():
    """(MemAvailable, MemFree) in MiB."""
    values = {}
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith(("MemAvailable:", "MemFree:")):
                name, kib = line.split()[:2]
                values[name] = int(kib) // 1024
    return values["MemAvailable:"], values["MemFree:"]


def main(path):
    with open(path, "w", encoding="ascii", buffering=1) as sink:
        second, least = int(time.time()), sample()
        while True:
            time.sleep(INTERVAL_S)
            now, seen = int(time.time()), sample()
            if now != second:
                sink.write("%d %d %d\n" % (second, *least))
                second, least = now, seen
            else:
                least = tuple(map(min, least, seen))


if __name__ == "__main__":
    main(sys.argv[1])
