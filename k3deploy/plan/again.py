"""The baseline against itself, as a candidate: the same path, the same playbook, nothing different."""

from __future__ import annotations

from collections.abc import Sequence

from k3deploy.matrix import Arm, Candidate, Gate, Guards

CALIBRATE = "calibrate"
ARM = "baseline-again"
_PREFILL = ("pp2048", "pp4096")
_DECODE = ("tg100",)


def calibrate_candidate(cells: Sequence[str] | None) -> Candidate:
    """Judged as a row would be, so that it is seen whether a difference is found where there is none.

    cells: the cells that are measured, if not all.
    """
    prefill = [cell for cell in _PREFILL if cells is None or cell in cells]
    decode = [cell for cell in _DECODE if cells is None or cell in cells]
    gates = {"cold_prefill": Gate(cells=prefill, require="faster")} if prefill else {}
    gates |= {"decode": Gate(cells=decode, require="not_slower")} if decode else {}
    return Candidate(
        name=CALIBRATE,
        rows=(),
        arms=(Arm(ARM, {}),),
        gates=gates,
        guards=Guards(),
        harness={},
        build=None,
    )
