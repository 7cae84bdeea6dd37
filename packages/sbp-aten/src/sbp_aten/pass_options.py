"""The settings of the passes of a step: `PassOptions`, and settings of single passes.

Values only, so that a config can be checked before anything heavy is imported; `passes` holds the
passes, and `passes.pipeline` their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from sbp_core.errors import SbpValueError
from sbp_core.graph_variant import SliceAlong
from sbp_core.passes import RecomputeOptions

__all__ = ["LossMeaning", "PassOptions", "Slicing"]


def _one_of(name: str, value: str, *allowed: str) -> None:
    if value not in allowed:
        raise SbpValueError(f"{name}={value!r}", accepted=" or ".join(map(repr, allowed)))


class LossMeaning(StrEnum):
    """What the loss of a step of several micro-batches is.

    `whole_batch`: what it would be if the batch were one, so a mean over valid tokens is that of
    all of them. `mean_of_micro_batches`: the mean of the losses of the micro-batches.
    `each_micro_batch`: each micro-batch, or every few of them, ends with an update by the mean of
    their own losses.
    """

    WHOLE_BATCH = "whole_batch"
    MEAN_OF_MICRO_BATCHES = "mean_of_micro_batches"
    EACH_MICRO_BATCH = "each_micro_batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class CastPlacement:
    """How conversions are placed.

    Args:
        reduce_dtype: What gradients are summed over ranks in, where products of low precision make
            them: `float32`, or `as_made`, which moves half the bytes and rounds the parts of the
            sum. Concerns gradients of matrices; those of convolutions are summed as they are made.
        parameters: Whether a parameter is converted in `each_phase` that uses it, so that no phase
            holds gathered copies for another, or `once` a micro-batch, which saves a little where
            parameters are whole on every rank.
    """

    reduce_dtype: Literal["float32", "as_made"] = "float32"
    parameters: Literal["each_phase", "once"] = "each_phase"

    def __post_init__(self) -> None:
        _one_of("reduce_dtype", self.reduce_dtype, "float32", "as_made")
        _one_of("parameters", self.parameters, "each_phase", "once")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassSplit:
    """Which cross-entropies are written so that their classes may be split.

    Args:
        when: `always`, or only where it is `profitable`: where the logits are the product of a
            matrix, and there are more classes than samples in a micro-batch. Then even data
            parallelism, which moves the gradient of that matrix, moves more:
            2 (p - 1) d c > 2 (p - 1) d n + 6 (p - 1) n for d features, c classes and n samples.
        min_classes: Fewer classes are never split, >= 1. The price of splitting is more passes
            over the logits: a step of a linear classifier of 512 features and 32,000 classes on
            512 samples takes 1.24 times as long on one device where nothing is split (two CPU
            cores, run op by op), less with more features.
    """

    when: Literal["profitable", "always"] = "profitable"
    min_classes: int = 1024

    def __post_init__(self) -> None:
        _one_of("when", self.when, "profitable", "always")
        if self.min_classes < 1:
            raise SbpValueError(f"min_classes={self.min_classes}", accepted="an integer >= 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPrecision:
    """What computes in low precision.

    Args:
        dtype: The low precision.
        keep: Patterns of module paths, or names of operators, that stay in float32.
        lower: Names of further operators in low precision: `embedding` halves what a split table
            sends, and rounds what it holds; the gradient of the table is float32 all the same.
    """

    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    keep: tuple[str, ...] = ()
    lower: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slicing:
    """How the operators of one parameter are sliced.

    Args:
        count: Slices; it divides the dims that are sliced.
        along: What they are; see the module's docstring. An operator that can be cut equally in
            the other way only is cut so.

    Raises:
        SbpValueError: there are fewer than two slices.
    """

    count: int
    along: SliceAlong = SliceAlong.OUTPUT

    def __post_init__(self) -> None:
        if self.count < 2:
            raise SbpValueError(f"{self.count} slices", accepted="an integer >= 2")


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOptions:
    """The passes of a step; see `passes.pipeline` for their order.

    Args:
        tie_step_counters: One step counter on the host instead of one tensor a parameter.
        counters_apart: One step counter on the host for each parameter, as they are not equal.
        fold_constants: What is known before the step is not computed in it.
        drop_identities: Operators that give back their argument go.
        fold_views: Transposes of transposes go, and reshapes of reshapes become one.
        share_expressions: Equal expressions are computed once.
        mixed_precision: Products of a step captured in float32 in low precision; None: not.
        place_casts: Conversions stand where what is sent is narrow; None: where they are.
        split_classes: Cross-entropies that split classes need no whole logits for; None: none.
        sum_losses: Mean losses are a sum over a count, so that split batches give partial sums.
        split_batch_norm: Batch normalisation in training is written in sums, for the same reason.
        split_backward: Convolutions compute their input gradients apart from those of weights, so
            that a pipeline can send the former first. None: where a planner is given a mesh with
            an axis `pipe`; not in `prepare_step` itself, which knows no mesh.
        slices: Pattern of parameters or modules -> how their operators are sliced. None: not.
        expose_batch_dim: Products over (times, batch, features) keep the batch as a dim of its own.
        recompute: Forward values that are made again; by default those under
            `torch.utils.checkpoint` in the model. None: none.
        defer_reductions: Norms of split tensors are partial numbers, not gathers.
        accumulate_addends: Patterns of parameters whose gradients are accumulated addend by addend.
    """

    tie_step_counters: bool = True
    counters_apart: bool = False
    fold_constants: bool = True
    drop_identities: bool = True
    fold_views: bool = True
    share_expressions: bool = True
    mixed_precision: MixedPrecision | None = None
    place_casts: CastPlacement | None = field(default_factory=CastPlacement)
    split_classes: ClassSplit | None = field(default_factory=ClassSplit)
    sum_losses: bool = True
    split_batch_norm: bool = True
    split_backward: bool | None = None
    slices: Mapping[str, Slicing] | None = None
    expose_batch_dim: bool = True
    recompute: RecomputeOptions | None = field(default_factory=RecomputeOptions)
    defer_reductions: bool = True
    accumulate_addends: tuple[str, ...] = ()
