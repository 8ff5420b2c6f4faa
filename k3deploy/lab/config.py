"""What a lab is called and where its parts live: a function of the environment, nothing is touched here."""

from __future__ import annotations

import ipaddress
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from k3deploy.errors import K3Error

DEFAULT_NAME = "k3lab"
DEFAULT_SUBNET = "10.77.53.0/24"
RANK_COUNT = 4
_FIRST_RANK_HOST = 10  # rank0 is .10 of the subnet, rank1 .11, ...
_NAME = re.compile(r"[a-z][a-z0-9]{0,11}")  # a prefix of names, also of the bridge's (the kernel allows 15 characters)


@dataclass(frozen=True, slots=True)
class Rank:
    """One container of the lab; ``name`` is its hostname and its name in the inventory."""

    name: str
    container: str
    address: str
    is_builder: bool

    @property
    def mac(self) -> str:
        """A locally administered hardware address, always the same: like a machine's, it outlives a reboot."""
        return "02:4b:" + ":".join(f"{byte:02x}" for byte in ipaddress.IPv4Address(self.address).packed)


@dataclass(frozen=True, slots=True)
class LabConfig:
    """Names, addresses and directories of one lab; several labs with different names can run side by side."""

    name: str
    subnet: ipaddress.IPv4Network
    state_dir: Path  # keys, known_hosts, ssh_config: private to the user
    cache_dir: Path  # shared by all labs of the user: images, models/, src/, ccache/
    run_dir: Path  # root's: the private mount namespace; gone after a reboot, as the namespace is
    data_dir: Path  # root's: podman's storage, where it cannot share the host's

    @property
    def ranks(self) -> tuple[Rank, ...]:
        return tuple(
            Rank(
                name=f"rank{number}",
                container=f"{self.name}-rank{number}",
                address=str(self.subnet[_FIRST_RANK_HOST + number]),
                is_builder=number == 0,
            )
            for number in range(RANK_COUNT)
        )

    def rank(self, name: str) -> Rank:
        """The rank called ``name`` (``rank1`` or just ``1``)."""
        for rank in self.ranks:
            if name in (rank.name, rank.name.removeprefix("rank")):
                return rank
        valid = ", ".join(rank.name for rank in self.ranks)
        raise K3Error(f"no rank {name!r} in the lab; valid: {valid}")

    @property
    def bridge(self) -> str:
        """The network interface of the lab on the host."""
        return f"{self.name}-br"

    @property
    def private_key(self) -> Path:
        return self.state_dir / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        return self.state_dir / "known_hosts"

    @property
    def ssh_config(self) -> Path:
        return self.state_dir / "ssh_config"

    @property
    def control_dir(self) -> Path:
        """Where Ansible's ssh keeps its control sockets for this lab (inventory/lab names the same place)."""
        return self.state_dir / "cp"

    @property
    def inventory_dir(self) -> Path:
        """An inventory layer with this lab's addresses, for labs whose addresses differ from inventory/lab."""
        return self.state_dir / "inventory"


def _default_subnet(name: str) -> str:
    """The subnet that goes with a lab name, so that two labs need no configuration to live side by side."""
    if name == DEFAULT_NAME:
        return DEFAULT_SUBNET
    return f"10.77.{100 + zlib.crc32(name.encode()) % 150}.0/24"


def lab_config(environ: Mapping[str, str]) -> LabConfig:
    """Read HOME, XDG_STATE_HOME, XDG_CACHE_HOME, K3DEPLOY_LAB (name) and K3DEPLOY_LAB_SUBNET (CIDR)."""
    name = environ.get("K3DEPLOY_LAB") or DEFAULT_NAME
    if not _NAME.fullmatch(name):
        raise K3Error(f"K3DEPLOY_LAB={name!r}: valid is a lower-case letter, then at most 11 letters or digits")
    wanted = environ.get("K3DEPLOY_LAB_SUBNET") or _default_subnet(name)
    try:
        subnet = ipaddress.IPv4Network(wanted)
    except ValueError as wrong:
        raise K3Error(f"K3DEPLOY_LAB_SUBNET={wanted!r}: {wrong}; valid is for example {DEFAULT_SUBNET}") from wrong
    if subnet.prefixlen > 27:
        raise K3Error(f"K3DEPLOY_LAB_SUBNET={wanted!r} is too small: /27 or larger is needed")
    home = Path(environ.get("HOME") or Path.home())
    state = Path(environ.get("XDG_STATE_HOME") or home / ".local" / "state")
    cache = Path(environ.get("XDG_CACHE_HOME") or home / ".cache")
    return LabConfig(
        name=name,
        subnet=subnet,
        state_dir=state / "k3deploy" / "labs" / name,
        cache_dir=cache / "k3deploy",
        run_dir=Path("/run/k3deploy") / name,
        data_dir=Path("/var/lib/k3deploy") / name,
    )
