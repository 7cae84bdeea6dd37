"""Optimizers of the user's own code: stepped as eager PyTorch does, or refused at once."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from updates import Maker, compare, eager, graph_run, made, net_batch, net_loss, of

from sbp_aten.passes import prepare_step
from sbp_core.errors import CaptureError, GraphError, SbpError
from sbp_torch.graph_capture import UpdateOptions, capture, initial_states, scalar_values
from sbp_torch.optim import CombinedOptimizer
from sbp_torch.runtime.single import run_graph
from sbp_torch.testing.programs import assert_near

#: Moves a parameter by its gradient and its state, in a group.
Rule = Callable[[dict[str, Any], Tensor, Tensor, dict[str, Any]], object]


class Ruled(optim.Optimizer):
    """Moves every parameter by a rule."""

    rule: Rule

    def __init__(self, params: Any, lr: float = 0.1, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, **settings})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    type(self).rule(group, p, p.grad, self.state[p])


def ruled(rule: Rule, **settings: Any) -> Maker:
    kind = type(f"By{rule.__name__.title()}", (Ruled,), {"rule": staticmethod(rule)})
    return of(kind, **settings)


def assert_as_eager(maker: Maker, steps: int = 5, tolerance: float = 1e-13) -> None:
    model, _ = eager(maker, steps)

    states, _ = graph_run(maker, steps, UpdateOptions())

    compare(states, model, tolerance)


def assert_refused(maker: Maker, match: str) -> CaptureError:
    model, optimizer = made(maker)
    with pytest.raises(CaptureError, match=match) as told:
        capture(model, net_loss, net_batch(0), optimizer)
    assert told.value.accepted
    return told.value


def sqrt_adam(group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    if not state:
        state["step"], state["m"], state["v"] = 0, torch.zeros_like(p), torch.zeros_like(p)
    state["step"] += 1
    beta1, beta2 = group["betas"]
    state["m"].mul_(beta1).add_(g, alpha=1 - beta1)
    state["v"].mul_(beta2).addcmul_(g, g, value=1 - beta2)
    second = math.sqrt(1 - math.pow(beta2, state["step"]))
    size = group["lr"] * second / (1 - beta1 ** state["step"])
    size = size * (1 + abs(state["step"] % 3 - 2) + state["step"] // 2)
    p.addcdiv_(state["m"], state["v"].sqrt().add_(1e-8), value=-size)


def counted(group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    state["n"] = state.get("n", 0) + 1
    p.sub_(g * group["lr"] / state["n"])


def factored(group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    large = p.dim() == 2 and min(p.shape) >= 4
    if not state:
        first = p.new_zeros(p.shape[:1]) if large else torch.zeros_like(p)
        state["row" if large else "all"] = first
    if large:
        scale = state["row"].add_((g * g).mean(1)).sqrt()[:, None]
    else:
        scale = state["all"].add_(g * g).sqrt()
    p.sub_(group["lr"] * g / (scale + 1e-3))


def by_size(group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    if not state:
        state["share"] = torch.full_like(p, 1 / max(p.numel(), 1))
    p.sub_(group["lr"] * g * state["share"].mul_(0.9))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("rule", [sqrt_adam, counted, factored, by_size])
def test_rules_as_other_packages_write_them_equal_eager(rule: Rule) -> None:
    assert_as_eager(ruled(rule, betas=(0.9, 0.99)))


def late(group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    state["m"] = state.get("m", torch.zeros_like(p)) * 0.9 + 1.0
    p.sub_(group["lr"] * state["m"] * g)


def ticking(group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    state["t"] = state["t"] + 1 if "t" in state else torch.ones(())
    p.sub_(group["lr"] / state["t"] * g)


def halving(group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    state["b"] = state.get("b", 1.0) * 0.5
    p.sub_(group["lr"] * state["b"] * g)


def capped(group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    state["k"] = min(state.get("k", 0) + 1, 3)
    p.sub_(group["lr"] / state["k"] * g)


def counting_in_the_group(
    group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]
) -> None:
    group["step"] = group.get("step", 0) + 1
    p.sub_(g * group["lr"] / group["step"])


def replacing(group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    p.data = p.data - g * group["lr"]


def comparing(group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    state["n"] = state.get("n", 0) + 1
    if state["n"] % 2 == 0:
        p.sub_(g * group["lr"])


@pytest.mark.parametrize(
    ("rule", "match"),
    [
        (late, "after 1 steps the state 'm' of a parameter"),
        (ticking, "after 1 steps the state 't'"),
        (halving, "'b' of ByHalving is a Python number that goes 0.5, 0.25, 0.125"),
        (capped, "after 4 steps the state 'k'"),
        (counting_in_the_group, "changes the setting 'step' of group 0"),
        (replacing, "puts another tensor into a parameter"),
        (comparing, "ByComparing.step cannot be captured: GuardOnDataDependent"),
    ],
)
def test_what_no_graph_would_do_is_refused(rule: Rule, match: str) -> None:
    assert_refused(ruled(rule), match)


@pytest.mark.slow
def test_states_that_begin_otherwise_are_captured_once_a_step_was_taken() -> None:
    def stepped(model: nn.Module) -> optim.Optimizer:
        optimizer = ruled(late)(model)
        net_loss(model, net_batch(7)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    assert_as_eager(stepped)


class Attributed(Ruled):
    """Has attributes of its own."""

    def __init__(self, params: Any, power: float = 2.0, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.power, self.factor = power, torch.tensor(0.5, dtype=torch.float64)

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.abs().pow(self.power) * p.grad.sign() * self.factor * group["lr"])


@pytest.mark.slow
def test_attributes_of_an_optimizer_are_constants() -> None:
    assert_as_eager(of(Attributed))


class Numbered(Attributed):
    """Counts in an attribute."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.power += 1.0
        super().step()


