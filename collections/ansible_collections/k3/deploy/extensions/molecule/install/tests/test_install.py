"""Releases: whole, verified, read-only for the service, and the candidate's link to its own."""

from __future__ import annotations

import json

from testinfra.host import Host

ROOT = "/opt/k3deploy"


def test_every_rank_holds_the_same_release_and_its_files_are_as_the_manifest_says(rank0: Host, rank1: Host, build_id: str) -> None:
    for rank in (rank0, rank1):
        folder = f"{ROOT}/releases/{build_id}"
        files = json.loads(rank.check_output(f"cat {folder}/manifest.json"))["files"]
        lines = "".join(f"{item['sha256']}  {folder}/{path}\n" for path, item in files.items())
        rank.check_output(f"sha256sum --check --strict --quiet <<'EOF'\n{lines}EOF")
        said = rank.check_output(f"cd {folder} && find . -type f -printf '%P %m %u\\n'").splitlines()
        modes = {path: f"{item['mode'].lstrip('0')} root" for path, item in files.items()}
        # The damaged library is repaired and the one too many is gone.
        assert dict(line.split(" ", 1) for line in said) == {**modes, "manifest.json": "644 root"}


def test_a_refused_release_is_not_there_under_any_name(rank1: Host, build_id: str) -> None:
    assert rank1.check_output(f"ls -A {ROOT}/releases").split() == [build_id]


def test_archives_are_removed_after_use(rank0: Host, rank1: Host) -> None:
    assert rank1.check_output(f"find {ROOT}/work -name '*.tar'") == ""
    assert rank0.check_output(f"find {ROOT}/work -name '*.tar'") == ""


def test_the_candidate_has_a_link_to_its_release_and_a_log_directory(rank0: Host, rank1: Host, build_id: str) -> None:
    for rank in (rank0, rank1):
        link = rank.file(f"{ROOT}/candidates/baseline/release")
        assert link.linked_to == f"{ROOT}/releases/{build_id}"
        assert rank.check_output(f"readlink {link.path}") == f"../../releases/{build_id}"
        # What ran before the switch is recorded beside it.
        assert rank.check_output(f"readlink {ROOT}/candidates/baseline/previous") == "../../releases/older"
        log = rank.file(f"{ROOT}/candidates/baseline/log")
        assert (log.user, log.mode) == ("k3deploy", 0o750)


def test_systemd_knows_the_common_units_without_complaint(rank1: Host) -> None:
    assert rank1.run("systemd-analyze verify k3-candidate.target").stderr == ""
    assert rank1.check_output("systemctl is-enabled k3-candidate.target || true") in ("static", "disabled")
