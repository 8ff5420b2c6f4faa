"""YAML that people write, read with the line of every key.

``Document`` keeps the composed nodes beside the data, so that whatever is found wrong later (by pydantic or by hand) is
shown as ``file:line: what is wrong, what is valid``. Whatever bytes a file holds, reading it ends in data or in an
``InputError``.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from k3deploy.errors import InputError, Problem

Model = TypeVar("Model", bound=BaseModel)
KeyPath = tuple[str | int, ...]

# Far above what a person writes, far below what makes validation slow: aliases can multiply a few lines into millions.
MAX_NODES = 200_000
MAX_BYTES = 4 << 20
_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map", "timestamp")}


def suggest(word: str, valid: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the nearest valid word, or nothing."""
    by_letters = {one.casefold(): one for one in valid}
    near = difflib.get_close_matches(word.casefold(), list(by_letters), n=1, cutoff=0.6)
    return f"; did you mean {by_letters[near[0]]!r}?" if near else ""


class Document:
    """One YAML file: its data, and where each part of it stands."""

    def __init__(self, path: Path, root: yaml.Node | None, data: Any) -> None:
        self.path = path
        self.data = data
        self._root = root

    def place(self, keys: Sequence[str | int]) -> tuple[int, int]:
        """Line and column (from 1) of the deepest part of ``keys`` that exists; ``(1, 1)`` for an empty file."""
        if self._root is None:
            return 1, 1
        node: yaml.Node = self._root
        mark = node.start_mark
        for key in keys:
            found = _child(node, key)
            if found is None:
                break
            mark, node = found
        return mark.line + 1, mark.column + 1

    def problem(self, keys: Sequence[str | int], message: str) -> Problem:
        """A problem at the place of ``keys``."""
        line, column = self.place(keys)
        return Problem(self.path, line, message, column)

    def walk(self) -> Iterable[tuple[KeyPath, str, int]]:
        """Every mapping key of the file with its path and its line."""
        stack: list[tuple[KeyPath, yaml.Node]] = [] if self._root is None else [((), self._root)]
        seen: set[int] = set()
        while stack:
            path, node = stack.pop()
            if id(node) in seen:  # an alias: already walked where its anchor stands
                continue
            seen.add(id(node))
            if isinstance(node, yaml.MappingNode):
                for key, value in node.value:
                    if isinstance(key, yaml.ScalarNode):
                        yield (*path, key.value), key.value, key.start_mark.line + 1
                        stack.append(((*path, key.value), value))
            elif isinstance(node, yaml.SequenceNode):
                stack.extend(((*path, index), value) for index, value in enumerate(node.value))


