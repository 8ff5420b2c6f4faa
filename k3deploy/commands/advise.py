"""What a run measures next, for the playbook: ``python -m k3deploy.commands.advise RUN_DIR [--until T] [--block-s S]``.

Prints one JSON object: ``block`` (as in the plan, or null when the run is over) and ``why``. Blocks that are void are
put aside first: their record goes to ``void/NNN-K.json`` with the reason in ``void``, their logs get the same mark. The
playbook asks before every block, so that a void block is measured again at once, beside the block it is paired with.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from k3deploy.errors import K3Error


def advise(run_dir: Path, *, until: float | None = None, block_s: float = 0.0) -> dict[str, Any]:
    """Put void blocks aside and say what comes next; raises ``K3Error``."""
    from k3deploy.facts import assemble
    from k3deploy.judge.step import next_step

    plan = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))
    step = next_step(plan, assemble(run_dir), now=time.time(), until=until, block_s=block_s)
    for index, reason in step.void.items():
        put_aside(run_dir, index, reason)
    return {"block": step.block, "why": step.why}


def put_aside(run_dir: Path, index: int, reason: str) -> Path:
    """Move the record of a void block, and its logs, out of what counts."""
    from k3deploy.paths import write_json

    path = run_dir / "blocks" / f"{index:03d}.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    number = 1
    while (target := run_dir / "void" / f"{index:03d}-{number}.json").exists():
        number += 1
    for rank in record.get("ranks", {}).values():
        for kind, name in list((rank.get("logs") or {}).items()):
            log = run_dir / name
            if log.exists():
                kept = log.with_name(f"{index:03d}-void{number}-{kind}.log")
                log.rename(kept)
                rank["logs"][kind] = str(kept.relative_to(run_dir))
    write_json(target, {**record, "void": reason})
    path.unlink()
    return target


def main(argv: Sequence[str] | None = None) -> int:
    """The program: 0 and JSON on standard output, or 1 and words on standard error."""
    parser = argparse.ArgumentParser(prog="python -m k3deploy.commands.advise")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--until", type=float)
    parser.add_argument("--block-s", type=float, default=0.0)
    options = parser.parse_args(argv)
    try:
        answer = advise(options.run_dir, until=options.until, block_s=options.block_s)
    except (K3Error, OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