def test_an_attribute_that_a_step_changes_is_refused() -> None:
    assert_refused(of(Numbered), "a step changes Numbered.power")


class Shared(Ruled):
    """Keeps a state of no parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.state["all"] = {"k": 0}  # type: ignore[index]


class Wrapping(Ruled):
    """Steps another optimizer."""

    def __init__(self, params: Any) -> None:
        held = list(params)
        super().__init__(held)
        self.base = optim.SGD(held)


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (Shared, "keeps a state under 'all'"),
        (Wrapping, "Wrapping.base holds SGD"),
        (optim.SparseAdam, "SparseAdam takes sparse gradients, and that of '.*' is dense"),
    ],
)
def test_optimizers_that_hold_more_than_their_groups_are_refused(kind: Any, match: str) -> None:
    assert_refused(lambda model: kind(list(model.parameters())), match)


class Whole(Ruled):
    """Looks at all groups, and at which one it is in."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"]]
        total = torch.sqrt(torch.stack([(p.grad**2).sum() for p in held]).sum())
        for index, group in enumerate(self.param_groups):
            for p in group["params"]:
                p.sub_(p.grad * group["lr"] / (total + 1 + index))


@pytest.mark.slow
def test_an_optimizer_sees_all_of_its_groups() -> None:
    def grouped(model: nn.Module) -> optim.Optimizer:
        first, *others = model.parameters()
        return Whole([{"params": [first]}, {"params": others, "lr": 0.05}])

    assert_as_eager(grouped)


def halved(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def wrapper(self: optim.Optimizer, *args: Any) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = p.grad * 0.5
        return step(self, *args)

    return wrapper


class Decorated(Ruled):
    """Halves its gradients in a decorator."""

    @halved
    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * group["lr"])


@pytest.mark.slow
def test_decorators_of_the_users_own_run() -> None:
    assert_as_eager(of(Decorated))


def test_hooks_and_replaced_steps_are_refused_but_not_schedulers() -> None:
    def hooked(model: nn.Module) -> optim.Optimizer:
        optimizer = optim.SGD(model.parameters())
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer

    def replaced(model: nn.Module) -> optim.Optimizer:
        optimizer = optim.SGD(model.parameters())
        optimizer.step = lambda *_: None  # type: ignore[method-assign, assignment]
        return optimizer

    def scheduled(model: nn.Module) -> optim.Optimizer:
        optimizer = ruled(counted)(model)
        optim.lr_scheduler.StepLR(optimizer, 1)
        return optimizer

    assert_refused(hooked, "a hook on its steps, by register_step_post_hook")
    assert_refused(replaced, "was set on the object")
    model, optimizer = made(scheduled)
    assert capture(model, net_loss, net_batch(0), optimizer).nodes


class MySgd(optim.SGD):
    """Adds nothing."""


class MyRadam(optim.RAdam):
    """Adds a way to be made."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.05)


class MyAdafactor(optim.Adafactor):
    """Adds nothing."""


class Signs(optim.SGD):
    """Steps its parent on signs."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = p.grad.sign()
        super().step()


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    "maker",
    [
        of(MySgd, lr=0.1, momentum=0.9, dampening=0.5),
        of(MyRadam),
        of(MyAdafactor, lr=0.01),
        of(Signs, lr=0.01, momentum=0.9),
    ],
)
def test_subclasses_step_as_eager(maker: Maker) -> None:
    assert_as_eager(maker, tolerance=1e-12)


def test_a_subclass_that_dampens_its_first_step_otherwise_is_refused() -> None:
    assert_refused(of(Signs, lr=0.1, momentum=0.9, dampening=0.5), "'momentum_buffer'")


