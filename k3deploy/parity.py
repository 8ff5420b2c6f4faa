"""What two arms said on the same questions, and how far apart that is: data of the parity test, pure functions on it.

Log-probabilities are natural logarithms; an output error is the largest absolute difference of one, a state error is
relative to max|S| of the layer it occurs in.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field


class _Answer(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)

    error: str = ""


class Position(BaseModel):
    """The likeliest next tokens after a prefix of ``position`` tokens: {token id: log-probability}."""

    model_config = ConfigDict(extra="allow", frozen=True)

    position: int
    top: dict[str, float]


class Positions(_Answer):
    prompt_sha256: str = ""
    positions: list[Position] = Field(default_factory=list)


class StateDifference(BaseModel):
    """Two recurrent states: the largest difference of an element, and the largest relative to max|S| of its layer."""

    model_config = ConfigDict(extra="allow", frozen=True)

    max_error: float
    relative_error: float


class State(_Answer):
    prompt_sha256: str = ""
    tokens: int | None = None
    states: int | None = None
    max_abs: float | None = None
    compared: dict[str, StateDifference] = Field(default_factory=dict)


class Continuation(BaseModel):
    """A greedy continuation; ``margins`` are the log-probability of each token less that of the runner-up."""

    model_config = ConfigDict(extra="allow", frozen=True)

    id: str
    prompt_sha256: str
    tokens: list[int]
    margins: list[float | None] = Field(default_factory=list)


class Suites(_Answer):
    texts: dict[str, list[Continuation]] = Field(default_factory=dict)


class Chunked(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)

    tokens: list[int]
    cache_n: int | None = None


class Continued(_Answer):
    """The continuation of a prompt evaluated in one piece, and in chunks of so many tokens."""

    whole: list[int] = Field(default_factory=list)
    chunks: dict[str, Chunked] = Field(default_factory=dict)


class Reuse(_Answer):
    first: list[int] = Field(default_factory=list)
    other: list[int] = Field(default_factory=list)
    again: list[int] = Field(default_factory=list)
    after_erase: list[int] = Field(default_factory=list)
    after_cancel: list[int] = Field(default_factory=list)


class Parity(_Answer):
    """All answers of one server start; a part that was not asked for is ``None``."""

    positions: Positions | None = None
    state: State | None = None
    suites: Suites | None = None
    continuation: Continued | None = None
    reuse: Reuse | None = None

    @property
    def asked(self) -> bool:
        return any((self.positions, self.state, self.suites, self.continuation, self.reuse))


@dataclass(frozen=True, slots=True)
class OutputDifference:
    """The largest difference of a log-probability, where it is, and on how many positions that rests."""

    max_error: float
    position: int
    positions: int


def output_difference(one: Parity, other: Parity) -> OutputDifference | None:
    """``None`` where the two were not asked the same."""
    if not one.positions or not other.positions or one.positions.prompt_sha256 != other.positions.prompt_sha256:
        return None
    theirs = {entry.position: entry.top for entry in other.positions.positions}
    found = [
        (_largest(entry.top, theirs[entry.position]), entry.position)
        for entry in one.positions.positions
        if entry.position in theirs
    ]
    if not found:
        return None
    error, position = max(found)
    return OutputDifference(error, position, len(found))


def _largest(one: dict[str, float], other: dict[str, float]) -> float:
    """The largest difference; a token that only one list has is at most as likely in the other as that one's last."""
    least_of = (min(one.values(), default=0.0), min(other.values(), default=0.0))
    differences = [0.0]
    for token in one.keys() | other.keys():
        if token in one and token in other:
            differences.append(abs(one[token] - other[token]))
        elif token in one:
            differences.append(one[token] - least_of[1])
        else:
            differences.append(other[token] - least_of[0])
    return max(differences)


def state_difference(one: Parity, one_slug: str, other: Parity, other_slug: str) -> StateDifference | None:
    """The comparison that the head made for whichever arm was measured second."""
    if one.state and other_slug in one.state.compared:
        return one.state.compared[other_slug]
    if other.state and one_slug in other.state.compared:
        return other.state.compared[one_slug]
    return None


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token in which two continuations differ, and by how much the baseline's had won there."""

    suite: str
    text: str
    at: int
    margin: float | None

    def __str__(self) -> str:
        margin = "unknown" if self.margin is None else f"{self.margin:.3g}"
        return f"{self.suite}/{self.text} at token {self.at + 1} (margin {margin})"


def divergences(baseline: Parity, arm: Parity, suite: str) -> tuple[list[Divergence], int]:
    """(where continuations of this suite part, how many were compared)."""
    mine = {text.id: text for text in (arm.suites.texts.get(suite, []) if arm.suites else [])}
    found, compared = [], 0
    for text in baseline.suites.texts.get(suite, []) if baseline.suites else []:
        other = mine.get(text.id)
        if other is None or other.prompt_sha256 != text.prompt_sha256:
            continue
        compared += 1
        at = first_difference(text.tokens, other.tokens)
        if at is not None:
            found.append(Divergence(suite, text.id, at, text.margins[at] if at < len(text.margins) else None))
    return found, compared


def asked(baseline: Parity, arm: Parity, suite: str) -> int:
    """How many texts of a suite either of the two has an answer to, or was asked in another wording."""
    texts = (who.suites.texts.get(suite, []) if who.suites else [] for who in (baseline, arm))
    return len({text.id for answers in texts for text in answers})


def evaluated_anew(parity: Parity) -> list[str]:
    """The chunk sizes of a continuation that did not go on from a state: what came before was not in the slot."""
    chunks = parity.continuation.chunks if parity.continuation else {}
    return [size for size, chunked in chunks.items() if not chunked.cache_n]


def first_difference(one: list[int], other: list[int]) -> int | None:
    if one == other:
        return None
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def inconsistencies(parity: Parity) -> list[str]:
    """Where a server contradicts itself: chunks against one piece, and a prompt against the same prompt again."""
    found = []
    if parity.continuation and not parity.continuation.error:
        whole = parity.continuation.whole
        for size, chunked in parity.continuation.chunks.items():
            if (at := first_difference(whole, chunked.tokens)) is not None:
                found.append(
                    f"a prompt in chunks of {size} tokens goes on otherwise than in one piece (token {at + 1})"
                )
    if parity.reuse and not parity.reuse.error:
        for name, when in (
            ("again", "after another prompt"),
            ("after_erase", "after the slot was erased"),
            ("after_cancel", "after a request that was broken off"),
        ):
            if (at := first_difference(parity.reuse.first, getattr(parity.reuse, name))) is not None:
                found.append(f"a prompt goes on otherwise {when} (token {at + 1})")
    return found
