#!/usr/bin/env python3
"""Compile one build on the builder: source -> patches -> cmake -> release tree -> manifest. Standard library only.

Reads a spec (JSON) and writes `result` and `progress` (JSON, atomically). The build id is `<build key>-<8 hex>`, where the second part covers what
only the builder knows: the toolchain's versions and the content of a source tree. A build whose manifest is intact is not built again.
With --check, reads the spec from standard input and says on standard output whether there is anything to build.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import traceback
from pathlib import Path

import k3_patch

SKIPPED = {".git", ".github", "__pycache__", ".cache"}
NINJA = re.compile(r"^\[\s*(\d+)/(\d+)\]\s*(.*)")
MAKE = re.compile(r"^\[\s*(\d+)%\]\s*(.*)")
FLAG = re.compile(r"(?<![\w-])(-{1,2}[a-zA-Z][\w-]*)")


def products(folder, names):
    """Which of these names in a folder of a source tree are no source: folders of version control and of builds, never files."""
    return [name for name in names if (name in SKIPPED or name.startswith("build")) and Path(folder, name).is_dir()]


class BuildError(Exception):
    """The build cannot be made; the message says why and what to do."""


def write_json(path: Path, value: object) -> None:
    """Write JSON so that a reader sees the old document or the new one."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(json.dumps(value, indent=1, sort_keys=True))
    temporary.replace(path)


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as raw:
        for chunk in iter(lambda: raw.read(1 << 20), b""):
            digest.update(chunk)
    return digest.hexdigest()


