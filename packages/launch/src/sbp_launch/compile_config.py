"""The group `compile`: how a step is captured, rewritten and laid out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sbp_aten.pass_options import PassOptions
from sbp_core.errors import ConfigError
from sbp_launch.checks import check_least

__all__ = ["CompileConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileConfig:
    """How a step becomes a plan.

    Args:
        autocast: dtype of `torch.autocast` around the forward; empty for none.
        random: `counted` draws the one-device numbers on every mesh; `per_shard` is faster, and
            draws other numbers on every mesh.
        plugins: Names of graph passes of plugins, applied in this order before planning.
        unknown_ops: What becomes of operators that nothing says how to split: `refuse` them, run
            them `whole` on every rank, or `discover` by execution how they may be split.
        passes: Each pass with its switch or its settings.
        overlap: Whether collectives are begun as soon as their input is made, and waited for where
            their result is used; else the thread that boxes waits in each.
        boxing_thread: Whether boxing has a thread of its own on every rank, in parallel with
            computing.
        bucket_bytes: Most bytes of a flat buffer in which small gradients, or parameters of a
            block, travel together; 0 for none; null for what the price suggests.
        prefetch: With overlap or a boxing thread, how many segments ahead of its use a parameter is
            gathered.
        in_place_states: Updates write over the states, once forward and backward have succeeded on
            every rank. Otherwise new values are kept next to the old ones to the end of the step.
        input_gradients_first: In a pipeline, gradients that another stage waits for are computed
            and sent before those of weights; those of activations are held until then.
        offload_in_flight: Most groups of offloaded states that are on the device at a time.
        regather: Patterns of the parameters that are gathered anew for the backward phase; others
            are kept from forward to backward.
        prove: Whether a planned step is run next to the captured one before a step is taken, on
            random data in float64; one that computes something else is refused.
        prove_s: Most seconds that this may take, as estimated; what would take longer is proved on
            fewer samples, or reported as not proved.
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
