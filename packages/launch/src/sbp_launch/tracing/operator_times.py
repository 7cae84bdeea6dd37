"""`OperatorTimes`: measured times of operators, which traced runs write for `sbp-calibrate`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sbp_core.errors import ConfigError
from sbp_core.operators import MeasuredOperator
from sbp_core.serialize import Document

#: Name of the file with times of operators in a run folder.
OPERATORS = "operators.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTimes:
    """Measured times of the operators of a run.

    Args:
        backend: The boxing backend of the run.
        num_ranks: Number of ranks, which shared the machine.
        machine: See `Cluster.machine`.
        operators: Each different call of an operator, once.
    """

    backend: str
    num_ranks: int
    machine: Mapping[str, str]
    operators: tuple[MeasuredOperator, ...]


OPERATOR_TIMES: Document[OperatorTimes] = Document(
    kind=OperatorTimes,
    format="sbp-operators",
    version=1,
    todo="trace the operators of a run: sbp-train trainer.trace=5..14 trainer.trace_operators=true",
    error=ConfigError,
)