def output(*argv: str, env: dict[str, str] | None = None) -> str:
    """Standard output of a command, or an empty string when it does not exist or fails."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120, errors="replace", env=env)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr if done.returncode == 0 else ""


def hash_tree(tree: Path) -> str:
    """sha256 over the relative path and content of every file of a source tree, version control and build folders left out."""
    digest = hashlib.sha256()
    for folder, names, files in os.walk(tree):
        names[:] = sorted(set(names) - set(products(folder, names)))
        for name in sorted(files):
            path = Path(folder, name)
            if path.is_file():
                # Names are bytes: not every one is text.
                digest.update(os.fsencode(path.relative_to(tree)) + f"\0{sha256_file(path)}\n".encode())
    return digest.hexdigest()


class Build:
    """One build from its spec to its manifest."""

    def __init__(self, spec: dict, progress: Path | None) -> None:
        self.spec = spec
        self.progress_path = progress
        self.builds = Path(spec["root"]) / "builds"
        self.started = time.time()

    def progress(self, message: str, done: int = 0, total: int = 0) -> None:
        if self.progress_path:
            write_json(self.progress_path, {"message": message, "done": done, "total": total, "started": self.started})

    # -- identity -----------------------------------------------------------------------------------------------

    def toolchain(self) -> dict[str, str]:
        """First lines of what each tool says of its version."""
        cmake = self.spec.get("cmake") or {}
        tools = {
            "cc": cmake.get("CMAKE_C_COMPILER", "cc"),
            "cxx": cmake.get("CMAKE_CXX_COMPILER", "c++"),
            "cmake": "cmake",
        }
        if self.spec["backend"] == "cuda":
            tools["nvcc"] = self.spec["cuda"]["nvcc"]
        found = {}
        for name, program in tools.items():
            text = output(program, "--version").strip()
            if not text:
                raise BuildError(f"{program} is not usable on the builder: install it, or name another in the build's cmake settings")
            found[name] = text.splitlines()[-1] if name == "nvcc" else text.splitlines()[0]
        return found

    def source_identity(self) -> str:
        """What identifies the source: the archive's hash, the commit, or the hash of a tree."""
        source = self.spec["source"]
        kind, path = source["kind"], Path(source.get("path") or "")
        if kind == "archive":
            if not path.is_file():
                raise BuildError(f"the source archive {path} is not on the builder")
            digest = sha256_file(path)
            if digest != source["sha256"]:
                raise BuildError(f"{path}: sha256 is {digest}, the inventory pins {source['sha256']}")
            return digest
        if kind == "git":
            listed = output("git", "ls-remote", source["url"], source["ref"]).split()
            return listed[0] if listed else source["ref"]
        if not path.is_dir():
            raise BuildError(f"the source directory {path} is not on the builder")
        self.progress("hashing the source tree")
        return hash_tree(path)

    # -- steps --------------------------------------------------------------------------------------------------

    def fetch(self, work: Path) -> Path:
        """A source tree to compile: never the operator's own when something is to be patched."""
        source = self.spec["source"]
        if source["kind"] == "archive":
            self.progress("unpacking the source")
            with tarfile.open(source["path"]) as archive:
                archive.extractall(work / "src", filter="data") if hasattr(tarfile, "data_filter") else archive.extractall(work / "src")
            tree = work / "src" / (source.get("subdir") or "")
        elif source["kind"] == "git":
            self.progress("cloning the source")
            self.run(["git", "clone", "--quiet", source["url"], str(work / "src")], "git clone")
            self.run(["git", "-C", str(work / "src"), "checkout", "--quiet", source["ref"]], "git checkout")
            tree = work / "src" / (source.get("subdir") or "")
        elif self.spec.get("patches"):
            self.progress("copying the source tree")
            shutil.copytree(source["path"], work / "src", symlinks=True, ignore=products)
            tree = work / "src"
        else:
            tree = Path(source["path"])
        if not (tree / "CMakeLists.txt").is_file():
            raise BuildError(f"{tree} holds no CMakeLists.txt: is `subdir` right?")
        return tree

    def patch(self, tree: Path) -> None:
        """Apply the patch sets in their order: a file that is not what a set was made for ends the build."""
        for item in self.spec.get("patches") or []:
            self.progress(f"applying {item['name']}")
            print("+ patch set", item["name"], flush=True)
            try:
                k3_patch.apply(item, tree)
            except k3_patch.PatchError as error:
                raise BuildError(f"patch set {item['name']} does not fit {self.spec['source']['path']}: " + " | ".join(error.lines[:8])) from None

    def markers(self) -> list[str]:
        """What the built files must contain: what the spec names, and what its patch sets promise."""
        wanted = list(self.spec.get("markers") or [])
        for item in self.spec.get("patches") or []:
            wanted += item.get("markers") or []
            wanted += [
                option["marker"]
                for option in item.get("options") or []
                if option.get("marker") and (self.spec.get("cmake") or {}).get(option["name"], option["default"]) != option["default"]
            ]
        return list(dict.fromkeys(wanted))

    def cmake_arguments(self, tree: Path, build: Path) -> list[str]:
        """The configure line: the inventory's own settings, then what a relocatable release needs."""
        settings = dict(self.spec.get("cmake") or {})
        settings.setdefault("CMAKE_BUILD_TYPE", "Release")
        # Libraries are found beside the programs wherever the release lies.
        settings.setdefault("CMAKE_BUILD_RPATH_USE_ORIGIN", "ON")
        settings.setdefault("CMAKE_BUILD_RPATH", "$ORIGIN/../lib")
        if self.spec["backend"] == "cuda":
            cuda = self.spec["cuda"]
            settings.setdefault("CMAKE_CUDA_COMPILER", cuda["nvcc"])
            if cuda.get("architectures"):
                settings.setdefault("CMAKE_CUDA_ARCHITECTURES", cuda["architectures"])
            if cuda.get("flashkda_dir"):
                settings.setdefault("K3_FLASHKDA_DIR", cuda["flashkda_dir"])
        if shutil.which("ccache"):
            for language in ("C", "CXX", *(["CUDA"] if self.spec["backend"] == "cuda" else [])):
                settings.setdefault(f"CMAKE_{language}_COMPILER_LAUNCHER", "ccache")
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        return [
            "cmake",
            "-S",
            str(tree),
            "-B",
            str(build),
            *generator,
            *(f"-D{k}={v}" for k, v in sorted(settings.items())),
        ]

    def environment(self, work: Path) -> dict[str, str]:
        environment = dict(os.environ)
        if self.spec.get("ccache_dir"):
            environment.update(CCACHE_DIR=self.spec["ccache_dir"], CCACHE_BASEDIR=str(work), CCACHE_NOHASHDIR="1")
        if self.spec["backend"] == "cuda":
            # GB10 images put CUDA on the login PATH only.
            environment["PATH"] = f"{Path(self.spec['cuda']['nvcc']).parent}:{environment.get('PATH', '')}"
        return environment

    def run(self, argv: list[str], what: str, env: dict[str, str] | None = None) -> None:
        """Run a step with its output in the log, turning ninja's and make's counters into progress."""
        print("+", *argv, flush=True)
        last: list[str] = []
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=env) as child:
            assert child.stdout is not None
            for line in child.stdout:
                print(line, end="", flush=True)
                last = [*last[-30:], line.rstrip()]
                ninja, make = NINJA.match(line), MAKE.match(line)
                if ninja:
                    self.progress(f"{what}: {ninja[3][:100]}", int(ninja[1]), int(ninja[2]))
                elif make:
                    self.progress(f"{what}: {make[2][:100]}", int(make[1]), 100)
        if child.returncode != 0:
            errors = [line for line in last if re.search(r"error|Error|FAILED|rejected|No space", line)] or last[-5:]
            raise BuildError(f"{what} failed (exit {child.returncode}): " + " | ".join(errors[:6]))

    def compile(self, tree: Path, build: Path) -> None:
        environment = self.environment(build.parent)
        self.progress("configuring")
        self.run(self.cmake_arguments(tree, build), "cmake", environment)
        jobs = str(self.spec.get("jobs") or os.cpu_count() or 1)
        targets = [argument for target in self.spec["targets"] for argument in ("--target", target)]
        self.run(["cmake", "--build", str(build), "-j", jobs, *targets], "compile", environment)

    # -- the release tree ---------------------------------------------------------------------------------------

    def stage(self, built: Path, release: Path) -> None:
        """Copy the programs to bin/ and the shared libraries, under the names that the loader asks for, to lib/."""
        (release / "bin").mkdir(parents=True)
        (release / "lib").mkdir()
        programs = [path for target in self.spec["targets"] for path in built.rglob(target) if path.is_file()]
        found = {path.name for path in programs}
        lost = [target for target in self.spec["targets"] if target not in found]
        if lost:
            raise BuildError(f"{built} holds no program named {', '.join(lost)}")
        for path in programs:
            shutil.copy2(path, release / "bin" / path.name)
        for path in built.rglob("lib*.so*"):
            if path.is_file() and not path.is_symlink():
                shutil.copy2(path, release / "lib" / soname(path))

    def check(self, release: Path, target: str) -> str:
        """A program of the release must start from where it lies, with nothing but its own libraries; returns what it says first."""
        flag = "--version" if target == "llama-server" else "--help"
        done = subprocess.run(
            [release / "bin" / target, flag],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=120,
            env=dict(os.environ, LD_LIBRARY_PATH=str(release / "lib")),
        )
        text = (done.stdout + done.stderr).strip()
        # Some of them answer --help with exit 1; the loader says 127, a wrong processor ends it by a signal.
        if done.returncode not in (0, 1) or not text:
            raise BuildError(f"{target} does not start on the builder (exit {done.returncode}): {text[:200] or 'it is built for another processor'}")
        return text.splitlines()[0][:200]

    def manifest(self, release: Path, build: Path, identity: str, toolchain: dict[str, str], build_id: str) -> dict:
        files = {
            str(path.relative_to(release)): {
                "sha256": sha256_file(path),
                "mode": "0755" if path.parent.name == "bin" else "0644",
                "size": path.stat().st_size,
            }
            for path in sorted(release.rglob("*"))
            if path.is_file()
        }
        wanted = self.markers()
        markers = find_markers(release, [*wanted, *(self.spec.get("known_markers") or [])])
        missing = [marker for marker in wanted if not markers[marker]]
        if missing:
            raise BuildError(
                f"built, but {', '.join(missing)} is in none of its files: unknown cmake options pass silently, so the source tree lacks the feature"
            )
        cache = cmake_cache(build / "CMakeCache.txt")
        server = "llama-server" in self.spec["targets"]
        environment = dict(os.environ, LD_LIBRARY_PATH=str(release / "lib"))
        usage = output(str(release / "bin" / "llama-server"), "--help", env=environment) if server else ""
        return {
            "build_id": build_id,
            "build_key": self.spec["key"],
            "name": self.spec.get("name", ""),
            "files": files,
            "source": {"kind": self.spec["source"]["kind"], "identity": identity},
            "patch_sets": self.spec.get("patch_sets") or [],
            "cmake_cache": cache,
            "toolchain": toolchain,
            "markers": markers,
            "rdma": cache.get("GGML_RPC_RDMA"),
            "nccl": nccl_state(cache),
            "version": {target: self.check(release, target) for target in self.spec["targets"]},
            "server_flags": sorted(set(FLAG.findall(usage))),
            "built_on": os.uname().nodename,
            "arch": os.uname().machine,
            "seconds": round(time.time() - self.started, 1),
        }

    def identify(self) -> tuple[dict[str, str], str, str]:
        """(toolchain, source identity, build id): everything that names this build."""
        toolchain = self.toolchain() if self.spec["source"]["kind"] != "prebuilt" else {}
        identity = self.source_identity()
        tail = hashlib.sha256(json.dumps([toolchain, identity], sort_keys=True).encode()).hexdigest()[:8]
        return toolchain, identity, f"{self.spec['key']}-{tail}"

    def foresee(self) -> dict:
        """What `main` would answer, without building: the manifest is known when the build is there."""
        known = existing(self.builds / self.identify()[2])
        return {"changed": False, "manifest": known} if known else {"changed": True}

    def main(self) -> dict:
        toolchain, identity, build_id = self.identify()
        final = self.builds / build_id
        known = existing(final)
        if known:
            return {"changed": False, "manifest": known}
        for leftover in self.builds.glob(".*"):
            shutil.rmtree(leftover, ignore_errors=True)
        work = self.builds / f".{build_id}"
        work.mkdir(parents=True)
        release = work / "release"
        if self.spec["source"]["kind"] == "prebuilt":
            build = Path(self.spec["source"]["path"])
        else:
            tree, build = self.fetch(work), work / "build"
            self.patch(tree)
            self.compile(tree, build)
        self.progress("collecting the release")
        self.stage(build, release)
        manifest = self.manifest(release, build, identity, toolchain, build_id)
        write_json(release / "manifest.json", manifest)
        shutil.rmtree(final, ignore_errors=True)
        release.rename(final)
        if not self.spec.get("keep_tree"):
            shutil.rmtree(work, ignore_errors=True)
        return {"changed": True, "manifest": manifest}


