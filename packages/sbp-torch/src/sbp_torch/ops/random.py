"""Counter-based random operators, `sbp.random_*`, which replace PyTorch's in captured graphs.

    sbp.random_uniform(size, seed, step, site, *, low, high, ...)     low + (high - low) u
    sbp.random_normal(size, seed, step, site, *, mean, std, ...)      mean + std z
    sbp.random_bernoulli(size, seed, step, site, *, p, ...)           True with probability p
    sbp.random_integers(size, seed, step, site, *, low, high, ...)    in [low, high)

They keep no state. An element depends only on the seed of the program, the step (a number for each
micro-batch, if these should differ), the site (a number for each operator), and its place in the
logical tensor. So every rank draws the same element: the rule of these operators passes a shard its
`start` and the `logical` shape. Integers are reduced with a bias below 2^-32 times the number of
values. Each element draws from Philox-4x32-10 with a counter made of its place:

    counter   (block mod 2^32, block div 2^32, site, step)      key   seed
    block     row * blocks in a row + (column div 4)             word  column mod 4

where a row is one line along the last dim (trailing dims of one element left aside). Draws with a
resolution of 53 bits take two words, so a block serves two elements.

With `micro_batches` > 1, `step` counts micro-batches, which cut `micro_batch_dim` into equal parts.
A micro-batch draws what the whole batch would have at its samples: `logical` is the shape of the
whole batch, and `start` counts from the beginning of the micro-batch. Without the dim, all draw the
same numbers.

With `per_shard`, a shard draws from its own generator, seeded by (seed, step, site, `stream`). This
is as fast as PyTorch's generators, but the numbers depend on the mesh. Ranks that hold equal shards
still hold equal numbers.

Importing this module registers the operators with PyTorch.

Source: Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC'11.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sbp_core.errors import SbpValueError
from sbp_torch.ops import register

#: The largest word.
WORD = 0xFFFFFFFF

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

#: Blocks made at once on a CPU: their words stay in its cache.
_CHUNK = 1 << 14

#: Bits of a uniform number of a dtype below 1, so few that rounding cannot reach 1.
UNIFORM_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def philox(counter: Sequence[Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Return the four words of Philox-4x32-10 for each counter.

    Args:
        counter: Four int64 tensors that broadcast, of words in [0, 2^32).
        key: Two words.

    Returns:
        Four int64 tensors of words in [0, 2^32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # int64 wraps around, so a product keeps all of its 64 bits.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & WORD) ^ c1 ^ k0,
            p1 & WORD,
            ((p0 >> 32) & WORD) ^ c3 ^ k1,
            p0 & WORD,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & WORD, (k1 + _KEY_STEPS[1]) & WORD
    return c0, c1, c2, c3


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The place of the elements to draw in their logical tensor.

    Args:
        size: Shape of the shard; any number of dims.
        start: Index of its first element.
        logical: Shape of the logical tensor.
    """

    size: tuple[int, ...]
    start: tuple[int, ...]
    logical: tuple[int, ...]

    @property
    def fits(self) -> bool:
        """Whether the shard is within the logical tensor."""
        return len(self.size) == len(self.start) == len(self.logical) and all(
            begin >= 0 and extent >= 0 and begin + extent <= whole
            for begin, extent, whole in zip(self.start, self.size, self.logical, strict=True)
        )

    def lines(self) -> Shard:
        """Return the same elements without trailing dims of size 1; at least one dim is left."""
        count = len(self.logical)
        while count > 1 and self.logical[count - 1] == 1:
            count -= 1
        if not count:
            return Shard(size=(1,), start=(0,), logical=(1,))
        return Shard(size=self.size[:count], start=self.start[:count], logical=self.logical[:count])


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomSource:
    """The source of random numbers: the key and the upper half of the counter.

    Args:
        seed: Seed of the whole program; 64 bits of it count.
        step: Number of the step or micro-batch, in [0, 2^32).
        site: Number of the operator, in [0, 2^32).
    """

    seed: int
    step: int
    site: int

    def words(self, low: Tensor, high: Tensor) -> tuple[Tensor, ...]:
        """Return four words for each pair of lower counter words, int64 in [0, 2^32)."""
        rest = [torch.tensor(word, device=low.device) for word in (self.site, self.step)]
        return philox([low, high, *rest], (self.seed & WORD, self.seed >> 32 & WORD))


#: Converts four int64 tensors of words, (n,) each, to numbers, (n, 4) or (n, 2).
Convert = Callable[[tuple[Tensor, ...]], Tensor]


