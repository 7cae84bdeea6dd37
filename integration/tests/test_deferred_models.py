"""Deferred initialisation of the models of the matrix, other people's and our zoo's."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.programs import PROGRAMS
from sbp_torch.deferred_init import deferred
from sbp_torch.graph_capture import capture, initial_states

SEED = 3


def _build(name: str, dtype: torch.dtype) -> Callable[[], nn.Module]:
    build = PROGRAMS[name].build
    if isinstance(build, partial) and getattr(build.func, "__name__", "") == "_transformer":
        pytest.importorskip("transformers", reason="a model of transformers, which is optional")
    return lambda: build().to(dtype)


@contextmanager
def _peak_bytes() -> Iterator[Callable[[], int]]:
    """Count the bytes of the storages that are alive at once."""
    sizes: dict[int, int] = {}
    peak = 0

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self,
            func: Callable[..., Any],
            types: Sequence[type],
            args: tuple[Any, ...] = (),
            kwargs: Mapping[str, Any] | None = None,
        ) -> Any:
            nonlocal peak
            made = func(*args, **(kwargs or {}))
            for value in tree_leaves((args, made)):
                if isinstance(value, Tensor) and value.device.type == "cpu":
                    storage = value.untyped_storage()
                    key = storage._cdata
                    if key not in sizes:
                        sizes[key] = storage.nbytes()
                        weakref.finalize(storage, sizes.pop, key)
            peak = max(peak, sum(sizes.values()))
            return made

    with Mode():
        yield lambda: peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_deferred_states_are_those_of_one_device_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    build = _build(name, dtype)
    made = deferred(build, SEED)

    states = dict(made.states().items())

    torch.manual_seed(SEED)
    expected = initial_states(build())
    assert states.keys() == expected.keys()
    for key, value in expected.items():
        assert states[key].dtype == value.dtype
        assert torch.equal(states[key], value), key


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_parameter_at_a_time_is_held(name: str) -> None:
    made = deferred(_build(name, torch.float32), SEED)
    largest = max(parameter.nbytes for parameter in made.model.parameters())
    states = made.states()

    with _peak_bytes() as peak:
        for _, value in states.items():
            del value

    # Truncated normal numbers are drawn again until they fit: beside those there are the new ones,
    # the result, and three masks.
    factor = 4 if name.startswith("vit") else 1
    assert largest <= peak() <= factor * largest + 1_000


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", ["gpt2", "dlrm", pytest.param("t5", marks=pytest.mark.exhaustive)])
def test_a_deferred_model_is_captured_as_the_real_one(name: str) -> None:
    build, program = _build(name, torch.float32), PROGRAMS[name]
    batch = program.batch(torch.Generator().manual_seed(0))

    def graph(model: nn.Module) -> Any:
        return capture(model, program.loss, batch, torch.optim.AdamW(model.parameters()))

    assert graph(deferred(build, SEED).model) == graph(build())