class Spare(nn.Module):
    """A parameter that never has a gradient beside two that do."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(5, 3)
        self.spare = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(x)
        return found


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("frozen", [False, True])
def test_dampening_begins_with_the_first_step_of_each_parameter(frozen: bool) -> None:
    def begun() -> tuple[nn.Module, optim.Optimizer]:
        torch.manual_seed(0)
        model = Spare().double()
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
        model.last.bias.requires_grad_(not frozen)
        net_loss(model, net_batch(9)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        model.last.bias.requires_grad_(True)
        return model, optimizer

    model, optimizer = begun()
    graph = prepare_step(capture(model, net_loss, net_batch(0), optimizer))
    states: Mapping[str, Any] = initial_states(model, optimizer)
    states |= {e.name: states[e.stands_for[0]].item() for e in graph.inputs if e.stands_for}
    wanted, other = begun()
    for index in range(3):
        with torch.no_grad():
            scalars = scalar_values(model, optimizer)
            _, states = run_graph(graph, states, [net_batch(index)], scalars)
        other.zero_grad()
        net_loss(wanted, net_batch(index)).backward()  # type: ignore[no-untyped-call]
        other.step()

    compare(states, wanted, 1e-12)


def last_gradient(group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    if not state:
        state["before"] = torch.zeros_like(p)
    p.sub_(group["lr"] * (2 * g - state["before"]))
    state["before"].copy_(g)


@pytest.mark.slow
def test_an_optimizer_keeps_the_mean_gradient_of_the_micro_batches() -> None:
    model, optimizer = made(ruled(last_gradient))
    graph = prepare_step(capture(model, net_loss, net_batch(0), optimizer), 2)
    states: Mapping[str, Any] = initial_states(model, optimizer)
    wanted, other = made(ruled(last_gradient))
    for index in range(0, 6, 2):
        pair = [net_batch(index), net_batch(index + 1)]
        with torch.no_grad():
            _, states = run_graph(graph, states, pair, scalar_values(model, optimizer))
        other.zero_grad()
        for batch in pair:
            (net_loss(wanted, batch) / 2).backward()  # type: ignore[no-untyped-call]
        other.step()

    compare(states, wanted, 1e-12)
    for name, parameter in wanted.named_parameters():
        assert_near(name, states[f"{name}.before"], other.state[parameter]["before"], 1e-12)


class Shrinking(nn.Module):
    """Changes its parameter in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.last.weight.mul_(0.9)
        found: Tensor = self.last(x)
        return found


def noisy(group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    p.sub_(group["lr"] * (g + torch.randn_like(g)))


@pytest.mark.slow
def test_what_several_micro_batches_cannot_do_is_refused() -> None:
    model = Shrinking().double()
    changing = capture(model, net_loss, net_batch(0), optim.SGD(model.parameters()))
    drawing = capture(*(lambda m, o: (m, net_loss, net_batch(0), o))(*made(ruled(noisy))))

    for graph, match in (
        (changing, "'last.weight' is changed in forward, once for each of 2 micro-batches"),
        (drawing, "the optimizer draws random numbers"),
    ):
        assert prepare_step(graph).nodes
        with pytest.raises(GraphError, match=match):
            prepare_step(graph, 2)


class Otherwise(CombinedOptimizer):
    """Steps in another way than its parts do."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.optimizers[0].step()


def test_several_optimizers_step_as_they_are() -> None:
    assert_refused(
        lambda m: Otherwise([optim.SGD(m.parameters())]), "Otherwise is a CombinedOptimizer, but"
    )


def test_options_that_would_be_ignored_are_refused() -> None:
    model, optimizer = made(of(optim.SGD))

    with pytest.raises(CaptureError, match="SGD has the setting 'beta1'") as told:
        scalar_values(model, optimizer, UpdateOptions(scheduled=("beta1",)))

    assert told.value.accepted == "lr, momentum, weight_decay"


class Waves(nn.Module):
    """A complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(5, 3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.w.dtype) @ self.w).abs()


def test_complex_gradients_are_clipped_by_norm_as_torch_does() -> None:
    options = UpdateOptions(clip_norm=0.05)
    model, wanted = Waves(), Waves()
    optimizer, other = (optim.SGD(each.parameters(), lr=0.1) for each in (model, wanted))
    graph = capture(model, net_loss, net_batch(0), optimizer, update=options)
    scalars = scalar_values(model, optimizer, options)
    with torch.no_grad():
        found, states = run_graph(graph, initial_states(model, optimizer), [net_batch(0)], scalars)

    net_loss(wanted, net_batch(0)).backward()  # type: ignore[no-untyped-call]
    norm = nn.utils.clip_grad_norm_(wanted.parameters(), 0.05)
    other.step()

    assert_near("norm", found["grad_norm"], norm, 1e-12)
    assert torch.allclose(states["w"], wanted.w, rtol=0, atol=1e-9)
    with pytest.raises(SbpError, match="'w', which is complex"):
        capture(model, net_loss, net_batch(0), optimizer, update=UpdateOptions(clip_value=0.1))
