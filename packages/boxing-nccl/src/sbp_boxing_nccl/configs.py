"""The settings of the backend `mpi`, validated on construction. Imports neither torch nor MPI."""

from __future__ import annotations

from dataclasses import dataclass

from sbp_core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiBoxingConfig:
    """Settings of `sbp_boxing_nccl.backend.MpiBackend`.

    Args:
        connect_timeout_s: Seconds to wait for the other processes at the start, above 0.

    Raises:
        ConfigError: a setting cannot be meant.
    """

    connect_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if not self.connect_timeout_s > 0:
            raise ConfigError(
                f"connect_timeout_s={self.connect_timeout_s} leaves no time to connect",
                accepted="seconds above 0",
            )
