"""Choose the collectives and transfers that `sbp-calibrate` measures: kinds, groups, sizes.

A call is one such boxing step on a mesh of the first ranks: the step that `route` chooses for a
conversion between two layouts. `measuring` times the calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt, prod

from sbp_core.boxing import BoxingStep, route
from sbp_core.calibration import MeasuredCase
from sbp_core.errors import BoxingError
from sbp_core.placement import Placement
from sbp_core.sbp import Broadcast, NdSbp, Partial, Sbp, Split
from sbp_launch.calibrate.calibration_config import CalibrateConfig

#: Dtype of the messages: that of most activations and gradients on CPUs.
DTYPE = "float32"

_ITEM_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationCall:
    """One call to measure.

    Args:
        case: Its kind and groups.
        shared_bytes: S, the bytes that a group shares, as in `sbp_core.calibration.Measurement`.
        step: The boxing step to run.
    """

    case: MeasuredCase
    shared_bytes: int
    step: BoxingStep


def cases_of(config: CalibrateConfig) -> tuple[MeasuredCase, ...]:
    """Return the cases to measure: with one group, and with as many as the ranks allow.

    Transfers are measured with one message, with one from each rank of the first half to a rank of
    the second, and with one from each rank to the next, the last one sending to the first.
    """
    cases: list[MeasuredCase] = []
    for kind in config.kinds:
        if kind == "transfer":
            at_once = {1, config.ranks // 2, config.ranks} if config.ranks > 1 else set()
            sizes = dict.fromkeys(sorted(at_once), 2)
            cases += [MeasuredCase(kind=kind, group_size=2, concurrent_groups=g) for g in sizes]
            continue
        for size in config.chosen_group_sizes:
            for groups in sorted({1, config.ranks // size}):
                cases.append(MeasuredCase(kind=kind, group_size=size, concurrent_groups=groups))
    return tuple(cases)


def calls_of(config: CalibrateConfig) -> Iterator[tuple[CalibrationCall, ...]]:
    """Yield the calls of each size, ascending; the same on every rank."""
    cases = cases_of(config)
    for size in config.chosen_sizes:
        yield tuple(make_call(case, size, config.ranks) for case in cases)


def make_call(case: MeasuredCase, size_bytes: int, num_ranks: int) -> CalibrationCall:
    """Return the call of a case whose S is about `size_bytes`, rounded so that shards are even.

    Args:
        case: Kind and groups.
        size_bytes: Bytes, >= 1.
        num_ranks: Number of ranks of the run.
    """
    elements = max(1, size_bytes // _ITEM_BYTES)
    if case.kind == "transfer":
        return _transfer(case, elements, num_ranks)
    n, groups = case.group_size, case.concurrent_groups
    width = n * max(1, isqrt(elements) // n)
    # For each collective of n ranks: layouts before and after, and a shape that n divides.
    conversions: dict[str, tuple[Sbp, Sbp, tuple[int, ...]]] = {
        "all-reduce": (Partial("sum"), Broadcast(), (elements,)),
        "reduce-scatter": (Partial("sum"), Split(0), (_multiple(elements, n),)),
        "all-gather": (Split(0), Broadcast(), (_multiple(elements, n),)),
        # Nearly square.
        "all-to-all": (Split(0), Split(1), (_multiple(round(elements / width), n), width)),
    }
    before, after, shape = conversions[case.kind]
    shared = prod(shape) * _ITEM_BYTES
    if groups == 1:
        mesh = Placement.grid((n,))
        step = _only_step(case, shape, (mesh, NdSbp(before)), (mesh, NdSbp(after)))
    else:
        # Each group has its own slice of dim 0.
        mesh, own = Placement.grid((groups, n)), Split(0)
        source, target = (
            NdSbp(own, Split(entry.dim + 1) if isinstance(entry, Split) else entry)
            for entry in (before, after)
        )
        step = _only_step(case, (groups, *shape), (mesh, source), (mesh, target))
    return CalibrationCall(case=case, shared_bytes=shared, step=step)


def _transfer(case: MeasuredCase, elements: int, num_ranks: int) -> CalibrationCall:
    """Return the transfer of one message from each sender to a different rank."""
    messages, ranks = case.concurrent_groups, list(range(num_ranks))
    if messages == num_ranks:
        senders, receivers = ranks, [*ranks[1:], ranks[0]]
    else:
        senders, receivers = ranks[:messages], ranks[messages : 2 * messages]
    split = NdSbp(Split(0))
    shape = (messages * elements,)
    step = _only_step(case, shape, (Placement(senders), split), (Placement(receivers), split))
    return CalibrationCall(case=case, shared_bytes=elements * _ITEM_BYTES, step=step)


def _only_step(
    case: MeasuredCase,
    shape: tuple[int, ...],
    source: tuple[Placement, NdSbp],
    target: tuple[Placement, NdSbp],
) -> BoxingStep:
    steps = route(shape, DTYPE, source, target).steps
    if [step.kind.value for step in steps] != [case.kind]:
        raise BoxingError(
            f"the route of a conversion that should measure {case.kind} has other steps",
            where=[str(step) for step in steps],
            todo="leave this kind out of `kinds`",
        )
    return steps[0]


def _multiple(elements: int, of: int) -> int:
    return max(of, round(elements / of) * of)