def existing(final: Path) -> dict | None:
    """The manifest of a build that lies there whole, else None."""
    try:
        manifest = json.loads((final / "manifest.json").read_text())
        intact = all(sha256_file(final / name) == item["sha256"] for name, item in manifest["files"].items())
    except (OSError, ValueError, KeyError):
        return None
    return manifest if intact else None


def soname(library: Path) -> str:
    """The name under which the loader looks for a shared library."""
    match = re.search(r"SONAME.*\[([A-Za-z0-9_.+-]+)\]", output("readelf", "-d", str(library)))
    return match[1] if match else library.name


def find_markers(release: Path, markers: list[str]) -> dict[str, list[str]]:
    """{marker: files of the release that contain it as a string}."""
    found: dict[str, list[str]] = {marker: [] for marker in markers}
    for path in sorted(release.rglob("*")):
        if not (markers and path.is_file()):
            continue
        content = path.read_bytes()
        for marker in found:
            if marker.encode() in content:
                found[marker].append(str(path.relative_to(release)))
    return found


def nccl_state(cache: dict[str, str]) -> dict:
    """Whether the configure step found NCCL, and what that is worth: it joins the GPUs of one process, RPC has its own transport."""
    library = cache.get("NCCL_LIBRARY", "").strip()
    found = bool(library) and "NOTFOUND" not in library
    return {"found": found, "note": "llama.cpp's RPC path does not use NCCL: what goes between ranks goes over RPC's own TCP or RDMA transport"}


