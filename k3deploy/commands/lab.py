"""`k3deploy lab`: bring the embedded four-rank lab up, look at it, take it down."""

from __future__ import annotations

import json
import os
import sys

import click

from k3deploy.lab.cluster import Lab, LabStatus


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def lab() -> None:
    """Four ranks on this machine: containers with their own systemd, reached by ssh.

    \b
    Examples:
      k3deploy lab up                    # half a minute to a few; seconds the next time
      k3deploy lab status
      k3deploy lab shell rank1
      ansible -i inventory/lab all -m ping
      k3deploy lab down                  # leaves no container, bridge, mount or process

    \b
    Environment:
      K3DEPLOY_LAB            name of the lab (default k3lab); two names are two labs
      K3DEPLOY_LAB_SUBNET     its subnet (default 10.77.53.0/24)
      K3DEPLOY_DEBIAN_MIRROR  where Debian comes from when no container registry answers
    """


@lab.command()
@click.option("--yes", "-y", is_flag=True, help="Install missing system packages without asking.")
def up(yes: bool) -> None:
    """Bring the lab up; does only what is missing.

    Asks before it installs system packages, on a terminal and outside CI.
    """
    asks = not yes and sys.stdin.isatty() and not os.environ.get("CI")

    def confirm(question: str) -> bool:
        return click.confirm(question, default=True) if asks else True

    here = Lab.from_environment()
    here.up(progress=_say, confirm=confirm)
    layers = " ".join(f"-i {layer}" for layer in here.inventories())
    click.echo(f"Next: ansible {layers} all -m ping, or: k3deploy lab shell rank0")


@lab.command()
@click.option("--purge", is_flag=True, help="Remove the image and its cache too.")
def down(purge: bool) -> None:
    """Take the lab down: nothing of it stays. Safe to repeat, and after a killed `up`."""
    Lab.from_environment().down(progress=_say, purge=purge)


@lab.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(as_json: bool) -> None:
    """Show each rank: container, ssh, systemd. Exits 1 when the lab is not wholly up."""
    seen = Lab.from_environment().status()
    if as_json:
        click.echo(json.dumps(seen.as_dict(), indent=2))
    else:
        _print_table(seen)
    sys.exit(0 if seen.up else 1)


@lab.command()
@click.argument("rank")
def shell(rank: str) -> None:
    """Open a root shell on RANK (rank1, or just 1)."""
    argv = Lab.from_environment().shell_argv(rank)
    os.execvp(argv[0], argv)


def _say(line: str) -> None:
    click.echo(line)


def _print_table(seen: LabStatus) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"lab {seen.name}: {'up' if seen.up else 'not up'} ({seen.engine}, {seen.subnet})")
    for heading in ("rank", "address", "container", "state", "ssh", "systemd"):
        table.add_column(heading)
    for rank in seen.ranks:
        table.add_row(rank.name, rank.address, rank.container, rank.state, "yes" if rank.ssh else "no", rank.systemd)
    Console().print(table)
