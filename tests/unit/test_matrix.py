"""The matrix as data: the shipped rows say what the matrix says, and every mistake in a row is named at its line."""

from __future__ import annotations

import functools
import runpy
import shutil
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3deploy.errors import InputError, Problem
from k3deploy.matrix import CandidateError, Matrix
from k3deploy.settings import Settings, flags, merge

SHIPPED = Path(__file__).parents[2] / "inventory" / "matrix"


@functools.cache
def shipped() -> Matrix:
    return Matrix.load(SHIPPED)


@pytest.fixture
def matrix() -> Matrix:
    return shipped()


def problems_after(tmp_path: Path, **files: str) -> tuple[Problem, ...]:
    """Problems of the shipped matrix with some files replaced or added."""
    directory = tmp_path / "matrix"
    shutil.copytree(SHIPPED, directory)
    for name, text in files.items():
        (directory / f"{name}.yml").write_text(text)
    with pytest.raises(InputError) as caught:
        Matrix.load(directory)
    return caught.value.problems


def row(row_id: str, **changes: object) -> str:
    """A minimal valid row, changed."""
    data: dict[str, object] = {
        "id": row_id,
        "title": "t",
        "hypothesis": "h",
        "guard": "g",
        "rejection": "r",
        "kind": "runtime",
        "set": {"ubatch_size": 1024},
        "gates": {"decode": {"cells": ["tg100"], "require": "not_slower"}},
    }
    return yaml.safe_dump(data | changes, sort_keys=False)


def test_the_baseline_is_the_observed_configuration(matrix: Matrix) -> None:
    values = matrix.baseline.settings.values()
    expected = {
        "ctx_size": 600000,
        "batch_size": 4096,
        "ubatch_size": 1536,
        "threads": 20,
        "threads_batch": 32,
        "cache_type_k": "q8_0",
        "cache_type_v": "f16",
        "split_mode": "layer",
        "tensor_split": [1, 1, 1, 1],
        "rpc_port": 50053,
        "guard_mib": 1536,
    }
    assert {key: values[key] for key in expected} == expected
    assert values["environment"] == {"GGML_CUDA_K3_FLASHKDA": "1", "GGML_CUDA_K3_FLASHKDA_DIAG": "1"}
    assert matrix.baseline.observed["gpu_architecture"] == "sm_121a"
    assert matrix.baseline.observed["workers"] == 3


def test_every_row_of_the_matrix_is_there(matrix: Matrix) -> None:
    numbered = [f"U{number}" for number in range(1, 13)]
    assert list(matrix.rows) == [*numbered[:8], "U8proxy", *numbered[8:10], "U10b", *numbered[10:], "next"]
    kinds = {name: entry.kind for name, entry in matrix.rows.items()}
    assert [name for name, kind in kinds.items() if kind == "runtime"] == ["U2", "U3", "U6", "U7", "U9", "next"]
    assert [name for name, kind in kinds.items() if kind == "build"] == ["U1", "U10", "U10b", "U11", "U12"]
    assert [name for name, kind in kinds.items() if kind == "transport"] == ["U4", "U5"]
    assert [name for name, kind in kinds.items() if kind == "profile"] == ["U8", "U8proxy"]
    assert all(entry.guards.rank_available_mib == 1536 for entry in matrix.rows.values())


def test_a_swept_variable_of_the_environment_names_its_arms_by_its_value(matrix: Matrix) -> None:
    arms = matrix.resolve("candidate-U12").arms
    assert [(arm.name, arm.settings["environment"]) for arm in arms] == [
        ("U12@exact", {"GGML_CUDA_K3_IQ1S_GROUPED": "exact"}),
        ("U12@fine", {"GGML_CUDA_K3_IQ1S_GROUPED": "fine"}),
    ]


