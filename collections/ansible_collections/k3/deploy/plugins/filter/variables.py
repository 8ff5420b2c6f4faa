"""Names of variables that nothing reads: Ansible ignores a misspelt variable silently, and a default takes its place."""

from __future__ import annotations

import difflib
import re
from functools import cache
from pathlib import Path

# What an inventory may set (docs/architecture.md, contract 3), whether roles or the planning command read it.
INVENTORY = frozenset(
    (
        *("k3_cluster", "k3_root", "k3_user", "k3_user_groups", "k3_devices", "k3_ccache_dir", "k3_model", "k3_builds", "k3_build"),
        *("k3_candidate_head_port", "k3_transport", "k3_parity", "k3_production", "k3_scale", "k3_settings", "k3_matrix", "k3_load_timeout_s"),
        *("k3_fabric_address", "k3_rdma_device", "k3_rdma_gid", "k3_memory_mib", "k3_cpus", "k3_local_worker", "k3_health", "k3_guard"),
        *("k3_production_memory_mib",),
    )
)
# What a run adds in its own layer.
RUN = ("k3_run_", "k3_window_")
ROLES = Path(__file__).resolve().parents[2] / "roles"


@cache
def _roles():
    """{role: every name with its prefix that its own files speak of}: its variables, and what it registers."""
    found = {}
    for role in (path for path in ROLES.iterdir() if path.is_dir()):
        kinds = ("defaults", "meta", "tasks", "templates")
        texts = (path.read_text(encoding="utf-8") for kind in kinds for path in (role / kind).rglob("*") if path.is_file())
        found[role.name] = {word for text in texts for word in re.findall(rf"\b{role.name}_\w+", text)}
    return found


def unknown_variables(variables):
    """Sentences about the names with one of this project's prefixes that nothing reads, each with the nearest name that is read.

    variables: a rank's variables by name (hostvars of it).
    """
    known = INVENTORY.union(*_roles().values())
    prefixes = ("k3_", *(f"{role}_" for role in _roles()))
    sentences = []
    for name in sorted(str(name) for name in variables):
        if name in known or not name.startswith(prefixes) or name.startswith(RUN):
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else "docs/architecture.md lists the names"
        sentences.append(f"nothing reads the variable {name}: {hint}")
    return sentences


class FilterModule:
    """Registers the filter."""

    def filters(self):
        return {"unknown_variables": unknown_variables}
