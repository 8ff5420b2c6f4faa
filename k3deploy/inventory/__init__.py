"""The cluster: what an Ansible inventory says, with Ansible's own precedence, as validated data.

``load(path)`` asks ``ansible-inventory`` (groups, host_vars, files and their precedence are Ansible's business) and
validates every variable that is ours. Beside that it reads the inventory's YAML files for two things that Ansible
does not do: naming the line of a mistake, and noticing a misspelt variable, which Ansible would silently ignore.
"""

from k3deploy.inventory.reading import known_variables, load, misspelt, role_names
from k3deploy.inventory.schema import (
    BuildSpec,
    Cluster,
    Guard,
    Health,
    Model,
    Parity,
    Production,
    Rank,
    Source,
    Transport,
    Vocabulary,
)

__all__ = [
    "BuildSpec",
    "Cluster",
    "Guard",
    "Health",
    "Model",
    "Parity",
    "Production",
    "Rank",
    "Source",
    "Transport",
    "Vocabulary",
    "known_variables",
    "load",
    "misspelt",
    "role_names",
]
