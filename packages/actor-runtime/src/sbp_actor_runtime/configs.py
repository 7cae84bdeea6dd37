"""Settings of the actor runtime. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

from sbp_core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorConfig:
    """Settings of the actor runtime.

    Args:
        threads_per_rank: Threads that one operator may use (intra-op), >= 1.
        first_deadline_s: Seconds that an actor may wait for others in the first step, > 0.
        deadline_s: The same for every later step.
        debug_fingerprints: Whether ranks compare what they are about to do before every boxing step
            (`sbp_core.boxing.processes.fingerprint`): names both sides of a mismatch, and costs a
            small exchange a step.
    """

    threads_per_rank: int = 1
    first_deadline_s: float = 300.0
    deadline_s: float = 120.0
    debug_fingerprints: bool = False

    def __post_init__(self) -> None:
        if self.threads_per_rank < 1:
            raise ConfigError(
                f"threads_per_rank={self.threads_per_rank}", accepted="an integer >= 1"
            )
        for name in ("first_deadline_s", "deadline_s"):
            # Written so that NaN is refused.
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)}", accepted="seconds > 0")
