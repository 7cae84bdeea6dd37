"""Rules of interpolation, sampling, padding and folding, verified by execution."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from sbp_aten.rules import folding, resampling
from sbp_core.sbp import B, P, Partial, S, Sbp
from sbp_core.signatures import legal_signatures
from sbp_torch.testing.signatures import Sample, check_rule, sample

_draw = torch.Generator().manual_seed(17)


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_draw)


def _image(count: int) -> tuple[int, ...]:
    return (2, 3, *(3, 4, 6)[-count:])


def _sizes(count: int) -> tuple[list[int], ...]:
    """Return output sizes that are no multiples, multiples, and parts of those of `_image`."""
    return [5, 5, 5][:count], [6, 8, 12][-count:], [1, 2, 3][-count:]


def _upsamplings(
    name: str, count: int, corners: tuple[bool, ...], *, vec: bool
) -> dict[str, list[Sample]]:
    shape, sizes = _image(count), _sizes(count)
    single = (2, 3, *(1,) * count)
    forward = [
        *(sample(real(*shape), size, *corners) for size in sizes),
        sample(real(*single), sizes[0], *corners),
    ]
    backward = [
        *(sample(real(2, 3, *size), size, list(shape), *corners) for size in sizes),
        sample(real(2, 3, *sizes[0]), sizes[0], list(single), *corners),
    ]
    found = {f"aten.{name}.default": forward, f"aten.{name}_backward.default": backward}
    if vec:
        found[f"aten.{name}.vec"] = [
            sample(real(*shape), None, *corners, [2.0] * count),
            sample(real(*shape), sizes[1], *corners, None),
        ]
    return found


def _grid(count: int, mode: int, *, backward: bool = False) -> Sample:
    image = real(2, 3, *(3, 4, 5)[:count])
    grid = real(2, *(5, 3, 4)[:count], count).tanh()
    if not backward:
        return sample(image, grid, mode, 0, False)
    return sample(real(2, 3, *(5, 3, 4)[:count]), image, grid, mode, 0, False, [True, True])


def _pads(kind: str, count: int) -> dict[str, list[Sample]]:
    """Return calls that pad all dims, and the last one alone, with and without a batch."""
    shape = (2, 3, *(4, 3, 5)[:count])
    found: dict[str, list[Sample]] = {f"aten.{kind}_pad{count}d.default": []}
    gradients = found.setdefault(f"aten.{kind}_pad{count}d_backward.default", [])
    forward = getattr(torch.ops.aten, f"{kind}_pad{count}d").default
    for x, pad in (
        (real(*shape), [1, 2] * count),
        (real(*shape[1:]), [2, 1, 0, 0, 0, 0][: 2 * count]),
    ):
        found[f"aten.{kind}_pad{count}d.default"].append(sample(x, pad))
        gradients.append(sample(torch.randn_like(forward(x, pad)), x, pad))
    return found


CASES: dict[str, list[Sample]] = {
    **{
        name: calls
        for stem in ("upsample_nearest", "_upsample_nearest_exact")
        for count in (1, 2, 3)
        for name, calls in _upsamplings(f"{stem}{count}d", count, (), vec=True).items()
    },
    **{
        name: calls
        for stem, count in (
            ("upsample_linear1d", 1),
            ("upsample_bilinear2d", 2),
            ("upsample_trilinear3d", 3),
            ("upsample_bicubic2d", 2),
            ("_upsample_bicubic2d_aa", 2),
            ("_upsample_bilinear2d_aa", 2),
            ("_upsample_lanczos2d_aa", 2),
        )
        for name, calls in _upsamplings(stem, count, (False,), vec=True).items()
    },
    "aten.grid_sampler_2d.default": [_grid(2, 0), _grid(2, 1), _grid(2, 2)],
    "aten.grid_sampler_3d.default": [_grid(3, 0), _grid(3, 1)],
    "aten.grid_sampler_2d_backward.default": [
        _grid(2, 0, backward=True),
        _grid(2, 1, backward=True),
    ],
    "aten.grid_sampler_3d_backward.default": [_grid(3, 0, backward=True)],
    "aten.affine_grid_generator.default": [
        sample(real(5, 2, 3), [5, 3, 4, 2], False),
        sample(real(2, 3, 4), [2, 3, 4, 2, 3], True),
    ],
    "aten.constant_pad_nd.default": [
        sample(real(5, 4, 3), [1, 2], 0.0),
        sample(real(5, 4, 3), [0, 0, 1, -1], 2.5),
        sample(real(5, 4), [-1, -1], 2.5),
        sample(torch.arange(10).reshape(5, 2) > 4, [1, 0]),
    ],
    **dict(
        chain.from_iterable(
            _pads(kind, count).items()
            for kind in ("reflection", "replication")
            for count in (1, 2, 3)
        )
    ),
    **{
        f"aten.{name}.default": [
            sample(real(2, 6, 3), 3),
            sample(real(2, 6, 3), 1),
            sample(real(2, 6, 3), 6),
        ]
        for name in ("channel_shuffle", "native_channel_shuffle")
    },
    "aten.im2col.default": [
        sample(real(2, 5, 6, 4), [3, 2], [1, 1], [1, 0], [2, 1]),
        sample(real(2, 3, 6, 8), [2, 2], [1, 1], [0, 0], [2, 2]),
        sample(real(3, 6, 9), [2, 3], [1, 1], [0, 0], [2, 3]),
    ],
    "aten.col2im.default": [
        sample(real(2, 20, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]),
        sample(real(2, 12, 6), [4, 6], [2, 2], [1, 1], [0, 0], [2, 2]),
        sample(real(12, 9), [6, 6], [2, 2], [1, 1], [0, 0], [2, 2]),
    ],
    "aten.pixel_shuffle.default": [sample(real(2, 12, 3, 5), 2), sample(real(20, 2, 3), 2)],
    "aten.pixel_unshuffle.default": [sample(real(2, 3, 6, 10), 2), sample(real(5, 4, 6), 2)],
    **{
        f"aten.{name}.default": [
            sample(real(5, 7, 3), 1, 3, 2),
            sample(real(5, 6, 3), -2, 2, 2),
            sample(real(5, 6), 0, 1, 1),
            sample(real(), 0, 1, 1),
        ]
        for name in ("unfold", "unfold_copy")
    },
    "aten.unfold_backward.default": [
        sample(real(5, 3, 3, 3), [5, 7, 3], 1, 3, 2),
        sample(real(5, 3, 3, 2), [5, 6, 3], 1, 2, 2),
    ],
}

RULES = {**folding.RULES, **resampling.RULES}


@pytest.mark.slow(but=6)
@pytest.mark.parametrize("op", CASES)
def test_the_operator_can_be_cut_as_its_rule_says(op: str) -> None:
    check_rule(op, CASES[op], axis_sizes=(2, 3))


def test_every_operator_has_a_test() -> None:
    assert set(CASES) == set(RULES)


def _found(op: str, case: Sample, axis_size: int = 2) -> dict[tuple[Sbp, ...], tuple[Sbp, ...]]:
    return {
        entry.inputs: entry.outputs for entry in legal_signatures(op, *case[0], axis_size=axis_size)
    }


def test_nearest_interpolation_to_a_multiple_leaves_space_free() -> None:
    maximum, minimum = Partial("max"), Partial("min")

    found = _found("aten.upsample_nearest2d.default", sample(real(2, 3, 4, 5), [8, 10]))

    assert found == {
        (S(0),): (S(0),),
        (S(1),): (S(1),),
        (S(2),): (S(2),),
        (P,): (P,),
        (maximum,): (maximum,),
        (minimum,): (minimum,),
        (B,): (B,),
    }


def test_linear_interpolation_upwards_keeps_space_whole() -> None:
    found = _found("aten.upsample_bilinear2d.default", sample(real(2, 3, 4, 6), [8, 12], False))

    assert found == {(S(0),): (S(0),), (S(1),): (S(1),), (P,): (P,), (B,): (B,)}


def test_pixels_become_channels_where_whole_blocks_fall_to_each_rank() -> None:
    found = _found("aten.pixel_shuffle.default", sample(real(2, 12, 3, 5), 2), axis_size=3)

    assert found[(S(1),)] == (S(1),)
    assert found[(S(2),)] == (S(2),)
    assert (S(3),) not in found


def test_padding_with_other_than_zero_is_monotone_but_not_linear() -> None:
    maximum = Partial("max")

    zeros = _found("aten.constant_pad_nd.default", sample(real(5, 4), [1, 0], 0.0))
    ones = _found("aten.constant_pad_nd.default", sample(real(5, 4), [1, 0], 1.0))

    assert (P,) in zeros and (P,) not in ones
    assert zeros[(maximum,)] == ones[(maximum,)] == (maximum,)


def test_the_gradient_of_a_sampled_image_is_summed_over_the_places_that_were_read() -> None:
    found = _found("aten.grid_sampler_2d_backward.default", _grid(2, 0, backward=True))

    assert found[S(2), B, S(1)] == (P, S(1))
    assert found[S(1), S(1), B] == (S(1), P)
    assert found[B, P, B] == (B, P)
