"""The operator variants of the survey by name, each with its samples.

Most come from PyTorch's own operator database, which its tests use; `additions` lists operators
that the database never calls.
"""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice, pairwise
from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

#: Dtypes of the survey, in the order in which a variant prefers them.
DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64)

#: Dtypes of variants that support none of the above.
OTHER_DTYPES = (torch.bfloat16, torch.int8)

#: Number of samples of a variant to choose from.
_LOOKED_AT = 48

#: A sample with more elements is taken only if there is no smaller one.
_LARGE = 20_000

#: Variants other than FFTs that are sampled in complex64 although they support float32.
_COMPLEX = frozenset(
    [
        *("abs", "add", "angle", "conj", "conj_physical", "div", "imag", "matmul", "mm", "mul"),
        *("real", "reciprocal", "resolve_conj", "sgn", "sub", "sum", "view_as_real"),
    ]
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One call of a variant.

    Args:
        args, kwargs: The arguments; `requires_grad` of tensors is set.
        finish: Converts the outputs to values with a well-defined gradient (signs of eigenvectors
            are arbitrary, so it takes absolute values).
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    finish: Callable[[Any], Any] = lambda made: made


@dataclass(frozen=True, slots=True)
class Variant:
    """An operator in the form that users call.

    Args:
        name: Its name, unique in the survey.
        run: The operator.
        dtypes: The dtypes of the survey that it supports.
        samples: Returns samples of one dtype.
        direct: Whether `run` is an ATen overload that is recorded itself, even if it decomposes
            into others.
    """

    name: str
    run: Callable[..., Any]
    dtypes: tuple[torch.dtype, ...]
    samples: Callable[[torch.dtype], Iterator[Sample]]
    direct: bool = False

    def chosen(self, dtype: torch.dtype, count: int) -> list[Sample]:
        """Return `count` samples spread over all, those with more dims to split preferred."""
        found = list(islice(self.samples(dtype), _LOOKED_AT))
        count = min(count, len(found))
        bounds = [len(found) * index // max(count, 1) for index in range(count + 1)]
        return [max(found[start:stop], key=_worth) for start, stop in pairwise(bounds)]


def _worth(sample: Sample) -> tuple[bool, int]:
    tensors = [leaf for leaf in _leaves(sample) if isinstance(leaf, torch.Tensor)]
    elements = sum(tensor.numel() for tensor in tensors)
    dims = sum(extent > 1 for tensor in tensors for extent in tensor.shape)
    usable = elements < _LARGE and all(prod(tensor.shape) for tensor in tensors)
    return usable, min(dims, 12)


def _leaves(sample: Sample) -> list[Any]:
    return tree_leaves((sample.args, sample.kwargs))


@cache
def _database() -> types.ModuleType:
    """Return PyTorch's module of operator samples."""
    try:
        import expecttest  # noqa: F401
    except ImportError:
        # PyTorch's test modules import it for a base class of tests, which samples do not use.
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = type("TestCase", (), {})  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_methods_invocations
    return common_methods_invocations


def _dtypes(name: str, supported: set[torch.dtype]) -> tuple[torch.dtype, ...]:
    found = [dtype for dtype in DTYPES[:-1] if dtype in supported]
    wants_complex = name.startswith("fft.") or name in _COMPLEX or torch.float32 not in supported
    if torch.complex64 in supported and wants_complex:
        found.append(torch.complex64)
    return tuple(found or [dtype for dtype in OTHER_DTYPES if dtype in supported])


def _of_database(info: Any) -> Variant:
    def samples(dtype: torch.dtype) -> Iterator[Sample]:
        grad = info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
        for sample in info.sample_inputs("cpu", dtype, requires_grad=grad):
            yield Sample(
                (sample.input, *sample.args), dict(sample.kwargs), sample.output_process_fn_grad
            )

    name = info.name + (f".{info.variant_test_name}" if info.variant_test_name else "")
    return Variant(name, info.op, _dtypes(info.name, set(info.supported_dtypes("cpu"))), samples)


def _of_foreach(info: Any) -> Variant:
    def samples(dtype: torch.dtype) -> Iterator[Sample]:
        grad = info.supports_autograd and dtype.is_floating_point
        # Two tensors per list are as informative as twenty.
        for sample in info.sample_inputs("cpu", dtype, requires_grad=grad, num_input_tensors=[2]):
            yield Sample((sample.input, *sample.args), dict(sample.kwargs))

    supported = set(info.supported_dtypes("cpu")) - {torch.float64, torch.complex64}
    return Variant(info.name, info.method_variant, _dtypes(info.name, supported), samples)


@cache
def variants() -> tuple[Variant, ...]:
    """Return all variants of the survey; names are unique."""
    from signatures.additions import additions

    module = _database()
    foreach: Sequence[str] = ("unary", "binary", "pointwise", "reduce", "other")
    lists = chain.from_iterable(getattr(module, f"foreach_{kind}_op_db") for kind in foreach)
    made = [
        *map(_of_database, module.op_db),
        *(_of_foreach(info) for info in lists if info.method_variant is not None),
        *additions(),
    ]
    unique: dict[str, Variant] = {}
    for variant in made:
        unique.setdefault(variant.name, variant)
    return tuple(unique.values())
