"""The SBP algebra: how mesh axes hold a logical tensor (split, broadcast, partial), as values.

`S(dim)` splits, `B` broadcasts, `P` (`P("sum")`, `P("max")`, `P("min")`) leaves partial values that
are reduced to the logical one. `NdSbp` has one entry for each mesh axis. Tensors have *dims*,
meshes have *axes*. This module also computes the slice that a rank holds. `sbp_core.signatures` has
the legal signatures of operators, and `sbp_core.boxing` converts one `NdSbp` into another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import overload

from sbp_core.errors import SbpTypeError, SbpValueError
from sbp_core.serialize import JsonForm

__all__ = [
    "REDUCTIONS",
    "B",
    "Broadcast",
    "NdSbp",
    "P",
    "Partial",
    "S",
    "Sbp",
    "Split",
    "all_entries",
    "all_nd_sbps",
    "check_sbp",
    "local_shape",
    "parse_sbp",
    "split_bounds",
]

#: The reductions of partial values.
REDUCTIONS = ("sum", "max", "min")


@dataclass(frozen=True, slots=True)
class Split:
    """Split a tensor along `dim` (>= 0) over the ranks of one mesh axis, balanced."""

    dim: int

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, int) or self.dim < 0:
            raise SbpValueError(
                f"S({self.dim!r}) names no tensor dim",
                accepted="an integer >= 0, counted from the first dim",
                todo="write a negative dim as rank + dim",
            )

    def __repr__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Hold the whole tensor on every rank of one mesh axis."""

    def __repr__(self) -> str:
        return "B"


@dataclass(frozen=True, slots=True)
class Partial:
    """Hold, on each rank of one mesh axis, a value whose elementwise reduction is the tensor."""

    reduction: str = "sum"

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise SbpValueError(
                f"P({self.reduction!r}) is no known reduction",
                accepted=", ".join(f'P("{name}")' for name in REDUCTIONS),
            )

    def __call__(self, reduction: str) -> Partial:
        """Return the partial of another reduction: `P("max")`."""
        return Partial(reduction)

    def __repr__(self) -> str:
        return "P" if self.reduction == "sum" else f'P("{self.reduction}")'


#: How one mesh axis holds a tensor.
Sbp = Split | Broadcast | Partial

#: `S(dim)`: the tensor is split along a dim.
S = Split
#: The whole tensor is on every rank.
B = Broadcast()
#: Every rank holds an addend of the tensor; `P("max")`, `P("min")`: it is their maximum, minimum.
P = Partial()

_ENTRY = re.compile(
    r"""\s*(?:S\(\s*(?P<dim>\d{1,9})\s*\)|(?P<b>B)|P(?:\(\s*["']?(?P<red>\w+)["']?\s*\))?)\s*"""
)


def parse_sbp(text: str) -> Sbp:
    """Read one entry: `S(0)`, `B`, `P`, `P(max)`.

    Raises:
        SbpValueError: `text` is not such an entry.
    """
    match = _ENTRY.fullmatch(text)
    if match is None:
        raise SbpValueError(
            f"{text.strip()!r} is no SBP value", accepted='S(dim), B, P, P("max"), P("min")'
        )
    if match["dim"] is not None:
        return Split(int(match["dim"]))
    if match["b"]:
        return B
    return Partial(match["red"] or "sum")


class NdSbp(tuple[Sbp, ...]):
    """One `Sbp` for each mesh axis, in axis order: `NdSbp(S(0), B)`."""

    __slots__ = ()

    def __new__(cls, *entries: Sbp) -> NdSbp:
        """Return the value after checking every entry."""
        for entry in entries:
            if not isinstance(entry, Split | Broadcast | Partial):
                raise SbpTypeError(
                    f"{entry!r} is no SBP value", accepted='S(dim), B, P, P("max"), P("min")'
                )
        return super().__new__(cls, entries)

    def __getnewargs__(self) -> tuple[Sbp, ...]:
        return tuple(self)

    @classmethod
    def parse(cls, text: str) -> NdSbp:
        """Read `"S(0), B"`; also with parentheses around the whole.

        Raises:
            SbpValueError: an entry is not an SBP value.
        """
        inner = text.strip()
        if inner.startswith("(") and inner.endswith(")"):
            inner = inner[1:-1]
        return cls(*(parse_sbp(entry) for entry in inner.split(",") if entry.strip()))

    @classmethod
    def json_form(cls) -> JsonForm:
        """Return its JSON form: its text."""
        return JsonForm(str, str, cls.parse)

    def replace(self, axis: int, entry: Sbp) -> NdSbp:
        """Return a copy with another entry on one mesh axis."""
        return NdSbp(*self[:axis], entry, *self[axis + 1 :])

    @property
    def has_partial(self) -> bool:
        """Whether any axis holds partial values."""
        return any(isinstance(entry, Partial) for entry in self)

    @property
    def is_broadcast(self) -> bool:
        """Whether every rank holds the whole tensor."""
        return all(isinstance(entry, Broadcast) for entry in self)

    def split_axes(self, dim: int) -> tuple[int, ...]:
        """Return the mesh axes that split `dim`, in order."""
        return tuple(
            axis for axis, entry in enumerate(self) if isinstance(entry, Split) and entry.dim == dim
        )

    def __str__(self) -> str:
        return ", ".join(str(entry).replace('"', "") for entry in self)

    def __repr__(self) -> str:
        return f"NdSbp({', '.join(map(repr, self))})"


