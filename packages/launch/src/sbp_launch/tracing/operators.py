"""The file in which a run leaves what its operators took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sbp_core.errors import ConfigError
from sbp_core.operators import MeasuredOperator
from sbp_core.serialize import Document

#: The file of a run folder that holds the times.
OPERATORS = "operators.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTimes:
    """What the operators of a run took.

    Args:
        backend: Its boxing backend.
        num_ranks: Its ranks, which shared the machine.
        machine: See `Cluster.machine`.
        operators: Each call of an operator once.
    """

    backend: str
    num_ranks: int
    machine: Mapping[str, str]
    operators: tuple[MeasuredOperator, ...]

    def save(self, path: Path) -> None:
        """Write the file of a run folder."""
        OPERATOR_TIMES.write(self, path)

    @classmethod
    def load(cls, path: Path) -> OperatorTimes:
        """Read what `save` wrote.

        Raises:
            ConfigError: there is no such file, or it is another one.
        """
        return OPERATOR_TIMES.read(path)


OPERATOR_TIMES: Document[OperatorTimes] = Document(
    kind=OperatorTimes,
    format="sbp-operators",
    version=1,
    todo="trace the operators of a run: sbp-train trainer.trace=5..14 trainer.trace_operators=true",
    error=ConfigError,
)
