"""Random numbers by counting: the same for an element whoever draws it.

Each element draws from Philox-4x32-10 under a counter made of its place in the logical tensor, so
that a rank can make the numbers of its shard alone, and no state is kept:

    counter   (block mod 2^32, block div 2^32, site, step)      key   seed
    block     row * blocks in a row + (column div 4)             word  column mod 4

where a row is one line along the last dim (trailing dims of one element left aside). Draws with a
resolution of 53 bits take two words, so that a block serves two elements.

Source: Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC'11.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: The largest word.
WORD = 0xFFFFFFFF

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

#: Blocks made at once on a CPU: their words stay in its cache.
_CHUNK = 1 << 14

#: Bits that a uniform number of a dtype has below 1, so that rounding cannot reach 1.
UNIFORM_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def philox(counter: Sequence[Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Return the four words of Philox-4x32-10 under each counter.

    Args:
        counter: Four int64 tensors that broadcast, of words in [0, 2^32).
        key: Two words.

    Returns:
        Four int64 tensors of words in [0, 2^32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # int64 wraps around, so that all 64 bits of a product are there.
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
    """Where the elements to draw lie in their logical tensor.

    Args:
        size: Shape of the shard; any number of dims.
        start: Its first element.
        logical: Shape of the logical tensor.
    """

    size: tuple[int, ...]
    start: tuple[int, ...]
    logical: tuple[int, ...]

    @property
    def fits(self) -> bool:
        """Whether the shard lies within the logical tensor."""
        return len(self.size) == len(self.start) == len(self.logical) and all(
            begin >= 0 and extent >= 0 and begin + extent <= whole
            for begin, extent, whole in zip(self.start, self.size, self.logical, strict=True)
        )

    def lines(self) -> Shard:
        """Return the same elements without trailing dims of one element, in one dim at least."""
        count = len(self.logical)
        while count > 1 and self.logical[count - 1] == 1:
            count -= 1
        if not count:
            return Shard(size=(1,), start=(0,), logical=(1,))
        return Shard(size=self.size[:count], start=self.start[:count], logical=self.logical[:count])

    def rows(self, device: torch.device) -> Tensor:
        """Return the numbers of the rows in the logical tensor: int64 (number of rows,)."""
        numbers = torch.zeros(1, dtype=torch.int64, device=device)
        for extent, begin, whole in zip(
            self.size[:-1], self.start[:-1], self.logical[:-1], strict=True
        ):
            own = torch.arange(begin, begin + extent, device=device)
            numbers = (numbers[:, None] * whole + own).flatten()
        return numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where numbers come from: key and upper half of the counter.

    Args:
        seed: Of the whole program; 64 bits of it count.
        step: Which of its rounds, in [0, 2^32).
        site: Which of its operators, in [0, 2^32).
    """

    seed: int
    step: int
    site: int

    @property
    def key(self) -> tuple[int, int]:
        """The key of Philox."""
        return self.seed & WORD, self.seed >> 32 & WORD

    @property
    def fits(self) -> bool:
        """Whether the counter has room for step and site."""
        return 0 <= self.step <= WORD and 0 <= self.site <= WORD

    def words(self, low: Tensor, high: Tensor) -> tuple[Tensor, ...]:
        """Return four words for each pair that begins the counter, int64 in [0, 2^32)."""
        rest = [torch.tensor(word, device=low.device) for word in (self.site, self.step)]
        return philox([low, high, *rest], self.key)


#: Makes numbers, (n, 4) or (n, 2), of four int64 tensors of words, (n,) each.
Convert = Callable[[tuple[Tensor, ...]], Tensor]


def draw(
    shard: Shard,
    source: Source,
    convert: Convert,
    *,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return the numbers of a shard: `shard.size`, `dtype`.

    Args:
        shard: Which elements.
        source: Where they come from.
        convert: Makes the numbers.
        width: How many elements one block serves: 4, or 2.
        dtype: Of what is returned.
        device: Of what is returned.
    """
    made = torch.empty(shard.size, dtype=dtype, device=device)
    if not made.numel() or device.type == "meta":
        return made
    lines = shard.lines()
    rows = lines.rows(device)
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

    They are made in float64 whatever `dtype`: so hardly a rounded one depends on how a device, or a
    vector unit, evaluates logarithm and sine.
    """
    if width(dtype) == 2:
        unit = uniform(words, dtype)
        radius, turn = 1 - unit[:, :1], unit[:, 1:]
    else:
        pairs = torch.stack(words, -1).to(torch.float64) * 2.0**-32
        radius, turn = pairs[:, ::2] + 2.0**-32, pairs[:, 1::2]
    length, angle = (-2 * radius.log()).sqrt(), turn * (2 * math.pi)
    return torch.stack([length * angle.cos(), length * angle.sin()], -1).flatten(1)
