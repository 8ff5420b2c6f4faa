"""``k3deploy`` with a playbook other than apply.yml: what a fault in one phase needs no other phase for.

    applyfrom.py PLAYBOOK EXTRA ARGUMENT...

The command line, its signals, its way back and its exit codes are the real ones; of apply.yml's playbooks only PLAYBOOK
(preflight, install or measure) runs, with the JSON object EXTRA as extra variables.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from k3deploy import cli, runner


def main(playbook: str, extra: Mapping[str, Any], arguments: Sequence[str]) -> int:
    whole = runner.run_playbook

    def part(name: str, inventories: Sequence[Path], given: Mapping[str, Any], *rest: Any, **more: Any) -> Any:
        if name == "apply":
            return whole(playbook, inventories, {**given, **extra}, *rest, **more)
        return whole(name, inventories, given, *rest, **more)

    runner.run_playbook = part
    return cli.run(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3:]))