def test_the_suggested_next_load_is_exact(matrix: Matrix) -> None:
    (arm,) = matrix.resolve("candidate-next").arms
    running = merge(matrix.baseline.settings.values(), arm.settings)
    expected = {
        "ctx_size": 600000,
        "parallel": 1,
        "batch_size": 4096,
        "ubatch_size": 2048,
        "threads": 16,
        "threads_batch": 20,
        "cache_reuse": 256,
        "flash_attn": "on",
        "split_mode": "layer",
        "tensor_split": [1, 1, 1, 1],
        "cache_type_k": "q8_0",
        "cache_type_v": "f16",
        "rpc_port": 50053,
        "guard_mib": 1536,
    }
    assert {key: running[key] for key in expected} == expected
    assert running["environment"]["GGML_CUDA_K3_FLASHKDA"] == "1"
    assert running["graph_ladder"]["prefill"] == [256, 512, 1024, 1536, 2048]
    assert "cpu_range_batch" not in running


def test_a_sweep_is_an_arm_a_value(matrix: Matrix) -> None:
    arms = matrix.resolve("candidate-U2").arms
    assert [(arm.name, arm.settings["ubatch_size"]) for arm in arms] == [("U2@2048", 2048), ("U2@3072", 3072)]
    assert [arm.name for arm in matrix.resolve("candidate-U2@3072").arms] == ["U2@3072"]
    assert [arm.settings["threads_batch"] for arm in matrix.resolve("candidate-U3").arms] == [16, 18, 20]
    assert {arm.settings["threads"] for arm in matrix.resolve("candidate-U3").arms} == {16}


def test_a_composition_has_the_settings_gates_and_findings_of_its_rows(matrix: Matrix) -> None:
    candidate = matrix.resolve("candidate-U2@2048+U9")
    assert [arm.name for arm in candidate.arms] == ["U2@2048+U9"]
    assert candidate.arms[0].settings["cache_type_k"] == "f16"
    assert candidate.arms[0].settings["ubatch_size"] == 2048
    assert {"cold_ttft", "long_context_quality"} <= candidate.gates.keys()
    assert {row_id for row_id, _ in candidate.findings} == {"U2", "U9"}


def test_next_shows_what_is_known_of_the_rows_that_it_combines(matrix: Matrix) -> None:
    assert {row_id for row_id, _ in matrix.resolve("candidate-next").findings} == {"next", "U2", "U3", "U6", "U7"}


@pytest.mark.parametrize("alone", ["U1", "U4", "U5", "U8", "U8proxy"])
@pytest.mark.parametrize("other", ["U2", "U9", "next"])
def test_rows_that_stand_alone_are_refused_with_their_reason(matrix: Matrix, alone: str, other: str) -> None:
    for name in (f"candidate-{alone}+{other}", f"candidate-{other}+{alone}"):
        with pytest.raises(CandidateError, match="U1, U4, U5 and U8 out of a first A/B") as caught:
            matrix.resolve(name)
        assert caught.value.remedy == f"Measure it by itself: candidate-{alone}"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("candidate-U99", "no row 'U99'"),
        ("candidate-nxt", "did you mean 'next'"),
        ("candidate-U2@4096", r"no value '4096' \(values: 2048, 3072\)"),
        ("candidate-U9@f16", "the row is no sweep"),
        ("candidate-U2+U2", "named twice"),
        ("candidate-U2@2048+U2@3072", "named twice"),
        ("candidate-", "is no candidate"),
        ("U2", "is no candidate; did you mean 'candidate-U2'"),
        ("candidate-u2", "no row 'u2' in .*; did you mean 'U2'"),
        ("candidate-U2+", "no row ''"),
        ("candidate-U10+U2", "parity check has passed"),
    ],
)
def test_impossible_candidates_say_why(matrix: Matrix, name: str, words: str) -> None:
    with pytest.raises(CandidateError, match=words):
        matrix.resolve(name)


