"""Filters that turn a rank's state into a list of problems: pure functions of data, told apart from how the data is had."""

from __future__ import annotations

from ansible_collections.k3.deploy.plugins.module_utils.production import held_words, joins, moment

# By systemd-analyze security: 0 is confined, 10 is open.
MOST_EXPOSED = 4.0


def _listening(state, address, port):
    """Sockets of a rank that would collide with address:port."""
    return [item for item in state["listeners"] if item["port"] == int(port) and item["address"] in (address, "0.0.0.0", "*", "::")]


def _endpoint_problems(state, processes):
    """Candidate ports that somebody else holds, and addresses that are not this rank's."""
    problems = []
    endpoints = set()
    for process in (process for arm in processes.values() for process in arm.values() if isinstance(process, dict)):
        listen = process.get("listen") or process.get("url", "").split("//")[-1]
        if listen:
            endpoints.add(listen)
    for endpoint in sorted(endpoints):
        address, _colon, port = endpoint.rpartition(":")
        address = address.strip("[]")
        if address not in state["addresses"]:
            problems.append(f"{address} is not an address of this rank: check k3_fabric_address")
        for item in _listening(state, address, port):
            if not (item.get("unit") or "").startswith("k3-candidate"):
                problems.append(f"port {port} is taken by pid {item['pid']}: free it, or choose another in the inventory")
    return problems


def _production_problems(state, production, is_head):
    """Production must be there and well before anything may drain it."""
    problems = []
    for name, unit in state["production"]["units"].items():
        if unit["load"] == "not-found":
            problems.append(f"production's unit {name} does not exist: check k3_production")
        elif unit["active"] != "active":
            problems.append(f"production's unit {name} is {unit['active']}: bring production into order first")
    if is_head:
        head = state["production"].get("head") or {}
        window = state.get("window")
        if head.get("status") != 200 and not window:
            problems.append(f"production does not answer at {production.get('head_url')}: {head.get('detail')}")
    return problems


def preflight_problems(state, expect):
    """What makes a rank unfit.

    state: the result of k3.deploy.rank_state. expect: {run_id, owner, is_head, production, processes, model: {path, sha256}, disk_mib, root, arch,
    tools}.
    Returns a list of sentences, each with its remedy; empty when the rank is fit.
    """
    problems = [f"{tool} is not installed" for tool in expect.get("tools", []) if not state["tools"].get(tool)]
    window = state.get("window")
    if window and window.get("run_id") != expect.get("run_id") and not joins(window, "run", expect.get("owner")):
        problems.append("LOCKED: " + held_words(window, state["time"]))
    elif not window:
        problems += _production_problems(state, expect.get("production") or {}, expect.get("is_head"))
    problems += _endpoint_problems(state, expect.get("processes") or {})
    model = expect.get("model") or {}
    if expect.get("is_head") and model.get("path"):
        if not state["paths"].get(model["path"], {}).get("is_file"):
            problems.append(f"the model {model['path']} is not on the head")
        elif model.get("sha256") and state["hashes"].get(model["path"]) not in (None, model["sha256"]):
            problems.append(f"the model {model['path']} has sha256 {state['hashes'][model['path']]}, the inventory pins {model['sha256']}")
    free = state["paths"].get(expect.get("root"), {}).get("free_mib")
    if free is not None and free < expect.get("disk_mib", 0):
        problems.append(f"{free} MiB free at {expect['root']}, {expect['disk_mib']} MiB are needed")
    return problems


def _confinement_problems(units):
    """Units that are open to more than they need, whoever opened them."""
    return [
        f"{name} has an exposure of {unit['exposure']} by systemd-analyze security, at most {MOST_EXPOSED} is allowed: "
        "a drop-in of yours weakens it (systemctl cat shows which)"
        for name, unit in units.items()
        if unit.get("active") == "active" and (unit.get("exposure") or 0) > MOST_EXPOSED
    ]


def _process_problems(unit, name, wanted, slug, root, build_id):
    """Differences between one process as it runs and as it was planned."""
    if unit is None or unit.get("active") != "active":
        return [f"{name} does not run"]
    problems = []
    base = f"{root}/candidates/{slug}/release/"
    argv = [base + wanted["argv"][0], *wanted["argv"][1:]]
    if unit.get("argv") != argv:
        problems.append(f"{name} runs as {unit.get('argv')}, planned was {argv}")
    if build_id and unit.get("build_id") != build_id:
        problems.append(f"{name} runs build {unit.get('build_id')}, planned was {build_id}")
    environment = unit.get("environment") or {}
    for variable, value in wanted.get("environment", {}).items():
        if environment.get(variable) != str(value):
            problems.append(f"{name} runs with {variable}={environment.get(variable)}, planned was {value}")
    return problems


