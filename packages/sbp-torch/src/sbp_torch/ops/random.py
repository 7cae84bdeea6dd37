"""Our operators that draw random numbers, `sbp.random_*`, for PyTorch.

    sbp.random_uniform(size, seed, step, site, *, low, high, ...)     low + (high - low) u
    sbp.random_normal(size, seed, step, site, *, mean, std, ...)      mean + std z
    sbp.random_bernoulli(size, seed, step, site, *, p, ...)           True with probability p
    sbp.random_integers(size, seed, step, site, *, low, high, ...)    in [low, high)

They keep no state. An element's number follows from the seed of the program, the step (one a
micro-batch, too, if they should differ), the site (one an operator), and its place in the logical
tensor (`philox`): the rule of these operators tells a shard its `start` and the `logical` shape.
Integers are reduced with a bias below 2^-32 times the number of values.

Of a step on a whole batch that is computed in micro-batches, `step` counts these. Each draws what
the whole batch draws for its samples, which lie along `micro_batch_dim`: `start` and `logical` are
then of the whole batch, but for the place of the micro-batch. Without such a dim all draw the same.

With `per_shard` a shard draws from a generator of its own instead, seeded by (seed, step, site,
`stream`): as fast as PyTorch draws, but other numbers on every mesh. Ranks that hold equal shards
still hold equal numbers.

Importing this module registers the operators with PyTorch, which is the only way to have them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sbp_core.errors import SbpValueError
from sbp_torch.ops.philox import (
    UNIFORM_BITS,
    WORD,
    Convert,
    Shard,
    Source,
    draw,
    normal,
    philox,
    uniform,
    width,
)

_WHERE = (
    "SymInt[] size, int seed, int step, int site, *, SymInt[]? start=None, "
    "SymInt[]? logical=None, bool per_shard=False, int stream=0, int micro_batches=1, "
    "int micro_batch_dim=-1, "
)


def draw_of(scalars: Mapping[str, float | int], num_micro_batches: int, index: int) -> int:
    """Return the draw of a micro-batch: the number that random ops count with, beside the seed.

    Args:
        scalars: Of the step; `step` counts steps from 0.
        num_micro_batches: Micro-batches of a step.
        index: Which one.

    Raises:
        SbpValueError: `step` is missing.
    """
    if "step" not in scalars:
        raise SbpValueError(
            "scalar 'step' is missing: the program draws random numbers, which differ by step",
            accepted="the number of the step, from 0",
        )
    return int(scalars["step"]) * num_micro_batches + index


def _generator(source: Source, stream: int, device: torch.device) -> torch.Generator:
    """Return a generator for one shard, seeded by 63 bits that Philox makes of it all."""
    low, high = torch.tensor(stream & WORD), torch.tensor(stream >> 32 & WORD)
    mixed = philox([low, high, torch.tensor(source.site), torch.tensor(source.step)], source.key)
    return torch.Generator(device).manual_seed(int(mixed[0]) << 31 ^ int(mixed[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Distribution:
    """A distribution with its parameters: how its numbers are drawn.

    Args:
        convert: Makes the numbers of counted words.
        fill: Fills a tensor with numbers, in place, from a generator.
        width: How many numbers a block of words gives: 4, or 2.
        dtype: Of the numbers.
    """

    convert: Convert
    fill: Callable[[Tensor, torch.Generator], Tensor]
    width: int
    dtype: torch.dtype


def _real(dtype: torch.dtype | None) -> torch.dtype:
    """Return a dtype that real random numbers may have.

    Raises:
        SbpValueError: it is another one.
    """
    dtype = dtype or torch.float32
    if dtype not in UNIFORM_BITS:
        raise SbpValueError(
            f"random numbers of {dtype}", accepted=", ".join(map(str, UNIFORM_BITS))
        )
    return dtype


def _uniform(dtype: torch.dtype | None, *, low: float = 0.0, high: float = 1.0) -> _Distribution:
    """Return how to draw uniformly from [low, high); rounding may reach `high` if it is not 1."""
    kind = _real(dtype)

    def convert(words: tuple[Tensor, ...]) -> Tensor:
        unit = uniform(words, kind)
        return unit if (low, high) == (0.0, 1.0) else unit * (high - low) + low

    def fill(made: Tensor, generator: torch.Generator) -> Tensor:
        return made.uniform_(low, high, generator=generator)

    return _Distribution(convert=convert, fill=fill, width=width(kind), dtype=kind)


def _normal(dtype: torch.dtype | None, *, mean: float = 0.0, std: float = 1.0) -> _Distribution:
    """Return how to draw normal numbers of a mean and a standard deviation (>= 0)."""
    kind = _real(dtype)

    def convert(words: tuple[Tensor, ...]) -> Tensor:
        return normal(words, kind) * std + mean

    def fill(made: Tensor, generator: torch.Generator) -> Tensor:
        return made.normal_(mean, std, generator=generator)

    return _Distribution(convert=convert, fill=fill, width=width(kind), dtype=kind)


def _bernoulli(dtype: torch.dtype | None, *, p: float = 0.5) -> _Distribution:
    """Return how to draw True (or 1) with probability `p` in [0, 1], to 2^-32.

    Raises:
        SbpValueError: `p` is no probability.
    """
    if not 0 <= p <= 1:
        raise SbpValueError(f"a probability of {p}", accepted="0 to 1")
    bound = round(p * (WORD + 1))

    def convert(words: tuple[Tensor, ...]) -> Tensor:
        return torch.stack(words, -1) < bound

    def fill(made: Tensor, generator: torch.Generator) -> Tensor:
        return made.bernoulli_(p, generator=generator)

    return _Distribution(convert=convert, fill=fill, width=4, dtype=dtype or torch.bool)


def _integers(dtype: torch.dtype | None, *, low: int = 0, high: int = 2) -> _Distribution:
    """Return how to draw integers from [low, high), 2^31 of them at the most.

    Raises:
        SbpValueError: there are none, or too many.
    """
    count = high - low
    if not 0 < count <= 1 << 31:
        raise SbpValueError(f"integers from {low} to {high}", accepted="1 to 2^31 of them")

    def convert(words: tuple[Tensor, ...]) -> Tensor:
        return (torch.stack(words, -1) * count >> 32) + low

    def fill(made: Tensor, generator: torch.Generator) -> Tensor:
        return made.random_(low, high, generator=generator)

    return _Distribution(convert=convert, fill=fill, width=4, dtype=dtype or torch.int64)


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
    """Draw random numbers: what all operators here do.

    Args:
        size: Shape of what is drawn.
        seed: Of the program.
        step: In [0, 2^32).
        site: In [0, 2^32).
        distribution_of: Makes the distribution of a dtype and the parameters.
        start: Where it begins in the logical tensor; None: at its beginning.
        logical: Shape of the logical tensor; None: that of what is drawn.
        per_shard: Draw from a generator of its own.
        stream: Which one.
        micro_batches: How many make a step, if `step` counts them.
        micro_batch_dim: Along which dim of `logical` they have equal parts; -1: all draw the same.
        dtype: None: float32 for real numbers, bool for Bernoulli's, int64 for integers.
        device: None: the CPU.
        parameters: Of the distribution, such as `low` and `high`.

    Raises:
        SbpValueError: step, site, dtype or a parameter is out of range, or the shard lies outside
            its tensor.
    """
    distribution = distribution_of(dtype, **parameters)
    first = [0] * len(size) if start is None else list(start)
    if micro_batch_dim >= 0 and logical is not None:
        first[micro_batch_dim] += step % micro_batches * (logical[micro_batch_dim] // micro_batches)
    if micro_batch_dim < 0 or not per_shard:
        step //= micro_batches
    source = Source(seed=seed, step=step, site=site)
    shard = Shard(
        size=tuple(size),
        start=tuple(first),
        logical=tuple(size if logical is None else logical),
    )
    if not (source.fits and shard.fits):
        raise SbpValueError(
            f"random numbers of {source} for {shard}",
            accepted="step and site in [0, 2^32); a shard within its logical tensor",
        )
    device = torch.device("cpu" if device is None else device)
    if not per_shard or device.type == "meta":
        return draw(
            shard,
            source,
            distribution.convert,
            width=distribution.width,
            dtype=distribution.dtype,
            device=device,
        )
    made = torch.empty(shard.size, dtype=distribution.dtype, device=device)
    return distribution.fill(made, _generator(source, stream, device))


def _shape_only(size: Sequence[int], *_: Any, kind: torch.dtype, **given: Any) -> Tensor:
    """Return what an operator makes, without data."""
    dtype = given.get("dtype") or kind
    return torch.empty(size, dtype=dtype, device=given.get("device") or "cpu")


def _register(
    name: str, distribution_of: Callable[..., _Distribution], parameters: str, kind: torch.dtype
) -> None:
    schema = f"({_WHERE}{parameters}, ScalarType? dtype=None, Device? device=None) -> Tensor"
    function = partial(_draw, distribution_of=distribution_of)
    made = torch.library.custom_op(f"sbp::{name}", function, mutates_args=(), schema=schema)
    made.register_fake(partial(_shape_only, kind=kind))


_register("random_uniform", _uniform, "float low=0., float high=1.", torch.float32)
_register("random_normal", _normal, "float mean=0., float std=1.", torch.float32)
_register("random_bernoulli", _bernoulli, "float p=0.5", torch.bool)
_register("random_integers", _integers, "int low=0, int high=2", torch.int64)
