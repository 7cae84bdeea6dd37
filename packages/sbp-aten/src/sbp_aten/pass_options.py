"""Settings of the passes of a training step: `PassOptions`, and settings of single passes.

Plain values, so that a config can be checked before anything heavy is imported. The passes are in
`passes`, their order in `passes.pipeline`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from sbp_core.errors import SbpValueError
from sbp_core.graph_variant import SliceAlong
from sbp_core.passes import RecomputeOptions

__all__ = ["LossMeaning", "PassOptions", "RowUpdates", "Slicing"]


def _one_of(name: str, value: str, *allowed: str) -> None:
    if value not in allowed:
        raise SbpValueError(f"{name}={value!r}", accepted=" or ".join(map(repr, allowed)))


class LossMeaning(StrEnum):
    """Definition of the loss of a step with several micro-batches.

    `whole_batch`: the loss of the undivided batch, so a mean over valid tokens runs over all of
    them. `mean_of_micro_batches`: the mean of the losses of the micro-batches. `each_micro_batch`:
    after each micro-batch, or every few of them, an update by the mean of their losses.
    """

    WHOLE_BATCH = "whole_batch"
    MEAN_OF_MICRO_BATCHES = "mean_of_micro_batches"
    EACH_MICRO_BATCH = "each_micro_batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class CastPlacement:
    """Placement of dtype casts.

    Args:
        reduce_dtype: Dtype in which gradients are summed over ranks, if products of low precision
            make them: `float32`, or `as_made`, which moves half the bytes and rounds the partial
            sums. Only for gradients of matrices; convolutions always sum `as_made`.
        add_dtype: Dtype in which gradients of an activation are added, if several products of low
            precision use it, such as those that make queries, keys and values: `as_made`, as in a
            model that is kept in low precision, so that tensor parallelism sends one sum; or
            `float32`, as PyTorch's autocast adds them, which sends twice the bytes.
        parameters: Whether a parameter is cast in `each_phase` that uses it, so that no phase holds
            gathered copies for another, or `once` a micro-batch, which saves a little if parameters
            are whole on every rank.
    """

    reduce_dtype: Literal["float32", "as_made"] = "float32"
    add_dtype: Literal["float32", "as_made"] = "as_made"
    parameters: Literal["each_phase", "once"] = "each_phase"

    def __post_init__(self) -> None:
        _one_of("reduce_dtype", self.reduce_dtype, "float32", "as_made")
        _one_of("add_dtype", self.add_dtype, "float32", "as_made")
        _one_of("parameters", self.parameters, "each_phase", "once")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassSplit:
    """Choice of the cross-entropies that are rewritten so that their classes may be split.

    Args:
        when: `always`, or only where it is `profitable`: if the logits are a product with a matrix,
            and there are more classes than samples in a micro-batch. Then data parallelism, which
            sends the gradient of that matrix, sends more: 2 (p - 1) d c > 2 (p - 1) d n + 6 (p - 1)
            n for d features, c classes and n samples.
        min_classes: Fewer classes are never split, >= 1. Splitting costs more passes over the
            logits: on one device, without any split, a step of a linear classifier of 512 features
            and 32,000 classes on 512 samples takes 1.24 times as long (two CPU cores, op by op),
            less with more features.
    """

    when: Literal["profitable", "always"] = "profitable"
    min_classes: int = 1024

    def __post_init__(self) -> None:
        _one_of("when", self.when, "profitable", "always")
        if self.min_classes < 1:
            raise SbpValueError(f"min_classes={self.min_classes}", accepted="an integer >= 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPrecision:
    """Choice of the operators that compute in low precision.

    Args:
        dtype: The low precision.
        keep: Patterns of module paths, or names of operators, that stay in float32.
        lower: Names of further operators in low precision. `embedding` halves the bytes that a
            split table sends, and rounds its rows; the gradient of the table stays float32.
    """

    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    keep: tuple[str, ...] = ()
    lower: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowUpdates:
    """Choice of the tables whose update works on the rows that a step looks up.

    Args:
        when: `always`, or only where it is `profitable`: if a table has at least `factor` times as
            many rows as a step looks up.
        factor: Rows of a table for each lookup of a step, > 0. An update by rows sorts the lookups
            and gathers rows; one of all rows streams through memory.
    """

    when: Literal["profitable", "always"] = "profitable"
    factor: float = 8.0

    def __post_init__(self) -> None:
        _one_of("when", self.when, "profitable", "always")
        if not self.factor > 0:
            raise SbpValueError(f"factor={self.factor}", accepted="a number > 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slicing:
    """Slicing of the operators of one parameter.

    Args:
        count: Number of slices; it divides the dims that are sliced.
        along: Kind of slices: see `passes.operator_slicing`. An operator that can be cut equally
            only in the other way is cut that way.

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
    """Passes of a step; see `passes.pipeline` for their order.

    Args:
        tie_step_counters: One step counter on the host instead of one tensor a parameter.
        counters_apart: One step counter on the host for each parameter, if they are not equal.
        fold_constants: Evaluate values that are known before the step.
        drop_identities: Remove operators that return their argument.
        fold_views: Remove transposes of transposes; merge reshapes of reshapes.
        share_expressions: Compute equal expressions once.
        mixed_precision: Compute products of a step captured in float32 in low precision. None: off.
        place_casts: Place dtype casts so that narrow dtypes are sent. None: off.
        split_classes: Write cross-entropies so that split classes need no whole logits. None: off.
        sum_losses: Write mean losses as sum / count, so that split batches give partial sums.
        deferred_batch_norm: Normalise each micro-batch by its own statistics, and update running
            statistics once per update, by those of all its samples.
        split_batch_norm: Write batch normalisation in training as sums, so that the batch can be
            split.
        split_backward: Compute input gradients of convolutions before weight gradients, so that a
            pipeline can send them first. None: only if a planner gets a mesh with an axis `pipe`;
            never in `prepare_step` itself, which knows no mesh.
        slices: Pattern of parameters or modules -> slicing of their operators. None: off.
        expose_batch_dim: Products over (times, batch, features) keep the batch as a separate dim.
        recompute: Forward values to recompute; by default those under `torch.utils.checkpoint` in
            the model. None: none.
        defer_reductions: Norms of split tensors are partial numbers, without gathers.
        accumulate_addends: Patterns of parameters whose gradients are accumulated addend by addend.
        update_rows: Update only the rows of a table that a step looks up, where the optimizer
            changes no other row. None: every row.
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
    deferred_batch_norm: bool = False
    split_batch_norm: bool = True
    split_backward: bool | None = None
    slices: Mapping[str, Slicing] | None = None
    expose_batch_dim: bool = True
    recompute: RecomputeOptions | None = field(default_factory=RecomputeOptions)
    defer_reductions: bool = True
    accumulate_addends: tuple[str, ...] = ()
    update_rows: RowUpdates | None = field(default_factory=RowUpdates)
