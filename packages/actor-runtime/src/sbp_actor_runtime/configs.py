"""Settings of the runtime `actor`: threads per rank, deadlines, and how operators are executed."""

from __future__ import annotations

from dataclasses import dataclass

from sbp_core.errors import ConfigError
from sbp_torch.segments.execution_options import Execution, check_execution


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorConfig:
    """Settings of the actor runtime.

    Args:
        threads_per_rank: Intra-op threads of one operator, >= 1; not threads of actors. None: the
            threads of PyTorch in this process (`torch.get_num_threads`), divided among its ranks.
        first_deadline_s: Seconds that an actor may wait for other actors in the first step, > 0.
        deadline_s: Seconds that an actor may wait in a later step, > 0.
        debug_fingerprints: Whether ranks compare a fingerprint of each boxing step before it
            (`sbp_torch.boxing.processes.fingerprint`). The error shows both sides of a mismatch.
            Costs a small exchange per boxing step.
        compile: How segments are executed: `eager`, one operator after the other; `inductor`,
            compiled in the first step; `cudagraph`, recorded on their third firing, on a GPU.
        compile_fallback: With `inductor`, run segments that cannot be compiled as `eager` does.
    """

    threads_per_rank: int | None = None
    first_deadline_s: float = 300.0
    deadline_s: float = 120.0
    debug_fingerprints: bool = False
    compile: Execution = "eager"
    compile_fallback: bool = False

    def __post_init__(self) -> None:
        check_execution(self.compile, compile_fallback=self.compile_fallback)
        if self.threads_per_rank is not None and self.threads_per_rank < 1:
            raise ConfigError(
                f"threads_per_rank={self.threads_per_rank}",
                accepted="an integer >= 1, or null for the number of PyTorch",
            )
        for name in ("first_deadline_s", "deadline_s"):
            # Not `<= 0`, because NaN has to be refused, too.
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)}", accepted="seconds > 0")
