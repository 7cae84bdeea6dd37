from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sbp_aten.passes.whole_batch.layout import Samples, divides, part_shape, reshaped


def part_of(whole: Tensor, layout: Samples, num_parts: int, index: int) -> Tensor:
    """Return a part as the docstring of the module draws it: of each block, one share."""
    blocks = whole.chunk(layout.blocks, layout.dim)
    return torch.cat([one.chunk(num_parts, layout.dim)[index] for one in blocks], layout.dim)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw two shapes of the same elements."""
    factors = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=5))
    cuts = [draw(st.lists(st.integers(0, len(factors)), max_size=3).map(sorted)) for _ in range(2)]
    first, second = (
        tuple(prod(factors[a:b]) for a, b in zip([0, *at], [*at, len(factors)], strict=True))
        for at in cuts
    )
    return first, second


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@example(shapes=((12,), (2, 6)), dim=0, blocks=3, num_parts=2)
@given(
    shapes=shapes(), dim=st.integers(0, 3), blocks=st.integers(1, 4), num_parts=st.integers(2, 4)
)
def test_parts_of_another_shape_are_those_parts_in_another_shape(shapes, dim, blocks, num_parts):
    before, after = shapes
    layout = Samples(dim % len(before), blocks)
    if not divides(before, layout, num_parts):
        return
    whole = torch.arange(prod(before)).reshape(before)
    parts = [part_of(whole, layout, num_parts, index) for index in range(num_parts)]
    candidates = [
        Samples(dim, count)
        for dim, extent in enumerate(after)
        for count in range(1, extent + 1)
        if divides(after, Samples(dim, count), num_parts)
    ]

    found = reshaped(layout, before, after, num_parts)

    def is_right(one: Samples) -> bool:
        made = [part_of(whole.reshape(after), one, num_parts, at) for at in range(num_parts)]
        local = part_shape(after, one, num_parts)
        return all(
            torch.equal(part.reshape(local), other) for part, other in zip(parts, made, strict=True)
        )

    assert [found] * (found is not None) == [one for one in candidates if is_right(one)]
