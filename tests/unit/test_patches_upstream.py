"""Patch sets on the pinned llama.cpp: they apply, what they change compiles, and the rest stays what it was.

Needs nvcc for most; a compiler that is missing is named where a test is skipped.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from k3deploy import patches
from k3deploy.errors import K3Error
from k3deploy.lab.config import lab_config
from k3deploy.lab.source import LLAMA_CPP, ensure_source

NAMES = patches.list_names()


def needed(program: str, *files: Path) -> str:
    """The path of a program. Where it or a file is missing the test is skipped and says so: CUDA and the headers of
    libibverbs are no part of what `make test` installs, and a set's files are compiled wherever they are there."""
    found = shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")
    missing = [str(path) for path in files if not path.is_file()] + ([] if found else [program])
    if missing or found is None:
        pytest.skip(f"needs {' and '.join(missing)}")
    return found


HEADERS = (
    r"ggml/include/[^/]+\.h|ggml/src/[^/]+\.h|ggml/src/ggml-rpc/[^/]+\.h|ggml/src/ggml-cuda/(vendors/)?[^/]+\.(cuh|h)"
)


@pytest.fixture(scope="session")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the pinned llama.cpp: the files that sets change, and the headers that they need."""
    archive = ensure_source(Path.home() / ".cache" / "k3deploy" / "src")
    wanted = {item.path for one in patches.available().values() for item in one.manifest.files if item.before}
    place = tmp_path_factory.mktemp("upstream")
    top = f"{LLAMA_CPP.filename.removesuffix('.tar.gz')}/llama.cpp/"
    with tarfile.open(archive) as source:
        for member in source:
            name = member.name.removeprefix(top)
            if name in wanted or re.fullmatch(HEADERS, name):
                member.name = name
                source.extract(member, place, filter="data")
    return place


@pytest.fixture
def copy(upstream: Path, tmp_path: Path) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        return Path(shutil.copytree(upstream, tmp_path / name))

    return make


@pytest.mark.source
@pytest.mark.parametrize("name", NAMES)
def test_every_set_applies_to_the_pinned_source_and_to_nothing_else(name: str, copy: Callable[[str], Path]) -> None:
    (one,) = patches.select([name])
    tree = copy("tree")
    assert {entry.state for entry in patches.check(one, tree)} == {"ready"}
    patches.apply([one], tree)
    for item in one.manifest.files:
        assert hashlib.sha256((tree / item.path).read_bytes()).hexdigest() == item.after
    tampered = copy("tampered")
    changed = next(item.path for item in one.manifest.files if item.before)
    text = (tampered / changed).read_text()
    removed = next(
        line[1:]
        for line in _lines_for(one, changed)
        if line.startswith(("-", " ")) and text.count(line[1:] + "\n") == 1
    )
    (tampered / changed).write_text(text.replace(removed + "\n", removed + " // not upstream's\n"))
    with pytest.raises(K3Error, match=rf"{changed}: hunk \d+ \(@@ .* @@\) of {name} does not apply"):
        patches.apply([one], tampered)


_BRIDGE_CMAKE = "ggml/src/ggml-cuda/flashkda-k3/flashkda-k3.cmake"


def _lines_for(one: patches.PatchSet, path: str, shortest: int = 21) -> list[str]:
    """The body lines of the diff of ``path``, of at least so many characters."""
    found: list[str] = []
    inside = False
    for line in "".join(one.texts.values()).splitlines():
        if line.startswith("+++ "):
            inside = line == f"+++ b/{path}"
        elif line.startswith(("--- ", "diff ", "@@ ")):
            continue
        elif inside and len(line) >= shortest:
            found.append(line)
    return found


@pytest.mark.source
def test_the_transports_object_is_the_same_byte_for_byte_at_the_default_sizes(copy: Callable[[str], Path]) -> None:
    compiler = needed("c++", Path("/usr/include/infiniband/verbs.h"))
    sizes = ["-DGGML_RPC_RDMA_CHUNK=262144", "-DGGML_RPC_RDMA_RX_DEPTH=24"]

    def compiled(tree: Path, *options: str) -> bytes:
        # From inside the tree: the object holds the source's name as it was given.
        argv = [compiler, "-O2", "-fPIC", "-std=gnu++17", "-DGGML_RPC_RDMA", *options, "-c", "-o", "x.o"]
        argv += ["-Iggml/include", "-Iggml/src"]
        source = "ggml/src/ggml-rpc/transport.cpp"
        subprocess.run([*argv, source], check=True, cwd=tree, capture_output=True)
        return (tree / "x.o").read_bytes()

    stock, changed = copy("stock"), copy("changed")
    patches.apply(patches.select(["u5-rdma-chunk"]), changed)
    plain = compiled(stock)
    assert compiled(changed, *sizes) == plain
    larger = compiled(changed, "-DGGML_RPC_RDMA_CHUNK=1048576", "-DGGML_RPC_RDMA_RX_DEPTH=64")
    assert b"K3_RDMA_RING chunk=1048576 rx_depth=64" in larger
    assert b"K3_RDMA_RING" not in plain


@pytest.mark.source
@pytest.mark.parametrize(
    ("name", "source", "options"),
    [
        ("u8-rpc-timing", "ggml/src/ggml-rpc/ggml-rpc.cpp", ["-Wall", "-Wextra", "-Werror"]),
        ("tests-k3-ops", "tests/test-backend-ops.cpp", []),
    ],
)
def test_what_a_set_changes_for_the_cpu_compiles(
    name: str, source: str, options: list[str], copy: Callable[[str], Path]
) -> None:
    compiler = needed("c++")
    tree = copy("tree")
    patches.apply(patches.select([name]), tree)
    argv = [compiler, "-fsyntax-only", "-std=gnu++17", "-Iggml/include", "-Iggml/src", *options, source]
    done = subprocess.run(argv, cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def compiled(tree: Path, argv: list[str]) -> subprocess.CompletedProcess[str]:
    """What a compiler says; what the user's compiler cache holds is not compiled again, and said again."""
    front = [found] if (found := shutil.which("ccache")) else []
    cache = {"CCACHE_DIR": str(lab_config(os.environ).cache_dir / "ccache"), "CCACHE_BASEDIR": str(tree)}
    environment = {**os.environ, **cache, "CCACHE_NOHASHDIR": "1"}
    return subprocess.run([*front, *argv], cwd=tree, env=environment, capture_output=True, text=True, check=False)


