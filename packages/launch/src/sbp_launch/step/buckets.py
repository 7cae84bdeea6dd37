"""Pad batches of many lengths to a few sizes (`pad_to`), for each of which the step is planned.

    sizes            4           8                       16
    lengths          1 2 3 4     5 6 7 8                 9 ... 16          17: refused
    forms            one         one                     one

The largest size is planned first, because it needs the most memory. The other sizes are planned
before the first step, with the states sharded as in the first plan. `neutral` proves that padding
changes neither loss nor gradients.
"""

from __future__ import annotations

from cmath import isinf  # of complex tensors, too
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sbp_core.errors import ConfigError, SbpError, SbpValueError, suggestion, words_of
from sbp_core.plugins import merge_settings
from sbp_core.runtime import BatchIs
from sbp_launch.step.forms import MOST_FORMS
from sbp_launch.team import Team
from sbp_launch.world import World
from sbp_torch.graph_capture import SampleDims, flatten_batch, rebuild_batch

_WHERE = "the argument pad_to"

#: The value that a process sends in place of a size if its part of the batch fits none.
_REFUSED = 2**62

#: The largest number of characters of an error that other processes quote.
_QUOTED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBuckets:
    """The sizes to which batches of many lengths are padded, each of which is a form of the step.

    Args:
        sizes: Lengths, at most 16; sorted when made. A batch is padded to the next one.
        values: Padding values of tensors, by their names in the batch: `{"input_ids": 0,
            "attention_mask": 0, "labels": -100}`. Keys and positions on the way to a tensor are
            joined by dots; a batch that is one tensor is called `batch`.
        dim: The dim of all these tensors that is padded, as the loop has them; not the sample dim.

    Raises:
        ConfigError: there are no sizes, or more sizes than forms of a step; a size is not a
            length; no tensor is named; or `dim` is not a dim.
    """

    sizes: tuple[int, ...]
    values: Mapping[str, bool | int | float]
    dim: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.sizes, Iterable):
            raise ConfigError(
                f"sizes is {self.sizes!r}",
                where=_WHERE,
                accepted="several lengths, such as (64, 128, 256)",
                todo=f"write one length as a tuple: sizes=({self.sizes!r},)",
            )
        sizes = tuple(self.sizes)
        is_whole = all(type(size) is int and size >= 1 for size in sizes)
        if not sizes or not is_whole or len({*sizes}) < len(sizes):
            raise ConfigError(
                f"sizes are {list(sizes)}",
                where=_WHERE,
                accepted="different lengths >= 1, such as (64, 128, 256)",
            )
        object.__setattr__(self, "sizes", tuple(sorted(sizes)))
        if len(sizes) > MOST_FORMS:
            raise ConfigError(
                f"sizes are {len(sizes)} lengths, and a step has at most {MOST_FORMS} forms, each "
                "of which is captured, planned and kept",
                where=_WHERE,
                accepted=f"at most {MOST_FORMS} sizes",
                todo="take fewer and longer steps, such as powers of 2",
            )
        if type(self.dim) is not int or self.dim < 0:
            raise ConfigError(
                f"dim is {self.dim!r}", where=_WHERE, accepted="the dim of the positions, >= 0"
            )
        if not self.values or not isinstance(self.values, Mapping):
            raise ConfigError(
                f"values={self.values!r} has no value for any tensor of the batch",
                where=_WHERE,
                accepted="a value for each tensor that is padded: {'ids': 0, 'labels': -100}",
            )

    @classmethod
    def of(cls, given: LengthBuckets | Mapping[str, Any] | None) -> LengthBuckets | None:
        """Return the sizes that the argument `pad_to` describes; None if it is None.

        Raises:
            ConfigError: a setting is unknown, missing or refused.
        """
        if given is None or isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"pad_to is {given!r}",
                where=_WHERE,
                accepted="LengthBuckets(sizes=(64, 128), values={'input_ids': 0}), or a mapping "
                "with these keys",
            )
        return merge_settings(cls, given, key="pad_to", where=_WHERE)

    def size_for(self, length: int) -> int | None:
        """Return the smallest size that holds a length; None if all are shorter."""
        return next((size for size in self.sizes if size >= length), None)


class Padding:
    """The preparation of a batch before a step takes it: its samples are moved to dim 0.

    Args:
        samples: The dims of the samples in the batches of the loop.
    """

    #: How many sizes there are.
    num_sizes = 0

    def __init__(self, samples: SampleDims = SampleDims()) -> None:  # noqa: B008 - frozen
        self.samples = samples
        #: Lines for the report.
        self.lines: tuple[str, ...] = ()

    def largest(self, batch: Any) -> Any:
        """Return a batch of the size that is planned first, as a step takes it."""
        return self.samples.in_front(batch)

    def begin(self, team: Team) -> None:
        """Register the processes that agree on sizes, if they give parts of a batch."""

    def examples(self) -> Iterator[Any]:
        """Yield, as a step takes them, batches of all further sizes that are planned ahead."""
        return iter(())

    def __call__(self, batch: Any, batch_is: BatchIs) -> Any:
        """Return a batch of this process as a step takes it.

        Raises:
            SbpValueError: a tensor lacks the dim that its samples should have.
        """
        return self.samples.in_front(batch)


