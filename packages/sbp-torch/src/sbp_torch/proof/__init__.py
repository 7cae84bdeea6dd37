"""Proof by execution: a step as it is planned, beside the step as it was captured.

In the order of use: `prove` decides what is run, `wide` brings graphs into double precision,
`numbering` finds the values that are equal as they are made alike, `parts` runs the rest, `whole`
takes whole steps, both on numbers that the program allows (`drawing`); `compare` judges, `cost`
says beforehand what that takes, `record` keeps what was proved. `padded` compares a step of a batch
with that of the same batch, padded.

Stability: provisional.
"""

from __future__ import annotations

from sbp_torch.proof.padded import PaddedStep
from sbp_torch.proof.prove import Step, prove
from sbp_torch.proof.record import Proof
from sbp_torch.proof.whole import OutputDifference

__all__ = ["OutputDifference", "PaddedStep", "Proof", "Step", "prove"]