# What ggml's common header names of cuBLAS: the library's own header is not on every machine that has the compiler.
CUBLAS = """#pragma once
typedef void * cublasHandle_t;
typedef int cublasStatus_t;
typedef int cublasComputeType_t;
#define CUBLAS_STATUS_SUCCESS 0
#define CUBLAS_TF32_TENSOR_OP_MATH 3
extern "C" cublasStatus_t cublasCreate(cublasHandle_t *);
extern "C" cublasStatus_t cublasSetMathMode(cublasHandle_t, int);
extern "C" cublasStatus_t cublasSetStream(cublasHandle_t, void *);
extern "C" const char * cublasGetStatusString(cublasStatus_t);
"""


@pytest.mark.source
@pytest.mark.parametrize("architecture", ["90", "121a"])
@pytest.mark.parametrize(
    ("name", "source", "variants", "spilled"),
    [
        ("flashkda-bridge", "flashkda-k3/flashkda-k3-kernels.cu", 3, 0),
        ("u1-chunked-kda", "k3-kda-chunked.cu", 1, 0),
        ("u11-kda-blocked", "k3-kda-blocked.cu", 2, 0),
        # four variants of the product, two of what prepares it; the widest tile keeps some addresses in local memory
        ("u12-iq1s-grouped", "k3-iq1s-grouped.cu", 6, 400),
    ],
)
def test_the_cuda_kernels_compile_and_keep_their_values_in_registers(
    name: str, source: str, variants: int, spilled: int, architecture: str, copy: Callable[[str], Path]
) -> None:
    compiler = needed("nvcc")
    tree = copy("tree")
    patches.apply(patches.select([name]), tree)
    (tree / "cublas").mkdir()
    (tree / "cublas" / "cublas_v2.h").write_text(CUBLAS)
    target = f"arch=compute_{architecture},code=sm_{architecture}"
    argv = [compiler, "-std=c++17", "-O3", "-use_fast_math", "-extended-lambda", "-gencode", target, "-Xptxas", "-v"]
    argv += ["-Icublas", "-Iggml/include", "-Iggml/src", "-c", "-o", "x.o", f"ggml/src/ggml-cuda/{source}"]
    done = compiled(tree, argv)
    assert done.returncode == 0, done.stderr[-2000:]
    spills = [int(found) for found in re.findall(r"(\d+) bytes spill stores", done.stderr)]
    assert len(spills) == variants
    assert max(spills) <= spilled


