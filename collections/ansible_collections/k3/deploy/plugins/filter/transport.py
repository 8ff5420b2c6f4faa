"""Filters on the ranks' links: what forbids a launch, and what carried the connections of a block."""

from __future__ import annotations

import re

from ansible_collections.k3.deploy.plugins.module_utils import rdma_causes, rdma_proof

# Device discovery opens connections and closes them again before the ones that stay: a worker that was waiting for the next command says this.
_FAREWELL = re.compile(r"recv failed \(bytes_recv=0\b")
_PACKAGES = {"rdma": "iproute2", "ibv_devinfo": "ibverbs-utils", "ib_write_bw": "perftest"}


def transport_seen(variables, slug):
    """What one rank's variables hold of its transport: {is_head, listen, pin, memlock, launch, ready, end (links, or None)}."""
    processes = variables["k3_run_processes"][slug]
    found = {name: (variables.get(f"block_{name}") or {}).get("link") for name in ("launch", "ready", "end")}
    worker, head = processes.get("worker"), processes.get("head")
    limits = {kind: process.get("memlock_bytes") or 0 for kind, process in (("worker", worker), ("head", head)) if process}
    pin = {"device": variables.get("k3_rdma_device"), "gid": variables.get("k3_rdma_gid")}
    return {"is_head": bool(head), "listen": worker["listen"] if worker else None, "pin": pin, "memlock": limits, **found}


def transport_launch_problems(seen, transport):
    """What forbids to start an arm: ranks of different builds, and, where RDMA is needed, what would keep it from coming about.

    seen: {rank: transport_seen}. transport: the arm's {rdma, require, chunk_bytes, rx_depth}. Returns sentences.
    """
    builds = {}
    for name, rank in sorted(seen.items()):
        builds.setdefault(rank["launch"]["build_id"] or "none", []).append(name)
    problems = []
    if len(builds) > 1:
        shown = "; ".join(f"{build} on {', '.join(names)}" for build, names in sorted(builds.items()))
        problems.append(f"the ranks have different builds, whose transports need not fit: {shown}: install one on all of them")
    if transport["rdma"] == "off" or (transport["rdma"] == "auto" and transport["require"] != "rdma"):
        return problems
    return problems + _link_problems(seen) + _memlock_problems(seen, transport)


def _link_problems(seen):
    """Ranks without a device of their address, an account that may not use it, and interfaces whose MTUs differ."""
    problems, mtus = [], {}
    for name, rank in sorted(seen.items()):
        link = rank["launch"]
        problems += [f"{name}: {problem}" for problem in link["resolved"]["problems"]]
        if (link.get("verbs") or {}).get("accessible") is False:
            problems.append(f"{name}: the service's account may not open /dev/infiniband/uverbs*: give it a group in k3_user_groups or a udev rule")
        if link["resolved"]["mtu"]:
            mtus.setdefault(link["resolved"]["mtu"], []).append(name)
    if len(mtus) > 1:
        shown = "; ".join(f"{mtu} on {', '.join(names)}" for mtu, names in sorted(mtus.items()))
        problems.append(f"the fabric's interfaces have different MTUs: {shown}: set one on all of them (firmware can reset it to 1500)")
    return problems


def link_problems(link):
    """What one rank lacks for RDMA, before anything of production is touched: programs, a device of its address, access to it."""
    problems = [f"{name} is not installed: it comes with {_PACKAGES[name]}" for name, path in sorted(link["tools"].items()) if not path]
    problems += link["resolved"]["problems"]
    if not link["verbs"]["nodes"]:
        problems.append("there is no /dev/infiniband/uverbs*: load ib_uverbs")
    elif link["verbs"]["accessible"] is False:
        problems.append("the service's account may not open /dev/infiniband/uverbs*: give it a group in k3_user_groups or a udev rule")
    return problems


