"""Proof by execution that the planned step computes the same as the captured step.

In the order of use: `proofs` decides what to run, and caches the results; `double_precision`
converts graphs to float64, and compares values; `numbering` finds values that are equal because
the same calls make them; `parts` estimates run times, and runs the remaining operators; `whole`
runs whole steps. Both run on random numbers that the program accepts (`drawing`).
"""

from __future__ import annotations

from sbp_torch.proof.proofs import PlannedStep, StepProof, prove
from sbp_torch.proof.whole import OutputDifference, PaddedStep

__all__ = ["OutputDifference", "PaddedStep", "PlannedStep", "StepProof", "prove"]