def draw(
    shard: Shard,
    source: RandomSource,
    convert: Convert,
    *,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return the numbers of a shard: `shard.size`, `dtype`.

    Args:
        shard: The elements to draw.
        source: The source of the numbers.
        convert: Converts words to numbers.
        width: Number of elements that one block serves: 4, or 2.
        dtype: The dtype of the result.
        device: The device of the result.
    """
    made = torch.empty(shard.size, dtype=dtype, device=device)
    if not made.numel() or device.type == "meta":
        return made
    lines = shard.lines()
    # The indices of the rows in the logical tensor: int64 (number of rows,).
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    every = zip(lines.size[:-1], lines.start[:-1], lines.logical[:-1], strict=True)
    for extent, first, whole in every:
        own = torch.arange(first, first + extent, device=device)
        rows = (rows[:, None] * whole + own).flatten()
    begin, end = lines.start[-1], lines.start[-1] + lines.size[-1]
    in_row = -(-lines.logical[-1] // width)
    first, last = begin // width, -(-end // width)
    count = last - first
    values = torch.empty((len(rows) * count, width), dtype=dtype, device=device)
    chunk = _CHUNK if device.type == "cpu" else len(values)
    for at in range(0, len(values), chunk):
        number = torch.arange(at, min(at + chunk, len(values)), device=device)
        blocks = rows[number // count] * in_row + (number % count + first)
        values[at : at + chunk] = convert(source.words(blocks & WORD, blocks >> 32))
    row_values = values.view(len(rows), count * width)
    offset = begin - first * width
    return made.copy_(row_values[:, offset : offset + lines.size[-1]].reshape(shard.size))


def width(dtype: torch.dtype) -> int:
    """Return how many uniform or normal numbers of a dtype one block serves."""
    return 2 if dtype == torch.float64 else 4


def uniform(words: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """Return numbers in [0, 1), float64 (n, `width(dtype)`), that `dtype` holds exactly."""
    bits = UNIFORM_BITS[dtype]
    if width(dtype) == 4:
        return (torch.stack(words, -1) >> (32 - bits)).to(torch.float64) * 2.0**-bits
    high, low = torch.stack(words[::2], -1), torch.stack(words[1::2], -1)
    return ((high >> 5) * (1 << 26) + (low >> 6)).to(torch.float64) * 2.0**-bits


def normal(words: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """Return normal numbers, float64 (n, `width(dtype)`), by the method of Box and Muller.

    Float64 for every `dtype` makes rounded numbers nearly independent of how a device, or a vector
    unit, evaluates logarithm and sine.
    """
    if width(dtype) == 2:
        unit = uniform(words, dtype)
        radius, turn = 1 - unit[:, :1], unit[:, 1:]
    else:
        pairs = torch.stack(words, -1).to(torch.float64) * 2.0**-32
        radius, turn = pairs[:, ::2] + 2.0**-32, pairs[:, 1::2]
    length, angle = (-2 * radius.log()).sqrt(), turn * (2 * math.pi)
    return torch.stack([length * angle.cos(), length * angle.sin()], -1).flatten(1)


_WHERE = (
    "SymInt[] size, int seed, int step, int site, *, SymInt[]? start=None, "
    "SymInt[]? logical=None, bool per_shard=False, int stream=0, int micro_batches=1, "
    "int micro_batch_dim=-1, "
)


def draw_of(scalars: Mapping[str, float | int], num_micro_batches: int, index: int) -> int:
    """Return the draw of a micro-batch: the argument `step` of random ops.

    Args:
        scalars: Scalar inputs of the step; `step` counts steps from 0.
        num_micro_batches: Micro-batches of a step.
        index: Index of the micro-batch.

    Raises:
        SbpValueError: `step` is missing.
    """
    if "step" not in scalars:
        raise SbpValueError(
            "scalar 'step' is missing: the program draws random numbers, which differ by step",
            accepted="the number of the step, from 0",
        )
    return int(scalars["step"]) * num_micro_batches + index


@dataclass(frozen=True, slots=True, kw_only=True)
class _Distribution:
    """A distribution with its parameters: how its numbers are drawn.

    Args:
        convert: Converts the words of Philox to numbers.
        fill: Fills a tensor with numbers, in place, from a generator.
        width: Number of elements that a block of words gives: 4, or 2.
        dtype: The dtype of the numbers.
    """

    convert: Convert
    fill: Callable[[Tensor, torch.Generator], Tensor]
    width: int
    dtype: torch.dtype


def _real(dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of real random numbers.

    Raises:
        SbpValueError: real random numbers cannot have the dtype.
    """
    dtype = dtype or torch.float32
    if dtype not in UNIFORM_BITS:
        raise SbpValueError(
            f"random numbers of {dtype}", accepted=", ".join(map(str, UNIFORM_BITS))
        )
    return dtype


def _uniform(dtype: torch.dtype | None, *, low: float = 0.0, high: float = 1.0) -> _Distribution:
    """Return how to draw uniformly from [low, high); but for [0, 1), rounding may reach `high`."""
    kind = _real(dtype)

    def convert(words: tuple[Tensor, ...]) -> Tensor:
        unit = uniform(words, kind)
        return unit if (low, high) == (0.0, 1.0) else unit * (high - low) + low

    return _Distribution(
        convert=convert,
        fill=lambda made, random: made.uniform_(low, high, generator=random),
        width=width(kind),
        dtype=kind,
    )


def _normal(dtype: torch.dtype | None, *, mean: float = 0.0, std: float = 1.0) -> _Distribution:
    """Return how to draw normal numbers of a mean and a standard deviation (>= 0)."""
    kind = _real(dtype)
    return _Distribution(
        convert=lambda words: normal(words, kind) * std + mean,
        fill=lambda made, random: made.normal_(mean, std, generator=random),
        width=width(kind),
        dtype=kind,
    )


def _bernoulli(dtype: torch.dtype | None, *, p: float = 0.5) -> _Distribution:
    """Return how to draw True (or 1) with probability `p` in [0, 1], to 2^-32.

    Raises:
        SbpValueError: `p` is no probability.
    """
    if not 0 <= p <= 1:
        raise SbpValueError(f"a probability of {p}", accepted="0 to 1")
    bound = round(p * (WORD + 1))
    return _Distribution(
        convert=lambda words: torch.stack(words, -1) < bound,
        fill=lambda made, random: made.bernoulli_(p, generator=random),
        width=4,
        dtype=dtype or torch.bool,
    )


def _integers(dtype: torch.dtype | None, *, low: int = 0, high: int = 2) -> _Distribution:
    """Return how to draw integers from [low, high), 2^31 of them at the most.

    Raises:
        SbpValueError: the range is empty or too large.
    """
    count = high - low
    if not 0 < count <= 1 << 31:
        raise SbpValueError(f"integers from {low} to {high}", accepted="1 to 2^31 of them")
    return _Distribution(
        convert=lambda words: (torch.stack(words, -1) * count >> 32) + low,
        fill=lambda made, random: made.random_(low, high, generator=random),
        width=4,
        dtype=dtype or torch.int64,
    )


def _draw(
    size: Sequence[int],
    seed: int,
    step: int,
    site: int,
    *,
    distribution_of: Callable[..., _Distribution],
    start: Sequence[int] | None = None,
    logical: Sequence[int] | None = None,
    per_shard: bool = False,
    stream: int = 0,
    micro_batches: int = 1,
    micro_batch_dim: int = -1,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **parameters: float,
) -> Tensor:
    """Draw random numbers: the implementation of all operators of this module.

    Args:
        size: Shape of the result.
        seed: Seed of the program.
        step: Number of the step or micro-batch, in [0, 2^32).
        site: Number of the operator, in [0, 2^32).
        distribution_of: Makes the distribution from a dtype and the parameters.
        start: Index of the first element in the logical tensor; None: its beginning.
        logical: Shape of the logical tensor; None: `size`.
        per_shard: Whether to draw from a generator of the shard.
        stream: Number of that generator.
        micro_batches: Micro-batches of a step, if `step` counts micro-batches.
        micro_batch_dim: The dim of `logical` that they split equally; -1: all draw the same.
        dtype: None: float32 for real numbers, bool for Bernoulli's, int64 for integers.
        device: None: the CPU.
        parameters: Parameters of the distribution, such as `low` and `high`.

    Raises:
        SbpValueError: step, site, dtype or a parameter is out of range, or the shard is outside
            its tensor.
    """
    distribution = distribution_of(dtype, **parameters)
    first = [0] * len(size) if start is None else list(start)
    if micro_batch_dim >= 0 and logical is not None:
        first[micro_batch_dim] += step % micro_batches * (logical[micro_batch_dim] // micro_batches)
    if micro_batch_dim < 0 or not per_shard:
        step //= micro_batches
    source = RandomSource(seed=seed, step=step, site=site)
    whole = tuple(size if logical is None else logical)
    shard = Shard(size=tuple(size), start=tuple(first), logical=whole)
    if not (0 <= step <= WORD and 0 <= site <= WORD and shard.fits):
        raise SbpValueError(
            f"random numbers of {source} for {shard}",
            accepted="step and site in [0, 2^32); a shard within its logical tensor",
        )
    device = torch.device("cpu" if device is None else device)
    kind = distribution.dtype
    if not per_shard or device.type == "meta":
        width = distribution.width
        return draw(shard, source, distribution.convert, width=width, dtype=kind, device=device)
    # A generator for this shard, seeded by 63 bits that Philox makes of all these numbers.
    low, high = torch.tensor(stream & WORD), torch.tensor(stream >> 32 & WORD)
    mixed = source.words(low, high)
    own = torch.Generator(device).manual_seed(int(mixed[0]) << 31 ^ int(mixed[1]))
    return distribution.fill(torch.empty(shard.size, dtype=kind, device=device), own)


def _shape_only(size: Sequence[int], *_: Any, kind: torch.dtype, **given: Any) -> Tensor:
    """Return a fake result of an operator."""
    dtype = given.get("dtype") or kind
    return torch.empty(size, dtype=dtype, device=given.get("device") or "cpu")


for _name, _distribution_of, _parameters, _kind in (
    ("uniform", _uniform, "float low=0., float high=1.", torch.float32),
    ("normal", _normal, "float mean=0., float std=1.", torch.float32),
    ("bernoulli", _bernoulli, "float p=0.5", torch.bool),
    ("integers", _integers, "int low=0, int high=2", torch.int64),
):
    _options = f"{_WHERE}{_parameters}, ScalarType? dtype=None, Device? device=None"
    register(
        f"random_{_name}({_options}) -> Tensor",
        partial(_draw, distribution_of=_distribution_of),
        partial(_shape_only, kind=_kind),
    )
