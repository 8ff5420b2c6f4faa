"""What to try, as data: the baseline, the rows, and how rows are composed into arms.

``Matrix.load(directory)`` reads ``baseline.yml`` and one file per row; every mistake in any of them is reported
at once with file and line. ``Matrix.resolve("candidate-U2+U6")`` turns a candidate's name into its arms, or
says why that cannot be.
"""

from k3deploy.matrix.compose import Arm, Candidate, CandidateError, Matrix
from k3deploy.matrix.schema import BASELINE, BuildChange, Finding, Gate, Guards, Row

__all__ = [
    "BASELINE",
    "Arm",
    "BuildChange",
    "Candidate",
    "CandidateError",
    "Finding",
    "Gate",
    "Guards",
    "Matrix",
    "Row",
]
