"""Settings of the config group `compile`: how a step is captured, rewritten and compiled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sbp_aten.pass_options import PassOptions
from sbp_core.errors import ConfigError
from sbp_launch.checks import check_least

__all__ = ["CompileConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileConfig:
    """Options of the compiler from a training step to a plan.

    Args:
        autocast: dtype of `torch.autocast` around the forward; empty for none.
        random: `counted` draws the one-device numbers on every mesh; `per_shard` is faster, and
            draws other numbers on every mesh.
        plugins: Names of graph passes of plugins, applied in this order before planning.
        unknown_ops: What to do with operators without a rule for splitting: `refuse` them, run them
            `whole` on every rank, or `discover` by execution how they may be split.
        passes: Each pass with its switch or its settings.
        overlap: Whether a collective starts as soon as its input is ready, and is waited for where
            its result is used; else the thread that starts it waits for it.
        boxing_thread: Whether communication has its own thread on every rank, in parallel with
            computing.
        bucket_bytes: Largest flat buffer in bytes in which small gradients, or parameters of a
            block, are sent together; 0 for none; null to choose it by predicted cost, and smaller
            where memory is short.
        prefetch: With overlap, a boxing thread or a pipeline, how many segments before its use a
            parameter is gathered.
        in_place_states: Whether updates overwrite the states, once forward and backward have
            succeeded on every rank. Otherwise new values are kept separately during the step.
        input_gradients_first: In a pipeline, gradients that another stage waits for are computed
            and sent before those of weights, for which activations are kept longer.
        offload_in_flight: Most groups of offloaded states that are on the device at a time.
        regather: Patterns of parameters that are gathered again for the backward phase; other
            parameters are kept from forward to backward.
        prove: Whether a planned step is compared with the captured one before the first step, on
            random data in float64; a plan with different results is refused.
        prove_s: Most seconds for this, as estimated; a longer proof uses fewer samples, or is
            reported as not done.
    """

    autocast: Literal["", "bfloat16", "float16"] = ""
    random: Literal["counted", "per_shard"] = "counted"
    plugins: tuple[str, ...] = ()
    unknown_ops: Literal["refuse", "whole", "discover"] = "refuse"
    passes: PassOptions = field(default_factory=PassOptions)
    overlap: bool = False
    boxing_thread: bool = False
    bucket_bytes: int | None = None
    prefetch: int = 1
    in_place_states: bool = True
    input_gradients_first: bool = True
    offload_in_flight: int = 2
    regather: tuple[str, ...] = ("*",)
    prove: bool = True
    prove_s: float = 10.0

    def __post_init__(self) -> None:
        check_least(self, 0, "bucket_bytes", "prefetch")
        if not self.prove_s > 0:
            raise ConfigError(
                f"prove_s={self.prove_s} is too small",
                accepted="seconds > 0",
                todo="compile.prove=false proves nothing",
            )
        check_least(self, 1, "offload_in_flight")
