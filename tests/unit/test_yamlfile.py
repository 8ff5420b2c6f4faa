"""YAML with line numbers: whatever is in a file, the reader is told where and what, and never sees a traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from k3deploy.errors import InputError, Problem
from k3deploy.yamlfile import load, validate


class Inner(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    speed: Literal["slow", "fast"]
    size: int = 1


class Outer(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    name: str
    inner: Inner | None = None
    many: dict[str, Inner] = Field(default_factory=dict)
    items: list[Inner] = Field(default_factory=list)
    set_: int = Field(default=0, alias="set")


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "file.yml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def problems_of(path: Path) -> tuple[Problem, ...]:
    with pytest.raises(InputError) as caught:
        validate(Outer, path)
    return caught.value.problems


def test_all_problems_are_told_at_once_each_at_its_line(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "nmae: x\ninner:\n  speed: fsat\n  size: big\nmany:\n  one:\n    sped: fast\n    speed: fast\n"
        "items:\n  - speed: slow\n    x: 1\n",
    )
    told = {(problem.line, problem.message) for problem in problems_of(path)}
    lines = {line for line, _ in told}
    assert lines == {1, 3, 4, 7, 11}
    text = "\n".join(message for _, message in told)
    assert "unknown key 'nmae'; did you mean 'name'?" in text
    assert "missing key 'name'" in text
    assert "'fsat' is not valid; did you mean 'fast'? (valid: slow, fast)" in text
    assert "inner.size: input should be a valid integer, got 'big'" in text
    assert "unknown key 'many.one.sped'; did you mean 'speed'? (valid here: speed, size)" in text


def test_a_problem_names_the_file_and_the_line(tmp_path: Path) -> None:
    path = write(tmp_path, "name: x\nextra: 1\n")
    assert str(problems_of(path)[0]).startswith(f"{path}:2: unknown key 'extra'")


def test_keys_are_told_by_the_name_that_people_write(tmp_path: Path) -> None:
    assert "valid here: name, inner, many, items, set)" in problems_of(write(tmp_path, "name: x\nfoo: 1\n"))[0].message


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "duplicate key 'a': first given on line 1"),
        ("a: [1\n", 2, "not valid YAML"),
        ("a: !!python/object:os.system x\n", 1, "is not allowed here"),
        ("a: &x [*x]\n", 1, "an alias refers to the structure that contains it"),
        ("? [a]\n: 1\n", 1, "a key must be a plain word"),
        ("a: 1\n---\nb: 2\n", 2, "not valid YAML"),
        ("a: \x01\n", 1, "U+0001"),
        ("- 1\n", 1, "must be a mapping"),
        ("", 1, "must be a mapping"),
        ("a: 0b2_\n" + "b: " + "[" * 5000, 0, "nested too deeply"),
    ],
)
def test_broken_files_end_in_a_problem(tmp_path: Path, text: str, line: int, words: str) -> None:
    found = problems_of(write(tmp_path, text))
    assert any(words in problem.message and problem.line == line for problem in found), found


def test_unreadable_files_end_in_a_problem(tmp_path: Path) -> None:
    assert "No such file" in problems_of(tmp_path / "absent.yml")[0].message
    assert "directory" in problems_of(tmp_path)[0].message
    assert "not UTF-8 text (byte 3)" in problems_of(write(tmp_path, b"a: \xff"))[0].message
    assert "cannot be read" in problems_of(tmp_path / "nul\0byte.yml")[0].message


def test_aliases_cannot_multiply_without_end(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert "aliases blow this up" in problems_of(write(tmp_path, "\n".join(lines)))[0].message


def test_tags_of_others_pass_where_only_keys_matter(tmp_path: Path) -> None:
    path = write(tmp_path, "secret: !vault |\n  abc\nplain: 1\n")
    assert load(path, any_tag=True).data["plain"] == 1
    with pytest.raises(InputError):
        load(path)


@given(st.binary(max_size=200))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300, deadline=None)
def test_any_bytes_end_in_data_or_in_problems(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path, content)
    try:
        validate(Outer, path)
    except InputError as error:
        assert error.problems
        assert all(problem.line >= 0 for problem in error.problems)


YAML_SHAPED = st.text(st.sampled_from("ab:-[]{}&*!?|>'\"#%@`,~ \n\t0129.e+<=_é\u2028\x85"), max_size=60)


@given(YAML_SHAPED)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=500, deadline=None)
def test_text_that_nearly_is_yaml_ends_in_data_or_in_problems(tmp_path: Path, text: str) -> None:
    try:
        load(write(tmp_path, text))
    except InputError as error:
        assert error.problems


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abcxyz", min_size=1, max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text("abcxyz", min_size=1, max_size=4), VALUES, max_size=4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_what_was_written_is_what_is_read(tmp_path: Path, data: dict[str, object]) -> None:
    assert load(write(tmp_path, yaml.safe_dump(data))).data == (data or {})


@given(st.lists(st.sampled_from(["a", "b", "c", "d"]), min_size=1, max_size=4, unique=True), st.integers(0, 5))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_every_key_knows_its_line(tmp_path: Path, keys: list[str], blank: int) -> None:
    document = load(write(tmp_path, "\n" * blank + "".join(f"{key}:\n  inner: 1\n" for key in keys)))
    for number, key in enumerate(keys):
        assert document.place([key])[0] == blank + 1 + 2 * number
        assert document.place([key, "inner"]) == (blank + 2 + 2 * number, 3)
        assert document.place([key, "absent"])[0] == blank + 1 + 2 * number