def _child(node: yaml.Node, key: str | int) -> tuple[yaml.Mark, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.value == str(key):
                return key_node.start_mark, value_node
    elif isinstance(node, yaml.SequenceNode) and isinstance(key, int) and 0 <= key < len(node.value):
        return node.value[key].start_mark, node.value[key]
    return None


class _Constructor(yaml.constructor.SafeConstructor):
    """Nodes to plain data, collecting problems instead of raising at the first."""

    def __init__(self, path: Path, *, any_tag: bool) -> None:
        super().__init__()
        self.path = path
        self.any_tag = any_tag
        self.problems: list[Problem] = []
        self._done: dict[int, Any] = {}
        self._open: set[int] = set()
        self._sizes: dict[int, int] = {}

    def plain(self, node: yaml.Node) -> Any:
        """The data of ``node``; parts with problems become ``None``."""
        if id(node) in self._done:
            return self._done[id(node)]
        if id(node) in self._open:
            self._complain(node, "an alias refers to the structure that contains it")
            return None
        self._open.add(id(node))
        try:
            value = self._build(node)
        finally:
            self._open.discard(id(node))
        self._done[id(node)] = value
        return value

    def _complain(self, node: yaml.Node, message: str) -> None:
        mark = node.start_mark
        self.problems.append(Problem(self.path, mark.line + 1, message, mark.column + 1))

    def _build(self, node: yaml.Node) -> Any:
        if node.tag not in _TAGS and node.tag != "tag:yaml.org,2002:merge":
            if not self.any_tag:
                self._complain(node, f"the tag {node.tag!r} is not allowed here: plain YAML only")
                return None
            if isinstance(node, yaml.ScalarNode):
                return node.value
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if isinstance(node, yaml.SequenceNode):
            items = [self.plain(child) for child in node.value]
            self._weigh(node, node.value)
            return items
        return self._mapping(node)

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        try:
            value = self.construct_object(node)
        except (ValueError, OverflowError, KeyError, yaml.YAMLError):
            self._complain(node, f"cannot read the value {node.value[:60]!r}")
            return None
        # A date is a string that looks like one; nothing here wants dates.
        return node.value if node.tag == "tag:yaml.org,2002:timestamp" else value

    def _mapping(self, node: yaml.Node) -> dict[str, Any]:
        data: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._complain(key_node, "a key must be a plain word")
                continue
            key = key_node.value
            if key in lines:
                self._complain(key_node, f"duplicate key {key!r}: first given on line {lines[key]}")
                continue
            lines[key] = key_node.start_mark.line + 1
            data[key] = self.plain(value_node)
        self._weigh(node, [value for _, value in node.value])
        return data

    def _weigh(self, node: yaml.Node, children: Sequence[yaml.Node]) -> None:
        size = 1 + sum(self._sizes.get(id(child), 1) for child in children)
        self._sizes[id(node)] = size
        if size > MAX_NODES:
            raise _TooLarge(node)


class _TooLarge(Exception):
    def __init__(self, node: yaml.Node) -> None:
        super().__init__()
        self.node = node


def read_bytes(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most ``limit`` bytes; whatever else is there is an ``InputError``."""
    try:
        if path.exists() and not (
            path.is_file() or path.is_dir()
        ):  # a named pipe would be waited for, and /dev/zero has no end
            raise InputError([Problem(path, 0, "cannot be read: it is not a file")])
        if path.stat().st_size > limit:
            raise InputError(
                [Problem(path, 0, f"is larger than {limit >> 20} MiB: not the kind of file that is read here")]
            )
        return path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError([Problem(path, 0, f"cannot be read: {reason}")]) from None


def load(path: Path, *, any_tag: bool = False) -> Document:
    """Read one YAML document.

    ``any_tag`` lets tags such as ``!vault`` pass as plain values: for files whose keys matter here but whose values are
    somebody else's. Raises ``InputError`` with every problem found: unreadable file, syntax, duplicate keys, tags,
    runaway aliases.
    """
    try:
        text = read_bytes(path, MAX_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError([Problem(path, 0, f"not UTF-8 text (byte {error.start})")]) from None
    constructor = _Constructor(path, any_tag=any_tag)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = None if root is None else constructor.plain(root)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise InputError([Problem(path, line, f"character U+{int(error.character):04X} is not allowed")]) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        parts = [part for part in (error.context, error.problem) if part]
        line, column = (mark.line + 1, mark.column + 1) if mark else (0, 0)
        raise InputError([Problem(path, line, "not valid YAML: " + ", ".join(parts), column)]) from None
    except _TooLarge as error:
        line = error.node.start_mark.line + 1
        raise InputError([Problem(path, line, f"aliases blow this up to more than {MAX_NODES} values")]) from None
    except RecursionError:
        raise InputError([Problem(path, 0, "nested too deeply")]) from None
    except (ValueError, yaml.YAMLError) as error:
        raise InputError([Problem(path, 0, f"not valid YAML: {error}")]) from None
    if constructor.problems:
        raise InputError(constructor.problems)
    return Document(path, root, data)


def validate(model: type[Model], path: Path) -> Model:
    """Read ``path`` and make a ``model`` of it, or raise ``InputError`` with every problem at its line."""
    return parse(model, load(path))


def parse(model: type[Model], document: Document) -> Model:
    """Make a ``model`` of a loaded document, or raise ``InputError`` with every problem at its line."""
    if not isinstance(document.data, dict):
        raise InputError([document.problem((), f"must be a mapping; valid keys: {_join(field_names(model))}")])
    try:
        return model.model_validate(document.data)
    except ValidationError as error:
        raise InputError(problems(model, error, document.problem)) from None


def problems(
    model: type[BaseModel], error: ValidationError, locate: Callable[[Sequence[str | int], str], Problem]
) -> list[Problem]:
    """Translate pydantic's errors into problems; ``locate(keys, message)`` knows where keys stand."""
    found: list[Problem] = []
    for detail in error.errors(include_url=False):
        keys, message = _explain(model, detail)
        problem = locate(keys, message)
        if problem not in found:  # members of a union complain one by one, in the same words
            found.append(problem)
    return found


def _explain(model: type[BaseModel], detail: ErrorDetails) -> tuple[KeyPath, str]:
    keys = tuple(part for part in detail["loc"] if part != "[key]")
    name = ".".join(str(part) for part in keys) or "the file"
    if detail["type"] == "extra_forbidden":
        valid = field_names(_model_at(model, keys[:-1]))
        word = str(keys[-1])
        return keys, f"unknown key {name!r}{suggest(word, valid)} (valid here: {_join(valid)})"
    if detail["type"] == "missing":
        return keys[:-1], f"missing key {name!r}"
    message = detail["msg"].removeprefix("Value error, ")
    value = detail.get("input")
    if detail["type"] == "literal_error":
        choices = [choice.strip(" '") for choice in str(detail["ctx"]["expected"]).replace(" or ", ",").split(",")]
        return keys, f"{name}: {_shown(value)} is not valid{suggest(str(value), choices)} (valid: {_join(choices)})"
    if detail["type"] in {"value_error", "assertion_error"} or isinstance(value, dict | list):
        return keys, f"{name}: {message}"
    return keys, f"{name}: {message[:1].lower()}{message[1:]}, got {_shown(value)}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _join(words: Iterable[str]) -> str:
    return ", ".join(words)


def field_names(model: type[BaseModel] | None) -> list[str]:
    """The keys that a model takes, as people write them (aliases)."""
    if model is None:
        return []
    return [field.alias or name for name, field in model.model_fields.items()]


def _model_at(model: type[BaseModel], keys: Sequence[str | int]) -> type[BaseModel] | None:
    """The model that stands at ``keys`` inside ``model``: through optional values, lists and maps."""
    current: Any = model
    for key in keys:
        inner = _unwrapped(current)
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            by_alias = {field.alias or name: field.annotation for name, field in inner.model_fields.items()}
            current = by_alias.get(str(key))
        elif get_origin(inner) in (list, dict, Mapping):
            current = get_args(inner)[-1]
        else:
            return None
    inner = _unwrapped(current)
    return inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None


def _unwrapped(annotation: Any) -> Any:
    while True:
        origin = get_origin(annotation)
        if origin is Annotated:
            annotation = get_args(annotation)[0]
        elif origin in (Union, types.UnionType):
            members = [member for member in get_args(annotation) if member is not type(None)]
            annotation = members[0]
        else:
            return annotation
