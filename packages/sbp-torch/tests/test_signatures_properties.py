"""Rules with a domain: any sum of products, any reshape, any broadcast, run against the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from sbp_core.signatures import Notation, RuleRegistry  # noqa: E402 - after the check for torch
from sbp_torch.signatures.verification import verify  # noqa: E402

_EXAMPLES = settings(max_examples=40, derandomize=True, deadline=None)
_MANY = settings(max_examples=500, derandomize=True, deadline=None)

_extents = st.integers(0, 5)


def _random(shape: Sequence[int]) -> torch.Tensor:
    return torch.randn(tuple(shape), dtype=torch.float64)


_sums_of_products = given(
    sizes=st.lists(_extents, min_size=4, max_size=4),
    operands=st.lists(st.permutations("abcd"), min_size=1, max_size=3),
    lengths=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    axis=st.integers(2, 6),
)


@pytest.mark.slow
@_EXAMPLES
@_sums_of_products
def test_every_sum_of_products_is_cut_as_derived(
    sizes: list[int], operands: list[list[str]], lengths: list[int], axis: int
) -> None:
    _check_sum_of_products(sizes, operands, lengths, axis)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@_MANY
@_sums_of_products
def test_very_many_sums_of_products_are_cut_as_derived(
    sizes: list[int], operands: list[list[str]], lengths: list[int], axis: int
) -> None:
    _check_sum_of_products(sizes, operands, lengths, axis)


def _check_sum_of_products(
    sizes: list[int], operands: list[list[str]], lengths: list[int], axis: int
) -> None:
    torch.manual_seed(0)
    extents = dict(zip("abcd", sizes, strict=True))
    given_labels = [names[:length] for names, length in zip(operands, lengths, strict=False)]
    used = sorted({name for names in given_labels for name in names})
    output = used[: lengths[3]]
    left = ", ".join(" ".join(names) or "()" for names in given_labels)
    notation = f"{left} -> {' '.join(output) or '()'}"
    equation = f"{','.join(map(''.join, given_labels))}->{''.join(output)}"

    def einsum(_op: str, args: Sequence[object], _kwargs: Mapping[str, object]) -> object:
        return torch.einsum(equation, *args)

    tensors = [_random([extents[name] for name in names]) for names in given_labels]
    report = verify(
        "my.einsum.default",
        *tensors,
        axis_sizes=(axis, 2),
        isolated=False,
        rules=RuleRegistry({"my.einsum.default": notation}),
        execute=einsum,
    )

    assert report.ok, str(report)


@st.composite
def _reshapes(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two shapes of one size: group the same prime factors in two ways, with ones in between."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3]), min_size=1, max_size=5))

    def grouped() -> list[int]:
        cuts = draw(st.lists(st.booleans(), min_size=len(factors), max_size=len(factors)))
        shape = [1]
        for factor, cut in zip(factors, cuts, strict=True):
            if cut:
                shape.append(1)
            shape[-1] *= factor
        return shape

    return grouped(), draw(st.permutations(grouped()))


@pytest.mark.slow
@_EXAMPLES
@given(shapes=_reshapes(), axis=st.integers(2, 4))
def test_every_reshape_is_cut_as_derived(shapes: tuple[list[int], list[int]], axis: int) -> None:
    _check_reshape(shapes, axis)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@_MANY
@given(shapes=_reshapes(), axis=st.integers(2, 4))
def test_very_many_reshapes_are_cut_as_derived(
    shapes: tuple[list[int], list[int]], axis: int
) -> None:
    _check_reshape(shapes, axis)


def _check_reshape(shapes: tuple[list[int], list[int]], axis: int) -> None:
    torch.manual_seed(0)
    source, target = shapes

    report = verify(
        "aten.view.default", _random(source), target, axis_sizes=(axis, 2), isolated=False
    )

    assert report.ok, str(report)


_broadcasts = given(
    shape=st.lists(_extents, min_size=0, max_size=3),
    keeps=st.lists(st.booleans(), min_size=6, max_size=6),
    drop=st.integers(0, 3),
    axis=st.integers(2, 4),
)


@pytest.mark.slow
@_EXAMPLES
@_broadcasts
def test_every_broadcast_is_cut_as_derived(
    shape: list[int], keeps: list[bool], drop: int, axis: int
) -> None:
    _check_broadcast(shape, keeps, drop, axis)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@_MANY
@_broadcasts
def test_very_many_broadcasts_are_cut_as_derived(
    shape: list[int], keeps: list[bool], drop: int, axis: int
) -> None:
    _check_broadcast(shape, keeps, drop, axis)


def _check_broadcast(shape: list[int], keeps: list[bool], drop: int, axis: int) -> None:
    torch.manual_seed(0)
    left = [extent if keep else 1 for extent, keep in zip(shape, keeps[:3], strict=False)]
    right = [extent if keep else 1 for extent, keep in zip(shape, keeps[3:], strict=False)]

    report = verify(
        "aten.mul.Tensor",
        _random(left),
        _random(right[drop:]),
        axis_sizes=(axis, 2),
        isolated=False,
    )

    assert report.ok, str(report)


_labels = st.sampled_from(["a", "b", "c", "d_1"])


@st.composite
def _notations(draw: st.DrawFn) -> Notation:
    def tensor() -> tuple[tuple[str, ...], ...]:
        names = draw(st.lists(_labels, unique=True, max_size=4))
        dims: list[tuple[str, ...]] = []
        for name in names:
            if dims and draw(st.booleans()):
                dims[-1] = (*dims[-1], name)
            else:
                dims += draw(st.sampled_from([[(name,)], [(), (name,)]]))
        return tuple(dims)

    inputs = tuple(tensor() for _ in range(draw(st.integers(0, 3))))
    product = draw(st.booleans()) and bool(inputs)
    outputs = tuple(tensor() for _ in range(1 if product else draw(st.integers(1, 2))))
    used = sorted({name for dims in (*inputs, *outputs) for dim in dims for name in dim})
    marked = st.sets(st.sampled_from(used)) if used else st.just(set())
    addends = tuple(
        sorted(draw(st.lists(st.integers(0, 2), min_size=len(inputs), max_size=len(inputs))))
    )
    ranks = {addend: rank for rank, addend in enumerate(dict.fromkeys(addends))}
    return Notation(
        inputs=inputs,
        outputs=outputs,
        addends=tuple(ranks[addend] for addend in addends) if product else None,
        whole=frozenset(draw(marked)),
        nonempty=frozenset(draw(marked)),
        work_flop=draw(st.sampled_from([None, 0.0, 3e20])),
    )


@pytest.mark.slow
@settings(max_examples=200, derandomize=True, deadline=None)
@given(notation=_notations())
def test_every_notation_reads_back_from_its_text(notation: Notation) -> None:
    assert Notation.parse(str(notation)) == notation
