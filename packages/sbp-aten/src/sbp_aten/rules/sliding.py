"""Find the spatial dims that may be split in a convolution, pooling or folding, and label them.

Along one dim there are *elements* (of the larger tensor) and *windows* (one for each position of
the window). A dim may be split if no window reaches into the block of the next one:

    elements (x r!), windows x     block-wise: padding 0, windows no wider than the stride
    elements k, windows 1          one window over exactly all elements: the elements may be split
    elements x!, windows y!        anything else: a shard would need a halo

Notation: see `sbp_core.signatures.notation` (`!` not split, `+` no empty shard, `x*` run of dims).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sbp_core.signatures import Dim, Dims


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Labels of the spatial dims of one call.

    Args:
        elements: Dims of the larger tensor.
        windows: Dims of the tensor with one element for each window.
        kernel: Dims of the weights, if the operator has any.
        whole: Labels that may not be split.
        nonempty: Labels whose shards may not be empty: kernels refuse a dim of no elements.
        why: Reason why the labels in `whole` may not be split.
    """

    elements: Dims
    windows: Dims
    kernel: Dims
    whole: frozenset[str]
    nonempty: frozenset[str]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Slide:
    """How a window slides along one dim.

    Args:
        elements: Number of elements.
        windows: Number of windows.
        kernel: Number of elements of a window.
        stride: Distance from one window to the next, in elements.
        padding: Elements added on each side; only whether it is 0 matters.
        dilation: Distance between the elements of a window.
    """

    elements: int
    windows: int
    kernel: int
    stride: int
    padding: int = 0
    dilation: int = 1

    @property
    def reach(self) -> int:
        """Number of elements from the first to the last element of a window, both included."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def blockwise(self) -> bool:
        """Whether each window lies in a separate block of elements."""
        in_block = self.padding == 0 and self.reach <= self.stride
        return in_block and self.elements == self.windows * self.stride

    @property
    def disjoint(self) -> bool:
        """Whether no element is in two windows."""
        return self.reach <= self.stride or self.windows <= 1

    @property
    def copies(self) -> bool:
        """Whether each window is one element, so that nothing is reduced."""
        return self.kernel == 1 and self.padding == 0

    @property
    def single(self) -> bool:
        """Whether there is one window, over exactly all elements."""
        exact = self.padding == 0 and self.dilation == 1 and self.kernel == self.elements
        return exact and self.windows == 1 and self.kernel > 1


def spread(value: int | Sequence[int], count: int) -> tuple[int, ...]:
    """Expand an argument with one number for all dims, or one for each dim, to one for each."""
    listed = (value,) if isinstance(value, int) else tuple(value)
    return listed * count if len(listed) == 1 else listed


def space(slides: Sequence[Slide], *, divisible: bool = False) -> Space:
    """Return the labels of spatial dims: see the module docstring.

    Args:
        slides: Sliding along each dim.
        divisible: Whether a single window may be divided among ranks: its weights can be split,
            too, or it has none.
    """
    elements: list[Dim] = []
    windows: list[Dim] = []
    kernel: list[Dim] = []
    whole: set[str] = set()
    nonempty: set[str] = set()
    for at, slide in enumerate(slides):
        x, y, k, r = (f"{name}{at}" for name in "xykr")
        inside: Dim = (k,) if slide.kernel != 1 else ()
        if divisible and slide.single:
            elements.append((k,))
            windows.append(())
            nonempty.add(k)
        elif slide.blockwise:
            elements.append((x, r) if slide.stride != 1 else (x,))
            windows.append((x,))
            nonempty.add(x)
            whole |= {r, *inside}
        else:
            elements.append((x,))
            windows.append((y,))
            whole |= {x, y, *inside}
        kernel.append(inside)
    return Space(
        elements=tuple(elements),
        windows=tuple(windows),
        kernel=tuple(kernel),
        whole=frozenset(whole),
        nonempty=frozenset(nonempty),
        why=_why(slides),
    )


def _why(slides: Sequence[Slide]) -> str:
    halo = max((slide.reach - slide.stride for slide in slides if not slide.blockwise), default=0)
    if halo > 0:
        return f"a shard would need {halo} neighbouring elements (halo)"
    if all(slide.blockwise for slide in slides):
        return "each window needs all of its elements"
    return "the windows do not begin where shards would"