def test_two_rows_that_set_one_key_differently_cannot_be_composed(tmp_path: Path) -> None:
    directory = tmp_path / "matrix"
    shutil.copytree(SHIPPED, directory)
    (directory / "X1.yml").write_text(row("X1", set={"threads": 4}, mixes_with=["U3"]))
    (directory / "X2.yml").write_text(row("X2", set={"environment": {"A": "1"}}, mixes_with=["X3"]))
    (directory / "X3.yml").write_text(row("X3", set={"environment": {"A": "2", "B": "3"}}))
    matrix = Matrix.load(directory)
    with pytest.raises(CandidateError, match="impossible composition: U3@16 sets threads to 16, X1 sets it to 4"):
        matrix.resolve("candidate-U3@16+X1")
    with pytest.raises(CandidateError, match=r"X2 sets environment\.A to 1, X3 sets it to 2"):
        matrix.resolve("candidate-X2+X3")


def test_all_mistakes_of_all_files_are_told_at_once(tmp_path: Path) -> None:
    found = problems_after(
        tmp_path,
        X1=row("X1", set={"ubatch_sizes": 1}),
        X2=row("X2", kind="runtme"),
        X3=row("U2"),
        X4=row("X4", set={"cache_type_k": "q8"}),
    )
    text = "\n".join(map(str, found))
    assert "X1.yml:8: unknown key 'set.ubatch_sizes'; did you mean 'ubatch_size'?" in text
    assert "X2.yml:6: kind: 'runtme' is not valid; did you mean 'runtime'?" in text
    assert "X3.yml:1: duplicate row id 'U2': also in U2.yml" in text
    assert "X4.yml:8: set.cache_type_k: 'q8' is not valid; did you mean 'q8_0'?" in text
    assert len(found) == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sweep": {"ubatch_sz": [1]}}, "sweep: unknown key 'ubatch_sz'; did you mean 'ubatch_size'?"),
        ({"set": {}, "sweep": {"ubatch_size": [512, "big"]}}, "sweep: ubatch_size: input should be a valid integer"),
        ({"sweep": {"ubatch_size": [512]}}, "ubatch_size: both set and swept"),
        ({"set": {}, "sweep": {"threads": [1, 2], "poll": [1]}}, "the same number of values"),
        ({"set": {}, "sweep": {"threads": [1, 1]}}, "a value twice"),
        ({"mixes_with": ["U22"]}, "mixes_with: no row 'U22'; did you mean 'U2'?"),
        ({"mixes_with": ["U4"]}, "mixes_with: U4 stands alone"),
        ({"mixes_with": ["X"]}, "lists itself"),
        ({"mixes_with": ["U2"], "alone": "because"}, "stands alone cannot list rows"),
        ({"kind": "build"}, "needs the key build"),
        ({"gates": {}}, "gates"),
        (
            {"gates": {"g": {"cells": ["tg100"], "require": "identical"}}},
            "a gate on cells requires one of faster, not_slower, not identical",
        ),
        ({"gates": {"g": {"require": "faster"}}}, "exactly one of cells, suite, observation"),
        ({"gates": {"g": {"observation": "o", "require": "at_most"}}}, "limit goes with"),
        ({"gates": {"g": {"cells": ["2k"], "require": "faster"}}}, "gates.g.cells.0"),
        ({"combines": ["U2", "U6"], "set": {}}, "U2 is a sweep: choose one of U2@2048, U2@3072"),
        ({"combines": ["U2@2048", "U6"]}, "ubatch_size: 1024 here, but the combined rows set 2048"),
        ({"combines": ["U1", "U2@2048"], "set": {}}, "U1 is not mixed with U2"),
        ({"combines": ["next"], "set": {}}, "next combines rows itself"),
        ({"set": {"environment": {"A": "x\ny"}}}, "must not contain newlines"),
        ({"set": {"cpu_range_batch": "9-4"}}, "runs backwards"),
        ({"set": {"ubatch_size": True}}, "valid integer"),
    ],
)
def test_a_mistake_in_a_row_is_named(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    found = problems_after(tmp_path, X=row("X", **changes))
    assert len(found) == 1
    assert words in found[0].message
    assert found[0].line > 0


def test_a_matrix_without_baseline_or_directory_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "U2.yml").write_text(row("U2"))
    with pytest.raises(InputError, match=r"has no baseline\.yml"):
        Matrix.load(tmp_path)
    with pytest.raises(InputError, match="is not a directory"):
        Matrix.load(tmp_path / "absent")


