"""The update of a step: every optimizer from its first step on, whole and sharded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, optim
from torch.fx.experimental import symbolic_shapes
from updates import (
    ALL,
    RESTATED,
    STRATEGIES,
    TRACED,
    Counting,
    compare,
    compare_sharded,
    eager,
    graph_run,
    made,
    net_batch,
    net_loss,
    of,
)

from sbp_aten.passes import prepare_step
from sbp_core.errors import CaptureError
from sbp_core.graph.ir import Phase
from sbp_torch.graph_capture import (
    UpdateOptions,
    capture,
    initial_states,
)
from sbp_torch.testing.programs import assert_equal


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", TRACED)
def test_ten_steps_from_the_first_on_equal_eager_bit_for_bit(name: str) -> None:
    model, optimizer = eager(TRACED[name], 10)

    states, _ = graph_run(TRACED[name], 10, UpdateOptions())

    compare(states, model, 0.0)
    for part in getattr(optimizer, "optimizers", (optimizer,)):
        for parameter, kept in part.state.items():
            owner = next(n for n, p in model.named_parameters() if p is parameter)
            for key, value in kept.items():
                if isinstance(value, Tensor):
                    assert_equal(f"{owner}.{key}", states[f"{owner}.{key}"], value)


@pytest.mark.slow
@pytest.mark.parametrize("name", RESTATED)
def test_ten_steps_in_other_words_equal_eager(name: str) -> None:
    model, _ = eager(RESTATED[name], 10)

    states, _ = graph_run(RESTATED[name], 10, UpdateOptions())

    compare(states, model, 1e-12 if name != "asgd" else 1e-6)  # it keeps its rate in float32


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["fused adamw", "lamb", "lars", "adafactor", "muon"])
def test_sharded_states_come_to_the_same_numbers(name: str, strategy: str) -> None:
    compare_sharded(ALL[name], strategy, 3 if strategy == "ZeRO-3" else 2, UpdateOptions())


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("name", ALL)
def test_every_optimizer_can_be_sharded(name: str, num_ranks: int, strategy: str) -> None:
    compare_sharded(ALL[name], strategy, num_ranks, UpdateOptions())


def test_every_fused_update_is_one_node_a_parameter() -> None:
    model, optimizer = made(TRACED["fused adamw"])

    graph = prepare_step(capture(model, net_loss, net_batch(0), optimizer))

    nodes = [n for n in graph.nodes if n.phase is Phase.OPTIMIZER and not n.is_host]
    assert [node.op for node in nodes] == ["sbp.fused_adam.default"] * 5
    assert [entry.name for entry in graph.inputs if entry.stands_for] == ["step_counter"]


def test_fused_kernels_may_be_asked_for() -> None:
    model, optimizer = made(TRACED["adam"])

    graph = capture(model, net_loss, net_batch(0), optimizer, update=UpdateOptions(fused=True))

    assert sum(node.op == "sbp.fused_adam.default" for node in graph.nodes) == 5


def test_capture_never_lists_the_files_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    # Only to say where a symbol was made; it imports torch.export and NetworkX, 0.5 s.
    def refuse() -> set[str]:
        raise AssertionError("listed")

    monkeypatch.setattr(symbolic_shapes, "uninteresting_files", refuse)
    model = torch.nn.Linear(3, 2)
    optimizer = optim.AdamW(model.parameters(), fused=True)

    capture(model, lambda model, batch: model(batch).sum(), torch.randn(4, 3), optimizer)

    assert symbolic_shapes.uninteresting_files is refuse


@pytest.mark.slow
def test_an_optimizer_of_the_users_own_is_captured_with_its_python_counter() -> None:
    model, optimizer = eager(of(Counting), 5)

    states, _ = graph_run(of(Counting), 5, UpdateOptions())

    compare(states, model, 0.0)
    for name, value in model.named_parameters():
        assert_equal(name, states[f"{name}.slow"], optimizer.state[value]["slow"])
    assert states["gain.count"] == 5


class FirstGradient(Counting):
    """Keeps its first gradient."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("first", p.grad.clone())
            p.sub_(self.state[p]["first"])


def test_states_made_of_the_first_gradient_are_refused_until_a_step_was_taken() -> None:
    model, optimizer = made(of(FirstGradient))

    with pytest.raises(
        CaptureError, match="'first' of FirstGradient is computed from the first"
    ) as told:
        capture(model, net_loss, net_batch(0), optimizer)
    net_loss(model, net_batch(0)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()

    assert "take one step" in told.value.todo
    assert capture(model, net_loss, net_batch(0), optimizer).nodes


class Later(Counting):
    """Makes a state in its third step."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if "mean" in state:
                state.setdefault("late", torch.zeros_like(p))
            state.setdefault("mean", torch.zeros_like(p))


class Heavy(optim.SGD):
    """Adds a state to those of SGD."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("drag", torch.full_like(p, 0.5)).mul_(0.9)
            p.sub_(self.state[p]["drag"] * 0.01)
        super().step()


@pytest.mark.slow
def test_a_subclass_of_sgd_keeps_its_own_states_beside_the_velocity() -> None:
    maker = of(Heavy, lr=0.1, momentum=0.9)
    model, _ = eager(maker, 5)

    states, _ = graph_run(maker, 5, UpdateOptions())

    compare(states, model, 0.0)


def test_a_state_that_is_made_in_a_later_step_is_captured_too() -> None:
    model, optimizer = made(of(Later))

    assert "gain.late" in initial_states(model, optimizer)


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    model, optimizer = made(of(optim.LBFGS))

    with pytest.raises(CaptureError, match="LBFGS"):
        capture(model, net_loss, net_batch(0), optimizer)