@overload
def split_bounds(extent: int, parts: int, index: int) -> tuple[int, int]: ...
@overload
def split_bounds(extent: int, parts: int) -> tuple[tuple[int, int], ...]: ...
def split_bounds(
    extent: int, parts: int, index: int | None = None
) -> tuple[int, int] | tuple[tuple[int, int], ...]:
    """Return the half-open bounds of one balanced part, or of all parts.

    The first `extent mod parts` parts hold one element more; parts may be empty.
    """
    base, more = divmod(extent, parts)
    if index is None:
        return tuple(split_bounds(extent, parts, part) for part in range(parts))
    start = index * base + min(index, more)
    return start, start + base + (1 if index < more else 0)


def check_sbp(
    shape: Sequence[int], sbp: NdSbp, mesh_shape: Sequence[int], *, stored: bool = False
) -> None:
    """Check that `sbp` can describe a tensor of `shape` on a mesh of `mesh_shape`.

    Args:
        shape: The shape of the whole tensor.
        sbp: The nd-SBP to check.
        mesh_shape: Ranks along each axis.
        stored: Whether the tensor is stored, for messages: nothing is stored as `P`.

    Raises:
        SbpValueError: the number of axes differs, or a split dim does not exist.
    """
    if len(sbp) != len(mesh_shape):
        raise SbpValueError(
            f"({sbp}) has {len(sbp)} entries for a mesh of {len(mesh_shape)} axes",
            accepted="one entry for each mesh axis",
        )
    for entry in sbp:
        if isinstance(entry, Split) and entry.dim >= len(shape):
            raise SbpValueError(
                f"{entry} splits a dim that a tensor of shape {tuple(shape)} does not have",
                accepted=", ".join(
                    ["B", *([] if stored else ["P"]), *(f"S({dim})" for dim in range(len(shape)))]
                ),
            )


def local_bounds(
    shape: Sequence[int], sbp: NdSbp, mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Return, for each dim, the half-open bounds of the slice held at a mesh coordinate.

    Mesh axes apply in order, each to the part that the previous axes leave.

    Raises:
        SbpValueError: see `check_sbp`.
    """
    check_sbp(shape, sbp, mesh_shape)
    bounds = [(0, extent) for extent in shape]
    for axis, entry in enumerate(sbp):
        if isinstance(entry, Split):
            start, stop = bounds[entry.dim]
            first, last = split_bounds(stop - start, mesh_shape[axis], coordinate[axis])
            bounds[entry.dim] = (start + first, start + last)
    return tuple(bounds)


def local_shape(
    shape: Sequence[int], sbp: NdSbp, mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> tuple[int, ...]:
    """Return the shape of the slice held at a mesh coordinate."""
    return tuple(stop - start for start, stop in local_bounds(shape, sbp, mesh_shape, coordinate))


def all_entries(num_dims: int, reductions: Sequence[str] = ("sum",)) -> tuple[Sbp, ...]:
    """Return every `Sbp` that a tensor of `num_dims` dims can have on one mesh axis."""
    splits: list[Sbp] = [Split(dim) for dim in range(num_dims)]
    return (*splits, B, *(Partial(reduction) for reduction in reductions))


def all_nd_sbps(
    num_dims: int, num_axes: int, reductions: Sequence[str] = ("sum",)
) -> Iterator[NdSbp]:
    """Yield every `NdSbp` of a tensor of `num_dims` dims on a mesh of `num_axes` axes."""
    for entries in product(all_entries(num_dims, reductions), repeat=num_axes):
        yield NdSbp(*entries)