class BucketPadding(Padding):
    """Pads batches to the sizes of `LengthBuckets`.

    Args:
        buckets: The sizes.
        example: A batch of this process. Tensors that `buckets` does not name must have the same
            length along `dim` in all batches as they have here.
        world: This process among all.
        samples: The dims of the samples in the batches of the loop.

    Raises:
        ConfigError: the example cannot be padded; names the tensor and the reason.
    """

    def __init__(
        self,
        buckets: LengthBuckets,
        example: Any,
        world: World,
        samples: SampleDims = SampleDims(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(samples)
        self.buckets, self.world, self.num_sizes = buckets, world, len(buckets.sizes)
        self.example, self._team = example, Team()
        self._fixed: dict[str, int] | None = None
        flat = flatten_batch(example)
        try:
            #: Length of the example along `dim`.
            self.length = self._length(flat)
            self._check_length(flat, self.length)
            for name in buckets.values:
                self._pad(name, flat[name], flat[name].shape[buckets.dim] + 1)
        except SbpValueError as error:
            raise error.replaced(ConfigError, where=_WHERE) from None
        self._fixed = {
            name: value.shape[buckets.dim]
            for name, value in flat.items()
            if self._is_of_one_length(name, value)
        }

    def largest(self, batch: Any) -> Any:
        """Return a batch padded to the largest size."""
        return self.samples.in_front(self.resize(batch, self.buckets.sizes[-1]))

    def examples(self) -> Iterator[Any]:
        """Yield the example in every size except the largest, from large to small."""
        for size in reversed(self.buckets.sizes[:-1]):
            yield self.samples.in_front(self.resize(self.example, size))

    def begin(self, team: Team) -> None:
        """Register the processes that agree on sizes, if they give parts of a batch."""
        self._team = team

    def __call__(self, batch: Any, batch_is: BatchIs) -> Any:
        """Return a batch padded to the next size; padded tensors are copies.

        Args:
            batch: A batch of this process.
            batch_is: If "local", all processes call this, and use the largest of their sizes.

        Raises:
            SbpValueError: the batch, here or in another process, cannot be padded; names the
                tensor and the reason.
        """
        size, problem = 0, None
        try:
            size = self._size(flatten_batch(batch))
        except SbpError as error:
            problem = error
        if batch_is == "local" and self.world.size > 1:
            size = self._agree(size, problem)
        if problem is not None:
            raise problem
        return self.samples.in_front(self.resize(batch, size))

    def _agree(self, size: int, problem: SbpError | None) -> int:
        """Return the largest size of all processes.

        Raises:
            SbpError: `problem`, or an error that quotes the problem of another process.
        """
        (highest,) = self._team.highest_of([size if problem is None else _REFUSED])
        if highest < _REFUSED:
            return highest
        told = self._team.gather(words_of(problem)[:_QUOTED] if problem is not None else "")
        if problem is not None:
            raise problem
        rank, text = next((rank, text) for rank, text in enumerate(told) if text)
        raise SbpValueError(
            f"rank {rank} cannot pad its part of the batch: {text}",
            accepted="parts that all fit a size of pad_to",
        )

    def _size(self, flat: Mapping[str, Tensor]) -> int:
        length = self._length(flat)
        return self._check_length(flat, length)

    def _length(self, flat: Mapping[str, Tensor]) -> int:
        """Return the length that all named tensors have.

        Raises:
            SbpValueError: a tensor is missing, lacks the dim, or has its samples along it; or the
                lengths differ.
        """
        dim, lengths = self.buckets.dim, dict[str, int]()
        for name in self.buckets.values:
            if name not in flat:
                raise SbpValueError(
                    f"pad_to names {name!r}, and the batch has no tensor of that name",
                    accepted=", ".join(map(repr, flat)),
                    todo=suggestion(name, flat),
                )
            if flat[name].dim() <= dim:
                raise SbpValueError(
                    f"{name!r} of shape {tuple(flat[name].shape)} has no dim {dim} to be padded",
                    accepted=f"tensors of more than {dim} dims",
                    todo=f"leave it out of values={{...}}, or choose another dim than {dim}",
                )
            if self.samples.of(name, flat[name]) == dim:
                raise SbpValueError(
                    f"dim {dim} of {name!r}, which pad_to pads, is the dim of its samples",
                    accepted="the dim of the positions",
                    todo="give it to pad_to as dim=...; or give the dim of the samples as "
                    "batch_dim=...",
                )
            lengths[name] = flat[name].shape[dim]
        first = next(iter(lengths))
        for name, length in lengths.items():
            if length != lengths[first]:
                raise SbpValueError(
                    f"{first!r} has {lengths[first]} positions at dim {dim}, and {name!r} has "
                    f"{length}",
                    accepted="one length for all tensors that are padded",
                    todo="cut or shift inside the loss, after the padding; or leave out of "
                    "values={...} what has no positions there",
                )
        return lengths[first]

    def _check_length(self, flat: Mapping[str, Tensor], length: int) -> int:
        """Return the size to which a batch is padded.

        Raises:
            SbpValueError: it is longer than all sizes, or some of its tensors would not fit them.
        """
        dim, sizes = self.buckets.dim, self.buckets.sizes
        size = self.buckets.size_for(length)
        if size is None:
            name = next(iter(self.buckets.values))
            raise SbpValueError(
                f"{name!r} has {length} positions at dim {dim}, more than the largest size, "
                f"{sizes[-1]}",
                accepted=f"up to {sizes[-1]} positions",
                todo=f"give sizes=({', '.join(map(str, (*sizes, length)))}) or larger ones to "
                "pad_to; or truncate what the loader makes",
            )
        for name, value in flat.items():
            if not self._is_of_one_length(name, value):
                continue
            found = value.shape[dim]
            if self._fixed is None:
                if found == length and sizes != (length,):
                    raise SbpValueError(
                        f"{name!r} has {found} positions at dim {dim}, like the padded "
                        "tensors, and pad_to has no value for it: it would not fit them",
                        accepted="a value for each tensor with positions, and for no other tensor",
                        todo=f"add {name!r}: VALUE to values={{...}}; if that dim of it does not "
                        "vary, give an example batch of another length",
                    )
            elif found != self._fixed.get(name, found):
                raise SbpValueError(
                    f"{name!r} has {found} positions at dim {dim}, had {self._fixed[name]} in the "
                    "example, and pad_to has no value for it: it would not fit the padded tensors",
                    accepted="a value for each tensor whose length varies",
                    todo=f"add {name!r}: VALUE to values={{...}} of pad_to",
                )
        return size

    def _is_of_one_length(self, name: str, value: Tensor) -> bool:
        """Whether a tensor is not padded, and has the padded dim, whose length must not vary."""
        dim = self.buckets.dim
        others = name not in self.buckets.values and value.dim() > dim
        return others and self.samples.of(name, value) != dim

    def resize(self, batch: Any, size: int) -> Any:
        """Return a batch whose named tensors are padded or truncated to a length.

        Args:
            batch: A batch that has these tensors.
            size: The new length.
        """
        flat, dim = flatten_batch(batch), self.buckets.dim
        made = {
            name: self._pad(name, flat[name], size).narrow(dim, 0, size)
            for name in self.buckets.values
            if flat[name].shape[dim] != size
        }
        return rebuild_batch(batch, {**flat, **made}) if made else batch

    def _pad(self, name: str, value: Tensor, size: int) -> Tensor:
        """Return a tensor, padded to a length if it is shorter.

        Raises:
            SbpValueError: its dtype cannot represent the padding value.
        """
        number, dim, dtype = self.buckets.values[name], self.buckets.dim, value.dtype
        if value.shape[dim] >= size:
            return value
        try:
            held = torch.full((), number, dtype=dtype).item()
            is_rounded = dtype.is_floating_point or dtype.is_complex
            is_held = held == number or (is_rounded and isinf(held) == isinf(number))
        except (RuntimeError, ValueError, OverflowError):
            is_held = False
        if not is_held:
            raise SbpValueError(
                f"{name!r} is of dtype {str(dtype).removeprefix('torch.')}, which does not hold "
                f"{number!r}, the value of its padding",
                accepted="a value of the tensor's dtype",
            )
        shape = list(value.shape)
        shape[dim] = size - value.shape[dim]
        return torch.cat([value, value.new_full(shape, number)], dim)


def make_padding(
    pad_to: LengthBuckets | Mapping[str, Any] | None,
    example: Any,
    world: World,
    samples: SampleDims,
) -> Padding:
    """Return the preparation of batches: padding, or none.

    Args:
        pad_to: See `parallelize`.
        example: A batch of this process.
        world: This process among all.
        samples: The dims of the samples in the batches of the loop.

    Raises:
        ConfigError: a setting is unknown, missing or refused; or the example cannot be padded.
    """
    buckets = LengthBuckets.of(pad_to)
    if buckets is None:
        return Padding(samples)
    return BucketPadding(buckets, example, world, samples)