def test_a_new_row_needs_no_code(tmp_path: Path) -> None:
    directory = tmp_path / "matrix"
    shutil.copytree(SHIPPED, directory)
    (directory / "V1.yml").write_text(row("V1", set={"poll": 0}, mixes_with=["U2"]))
    matrix = Matrix.load(directory)
    assert [arm.name for arm in matrix.resolve("candidate-U2@2048+V1").arms] == ["U2@2048+V1"]


def test_explaining_a_row_tells_what_speaks_against_it(matrix: Matrix) -> None:
    text = matrix.explain("U9")
    assert "against the hypothesis: 2.1 GiB per node is the size of the q8_0 cache" in text
    assert "against the hypothesis: --cache-reuse is not safe for K3" in matrix.explain("U7")
    for row_id in matrix.rows:
        assert matrix.rows[row_id].hypothesis in matrix.explain(row_id)


MIXABLE = ["U2@2048", "U3@16", "U6", "U7", "U9"]


@given(st.permutations(MIXABLE), st.integers(1, 5))
@settings(deadline=None)
def test_the_order_of_a_composition_changes_nothing_but_its_name(order: list[str], count: int) -> None:
    matrix = shipped()
    chosen = order[:count]
    one = matrix.resolve("candidate-" + "+".join(chosen)).arms[0].settings
    other = matrix.resolve("candidate-" + "+".join(sorted(chosen))).arms[0].settings
    assert one == other


SOME_SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "threads": st.none() | st.integers(1, 64),
        "ubatch_size": st.none() | st.integers(1, 4096),
        "kv_offload": st.booleans(),
        "metrics": st.booleans(),
        "environment": st.dictionaries(st.sampled_from("ABC"), st.sampled_from("12"), max_size=3),
    },
)


@given(SOME_SETTINGS, SOME_SETTINGS, SOME_SETTINGS)
def test_merging_is_layering(one: dict[str, object], two: dict[str, object], three: dict[str, object]) -> None:
    """The last layer that speaks wins, and null takes a key away."""
    merged = merge(one, two, three)
    for key in {*one, *two, *three} - {"environment"}:
        last = next(layer[key] for layer in (three, two, one) if key in layer)
        assert merged.get(key) == last
    assert None not in merged.values()


@given(SOME_SETTINGS)
def test_flags_are_a_function_of_settings_alone(values: dict[str, object]) -> None:
    assert flags(values) == flags(dict(reversed(values.items())))
    assert all(isinstance(argument, str) for argument in flags(values))
    assert "--environment" not in flags(values)


def test_flags_are_spelt_as_the_server_does() -> None:
    values = Settings.model_validate(
        {
            "flash_attn": True,
            "tensor_split": "1,1.5",
            "kv_offload": False,
            "metrics": False,
            "slots": True,
            "rope_scale": 2.0,
        }
    ).values()
    assert flags(values) == [
        *("--flash-attn", "on"),
        "--no-kv-offload",
        *("--tensor-split", "1,1.5"),
        *("--rope-scale", "2"),
        "--slots",
    ]


@given(st.sampled_from(["U2", "U3", "next", "baseline"]), st.integers(0, 2000), st.integers(0, 40), st.text(max_size=6))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
def test_no_damage_to_a_file_ends_in_a_traceback(tmp_path: Path, name: str, at: int, cut: int, put: str) -> None:
    for file in ("baseline", name):
        text = (SHIPPED / f"{file}.yml").read_text()
        if file == name:
            text = text[:at] + put + text[at + cut :]
        (tmp_path / f"{file}.yml").write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        Matrix.load(tmp_path)
    except InputError as error:
        assert error.problems
    for file in tmp_path.glob("*.yml"):
        file.unlink()


def test_the_pages_of_the_rows_are_what_the_matrix_says() -> None:
    """Regenerate with ``python docs/rows/generate.py``."""
    folder = SHIPPED.parents[1] / "docs" / "rows"
    expected = runpy.run_path(str(folder / "generate.py"))["pages"]()
    assert {path.name: path.read_text() for path in folder.glob("*.md")} == expected
