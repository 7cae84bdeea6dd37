"""Replace random ops at capture by counter-based ones, equal on one device and on any mesh.

before: mask = bernoulli_(empty_like(x), 0.9)              draws from a stream that every op shares
after:  mask = sbp.random_bernoulli(size, seed, draw, 3)   an element depends on the seed, the draw,
                                                           the op, and its place

`seed` and `draw` (step times micro-batches plus the micro-batch) are inputs of the graph; ops are
numbered in the order of the program. `counted_random` replaces the random ops of an eager program
in the same way. A plan is compared with that program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from sbp_torch._torch_compat import TorchDispatchMode, checkpoints_inlined
from sbp_torch.ops import random as _  # noqa: F401 - registers sbp.random_*

#: The counter-based form of one op: (draws, its arguments by position, by name) -> its results.
_CounterBased = Callable[["Draws", Sequence[Any], Mapping[str, Any]], Any]


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch leaves it untyped
    """Numbers the random ops of one step, and calls their counter-based forms.

    As a context, it replaces the random ops of an eager program.

    Args:
        seed: Seed of the program.
        draw: Number of the draw, in [0, 2^32).
        per_shard: Whether every shard draws from its own generator, which is faster, but makes the
            numbers depend on the mesh.
    """

    def __init__(self, seed: int = 0, draw: int = 0, *, per_shard: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch leaves it untyped
        self.seed, self.draw, self.per_shard = seed, draw, per_shard
        self.num_sites = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs or {})

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call an op; one that draws random numbers is replaced by its counter-based form."""
        counter_based = _COUNTER_BASED.get(func)
        if counter_based is None or (kwargs.get("generator") is not None):
            return func(*args, **kwargs)
        return counter_based(self, args, kwargs)

    def make(self, kind: str, size: Sequence[int], like: Mapping[str, Any], **own: Any) -> Tensor:
        """Return new random numbers.

        Args:
            kind: `uniform`, `normal`, `bernoulli` or `integers`.
            size: Shape of the result.
            like: `dtype` and `device` of the result.
            **own: Arguments of that kind.
        """
        site, self.num_sites = self.num_sites, self.num_sites + 1
        op = getattr(torch.ops.sbp, f"random_{kind}").default
        where = {key: like[key] for key in ("dtype", "device") if like.get(key) is not None}
        if self.per_shard:
            own["per_shard"] = True
        made: Tensor = op(list(size), self.seed, self.draw, site, **own, **where)
        return made


@contextmanager
def counted_random(seed: int, draw: int) -> Iterator[None]:
    """Let an eager step draw the same numbers as a captured step.

    `torch.utils.checkpoint` then saves activations instead of rematerialising them, because
    rematerialisation would draw other numbers.

    Args:
        seed: The seed of the run of the plan.
        draw: Step times micro-batches plus micro-batch.
    """
    with checkpoints_inlined(nullcontext), Draws(seed, draw):
        yield


