"""Fused kernels of PyTorch: taken where they compute what the optimizer says, and as it says."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from sbp_torch.graph_capture import (
    UpdateOptions,
    capture,
    fused_kernels,
    initial_states,
    scalar_values,
)
from sbp_torch.graph_capture.fused_kernels import Verdict, verdict
from sbp_torch.runtime.single import run_graph

_STEPS = 3

KINDS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "sgd": (optim.SGD, {}),
    "momentum": (optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "maximize": True}),
    "nesterov": (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "dampened": (optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    "adam": (optim.Adam, {"weight_decay": 0.1}),
    "adamw": (optim.AdamW, {}),
    "amsgrad": (optim.AdamW, {"amsgrad": True, "maximize": True}),
    "adagrad": (optim.Adagrad, {"weight_decay": 0.1, "lr_decay": 0.1}),
}

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Weights(nn.Module):
    """More elements than a vector has, and a remainder."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1.0, 1.0, 100, dtype=torch.float64).to(dtype))


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return a loss whose gradient is the batch."""
    assert isinstance(model, Weights)
    return (model.w * batch["g"]).sum()


def _gradients(dtype: torch.dtype, scale: float) -> Iterator[Tensor]:
    source = torch.Generator().manual_seed(0)
    for _ in range(_STEPS):
        values = torch.randn(100, generator=source, dtype=torch.float64)
        yield (values * scale + values.sign() * scale).to(dtype)


def _made(name: str, dtype: torch.dtype, **said: object) -> tuple[Weights, optim.Optimizer]:
    kind, settings = KINDS[name]
    model = Weights(dtype)
    return model, kind(model.parameters(), lr=0.1, **settings, **said)  # type: ignore[call-arg]


def _captured(name: str, dtype: torch.dtype, scale: float, **said: object) -> dict[str, Tensor]:
    """Return the parameter and its states after steps of the graph, with kernels asked for."""
    model, optimizer = _made(name, dtype, **said)
    options, first = UpdateOptions(fused=True), next(_gradients(dtype, scale))
    graph = capture(model, _loss, {"g": first}, optimizer, update=options)
    states: Any = initial_states(model, optimizer, options)
    with torch.no_grad():
        for g in _gradients(dtype, scale):
            scalars = scalar_values(model, optimizer, options)
            _, states = run_graph(graph, states, [{"g": g}], scalars)
    return {key: states[key] for key in sorted(states) if not key.endswith("step")}


def _eager(name: str, dtype: torch.dtype, scale: float, **said: object) -> dict[str, Tensor]:
    """Return the same after steps of plain PyTorch."""
    model, optimizer = _made(name, dtype, **said)
    for g in _gradients(dtype, scale):
        optimizer.zero_grad()
        _loss(model, {"g": g}).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    states = {f"w.{key}": value for key, value in optimizer.state[model.w].items()}
    states["w"] = model.w.detach()
    return {key: states[key] for key in sorted(states) if not key.endswith("step")}


def _assert_alike(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Equal as far as float32 can tell: a rounding to 16 bits more would be seen."""
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        most = float(value[value.isfinite()].abs().max()) if value.isfinite().any() else 1.0
        assert torch.allclose(
            found[key].double(), value.double(), rtol=0.0, atol=1e-6 * most, equal_nan=True
        ), key


@pytest.mark.slow(but=5)
@pytest.mark.parametrize(
    ("dtype", "scale"), [*((dtype, 1.0) for dtype in DTYPES), (torch.float16, 1e-3)], ids=str
)
@pytest.mark.parametrize("said", [None, False])
@pytest.mark.parametrize("name", KINDS)
def test_plain_code_is_what_counts_unless_the_optimizer_says_fused(
    name: str, said: bool | None, dtype: torch.dtype, scale: float
) -> None:
    """The squares of gradients of 0.001 are zero in float16: plain Adam then divides by zero."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = _captured(name, dtype, scale, fused=said)

    _assert_alike(found, _eager(name, dtype, scale, fused=said))


@pytest.mark.slow(but=6)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_a_kernel_that_the_optimizer_asks_for_is_taken_unless_it_is_wrong(
    name: str, dtype: torch.dtype
) -> None:
    is_wrong = verdict(KINDS[name][0], dtype) is Verdict.WRONG
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if is_wrong else "error")
        found = _captured(name, dtype, 1.0, fused=True)

    _assert_alike(found, _eager(name, dtype, 1.0, fused=not is_wrong))


def test_a_wrong_kernel_that_is_asked_for_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused_kernels, "verdict", lambda *_: Verdict.WRONG)
    fused_kernels._warn.cache_clear()
    model, optimizer = _made("adamw", torch.float32, fused=True)
    batch = {"g": torch.ones(100)}

    with pytest.warns(UserWarning, match=r"AdamW for torch\.float32 on CPUs .*PyTorch 2\.") as said:
        first = capture(model, _loss, batch, optimizer)
        capture(model, _loss, batch, optimizer)

    assert len(said) == 1
    assert not any("fused" in node.op for node in first.nodes)
    on_gpu = capture(model, _loss, batch, optimizer, device="cuda")
    assert any(node.op == "sbp.fused_adam.default" for node in on_gpu.nodes)
    fused_kernels._warn.cache_clear()


@pytest.mark.parametrize(
    ("said", "asked", "taken"),
    [
        ({"fused": True}, None, True),
        ({"fused": True}, False, False),
        ({"fused": False}, True, False),
        ({"foreach": False}, True, False),
        ({"foreach": True}, True, False),
        ({}, True, True),
        ({}, None, False),
    ],
)
def test_what_the_optimizer_says_comes_before_what_options_ask_for(
    said: dict[str, bool], asked: bool | None, taken: bool
) -> None:
    model, optimizer = _made("adamw", torch.float32, **said)

    options = UpdateOptions(fused=asked)
    graph = capture(model, _loss, {"g": torch.ones(100)}, optimizer, update=options)

    assert any(node.op == "sbp.fused_adam.default" for node in graph.nodes) is taken


def _skipping(kernel: Callable[..., None], where: slice) -> Callable[..., None]:
    """Return a kernel that updates some elements only, as one that is broken."""

    def broken(parameters: list[Tensor], *args: Any, **settings: Any) -> None:
        before = [value.clone() for value in parameters]
        kernel(parameters, *args, **settings)
        for value, old in zip(parameters, before, strict=True):
            value[where] = old[where]

    return broken


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("where", [slice(64), slice(128, None)], ids=["vectors", "remainder"])
def test_a_kernel_that_skips_elements_is_wrong(
    where: slice, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert verdict.__wrapped__(optim.AdamW, dtype) is not Verdict.WRONG

    monkeypatch.setattr(torch, "_fused_adamw_", _skipping(torch._fused_adamw_, where))

    assert verdict.__wrapped__(optim.AdamW, dtype) is Verdict.WRONG


def test_a_kernel_is_tried_whatever_surrounds_it() -> None:
    with torch.device("meta"), torch.inference_mode():
        found = verdict.__wrapped__(optim.Adagrad, torch.float32)

    assert found is Verdict.EQUAL


def test_there_is_no_kernel_for_complex_numbers() -> None:
    assert verdict(optim.Adam, torch.complex64) is Verdict.WRONG
