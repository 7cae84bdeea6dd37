"""Convolutions under every split, against one device; what others get silently wrong, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from sbp_aten.rules.convolution import RULES
from sbp_core.placement import Placement
from sbp_core.sbp import B, P, Partial, S, Sbp
from sbp_core.signatures import combine, derive, legal_signatures, localize, work_flop
from sbp_core.signatures.derivations import derivation
from sbp_torch.signatures.verification import abstract_call
from sbp_torch.testing.signatures import Sample, check_rule, sample

_draw = torch.Generator().manual_seed(11)

FORWARD = "aten.convolution.default"
BACKWARD = "aten.convolution_backward.default"


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_draw)


def conv(
    shape: Sequence[int],
    weight: Sequence[int],
    *,
    bias: int = 0,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    transposed: bool = False,
    groups: int = 1,
) -> Sample:
    """Return a convolution of random data; `bias` is its length, 0 for none."""
    numbers = [[number] * (len(shape) - 2) for number in (stride, padding, dilation)]
    return sample(
        real(*shape),
        real(*weight),
        real(bias) if bias else None,
        *numbers,
        transposed,
        [0] * (len(shape) - 2),
        groups,
    )


def gradient(forward: Sample, mask: Sequence[bool] = (True, True, True)) -> Sample:
    """Return the gradient of a convolution."""
    source, weight, bias, *rest = forward[0]
    made = torch.ops.aten.convolution.default(source, weight, bias, *rest)
    sizes = None if bias is None else [len(bias)]
    return sample(torch.randn_like(made), source, weight, sizes, *rest, list(mask))


CASES = {
    "1d": conv((5, 7, 6), (5, 7, 3), bias=5, padding=1),
    "2d, strided and dilated": conv((3, 4, 7, 9), (6, 4, 3, 2), bias=6, stride=2, dilation=2),
    "3d without bias": conv((2, 3, 3, 4, 3), (5, 3, 2, 2, 2), padding=1),
    "kernel 1": conv((2, 5, 7, 5), (4, 5, 1, 1), bias=4),
    "patches": conv((2, 3, 8, 12), (4, 3, 4, 4), bias=4, stride=4),
    "kernel 1, stride 2": conv((2, 3, 8, 6), (4, 3, 1, 1), stride=2),
    "kernel as large as the input": conv((2, 3, 5, 4), (4, 3, 5, 4), bias=4),
    "depthwise": conv((2, 6, 5, 5), (6, 1, 3, 3), bias=6, padding=1, groups=6),
    "depthwise, uneven": conv((2, 5, 5), (5, 1, 3), bias=5, groups=5),
    "depthwise with a multiplier": conv((2, 6, 5), (12, 1, 3), bias=12, groups=6),
    "grouped, 2 in and 3 out": conv((2, 12, 5), (18, 2, 3), bias=18, groups=6),
    "grouped, 4 in and 4 out": conv((2, 8, 5), (8, 4, 3), bias=8, groups=2),
    "transposed": conv((3, 5, 4, 5), (5, 6, 3, 3), bias=6, stride=2, padding=1, transposed=True),
    "transposed patches": conv((3, 4, 4, 5), (4, 5, 2, 2), bias=5, stride=2, transposed=True),
    "transposed from one element": conv((3, 4, 1), (4, 5, 5), bias=5, transposed=True),
    "transposed, grouped": conv((2, 12, 5), (12, 3, 3), bias=18, transposed=True, groups=6),
}

MASKS = [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]


@pytest.mark.slow(but=9)
@pytest.mark.parametrize("name", CASES)
def test_a_convolution_can_be_cut_as_its_rule_says(name: str) -> None:
    check_rule(FORWARD, [CASES[name]], axis_sizes=(2, 3))


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("name", CASES)
def test_the_gradient_of_a_convolution_can_be_cut_as_its_rule_says(name: str) -> None:
    mask = (True, True, CASES[name][0][2] is not None)

    check_rule(BACKWARD, [gradient(CASES[name], mask)], axis_sizes=(2, 3))


@pytest.mark.slow(but=5)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["1d", "patches", "transposed, grouped"])
def test_some_gradients_alone_can_be_cut_too(name: str, mask: Sequence[bool]) -> None:
    check_rule(BACKWARD, [gradient(CASES[name], mask)], axis_sizes=(2,))


def test_every_operator_has_a_test() -> None:
    assert set(RULES) == {FORWARD, BACKWARD}


def _found(op: str, case: Sample, axis_size: int = 2) -> dict[tuple[Sbp, ...], tuple[Sbp, ...]]:
    return {
        entry.inputs: entry.outputs for entry in legal_signatures(op, *case[0], axis_size=axis_size)
    }


def test_a_convolution_has_exactly_the_signatures_of_a_sum_of_products() -> None:
    found = _found(FORWARD, CASES["1d"])

    assert found == {
        (S(0), B, B): (S(0),),  # batch
        (B, S(0), S(0)): (S(1),),  # channels of the output
        (S(1), S(1), P): (P,),  # channels of the input: each rank has a part of every sum
        (P, B, P): (P,),
        (B, P, P): (P,),
        (B, B, Partial("max")): (Partial("max"),),  # the bias only shifts
        (B, B, Partial("min")): (Partial("min"),),
        (B, B, B): (B,),
    }


def test_weights_split_by_output_channel_never_give_a_replicated_output() -> None:
    found = _found(FORWARD, CASES["2d, strided and dilated"], axis_size=3)

    assert found[B, S(0), S(0)] == (S(1),)
    assert (B, S(0), B) not in found


def test_split_input_channels_give_partial_sums_and_the_bias_counts_once() -> None:
    found = _found(FORWARD, CASES["2d, strided and dilated"])

    assert found[S(1), S(1), P] == (P,)
    assert (S(1), S(1), B) not in found


def test_split_space_is_refused_and_the_halo_is_named() -> None:
    call = abstract_call(FORWARD, *CASES["2d, strided and dilated"])

    found = derivation(call)

    reasons = {entry.inputs: entry.reason for entry in found.rejected}
    assert not any(S(2) in entry.inputs or S(3) in entry.inputs for entry in found.legal)
    assert "3 neighbouring elements (halo)" in reasons[S(2), B, P]


def test_kernels_of_one_element_leave_space_free() -> None:
    found = _found(FORWARD, CASES["kernel 1"], axis_size=3)

    assert found[S(2), B, B] == (S(2),)
    assert found[S(3), B, B] == (S(3),)


def test_patches_side_by_side_leave_space_free_if_whole_patches_fall_to_each_rank() -> None:
    by_two = _found(FORWARD, CASES["patches"], axis_size=2)
    by_three = _found(FORWARD, CASES["patches"], axis_size=3)

    assert by_two[S(2), B, B] == (S(2),)
    assert (S(3), B, B) not in by_two  # 12 elements are 3 patches
    assert by_three[S(3), B, B] == (S(3),)


def test_a_kernel_as_large_as_the_input_can_be_divided() -> None:
    found = _found(FORWARD, CASES["kernel as large as the input"])

    assert found[S(2), S(2), P] == (P,)


def test_gradients_of_a_convolution_are_split_and_summed_where_they_have_to_be() -> None:
    found = _found(BACKWARD, gradient(CASES["1d"]))

    assert found == {
        (S(0), S(0), B): (S(0), P, P),  # batch
        (S(1), B, S(0)): (P, S(0), S(0)),  # channels of the output
        (B, S(1), S(1)): (S(1), S(1), B),  # channels of the input
        (P, B, B): (P, P, P),
        (B, P, B): (B, P, B),
        (B, B, P): (P, B, B),
        (B, P, P): (P, P, B),  # each counts in the gradient of the other
        (B, B, B): (B, B, B),
    }


def test_depthwise_channels_are_split_unevenly() -> None:
    found = _found(FORWARD, CASES["depthwise, uneven"], axis_size=3)

    assert found[S(1), S(0), S(0)] == (S(1),)


def test_groups_are_never_cut() -> None:
    found = _found(FORWARD, CASES["grouped, 2 in and 3 out"], axis_size=3)
    by_four = _found(FORWARD, CASES["grouped, 4 in and 4 out"], axis_size=4)

    assert found[S(1), S(0), S(0)] == (S(1),)
    assert (S(1), S(0), S(0)) not in by_four  # 2 groups


@pytest.mark.parametrize("name", ["grouped, 2 in and 3 out", "transposed, grouped"])
def test_a_rank_counts_its_own_groups(name: str) -> None:
    case = gradient(CASES[name])
    call = abstract_call(BACKWARD, *case)
    mesh = Placement.grid((3,))
    (split,) = [entry for entry in derive(call, 3) if entry.inputs == (S(1), S(1), S(0))]

    program = localize(call, combine([split]), mesh, 1)

    (local,) = program.calls
    assert local.args[9] == 2  # of 6 groups
    assert local.args[3] == (6,)  # of 18 channels of the bias


def test_channels_without_a_rank_to_hold_one_are_refused() -> None:
    found = _found(FORWARD, conv((2, 2, 5), (2, 2, 3)), axis_size=3)

    assert not any(S(1) in inputs or inputs[1] == S(0) for inputs in found)


def _work(**changes: Any) -> float:
    return work_flop(abstract_call(FORWARD, *conv((2, 4, 6, 6), (8, 4, 3, 3), **changes)))


def test_work_counts_a_multiplication_and_an_addition_for_each_weight_and_window() -> None:
    assert _work() == 2 * 2 * 8 * 4 * 9 * 16
    assert _work(bias=8, padding=1) == 2 * 2 * 8 * 4 * 9 * 36


@pytest.mark.parametrize(("axis_size", "is_legal"), [(2, True), (4, True), (8, False)])
def test_groups_of_equal_width_are_split_between_groups_only(
    axis_size: int, is_legal: bool
) -> None:
    # 8 divides the channels as well, but would cut groups of four in two.
    image, weight = (4, 16, 8, 8), (16, 4, 3, 3)
    rest = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 4)

    found = legal_signatures("aten.convolution.default", image, weight, *rest, axis_size=axis_size)

    assert ("S(1), S(0) -> S(1)" in map(str, found)) is is_legal
