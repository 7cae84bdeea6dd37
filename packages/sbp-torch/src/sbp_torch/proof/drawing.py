"""Draw random inputs that a captured graph accepts: indices in range, rows that the loss ignores.

The users of an integer, also through views, determine its range: an index into a table of n rows, a
class among n, or the number that a cross-entropy ignores. If they do not, numbers are taken from an
example. `parts` and `whole` run graphs on these inputs, to prove that two graphs are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, cast

import torch
from torch import Tensor

from sbp_core.graph import LogicalGraph, Node, Ref, TensorType
from sbp_core.signatures import is_view

#: Operators that copy integers from an argument to the result, at least some of them.
_HANDED_ON = frozenset(
    {"_to_copy", "clone", "where", "masked_fill", "cat", "stack", "select_scatter", "slice_scatter"}
)

#: Floats repeat after this number (a prime), because drawing takes longer than most operators.
_PERIOD = 1_000_003

#: Probability that an element is valid, in the first and in the last row of a batch.
_VALID = (0.9, 0.3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One way to draw numbers.

    Args:
        ignored: Which elements of masks and targets are ignored; `first`: some of them, and all of
            the first half of the rows, like a whole micro-batch.
        positive: Whether floats are positive, for roots and logarithms, or normally distributed.
        seed: Seed of the generator.
    """

    ignored: Literal["some", "none", "first", "all"] = "some"
    positive: bool = False
    seed: int = 0

    def generator(self) -> torch.Generator:
        """Return a new generator, with the same seed each time."""
        return torch.Generator().manual_seed(self.seed)

    def floats(self, shape: Iterable[int], random: torch.Generator) -> Tensor:
        """Return floats (float64), normally distributed or between 0.5 and 1.5."""
        size = tuple(shape)
        count = prod(size)
        drawn = min(count, _PERIOD)
        if self.positive:
            found = torch.rand(drawn, generator=random, dtype=torch.float64) + 0.5
        else:
            found = torch.randn(drawn, generator=random, dtype=torch.float64)
        if drawn < count:
            found = found.repeat(count // drawn + 1)[:count]
        return found.reshape(size)

    def valid(self, shape: Iterable[int], random: torch.Generator) -> Tensor:
        """Return a bool mask of the elements that are not ignored; rows have unequal counts."""
        size = tuple(shape)
        if self.ignored in ("none", "all") or not size:
            return torch.full(size, self.ignored != "all")
        chances = torch.linspace(*_VALID, size[0]).reshape(-1, *[1] * (len(size) - 1))
        found = torch.rand(size, generator=random) < chances
        if self.ignored == "first":
            found[: (size[0] + 1) // 2] = False
        return found


@dataclass(frozen=True, slots=True)
class Integers:
    """The numbers that an integer input may be.

    Args:
        bound: Exclusive upper bound; the lower bound is 0. None if it is unknown.
        ignored: A number that stands for "none".
    """

    bound: int | None = None
    ignored: int | None = None

    def merge(self, other: Integers) -> Integers:
        """Return the numbers that satisfy both."""
        bounds = [one for one in (self.bound, other.bound) if one is not None]
        ignored = self.ignored if self.ignored is not None else other.ignored
        return Integers(min(bounds, default=None), ignored)

    def draw(
        self, shape: Iterable[int], how: Draw, random: torch.Generator, example: Tensor | None
    ) -> Tensor:
        """Return integers of a shape (int64)."""
        size = tuple(shape)
        if self.bound is None and example is not None and example.numel():
            flat = example.reshape(-1).to(torch.int64)
            return flat[torch.randint(len(flat), size, generator=random)]
        bound = 2 if self.bound is None else max(self.bound, 1)
        found = torch.randint(bound, size, generator=random)
        if self.ignored is None:
            return found
        return found.where(how.valid(size, random), self.ignored)


def integers_of(graph: LogicalGraph) -> Mapping[str, Integers]:
    """Return the allowed numbers of the integer tensors of a graph, according to their users."""
    if integers_of not in graph.found:
        found: dict[str, Integers] = {}
        for node in reversed(graph.nodes):
            says = list(_uses(graph, node))
            if is_view(node.op) or node.kind in _HANDED_ON:
                given = [name for name in node.inputs() if _is_integer(graph, name)]
                known = [found[name] for name in node.outputs if name in found]
                says += [(name, one) for name in given for one in known]
            for name, here in says:
                found[name] = found.get(name, Integers()).merge(here)
        graph.found[integers_of] = found
    return cast(Mapping[str, Integers], graph.found[integers_of])


def _is_integer(graph: LogicalGraph, name: str) -> bool:
    kind = graph.types[name]
    return isinstance(kind, TensorType) and kind.dtype.startswith(("int", "uint"))


def _uses(graph: LogicalGraph, node: Node) -> Iterator[tuple[str, Integers]]:
    """Yield the integer arguments of a node, and which numbers they may be."""

    def size(at: int, dim: int) -> int:
        return graph.tensor(node.args[at].name).shape[dim]

    def name(at: int) -> str:
        found = node.args[at]
        assert isinstance(found, Ref), f"argument {at} of {node.op} is a tensor"
        return found.name

    args = node.args
    if node.kind in ("embedding", "_embedding_bag", "embedding_renorm"):
        yield name(1), Integers(size(0, 0))
    elif node.kind == "embedding_dense_backward":
        yield name(1), Integers(args[2])
    elif node.kind in ("nll_loss_forward", "nll_loss2d_forward"):
        yield name(1), Integers(size(0, 1 if len(graph.tensor(name(0)).shape) > 1 else 0), args[4])
    elif node.kind in ("nll_loss_backward", "nll_loss2d_backward"):
        yield name(2), Integers(size(1, 1 if len(graph.tensor(name(1)).shape) > 1 else 0), args[5])
    elif node.kind in ("gather", "index_select", "scatter", "scatter_add", "index_add"):
        yield name(2), Integers(size(0, args[1]))
    elif node.kind in ("index", "index_put"):
        for dim, index in enumerate(args[1]):
            if isinstance(index, Ref) and _is_integer(graph, index.name):
                yield index.name, Integers(size(0, dim))
    elif node.kind in ("ne", "eq") and isinstance(args[1], int) and args[1] < 0:
        yield from [(name(0), Integers(None, args[1]))] * _is_integer(graph, name(0))


def draw(
    kind: TensorType,
    integers: Integers,
    how: Draw,
    random: torch.Generator,
    example: Tensor | None = None,
) -> Tensor:
    """Return a random tensor of a type.

    Args:
        kind: Shape and dtype; floats in double precision.
        integers: The allowed numbers, for an integer dtype.
        how: How the numbers are drawn.
        random: The generator.
        example: A tensor of the same meaning. If its floats are all 0 or 1, the result is a mask;
            if none is negative, the result is positive.
    """
    dtype = getattr(torch, kind.dtype)
    if kind.dtype == "bool":
        return how.valid(kind.shape, random)
    if not (dtype.is_floating_point or dtype.is_complex):
        return integers.draw(kind.shape, how, random, example).to(dtype)
    if example is not None and example.numel() and bool((example >= 0).all()):
        if bool(((example == 0) | (example == 1)).all()) and bool(example.any()):
            return how.valid(kind.shape, random).to(dtype)
        how = replace(how, positive=True)
    return how.floats(kind.shape, random).to(dtype)
