"""List ways to shard the inputs of an operator call, for `discovery` to try; promising ones first.

They do not depend on the operator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product

from sbp_core.graph import TensorType
from sbp_core.sbp import B, Partial, S, Sbp, Split

#: The cut of every input.
Inputs = tuple[Sbp, ...]


def entries(tensor: TensorType, axis_size: int) -> tuple[Sbp, ...]:
    """Return the entries other than B that an input may have: splits and partial values.

    A dim can be split if each rank gets an element. The maximum of booleans is their disjunction.
    Booleans have no sum; complex numbers have only the sum.
    """
    kinds = {"bool": ("max", "min"), "complex64": ("sum",), "complex128": ("sum",)}
    splits = [S(dim) for dim, extent in enumerate(tensor.shape) if extent >= axis_size]
    return (*splits, *map(Partial, kinds.get(tensor.dtype, ("sum", "max", "min"))))


def candidates(
    inputs: Sequence[TensorType], axis_size: int, budget: int
) -> tuple[list[Inputs], bool]:
    """Return candidates other than all B, and whether these are all candidates.

    Args:
        inputs: Type of each tensor argument.
        axis_size: Ranks along the mesh axis.
        budget: The greatest number of candidates to return.
    """
    found: dict[Inputs, None] = {}
    whole = (B,) * len(inputs)
    for candidate in _in_order(inputs, [entries(entry, axis_size) for entry in inputs]):
        if candidate != whole and candidate not in found:
            if len(found) == budget:
                return list(found), False
            found[candidate] = None
    return list(found), True


def _in_order(inputs: Sequence[TensorType], choices: Sequence[Sequence[Sbp]]) -> Iterator[Inputs]:
    """Yield candidates, some of them repeatedly; candidates that are likely legal come first."""
    extents = sorted({extent for entry in inputs for extent in entry.shape}, reverse=True)
    agreeing = [_splits(inputs, choices, extent) for extent in extents]
    kinds: list[list[list[Sbp]]] = [
        [[entry for entry in some if entry == Partial(kind)] for some in choices]
        for kind in ("sum", "max", "min")
    ]
    for table in (*agreeing, *kinds):
        yield from _everywhere(table)
    beside_sums = [
        [[*splits, *sums] for splits, sums in zip(table, kinds[0], strict=True)]
        for table in agreeing
    ]
    tables: list[Sequence[Sequence[Sbp]]] = [*agreeing, *kinds, *beside_sums, choices]
    yield from _in_turn([_by_count(table) for table in tables])


def _in_turn(sources: Sequence[Iterator[Inputs]]) -> Iterator[Inputs]:
    """Yield from several sources in turn, until all are exhausted."""
    left = list(sources)
    while left:
        for source in list(left):
            try:
                yield next(source)
            except StopIteration:
                left.remove(source)


def _splits(
    inputs: Sequence[TensorType], choices: Sequence[Sequence[Sbp]], extent: int
) -> list[list[Sbp]]:
    """Return, for each input, the splits of dims of one extent."""
    return [
        [entry for entry in some if isinstance(entry, Split) and tensor.shape[entry.dim] == extent]
        for tensor, some in zip(inputs, choices, strict=True)
    ]


def _everywhere(table: Sequence[Sequence[Sbp]]) -> Iterator[Inputs]:
    """Yield the candidates that cut every possible input: by its first entry, its second, ..."""
    for index in range(max(map(len, table), default=0)):
        yield tuple(some[min(index, len(some) - 1)] if some else B for some in table)


def _by_count(table: Sequence[Sequence[Sbp]]) -> Iterator[Inputs]:
    """Yield every combination, in order of the number of cut inputs."""
    able: Mapping[int, Sequence[Sbp]] = {at: some for at, some in enumerate(table) if some}
    for count in range(1, len(able) + 1):
        for chosen in combinations(able, count):
            for cuts in product(*(able[at] for at in chosen)):
                placed = dict(zip(chosen, cuts, strict=True))
                yield tuple(placed.get(at, B) for at in range(len(table)))