def _like(tensor: Tensor, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return dtype and device of a tensor, unless the call gives others."""
    return {
        "dtype": kwargs.get("dtype") or tensor.dtype,
        "device": kwargs.get("device") or tensor.device,
    }


def _arg(args: Sequence[Any], kwargs: Mapping[str, Any], at: int, name: str, default: Any) -> Any:
    """Return an argument given by position or by name."""
    return args[at] if at < len(args) else kwargs.get(name, default)


def _uniform_of(draws: Draws, tensor: Tensor) -> Tensor:
    real = tensor.dtype if tensor.dtype.is_floating_point else torch.float32
    return draws.make("uniform", tensor.shape, {"dtype": real, "device": tensor.device})


def _bernoulli(
    draws: Draws, tensor: Tensor, p: float | Tensor, kwargs: Mapping[str, Any]
) -> Tensor:
    if isinstance(p, Tensor):
        return (_uniform_of(draws, tensor) < p).to(tensor.dtype)
    return draws.make("bernoulli", tensor.shape, _like(tensor, kwargs), p=float(p))


def _dropout(draws: Draws, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    x, p = args[0], float(args[1])
    train = _arg(args, kwargs, 2, "train", True)
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = draws.make("bernoulli", x.shape, {"device": x.device}, p=1 - p)
    return x * mask * (1 / (1 - p) if p < 1 else 0.0), mask


def _exponential(draws: Draws, tensor: Tensor, rate: float) -> Tensor:
    # The logarithm of 1 - u, which is never 0.
    return torch.log(1 - _uniform_of(draws, tensor)) / -rate


def _permutation(draws: Draws, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    wide = {"dtype": torch.float64, "device": kwargs.get("device")}
    order = torch.argsort(draws.make("uniform", (args[0],), wide))
    return order.to(kwargs.get("dtype") or torch.int64)


def _multinomial(draws: Draws, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Return, for each row, the indices of the largest p / e, where e is exponential.

    Source: Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006.
    """
    p, count = args[0], args[1]
    if _arg(args, kwargs, 2, "replacement", False) and count > 1:
        wide = p.unsqueeze(-2).expand(*p.shape[:-1], count, p.shape[-1])
        chosen: Tensor = (wide / _exponential(draws, wide, 1.0)).argmax(-1)
        return chosen
    return torch.topk(p / _exponential(draws, p, 1.0), count, dim=-1).indices


def _factory(kind: str, first: int, *names: str) -> _CounterBased:
    """Return the form of a factory whose size is argument `first`, after those called `names`."""

    def counter_based(draws: Draws, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        default = torch.int64 if kind == "integers" else torch.get_default_dtype()
        like = {"dtype": kwargs.get("dtype") or default, "device": kwargs.get("device")}
        return draws.make(kind, args[first], like, **dict(zip(names, args, strict=False)))

    return counter_based


def _drawn_in_shape(kind: str, *names: str) -> _CounterBased:
    """Return the form of an op that makes numbers in the shape of its first argument."""

    def counter_based(draws: Draws, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        own = dict(zip(names, args[1:], strict=False))
        return draws.make(kind, args[0].shape, _like(args[0], kwargs), **own)

    return counter_based


def _filling(kind: str, **arguments: tuple[str, float]) -> _CounterBased:
    """Return the form of an op that fills its first argument.

    Args:
        kind: See `Draws.make`.
        arguments: Arguments of the kind, in order: the name and default of each in the op.
    """

    def counter_based(draws: Draws, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        own = {
            name: _arg(args, kwargs, at, given, default)
            for at, (name, (given, default)) in enumerate(arguments.items(), 1)
        }
        filled: Tensor = args[0].copy_(draws.make(kind, args[0].shape, _like(args[0], {}), **own))
        return filled

    return counter_based


def _random_to(draws: Draws, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    low, high = (args[1], args[2]) if len(args) > 2 else (0, args[1])
    made = draws.make("integers", args[0].shape, _like(args[0], {}), low=low, high=high)
    filled: Tensor = args[0].copy_(made)
    return filled


_aten = torch.ops.aten

_COUNTER_BASED: dict[Any, _CounterBased] = {
    _aten.native_dropout.default: _dropout,
    _aten.bernoulli_.float: lambda d, a, k: a[0].copy_(
        _bernoulli(d, a[0], _arg(a, k, 1, "p", 0.5), {})
    ),
    _aten.bernoulli_.Tensor: lambda d, a, k: a[0].copy_(_bernoulli(d, a[0], a[1], {})),
    _aten.bernoulli.p: lambda d, a, k: _bernoulli(d, a[0], a[1], k),
    _aten.bernoulli.default: lambda d, a, k: _bernoulli(d, a[0], a[0], k),
    _aten.uniform_.default: _filling("uniform", low=("from", 0.0), high=("to", 1.0)),
    _aten.normal_.default: _filling("normal", mean=("mean", 0.0), std=("std", 1.0)),
    _aten.random_.to: _random_to,
    getattr(_aten.random_, "from"): _random_to,
    _aten.exponential_.default: lambda d, a, k: a[0].copy_(
        _exponential(d, a[0], _arg(a, k, 1, "lambd", 1.0))
    ),
    _aten.rand.default: _factory("uniform", 0),
    _aten.randn.default: _factory("normal", 0),
    _aten.randint.default: _factory("integers", 1, "high"),
    _aten.randint.low: _factory("integers", 2, "low", "high"),
    _aten.rand_like.default: _drawn_in_shape("uniform"),
    _aten.randn_like.default: _drawn_in_shape("normal"),
    _aten.randint_like.default: _drawn_in_shape("integers", "high"),
    _aten.randint_like.low_dtype: _drawn_in_shape("integers", "low", "high"),
    _aten.randperm.default: _permutation,
    _aten.multinomial.default: _multinomial,
    _aten.normal.Tensor_Tensor: lambda d, a, k: (
        a[0] + a[1] * d.make("normal", (a[0] + a[1]).shape, _like(a[0], {}))
    ),
    _aten.normal.Tensor_float: lambda d, a, k: (
        a[0] + _arg(a, k, 1, "std", 1.0) * d.make("normal", a[0].shape, _like(a[0], {}))
    ),
    _aten.normal.float_Tensor: lambda d, a, k: (
        a[0] + a[1] * d.make("normal", a[1].shape, _like(a[1], {}))
    ),
}
