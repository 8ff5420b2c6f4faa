"""How much of a file the page cache holds, without reading or dropping anything: whether a load starts from disk or from memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import re

CHUNK = 1 << 30  # bytes of address space that are mapped and asked about at once
SHARD = re.compile(r"-(\d{5})-of-(\d{5})(\.\w+)$")


def shards(path):
    """The files of a model: itself, or all parts of a split one when its first part is named."""
    found = SHARD.search(path)
    if not found:
        return [path]
    stem = path[: found.start()]
    return [f"{stem}-{number:05d}-of-{found[2]}{found[3]}" for number in range(1, int(found[2]) + 1)]


def resident_bytes(path):
    """Bytes of ``path`` in the page cache. mincore only looks: no page is read in. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    page = mmap.PAGESIZE
    handle = os.open(path, os.O_RDONLY)
    try:
        size, pages = os.fstat(handle).st_size, 0
        for offset in range(0, size, CHUNK):
            length = min(CHUNK, size - offset)
            count = -(-length // page)
            place = libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, handle, offset)
            if place in (None, ctypes.c_void_p(-1).value):
                raise OSError(ctypes.get_errno(), "mmap")
            try:
                vector = ctypes.create_string_buffer(count)
                if libc.mincore(place, length, vector) != 0:
                    raise OSError(ctypes.get_errno(), "mincore")
                pages += _resident(vector.raw[:count])
            finally:
                libc.munmap(place, length)
        return min(size, pages * page)
    finally:
        os.close(handle)


def _resident(vector):
    """How many of mincore's bytes, one a page, have the lowest bit set: the others are reserved."""
    return sum(vector.count(bytes((value,))) for value in range(1, 256, 2))


def state(path):
    """{path, bytes, resident_bytes, error}: resident_bytes is null where it cannot be known, and error says why."""
    found = {"path": path, "bytes": None, "resident_bytes": None, "error": None}
    try:
        files = shards(path)
        found["bytes"] = sum(os.stat(file).st_size for file in files)
        found["resident_bytes"] = sum(resident_bytes(file) for file in files)
    except (OSError, AttributeError) as error:
        found["error"] = str(error)
    return found