def _nvcc_argv(architecture: str, source: str, *options: str) -> list[str]:
    """As the build compiles for one architecture, from inside a tree; skips the test where the compiler is not."""
    compiler = needed("nvcc")
    target = f"arch=compute_{architecture},code=sm_{architecture}"
    argv = [compiler, "-std=c++17", "-O3", "-use_fast_math", "-extended-lambda", "-gencode", target, *options]
    return [*argv, "-Icublas", "-Iggml/include", "-Iggml/src", "-c", "-o", "x.o", f"ggml/src/ggml-cuda/{source}"]


def _with_cublas(tree: Path) -> Path:
    (tree / "cublas").mkdir()
    (tree / "cublas" / "cublas_v2.h").write_text(CUBLAS)
    return tree


@pytest.mark.source
@pytest.mark.parametrize(
    ("architecture", "asked_for", "coded"),
    [("121a", None, True), ("90", 900, True), ("90", None, False)],
)
def test_the_tiles_of_256_rows_spill_nothing_and_are_for_one_architecture(
    architecture: str, asked_for: int | None, coded: bool, copy: Callable[[str], Path]
) -> None:
    tree = _with_cublas(copy("tree"))
    patches.apply(patches.select(["u10-iq1s-rows256"]), tree)
    options = ["-Xptxas", "-v", *([f"-DK3_IQ1S_ROWS256_ARCH={asked_for}"] if asked_for else [])]
    done = compiled(tree, _nvcc_argv(architecture, "k3-iq1s-rows256.cu", *options))
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = re.findall(
        r"for _Z\w*mul_mat_qIL\w+\n.*?(\d+) bytes spill stores.*?\n.*?Used (\d+) registers", done.stderr, re.DOTALL
    )
    # 16 widths with and without a check of the rows; five widths are no tile, and have no code anywhere
    assert len(kernels) == 32
    assert {int(spilled) for spilled, _ in kernels} == {0}
    assert sum(int(registers) > 64 for _, registers in kernels) == (22 if coded else 0)


@pytest.mark.source
@pytest.mark.parametrize("quantizer", ["Q4_K", "IQ1_S"])
def test_the_tiles_of_256_rows_leave_the_other_kernels_object_code_alone(
    quantizer: str, copy: Callable[[str], Path]
) -> None:
    objcopy = needed("objcopy")
    header = "ggml/src/ggml-cuda/mmq.cuh"
    stock, changed = _with_cublas(copy("stock")), _with_cublas(copy("changed"))
    patches.apply(patches.select(["u10-iq1s-rows256"]), changed)

    def stub_line(tree: Path) -> int:
        (number,) = [n for n, line in enumerate((tree / header).read_text().splitlines()) if "NO_DEVICE_CODE" in line]
        return number

    # A kernel for a width that is no tile says its line in the header: that one has to be the same.
    moved = stub_line(changed) - stub_line(stock)
    (stock / header).write_text("\n" * moved + (stock / header).read_text())
    codes = []
    for tree in (stock, changed):
        (tree / "ggml/src/ggml-cuda/one.cu").write_text(f'#include "mmq.cuh"\nDECL_MMQ_CASE(GGML_TYPE_{quantizer});\n')
        done = compiled(tree, _nvcc_argv("121a", "one.cu"))
        assert done.returncode == 0, done.stderr[-2000:]
        code = tree / "code"
        argv = [objcopy, "-O", "binary", "--only-section=.nv_fatbin", "--set-section-flags=.nv_fatbin=alloc"]
        subprocess.run([*argv, str(tree / "x.o"), str(code)], check=True, capture_output=True)
        codes.append(code.read_bytes())
    assert len(codes[0]) > 100_000
    assert codes[0] == codes[1]


