"""Pooling rules, verified by execution; indices of maxima on a split plane, by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sbp_aten.rules.pooling import RULES
from sbp_core.sbp import B, P, Partial, S, Sbp
from sbp_core.signatures import legal_signatures
from sbp_torch.testing.signatures import Sample, check_rule, sample

_draw = torch.Generator().manual_seed(13)
aten = torch.ops.aten


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_draw)


def planes(count: int, *, odd: bool = False) -> tuple[torch.Tensor, ...]:
    """Return a batch and a sample without batch, of `count` spatial dims."""
    extents = (5, 4, 6)[-count:] if odd else (4, 4, 6)[-count:]
    return real(2, 3, *extents), real(3, *extents)


def slid(count: int) -> list[Sample]:
    """Return calls with windows that overlap, and with windows side by side."""
    overlapping = [sample(x, [3] * count, [2] * count, [1] * count) for x in planes(count)]
    return [*overlapping, sample(planes(count)[0], [2] * count)]


def adaptive(count: int) -> list[Sample]:
    """Return calls with as many elements for each window, with not as many, with one window."""
    both = [sample(x, [2] * count) for x in planes(count)]
    return [
        *both,
        sample(planes(count, odd=True)[0], [3] * count),
        sample(real(2, 3, *(5,) * count), [1] * count),
    ]


def adaptive_maxima_gradients(count: int) -> list[Sample]:
    """Return gradients of maxima over adaptive windows."""
    forward = getattr(aten, f"adaptive_max_pool{count}d").default
    found = []
    for (x, size), _ in adaptive(count):
        made, indices = forward(x, size)
        found.append(sample(torch.randn_like(made), x, indices))
    return found


def slid_gradients(count: int) -> list[Sample]:
    """Return gradients of maxima over sliding windows."""
    forward = getattr(aten, f"max_pool{count}d_with_indices").default
    found = []
    for (x, kernel, *rest), _ in slid(count):
        stride, padding = rest or (kernel, [0] * count)
        made, indices = forward(x, kernel, stride, padding)
        gradient = torch.randn_like(made)
        found.append(sample(gradient, x, kernel, stride, padding, [1] * count, False, indices))
    return found


def averaged_gradients(count: int) -> list[Sample]:
    """Return gradients of averages over sliding windows."""
    forward = getattr(aten, f"avg_pool{count}d").default
    found = []
    for (x, kernel, *rest), _ in slid(count):
        stride, padding = rest or (kernel, [0] * count)
        gradient = torch.randn_like(forward(x, kernel, stride, padding))
        found.append(sample(gradient, x, kernel, stride, padding, False, True, None))
    return found


def adaptive_gradients(count: int) -> list[Sample]:
    """Return gradients of adaptive averages."""
    forward = getattr(aten, f"_adaptive_avg_pool{count}d").default
    return [sample(torch.randn_like(forward(x, size)), x) for (x, size), _ in adaptive(count)]


def fractional(count: int) -> list[Sample]:
    batch, single = (real(*shape, *(6,) * count) for shape in ((2, 3), (3,)))
    kernel, size = [2] * count, [3] * count
    return [
        sample(batch, kernel, size, torch.rand(2, 3, count, dtype=torch.float64, generator=_draw)),
        sample(single, kernel, size, torch.rand(1, 3, count, dtype=torch.float64, generator=_draw)),
    ]


def fractional_gradients(count: int) -> list[Sample]:
    forward = getattr(aten, f"fractional_max_pool{count}d").default
    found = []
    for (x, kernel, size, drawn), _ in fractional(count):
        made, indices = forward(x, kernel, size, drawn)
        found.append(sample(torch.randn_like(made), x, kernel, size, indices))
    return found


def unpooled(count: int) -> list[Sample]:
    forward = getattr(aten, f"max_pool{count}d_with_indices").default
    steps = () if count == 2 else ([2] * count, [0] * count)
    return [sample(*forward(x, [2] * count), list(x.shape[-count:]), *steps) for x in planes(count)]


def _cases(count: int) -> dict[str, Callable[[], list[Sample]]]:
    cases = {
        f"adaptive_avg_pool{count}d": lambda: adaptive(count),
        f"adaptive_max_pool{count}d": lambda: adaptive(count)[:3],
        f"avg_pool{count}d": lambda: slid(count),
        f"max_pool{count}d": lambda: slid(count),
    }
    if count == 1:
        return cases
    return cases | {
        f"_adaptive_avg_pool{count}d": lambda: adaptive(count),
        f"_adaptive_avg_pool{count}d_backward": lambda: adaptive_gradients(count),
        f"adaptive_max_pool{count}d_backward": lambda: adaptive_maxima_gradients(count),
        f"avg_pool{count}d_backward": lambda: averaged_gradients(count),
        f"fractional_max_pool{count}d": lambda: fractional(count),
        f"fractional_max_pool{count}d_backward": lambda: fractional_gradients(count),
        f"max_pool{count}d_with_indices": lambda: slid(count),
        f"max_pool{count}d_with_indices_backward": lambda: slid_gradients(count),
        f"max_unpool{count}d": lambda: unpooled(count),
    }


CASES = {
    f"aten.{name}.default": make for count in (1, 2, 3) for name, make in _cases(count).items()
}


@pytest.mark.slow(but=5)
@pytest.mark.parametrize("op", CASES)
def test_pooling_can_be_cut_as_its_rule_says(op: str) -> None:
    check_rule(op, CASES[op](), axis_sizes=(2, 3))


def test_every_operator_has_a_test() -> None:
    assert set(CASES) == set(RULES)


def _found(op: str, case: Sample, axis_size: int = 2) -> dict[tuple[Sbp, ...], tuple[Sbp, ...]]:
    return {
        entry.inputs: entry.outputs for entry in legal_signatures(op, *case[0], axis_size=axis_size)
    }


def test_windows_that_overlap_leave_batch_and_channels_only() -> None:
    found = _found("aten.avg_pool2d.default", slid(2)[0])

    assert found == {(S(0),): (S(0),), (S(1),): (S(1),), (P,): (P,), (B,): (B,)}


def test_channels_of_a_sample_without_batch_come_first() -> None:
    found = _found("aten.max_pool2d_with_indices.default", slid(2)[1])

    assert found == {(S(0),): (S(0), S(0)), (B,): (B, B)}


def test_windows_side_by_side_leave_the_plane_free_and_indices_still_count_all_of_it() -> None:
    x = real(2, 3, 4, 6)

    by_two = _found("aten.max_pool2d_with_indices.default", sample(x, [2, 2]))
    by_three = _found("aten.max_pool2d_with_indices.default", sample(x, [2, 2]), axis_size=3)

    assert by_two[(S(2),)] == (S(2), S(2))
    assert by_three[(S(3),)] == (S(3), S(3))
    check_rule("aten.max_pool2d_with_indices.default", [sample(x, [2, 2])], axis_sizes=(2, 3))


def test_the_mean_over_a_whole_plane_is_a_partial_sum_of_uneven_parts() -> None:
    x = real(2, 3, 5, 7)

    found = _found("aten._adaptive_avg_pool2d.default", sample(x, [1, 1]), axis_size=3)

    assert found[(S(2),)] == (P,)
    assert found[(S(3),)] == (P,)
    check_rule("aten._adaptive_avg_pool2d.default", [sample(x, [1, 1])], axis_sizes=(3, 2))


def test_maxima_pass_where_no_indices_come_with_them() -> None:
    maximum = Partial("max")
    x = real(2, 3, 5)

    values = _found("aten.max_pool1d.default", sample(x, [2]))
    indexed = _found("aten.adaptive_max_pool1d.default", sample(x, [2]))

    assert values[(maximum,)] == (maximum,)
    assert (maximum,) not in indexed


def test_an_average_of_integers_is_rounded_and_not_linear() -> None:
    x = torch.arange(30).reshape(1, 2, 3, 5)

    found = _found("aten.avg_pool2d.default", sample(x, [2, 2]))

    assert (P,) not in found


def test_gradients_of_overlapping_maxima_are_summed_if_windows_are_dealt_out() -> None:
    (gradient,) = slid_gradients(2)[:1]

    found = _found("aten.max_pool2d_with_indices_backward.default", gradient)

    assert found[S(2), B, S(2)] == (P,)
    assert not any(S(2) in outputs for outputs in found.values())
