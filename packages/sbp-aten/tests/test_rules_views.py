"""Views and selections under every split, against one device: values, exact signatures, n-D."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_aten.rules import reshape, selection
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp, S
from sbp_core.signatures import (
    OpCall,
    Signature1d,
    combine,
    continuations,
    derive,
    enumerate_signatures,
    legal_signatures,
    localize,
)
from sbp_core.signatures.derivations import derivation
from sbp_core.signatures.rule import LocalProgram
from sbp_core.strategy import Signature
from sbp_torch.signatures.trial import refutation, whole_sample
from sbp_torch.signatures.verification import abstract_call, call_of, run_op, verify
from sbp_torch.testing.signatures import AXIS_SIZES, Sample, sample

_EXAMPLES = settings(max_examples=25, derandomize=True, deadline=None)
_draw = torch.Generator().manual_seed(13)

#: So many joint signatures of one call are drawn.
_NUM_JOINT = 8


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_draw)


def truth(*shape: int) -> torch.Tensor:
    return torch.randint(2, shape, generator=_draw).bool()


def whole(*shape: int) -> torch.Tensor:
    return torch.randint(-9, 9, shape, generator=_draw)


def claims(op: str, *args: Any, axis_size: int = 2, **kwargs: Any) -> set[str]:
    """Return the signatures on one axis, but for all B."""
    found = legal_signatures(op, *args, axis_size=axis_size, **kwargs)
    return {str(entry) for entry in found if entry.origin != "all B"}


def refuted(
    mesh_shape: Sequence[int], op: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[str]:
    """Run some of the signatures on a mesh; return what is wrong with them."""
    call, tensors = call_of(op, args, kwargs)
    draw = random.Random(0)
    chosen = {_drawn(call, mesh_shape, draw) for _ in range(_NUM_JOINT)}
    mesh, data = Placement.grid(tuple(mesh_shape)), whole_sample(call, tensors, run_op)
    wrong = []
    for signature in sorted(chosen, key=str):
        reason = refutation(data, signature, mesh, run_op, partial(localize, call, signature, mesh))
        if reason:
            wrong.append(f"{signature}: {reason}")
    return wrong


def _drawn(call: OpCall, mesh_shape: Sequence[int], draw: random.Random) -> Signature:
    """Return a random legal signature on a mesh."""
    parts: list[Signature1d] = []
    for axis in range(len(mesh_shape)):
        parts.append(draw.choice(continuations(call, tuple(parts), mesh_shape[: axis + 1])))
    return combine(parts)


RESHAPES = [
    sample(real(6, 4), [2, 3, 4]),
    sample(real(2, 3, 4), [6, 4]),
    sample(real(6, 4), [4, 6]),
    sample(real(12, 2), [8, 3]),
    sample(real(4, 1, 7), [4, 7, 1]),
    sample(real(5, 6), [5, -1, 2]),
    sample(truth(0, 6), [3, 0]),
    sample(real(3, 0, 5), [3, 0]),
    sample(real(1, 1), []),
]
SELECTED = [sample(real(4, 5, 3), 1, -1), sample(truth(5, 2), 0, 3)]
SLICED = [
    sample(real(4, 5), 1, 1, 4),
    sample(real(4, 5), 0, 0, 9223372036854775807),
    sample(truth(7, 3), 0, -6, -1, 2),
    sample(real(8, 2), 0, 1, 9223372036854775807, 2),
    sample(real(5, 2), 0, 4, 2),
    sample(real(7)),
]
SECTIONS = [sample(real(4, 7), [3, 0, 4], 1), sample(truth(5, 2), [5, 0])]
PARTS = [sample(real(4, 7), 3, 1), sample(real(5, 2), 7), sample(real(6), 2, -1)]
SQUEEZED = [sample(real(4, 1, 2), 1), sample(real(5, 2), -1), sample(real(), 0)]
EXPANDED = [sample(real(5, 1), [-1, 7]), sample(real(5), [1, 3, 5]), sample(real(), [4])]
SHAPED = [sample(real(5, 1, 2, 1)), sample(real(2, 3)), sample(real())]
SWAPPED = [sample(real(4, 5, 3), 0, -1), sample(real(), 0, -1)]
MOVED = [sample(real(4, 5, 3), [0, 1], [-1, 0])]
STRIDED = [
    sample(real(6, 4), [2, 12], [12, 1]),
    sample(real(5, 9), [5, 4, 3], [9, 2, 1]),
    sample(real(5, 9), [5, 4], [9, 2], 1),
    sample(real(3, 3), [2, 2], [1, 2], 1),
    sample(real(4, 6), [3, 6], [6, 1], 6),
]
BYTES = [
    sample(real(5, 4), torch.int64),
    sample(real(3, 4), torch.int32),
    sample(whole(5, 6).int(), torch.float64),
    sample(whole(5), torch.int64),
]

CASES: dict[str, list[Sample]] = {
    "aten._reshape_alias.default": [sample(real(6, 4), [3, 8], [8, 1])],
    "aten._reshape_alias_copy.default": [sample(real(6, 4), [3, 8], [8, 1])],
    "aten._reshape_copy.default": RESHAPES,
    "aten._unsafe_view.default": RESHAPES,
    "aten.alias.default": SHAPED,
    "aten.alias_copy.default": SHAPED,
    "aten.as_strided.default": STRIDED,
    "aten.as_strided_copy.default": STRIDED,
    "aten.broadcast_to.default": EXPANDED,
    "aten.chunk.default": PARTS,
    "aten.detach.default": SHAPED,
    "aten.detach_copy.default": SHAPED,
    "aten.expand.default": EXPANDED,
    "aten.expand_copy.default": EXPANDED,
    "aten.flatten.using_ints": [sample(real(2, 3, 4), 1), sample(real(5, 3)), sample(real())],
    "aten.lift.default": SHAPED,
    "aten.lift_fresh.default": SHAPED,
    "aten.lift_fresh_copy.default": SHAPED,
    "aten.mT.default": [sample(real(2, 5, 3))],
    "aten.moveaxis.int": SWAPPED[:1],
    "aten.moveaxis.intlist": MOVED,
    "aten.movedim.int": SWAPPED[:1],
    "aten.movedim.intlist": MOVED,
    "aten.narrow.default": [sample(real(4, 5), 1, 2, 2), sample(real(5), 0, -4, 3)],
    "aten.narrow_copy.default": [sample(real(4, 5), 1, 2, 2), sample(real(5), 0, 0, 5)],
    "aten.numpy_T.default": [sample(real(4, 5))],
    "aten.permute.default": [sample(real(4, 5, 3), [2, 0, -2])],
    "aten.permute_copy.default": [sample(real(4, 5, 3), [2, 0, -2])],
    "aten.ravel.default": [sample(real(5, 3))],
    "aten.reshape.default": RESHAPES,
    "aten.resize.default": [sample(real(6, 5), [3, 10]), sample(real(4, 3), [2, 3])],
    "aten.resize_as.default": [sample(real(5, 3), real(5, 3)), sample(real(6, 2), real(3, 4))],
    "aten.select.int": SELECTED,
    "aten.select_backward.default": [
        sample(real(4, 3), [4, 5, 3], 1, -2),
        sample(truth(2), [5, 2], 0, 3),
    ],
    "aten.select_copy.int": SELECTED,
    "aten.slice.Tensor": SLICED,
    "aten.slice_backward.default": [
        sample(real(4, 3), [4, 5], 1, 1, 4, 1),
        sample(real(4, 5), [4, 5], 0, 0, 9223372036854775807, 1),
        sample(real(3, 2), [7, 2], 0, -6, -1, 2),
        sample(truth(4, 2), [8, 2], 0, 1, 8, 2),
        sample(real(0, 2), [5, 2], 0, 4, 2, 1),
    ],
    "aten.slice_copy.Tensor": SLICED,
    "aten.split.Tensor": PARTS,
    "aten.split.sizes": SECTIONS,
    "aten.split_copy.Tensor": PARTS,
    "aten.split_with_sizes.default": SECTIONS,
    "aten.split_with_sizes_copy.default": SECTIONS,
    "aten.squeeze.default": SHAPED,
    "aten.squeeze.dim": SQUEEZED,
    "aten.squeeze.dims": [sample(real(5, 1, 2, 1), [1, 2]), sample(real(1, 2), [])],
    "aten.squeeze_copy.default": SHAPED,
    "aten.squeeze_copy.dim": SQUEEZED,
    "aten.squeeze_copy.dims": [sample(real(5, 1, 2, 1), [-1, 2])],
    "aten.swapaxes.default": SWAPPED,
    "aten.swapdims.default": SWAPPED,
    "aten.t.default": [sample(real(4, 5)), sample(real(5)), sample(real())],
    "aten.t_copy.default": [sample(real(4, 5)), sample(real(5))],
    "aten.tensor_split.indices": [sample(real(7, 3), [2, 5])],
    "aten.tensor_split.sections": [sample(real(3, 7), 3, -1)],
    "aten.transpose.int": SWAPPED,
    "aten.transpose_copy.int": SWAPPED,
    "aten.unbind.int": [sample(real(4, 5), 1), sample(truth(5, 2))],
    "aten.unbind_copy.int": [sample(real(4, 5), -1)],
    "aten.unflatten.int": [sample(real(5, 6), 1, [2, -1])],
    "aten.unsafe_chunk.default": PARTS,
    "aten.unsafe_split.Tensor": PARTS,
    "aten.unsafe_split_with_sizes.default": SECTIONS,
    "aten.unsqueeze.default": [sample(real(4, 5), -1), sample(real(4, 5), 1), sample(real(), 0)],
    "aten.unsqueeze_copy.default": [sample(real(4, 5), -2)],
    "aten.view.default": RESHAPES,
    "aten.view.dtype": BYTES,
    "aten.view_copy.default": RESHAPES,
    "aten.view_copy.dtype": BYTES,
}


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("op", CASES)
def test_every_claimed_signature_holds_when_it_is_run(op: str) -> None:
    for args, kwargs in CASES[op]:
        report = verify(op, *args, axis_sizes=AXIS_SIZES, isolated=False, **kwargs)

        assert report.ok, str(report)


def test_every_rule_of_these_modules_is_run() -> None:
    rules = {**reshape.RULES, **selection.RULES}

    assert set(rules) == set(CASES)


def test_a_reshape_splits_the_slowest_factor_that_both_sides_share() -> None:
    passes = {"P -> P", 'P("max") -> P("max")', 'P("min") -> P("min")'}

    assert claims("aten.view.default", (6, 4), (2, 3, 4)) == {
        "S(0) -> S(0)", "S(1) -> S(2)", *passes
    }  # fmt: skip
    assert claims("aten.view.default", (6, 4), (4, 6)) == {"S(0) -> S(0)", *passes}
    assert claims("aten.view.default", (6, 4), (4, 6), axis_size=3) == passes
    assert claims("aten.view.default", (9, 4), (4, 9)) == passes


def test_an_axis_behind_one_that_uses_a_factor_up_splits_the_next_one() -> None:
    merged, parted = (
        abstract_call("aten.view.default", ((2, 3), (6,)), {}),
        abstract_call("aten.view.default", ((6,), (2, 3)), {}),
    )

    assert _pair([S(0), S(1)], [S(0), S(0)]) in enumerate_signatures(merged, (2, 3))
    assert _pair([S(0), S(0)], [S(0), S(1)]) in enumerate_signatures(parted, (2, 3))
    assert _pair([S(0), S(0)], [S(0), S(1)]) not in enumerate_signatures(parted, (3, 2))


def test_the_next_factor_has_to_be_divided_and_not_the_dim_with_the_slower_one() -> None:
    # (2, 12) -> (6, 4) is a (b c) -> (a b) c with b = 3: two ranks divide 12 and 6, but not b.
    call = abstract_call("aten.view.default", ((2, 12), (6, 4)), {})

    assert _pair([S(0), S(1)], [S(0), S(0)]) not in enumerate_signatures(call, (2, 2))
    assert _pair([S(0), S(1)], [S(0), S(0)]) in enumerate_signatures(call, (2, 3))
    nested = _pair([S(0), S(1), S(1)], [S(0), S(0), S(1)])
    assert nested in enumerate_signatures(call, (2, 3, 2))


def test_heads_are_split_on_their_axis_whatever_the_number_of_devices() -> None:
    call = abstract_call("aten.view.default", ((16, 512, 768), (16, 512, 12, 64)), {})

    assert _pair([S(0), S(2)], [S(0), S(2)]) in enumerate_signatures(call, (2, 4))
    assert 12 % (2 * 4) != 0


def test_an_element_of_a_split_dim_is_a_partial_sum_of_zeros_and_itself() -> None:
    assert "S(1) -> P" in claims("aten.select.int", (4, 5), 1, 3)
    assert 'S(0) -> P("max")' in claims("aten.select.int", truth(5, 2), 0, 3)

    call = abstract_call("aten.select.int", ((4, 5), 1, 3), {})
    first, second = (_local(call, [S(1)], rank) for rank in (0, 1))
    assert [entry.op for entry in first.calls] == ["aten.new_zeros.default"]
    assert second.calls[0].args[1:] == (1, 0)


def test_the_gradient_of_a_selection_is_made_where_it_lies() -> None:
    assert {"B -> S(1)", "S(0) -> S(0)"} <= claims(
        "aten.select_backward.default", (4,), (4, 5), 1, 3
    )
    assert {"B -> S(0)", "S(0) -> P"} <= claims(
        "aten.slice_backward.default", (3, 2), (7, 2), 0, 1, 4, 1
    )


def test_every_second_element_stays_on_its_shard_where_two_divides_it() -> None:
    every = ("aten.slice.Tensor", (8, 3), 0, 1, 9223372036854775807, 2)

    assert "S(0) -> S(0)" in claims(*every)
    assert "S(0) -> S(0)" not in claims(*every, axis_size=3)


def test_a_squeeze_does_not_drop_dims_that_have_one_element_on_a_shard_only() -> None:
    call = abstract_call("aten.squeeze.default", ((2, 1, 3),), {})

    assert {str(entry) for entry in derive(call, 2)} >= {"S(0) -> S(0)", "S(2) -> S(1)"}
    assert _local(call, [S(0)], 0).calls[0].args[1] == (1,)


def test_frames_of_a_signal_are_free_over_its_batch() -> None:
    frames = claims("aten.as_strided.default", (4, 9), (4, 4, 3), (9, 2, 1))

    assert "S(0) -> S(0)" in frames
    assert not any(text.startswith("S(1)") for text in frames)


@pytest.mark.parametrize(
    ("op", "args", "why"),
    [
        ("aten.view.default", ((9, 4), (4, 9)), "its factors do not line up"),
        ("aten.as_strided.default", ((9,), (4, 3), (2, 1)), "it addresses memory"),
        ("aten.slice.Tensor", ((5,), 0, 1, 3), "it is a piece of a dim"),
        ("aten.view.dtype", (torch.zeros(3, 4), torch.uint8), "the bytes of one element"),
    ],
)
def test_what_has_to_stay_whole_says_why(op: str, args: Sequence[Any], why: str) -> None:
    assert why in derivation(abstract_call(op, args, {})).notation.why


@st.composite
def _regrouped(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two shapes of one size: the same factors, grouped in two ways, some with a 1 or a swap."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4]), min_size=1, max_size=5))

    def grouped() -> list[int]:
        shape = [1]
        for factor in factors:
            if draw(st.booleans()):
                shape.append(1)
            shape[-1] *= factor
        return shape

    target = grouped()
    return grouped(), draw(st.permutations(target)) if draw(st.booleans()) else target


_meshes = st.lists(st.integers(2, 4), min_size=1, max_size=3)


@pytest.mark.slow
@_EXAMPLES
@given(shapes=_regrouped(), mesh=_meshes)
def test_any_reshape_holds_on_any_mesh(
    shapes: tuple[list[int], list[int]], mesh: list[int]
) -> None:
    source, target = shapes
    tensor = torch.arange(torch.Size(source).numel(), dtype=torch.float64).reshape(source)

    assert refuted(mesh, "aten.view.default", (tensor, target), {}) == []


_shapes = st.lists(st.sampled_from([0, 1, 2, 3, 5, 8]), min_size=1, max_size=3)


@pytest.mark.slow
@_EXAMPLES
@given(shape=_shapes, mesh=_meshes, data=st.data())
def test_any_slice_and_its_gradient_hold_on_any_mesh(
    shape: list[int], mesh: list[int], data: st.DataObject
) -> None:
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    start, end = data.draw(st.integers(-9, 9)), data.draw(st.integers(-9, 9))
    step = data.draw(st.integers(1, 3))
    tensor = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    made = torch.ops.aten.slice.Tensor(tensor, dim, start, end, step)

    assert refuted(mesh, "aten.slice.Tensor", (tensor, dim, start, end, step), {}) == []
    backward = (made.clone(), shape, dim, start, end, step)
    assert refuted(mesh, "aten.slice_backward.default", backward, {}) == []


@pytest.mark.slow
@_EXAMPLES
@given(shape=_shapes, mesh=_meshes, data=st.data())
def test_any_permutation_selection_and_expansion_hold_on_any_mesh(
    shape: list[int], mesh: list[int], data: st.DataObject
) -> None:
    tensor = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    order = data.draw(st.permutations(range(len(shape))))
    wide = [5 if extent == 1 and data.draw(st.booleans()) else extent for extent in shape]
    dim = data.draw(st.integers(0, len(shape) - 1))

    assert refuted(mesh, "aten.permute.default", (tensor, order), {}) == []
    assert refuted(mesh, "aten.expand.default", (tensor, [2, *wide]), {}) == []
    assert refuted(mesh, "aten.squeeze.default", (tensor,), {}) == []
    if shape[dim]:
        index = data.draw(st.integers(-shape[dim], shape[dim] - 1))
        assert refuted(mesh, "aten.select.int", (tensor, dim, index), {}) == []
        assert refuted(mesh, "aten.unbind.int", (tensor, dim), {}) == []


def _pair(source: Sequence[S], target: Sequence[S]) -> Signature:
    return Signature((NdSbp(*source),), (NdSbp(*target),))


def _local(call: OpCall, inputs: Sequence[Any], rank: int) -> LocalProgram:
    """Return what a rank of two runs under the first signature with these inputs."""
    part = next(entry for entry in derive(call, 2) if entry.inputs == tuple(inputs))
    return localize(call, combine([part]), Placement.grid((2,)), rank)