@pytest.mark.parametrize(
    ("name", "new", "changed"),
    [
        (
            "u10-iq1s-rows256",
            ["k3-iq1s-rows256.cu", "k3-iq1s-rows256.cuh", "mmq-k3-iq1s-rows256.cuh"],
            ["mmq.cu", "mmq.cuh"],
        ),
        ("u10b-iq1s-ncols", [], ["mmq.cu"]),
    ],
)
def test_the_tile_sets_change_no_loader_product_or_configuration(name: str, new: list[str], changed: list[str]) -> None:
    (one,) = patches.select([name])
    files = {item.path.removeprefix("ggml/src/ggml-cuda/"): item.before is None for item in one.manifest.files}
    assert files == {**dict.fromkeys(new, True), **dict.fromkeys(changed, False)}


# Of FlashKDA and CUTLASS, which are the operator's: no more than what the adapter names.
FLASHKDA = """#pragma once
#include <cuda_runtime.h>
namespace cutlass { struct bfloat16_t { unsigned short bits; }; }
template <int D, bool state_in, bool state_out, bool fp32, bool varlen, typename... T> void launch_fwd(T...);
"""


@pytest.mark.source
def test_the_flashkda_adapter_compiles_and_holds_its_markers(copy: Callable[[str], Path]) -> None:
    compiler = needed("nvcc")
    tree = copy("tree")
    patches.apply(patches.select(["flashkda-bridge"]), tree)
    (tree / "given").mkdir()
    (tree / "given" / "cublas_v2.h").write_text(CUBLAS)
    (tree / "given" / "fwd.h").write_text(FLASHKDA)
    argv = [compiler, "-std=c++17", "-arch=sm_90", "-extended-lambda", "-Igiven", "-Iggml/include", "-Iggml/src"]
    argv += ["-c", "-o", "x.o", "ggml/src/ggml-cuda/flashkda-k3/flashkda-k3.cu"]
    done = compiled(tree, argv)
    assert done.returncode == 0, done.stderr[-2000:]
    adapter = (tree / "x.o").read_bytes()
    assert b"K3_FLASHKDA_ACTIVE" in adapter and b"K3_FLASHKDA_FALLBACK" in adapter


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"K3_FLASHKDA_DIR": "/nowhere"}, "/nowhere/csrc/fwd.h does not exist; set K3_FLASHKDA_DIR"),
        ({"CMAKE_CUDA_ARCHITECTURES": "86-real"}, "name architectures from 90 on"),
    ],
)
def test_a_flashkda_build_that_cannot_be_is_refused_by_cmake(
    tmp_path: Path, settings: dict[str, str], said: str
) -> None:
    cmake = needed("cmake")
    (one,) = patches.select(["flashkda-bridge"])
    script = tmp_path / "flashkda-k3.cmake"
    script.write_text(
        "".join(f"{line[1:]}\n" for line in _lines_for(one, _BRIDGE_CMAKE, shortest=0) if line.startswith("+"))
    )
    for name in ("csrc/fwd.h", "csrc/smxx/fwd_launch.cu", "cutlass/include/cutlass/cutlass.h"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    given = {"GGML_CUDA_K3_FLASHKDA": "ON", "K3_FLASHKDA_DIR": str(tmp_path), **settings}
    argv = [cmake, *(f"-D{key}={value}" for key, value in given.items()), "-P", str(script)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert said in " ".join(done.stderr.split())


def test_the_grouped_iq1s_product_leaves_what_other_quantizers_are_compiled_from_alone() -> None:
    (one,) = patches.select(["u12-iq1s-grouped"])
    folder = "ggml/src/ggml-cuda/"
    changed = {item.path.removeprefix(folder): item.before is None for item in one.manifest.files}
    assert changed == {"k3-iq1s-grouped.cu": True, "k3-iq1s-grouped.cuh": True, "mmq.cu": False}
    # mmq.cu holds no kernel; the kernels' headers and instances are not in the list
    removed = [line for line in "".join(one.texts.values()).splitlines() if re.match(r"-(?!-- )", line)]
    assert removed == []