def prove_problems(state, processes, arm, build_id, root, resolved=None):
    """Whether what runs on a rank is what was planned: argv, environment, build, and who holds each endpoint.

    state: k3.deploy.rank_state while the arm runs. processes: this rank's planned processes of the arm. build_id: the head's, which every rank
    must share: the protocol itself does not notice a worker of another build. resolved: variables found at launch. Returns sentences.
    """
    slug = arm["slug"]
    problems = []
    if not (build_id or "").startswith(arm["build_key"] + "-"):
        problems.append(f"the head's release of {slug} is {build_id}, planned was a build of {arm['build_key']}")
    for kind in ("worker", "head"):
        wanted = processes.get(kind)
        if not wanted:
            continue
        wanted = {**wanted, "environment": {**wanted.get("environment", {}), **(resolved or {})}}
        name = f"k3-candidate-{kind}@{slug}.service"
        unit = state["units"].get(name)
        problems += _process_problems(unit, name, wanted, slug, root, build_id)
        address, _colon, port = (wanted.get("listen") or wanted["url"].split("//")[-1]).rpartition(":")
        holders = _listening(state, address.strip("[]"), port)
        proxied = wanted.get("server")
        if unit and any(item["pid"] != unit.get("pid") and not (proxied and item.get("unit") == name) for item in holders):
            problems.append(f"port {port} is held by pid {holders[0]['pid']}, not by {name}")
        if unit and proxied:
            address, _colon, port = proxied.rpartition(":")
            if [item["pid"] for item in _listening(state, address, port)] != [unit.get("pid")]:
                problems.append(f"{name} does not listen at {proxied}, behind its timing proxy")
    for name, unit in state["units"].items():
        running = unit.get("active") in ("active", "activating")
        if running and "@" in name and name.split("@", 1)[1] != f"{slug}.service":
            problems.append(f"{name} of another arm runs too")
    return problems + _confinement_problems(state["units"])


def block_seen(variables):
    """What one rank's variables hold of a block: its state while the arm ran, what stopping it gave, and its health before and after."""
    return {
        "state": variables["block_state"]["state"],
        "stop": variables["block_stop"],
        "health": {"before": variables["block_health_before"]["health"], "after": variables["block_health_after"]["health"]},
    }


def rollback_seen(variables):
    """What one rank's variables hold of a rollback: how stopping the candidate ended, and on the head how production's return did."""
    return {"stopped": variables.get("window_stopped"), "restored": variables.get("window_restored")}


def rollback_left(seen, head):
    """What a rollback left undone, rank by rank, with what finishes it: sentences, empty when nothing is left.

    seen: {rank: rollback_seen}. The head's own failure to bring production back has been said by its task.
    """
    again = "run the rollback again once it can be reached, or on its console: systemctl stop 'k3-candidate*'"
    problems = []
    for rank, found in sorted(seen.items()):
        stopped = found.get("stopped") or {"unreachable": True}
        if stopped.get("unreachable"):
            problems.append(f"{rank} was not reached: what of the candidate runs there still does ({again})")
        elif stopped.get("failed"):
            problems.append(f"{rank}: {stopped.get('msg')}")
    window = (((seen.get(head) or {}).get("restored") or {}).get("production") or {}).get("window") or {}
    for rank, address in sorted((window.get("ranks") or {}).items()):
        if rank not in seen:
            place = f"{rank} ({address})" if address else rank
            end = f"; its own guard does so at {moment(window['deadline'])}" if window.get("deadline") else ""
            problems.append(f"{place} took part in the window and is not in this inventory: on it, systemctl stop 'k3-candidate*'{end}")
    return problems


class FilterModule:
    """Registers the filters."""

    def filters(self):
        return {
            "preflight_problems": preflight_problems,
            "prove_problems": prove_problems,
            "block_seen": block_seen,
            "rollback_seen": rollback_seen,
            "rollback_left": rollback_left,
        }
