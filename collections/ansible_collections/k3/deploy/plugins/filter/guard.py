"""Filters over what the ranks' guards recorded."""

from __future__ import annotations

from ansible_collections.k3.deploy.plugins.module_utils import log_excerpt, rdma_proof
from ansible_collections.k3.deploy.plugins.plugin_utils.guard_words import guard_words

# Floors of memory; whatever else a guard stops for (an orphaned worker, memory that cannot be read) says nothing about the candidate.
FLOORS = ("memory", "free")


def guard_trips(ranks):
    """{floors: [sentence], all: [sentence]} of the ranks whose guard stopped the candidate: where a floor was crossed, and all of them.

    ranks: {rank: its variables}, of which block_stop is the result of stopping the block there.
    """
    stops = {rank: variables.get("block_stop") or {} for rank, variables in ranks.items()}
    records = [(rank, stop["guard"]) for rank, stop in stops.items() if stop.get("guard")]
    records.sort(key=lambda item: (item[1].get("what") not in FLOORS, item[1].get("at", 0)))
    return {
        "floors": [guard_words(rank, record) for rank, record in records if record.get("what") in FLOORS],
        "all": [guard_words(rank, record) for rank, record in records],
    }


def block_broken(variables, slug):
    """What one rank's variables hold of a block that did not come to its end; its state only if it is of this start of the arm.

    The registered results may be those of the block before: a state counts when it is younger than the first memory seen of this start.
    """
    stop = variables.get("block_stop") or {}
    state = (variables.get("block_state") or {}).get("state") or {}
    began = stop["memory"][0][0] if stop.get("memory") else None
    own = any(name.endswith(f"@{slug}.service") for name in state.get("units") or {})
    fresh = own and began is not None and state.get("time", 0) >= began
    return {"state": state if fresh else None, "stop": stop}


def block_failures(ranks):
    """What failed in a block, a sentence a rank: the task that failed there, and the first line of what it said.

    ranks: {rank: its variables}, of which a rescue has ansible_failed_task and ansible_failed_result.
    """
    said = []
    for rank, variables in ranks.items():
        result = variables.get("ansible_failed_result") or {}
        task = (variables.get("ansible_failed_task") or {}).get("name") or ""
        words = str(result.get("msg") or "").strip().splitlines()
        if words and not result.get("unreachable"):
            said.append(f"{rank}: {task}: {words[0]}")
    return said


def transfer_breaks(ranks):
    """What the logs of a broken block, as they were before it was stopped, say of transfers that broke: a sentence each, led by its rank.

    ranks: {rank: its variables}, of which block_stop.k3_logs holds its logs.
    """
    said = []
    for rank, variables in ranks.items():
        for kind, text in sorted(((variables.get("block_stop") or {}).get("k3_logs") or {}).items()):
            said += [f"{rank}, {kind}: {line}" for line in rdma_proof.breaks(log_excerpt.unpack(text).splitlines())]
    return said


class FilterModule:
    """Registers the filters."""

    def filters(self):
        return {"guard_trips": guard_trips, "block_broken": block_broken, "block_failures": block_failures, "transfer_breaks": transfer_breaks}
