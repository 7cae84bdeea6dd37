"""Proof by execution: a step as it is planned, and the step as it was captured.

In the order of use: `proofs` decides what is run, and keeps what was proved; `running` brings
graphs into double precision, says beforehand how long they take, and compares values; `numbering`
finds the values that are equal because they are made alike, `parts` runs the rest, `whole` takes
whole steps, both on numbers that the program allows (`drawing`).
"""

from __future__ import annotations

from sbp_torch.proof.proofs import PlannedStep, StepProof, prove
from sbp_torch.proof.whole import OutputDifference, PaddedStep

__all__ = ["OutputDifference", "PaddedStep", "PlannedStep", "StepProof", "prove"]
