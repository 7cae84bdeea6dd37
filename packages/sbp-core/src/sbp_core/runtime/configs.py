"""Settings of the reference runtime. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

from sbp_core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceConfig:
    """Settings of the reference runtime.

    Args:
        threads_per_rank: Threads that one operator may use (intra-op), >= 1. Runs agree bit for
            bit only under the same number.
    """

    threads_per_rank: int = 1

    def __post_init__(self) -> None:
        if self.threads_per_rank < 1:
            raise ConfigError(
                f"threads_per_rank={self.threads_per_rank}", accepted="an integer >= 1"
            )