def cmake_cache(path: Path) -> dict[str, str]:
    """What the configure step decided: GGML_*, LLAMA_*, CUDA's and NCCL's entries of CMakeCache.txt."""
    entries = {}
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
        match = re.match(r"^((?:GGML|LLAMA|K3|CMAKE_CUDA|CMAKE_BUILD_TYPE|NCCL|CUDAToolkit)\w*):\w+=(.*)$", line)
        if match and not match[1].endswith("-ADVANCED"):
            entries[match[1]] = match[2]
    return entries


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--spec", type=Path)
    parser.add_argument("--result", type=Path)
    parser.add_argument("--progress", type=Path)
    arguments = parser.parse_args()
    if not arguments.check and None in (arguments.spec, arguments.result, arguments.progress):
        parser.error("--spec, --result and --progress are needed, or --check")
    try:
        if arguments.check:
            result = Build(json.load(sys.stdin), None).foresee()
        else:
            result = Build(json.loads(arguments.spec.read_text()), arguments.progress).main()
    except BuildError as error:
        result = {"error": str(error)}
    except OSError as error:
        result = {"error": f"{error.strerror}: {error.filename}"}
    except Exception as error:  # a damaged archive, a name that is no text: the log has the rest
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"}
    if arguments.check:
        print(json.dumps(result))
    else:
        write_json(arguments.result, result)
    return 1 if "error" in result else 0


if __name__ == "__main__":
    sys.exit(main())
