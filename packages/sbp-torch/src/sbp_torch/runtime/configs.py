"""Settings of the reference runtime, and those of segments, which all have. Nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from sbp_core.errors import ConfigError, unknown_name

#: How compute segments are executed (`runtime.execution`).
Execution = Literal["eager", "inductor", "cudagraph"]


def check_execution(compile: str, *, compile_fallback: bool) -> None:  # noqa: A002 (a setting)
    """Check the settings of segments that runtimes have in common.

    Raises:
        ConfigError: a setting cannot be meant.
    """
    accepted = get_args(Execution)
    if compile not in accepted:
        error = unknown_name("execution of segments", compile, accepted)
        raise ConfigError(f"compile={compile!r}", accepted=error.accepted, todo=error.todo)
    if compile_fallback and compile != "inductor":
        raise ConfigError(
            f"compile_fallback=true with compile={compile}",
            accepted="compile_fallback=true with compile=inductor",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceConfig:
    """Settings of the reference runtime.

    Args:
        threads_per_rank: Threads that one operator may use (intra-op), >= 1. Runs agree bit for
            bit only under the same number.
        compile: How segments are executed: `eager`, one operator after the other; `inductor`,
            compiled on their first firing; `cudagraph`, recorded on theirs. The last two round
            otherwise, or need a GPU.
        compile_fallback: With `inductor`, run what cannot be compiled as `eager` does.
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
