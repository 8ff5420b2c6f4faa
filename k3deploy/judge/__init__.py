"""From facts to a verdict: a pure function of the plan and of what was measured.

``judge(plan, facts)`` gives each arm, and the candidate as a whole, one of four outcomes:

INVALID       a validity check failed: what was measured is not what was planned, so no number counts.
REJECT        harm: clearly slower, a rank below its memory floor, output that changed where it must not.
ACCEPT        every gate passed with enough pairs of server starts.
INCONCLUSIVE  everything else, with what it would take to know.
"""

from k3deploy.judge.outcome import judge
from k3deploy.judge.rule import DELTA, NOT_INFERIOR
from k3deploy.judge.verdict import ArmVerdict, Comparison, GateResult, Verdict

__all__ = ["DELTA", "NOT_INFERIOR", "ArmVerdict", "Comparison", "GateResult", "Verdict", "judge"]
