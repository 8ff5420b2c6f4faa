"""A block of the project's own playbook on two machines that RDMA joins, from its launch to its record."""

from __future__ import annotations

import json
from pathlib import Path

import cases
from machine import Machine
from stand import HERE, Stand, play

from k3deploy.facts import TransportProof

SLUG = cases.PAIR.slug
BENCH = {
    "cells": [{"cell": "pp8", "state": "cold", "n_prompt": 8, "n_predict": 2}],
    "warmup": {"prefill": [8], "decode": [1]},
    "vocab": {"first_id": 300, "last_id": 2000, "bos": 1},
    **{"repeats": 1, "seed": 7, "deadline_s": 600, "request_timeout_s": 300, "probes": []},
}


def test_a_block_is_proven_to_run_over_rdma_between_two_hosts(
    stand: Stand, pair: tuple[Machine, Machine], tmp_path: Path
) -> None:
    near, far = pair
    applied = stand.layer["all"]
    processes = applied["hosts"]["rank0"]["k3_run_processes"][SLUG]
    chunk, depth = cases.PAIR.ring
    sizes = {"chunk_bytes": chunk, "rx_depth": depth, "token_bytes": 1024}
    arm = next(arm for arm in applied["vars"]["k3_run_arms"] if arm["slug"] == SLUG)
    hosts = {
        "rank0": {
            "k3_fabric_address": cases.HEAD_ADDRESS,
            "k3_run_processes": {SLUG: {"head": processes["head"], "guard_mib": 32}},
        },
        "rank1": {
            "k3_fabric_address": cases.PAIR.workers[0].address,
            "k3_run_processes": {SLUG: {"worker": processes["worker"], "guard_mib": 32}},
        },
    }
    window = {"run_id": applied["vars"]["k3_run_id"]}
    near.sh(f"echo '{json.dumps(window)}' > /opt/k3deploy/state/window.json")
    layer = {
        "all": {
            "vars": {
                **applied["vars"],
                "k3_production": {"head_unit": "llama-production.service"},
                "k3_model": {"path": processes["head"]["argv"][processes["head"]["argv"].index("--model") + 1]},
                "k3_run_arms": [{**arm, "transport": {"rdma": "pinned", "require": "rdma", **sizes}}],
                "k3_run_blocks": [{"index": 0, "pair": 1, "arm": SLUG, "slug": SLUG}],
                "k3_run_bench": BENCH,
            },
            "hosts": hosts,
            "children": {
                "ranks": {"hosts": {"rank0": {}, "rank1": {}}},
                "head": {"hosts": {"rank0": {}}},
                "workers": {"hosts": {"rank1": {}}},
            },
        }
    }
    play(HERE / "block.yml", {"rank0": near, "rank1": far}, layer, tmp_path)
    record = json.loads((tmp_path / "blocks/000.json").read_text(encoding="utf-8"))
    proof = TransportProof.model_validate(record["transport"])
    assert proof.transport == "RDMA", proof
    assert proof.problems == proof.events == proof.reconnected == []
    assert {rank: found["device"] for rank, found in proof.resolved.items()} == {
        "rank0": cases.DEVICE,
        "rank1": cases.DEVICE,
    }


def test_the_link_is_measured_by_the_real_program_before_production_is_drained(
    stand: Stand, pair: tuple[Machine, Machine], tmp_path: Path
) -> None:
    near, far = pair
    addresses = {"rank0": cases.HEAD_ADDRESS, "rank1": cases.PAIR.workers[0].address}
    layer = {
        "all": {
            "vars": {**stand.layer["all"]["vars"], "link_empty_gid": int(cases.EMPTY_GID)},
            "hosts": {name: {"k3_fabric_address": address} for name, address in addresses.items()},
            "children": {
                "ranks": {"hosts": {"rank0": {}, "rank1": {}}},
                "head": {"hosts": {"rank0": {}}},
                "workers": {"hosts": {"rank1": {}}},
            },
        }
    }
    play(HERE / "link.yml", {"rank0": near, "rank1": far}, layer, tmp_path)
    seen = json.loads((tmp_path / "link.json").read_text(encoding="utf-8"))
    assert float(seen["gbps"]) > 0
    assert cases.DEVICE in seen["why"]
    assert "the floor is 100000" in seen["too_slow"]
    assert "gave no result" in seen["no_result"]
