"""What of a unit's log travels to the controller: its start, its end, and what is counted of the middle. Runs on the rank.

Whole while it is short. A log with diagnostics has many MiB; the sizes that a server says stand at its start, what it broke of at its end,
and what tells which kernels ran, or how long each graph took, anywhere.
"""

from __future__ import annotations

import base64
import os
import zlib

from ansible_collections.k3.deploy.plugins.module_utils import log_lines

START = END = 128 << 10
_PIECE = 1 << 20  # read at a time
_LINE = 4096  # of a line of the middle, around what tells
_PACKED = "k3-log-zlib:"
_UNPACKED_LIMIT = 64 << 20  # of what a rank sends: several times what it may keep


class Middle:
    """Goes through what lies between start and end, and keeps the lines that are counted, a bound of each kind."""

    def __init__(self):
        self.kept, self.left_out, self.lost = [], 0, {}
        self._room = {name: kind.keep for name, kind in log_lines.KINDS.items()}
        self._words = [(word.encode(), name) for name, kind in log_lines.KINDS.items() for word in kind.words]

    def read(self, piece):
        """piece: whole lines. Most hold nothing that is counted, and that is found out for all of its lines at once."""
        found = [item for item in self._words if item[0] in piece]
        if not found:
            self.left_out += len(piece)
            return
        for line in piece.splitlines(keepends=True):
            names = list(dict.fromkeys(name for word, name in found if word in line))
            if names:
                self._keep(line, names, min(place for place in (line.find(word) for word, _ in found) if place >= 0))
            else:
                self.left_out += len(line)

    def _keep(self, line, names, place):
        """Keep a line of these kinds where one of them has room."""
        start = max(0, place - _LINE // 4) if len(line) > _LINE else 0
        cut = line[start : start + _LINE].strip(b"\r\n") + b"\n"
        if not any(self._room[name] >= len(cut) for name in names):
            self.left_out += len(line)
            for name in names:
                self.lost[name] = self.lost.get(name, 0) + 1
            return
        self.left_out += len(line) - len(cut)
        self.kept.append(cut)
        for name in names:
            self._room[name] -= len(cut)

    def text(self):
        lost = [log_lines.LOST.format(count, name) for name, count in sorted(self.lost.items())]
        lines = [log_lines.GAP.format(self.left_out), _text(b"".join(self.kept)).rstrip("\n"), *lost, log_lines.END]
        return "\n".join(line for line in lines if line) + "\n"


def excerpt(path, start=START, end=END):
    """A log as text: whole, or what of it travels; an empty string when there is none. Holds some MiB at most, however long the log is."""
    try:
        with open(path, "rb") as raw:
            # It may grow while it is read: what comes later is the next reading's.
            size = os.fstat(raw.fileno()).st_size
            if size <= start + end:
                return _text(raw.read(size))
            first = raw.read(start)
            first = first[: first.rfind(b"\n") + 1] or first
            raw.seek(size - end)
            last = raw.read(end)
            last = last[last.find(b"\n") + 1 :]
            middle = Middle()
            raw.seek(len(first))
            for piece in _pieces(raw, size - len(last) - len(first)):
                middle.read(piece)
    except OSError:
        return ""
    return _text(first).rstrip("\n") + "\n" + middle.text() + _text(last)


def _pieces(raw, size):
    """The next ``size`` bytes in pieces of whole lines; a line that is longer than a piece comes in several."""
    rest = b""
    while size > 0:
        read = raw.read(min(_PIECE, size))
        if not read:  # truncated meanwhile: the unit was started anew
            break
        size -= len(read)
        read = rest + read
        cut = read.rfind(b"\n") + 1 if size > 0 else len(read)
        if not cut and len(read) < 2 * _PIECE:
            rest = read
            continue
        cut = cut or len(read)
        yield read[:cut]
        rest = read[cut:]
    if rest:
        yield rest


def _text(raw):
    return raw.decode("utf-8", "replace")


def pack(text):
    """A text as it is carried in a module's result: Ansible copies and quotes results many times over, so a long one is compressed."""
    if len(text) <= 2 * (START + END) and not text.startswith(_PACKED):
        return text
    return _PACKED + base64.b64encode(zlib.compress(text.encode("utf-8", "replace"))).decode("ascii")


def unpack(text):
    """What ``pack`` was given. Never more than a rank may send, whatever a result says."""
    if not text.startswith(_PACKED):
        return text
    try:
        return _text(zlib.decompressobj().decompress(base64.b64decode(text[len(_PACKED) :]), _UNPACKED_LIMIT))
    except (ValueError, zlib.error) as error:
        return f"[k3deploy: this log did not arrive whole: {error}]\n"