def _memlock_problems(seen, transport):
    """Units whose limit of locked memory is below what their connections pin; a limit of 0 is none.

    The plan's own limit is what the arm's unit file says; a drop-in of the operator's beside it can lower what systemd sets.
    """
    connections = sum(bool(rank["listen"]) for rank in seen.values())
    problems = []
    for name, rank in sorted(seen.items()):
        units = rank["launch"].get("units") or {}
        for kind, limit in sorted(rank["memlock"].items()):
            count = connections if kind == "head" else 1
            needed = rdma_causes.memlock_needed(transport, count)
            lead = f"{name}: the {kind} pins {needed / rdma_causes.MIB:g} MiB for {count} connections, its unit may lock"
            actual = (units.get(kind) or {}).get("memlock_bytes")
            if limit and limit < needed:
                problems.append(f"{lead} {limit / rdma_causes.MIB:g} MiB: raise memlock_mib")
            elif actual is not None and actual < needed:
                others = [path for path in units[kind]["drop_ins"] if not path.endswith("/arm.conf")]
                where = f"take LimitMEMLOCK= out of {' or '.join(others)}" if others else "see systemctl cat of the unit"
                problems.append(f"{lead} {actual / rdma_causes.MIB:g} MiB as systemd has it: {where}, then systemctl daemon-reload")
    return problems


def _tokens(bench):
    """Tokens that a harness' result evaluated for certain: those of its samples."""
    cells = (bench or {}).get("cells") or []
    return sum((sample.get("prompt_n") or 0) + (sample.get("predicted_n") or 0) for cell in cells for sample in cell.get("samples") or [])


def _between(seen, earlier, later):
    return {name: {**rank, "before": rank[earlier], "after": rank[later]} for name, rank in seen.items()}


def transport_start(seen, transport):
    """The proof after the head is ready: loading the model is the traffic."""
    return rdma_proof.prove({**transport, "workload_bytes": 0}, _between(seen, "launch", "ready"))


def transport_block(seen, transport, bench):
    """The proof of a whole block for its record, with that of its start, what was resolved at launch, and queue pairs that changed."""
    start = transport_start(seen, transport)
    workload = _tokens(bench) * (transport.get("token_bytes") or 0)
    end = rdma_proof.prove({**transport, "workload_bytes": workload}, _between(seen, "ready", "end"))
    return {
        **end,
        "events": [*(f"while loading: {text}" for text in start["events"] if not _FAREWELL.search(text)), *end["events"]],
        "rdma": transport["rdma"],
        "workload_bytes": workload,
        "start": {key: start[key] for key in ("transport", "connections", "events", "problems")},
        "reconnected": rdma_proof.persistence(start, end),
        "resolved": {name: rank["launch"]["resolved"] for name, rank in sorted(seen.items())},
    }


def transport_broken(ranks, slug, transport):
    """The proof at the start of a block that broke, as its record keeps it; None where the block did not come so far.

    ranks: {rank: its variables}. The registered results may be those of the block before: a reading counts when it is younger than the first
    memory seen of this start, and a block that was not proven went no further, so that problems here are why it broke.
    """
    if not transport or not ranks or not all(_read_since_start(variables) for variables in ranks.values()):
        return None
    seen = {name: transport_seen(variables, slug) for name, variables in ranks.items()}
    proof = transport_start(seen, transport)
    resolved = {name: rank["launch"]["resolved"] for name, rank in sorted(seen.items())}
    return {**proof, "rdma": transport["rdma"], "resolved": resolved}


def _read_since_start(variables):
    """Whether a rank's connections were read after this start of the arm."""
    began = ((variables.get("block_stop") or {}).get("memory") or [[None]])[0][0]
    links = [(variables.get(name) or {}).get("link") for name in ("block_launch", "block_ready")]
    return began is not None and all(links) and links[1].get("time", 0) >= began


def pinned_environment(link, transport):
    """The variables that a pinned arm's processes must run with on this rank."""
    if transport["rdma"] != "pinned":
        return {}
    return {"GGML_RDMA_DEV": str(link["resolved"]["device"]), "GGML_RDMA_GID": str(link["resolved"]["gid"])}


class FilterModule:
    """Registers the filters."""

    def filters(self):
        return {
            "link_problems": link_problems,
            "transport_seen": transport_seen,
            "transport_launch_problems": transport_launch_problems,
            "transport_start": transport_start,
            "transport_block": transport_block,
            "transport_broken": transport_broken,
            "pinned_environment": pinned_environment,
        }
