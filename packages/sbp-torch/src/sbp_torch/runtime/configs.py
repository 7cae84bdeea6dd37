"""Settings of the reference runtime, which runs all ranks in one thread (`runtime.reference`)."""

from __future__ import annotations

from dataclasses import dataclass

from sbp_core.errors import ConfigError
from sbp_torch.segments.execution_options import Execution, check_execution

__all__ = ["ReferenceConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceConfig:
    """Settings of the reference runtime.

    Args:
        threads_per_rank: Number of intra-op threads, which one operator may use, >= 1; not threads
            of actors. Runs agree bit for bit only under the same number.
        compile: How segments are executed: `eager`, one operator after the other; `inductor`,
            compiled on their first execution; `cudagraph`, recorded on their third execution.
            `inductor` may round differently; `cudagraph` needs a GPU.
        compile_fallback: With `inductor`, run segments that cannot be compiled as `eager` does.
    """

    threads_per_rank: int = 1
    compile: Execution = "eager"
    compile_fallback: bool = False

    def __post_init__(self) -> None:
        check_execution(self.compile, compile_fallback=self.compile_fallback)
        if self.threads_per_rank < 1:
            raise ConfigError(
                f"threads_per_rank={self.threads_per_rank}", accepted="an integer >= 1"
            )
