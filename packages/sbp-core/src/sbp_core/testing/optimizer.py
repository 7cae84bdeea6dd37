"""The conformance suite of optimizers: subclass `OptimizerConformance` and supply one method.

    class TestMyOptimizer(OptimizerConformance):
        def make_factory(self):
            return build(MyConfig())

The update is captured with the step of a small MLP, and compared bit for bit with PyTorch's own.
Needs torch.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sbp_core.boxing.local import LocalBackend
from sbp_core.capture import capture, initial_states
from sbp_core.check import check
from sbp_core.compile import compile_plan
from sbp_core.graph.ir import InputKind
from sbp_core.graph.passes import prepare_step
from sbp_core.infer import infer_strategy
from sbp_core.placement import Placement
from sbp_core.plugins.kinds import OptimizerFactory, PlanRequest
from sbp_core.runtime.configs import ReferenceConfig
from sbp_core.runtime.reference import ReferenceRuntime
from sbp_core.runtime.single import run_graph
from sbp_core.testing.programs import (
    TinyMlp,
    assert_equal,
    assert_near,
    small_cluster,
    tiny_batch,
    tiny_loss,
)

Number = float | int

#: Learning rate of each step: a schedule, whatever the optimizer was built with.
RATES = (1e-2, 5e-3, 2e-2)

_BATCH_SIZE = 6


class OptimizerConformance(ABC):
    """What every optimizer must do. See the module's docstring for how to use it."""

    #: Largest deviation of a sharded run from one device, in float64, relative above 1.
    tolerance: float = 1e-9

    @abstractmethod
    def make_factory(self) -> OptimizerFactory:
        """Return what `build(config)` returns."""

    def make(self) -> tuple[TinyMlp, torch.optim.Optimizer]:
        """Return a model and its optimizer, equal on every call."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            model = TinyMlp().double()
        return model, self.make_factory()(model.parameters())

    def eager_run(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return losses and parameters of the eager program."""
        model, optimizer = self.make()
        losses = []
        for index, rate in enumerate(RATES):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad()
            loss = model.loss(tiny_batch(_BATCH_SIZE, index))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.detach())
        return losses, {name: value.detach() for name, value in model.named_parameters()}

    def test_it_optimizes_the_parameters_that_it_is_given(self) -> None:
        """All of them, in one group."""
        model, optimizer = self.make()
        held = [id(value) for group in optimizer.param_groups for value in group["params"]]
        assert held == [id(value) for value in model.parameters()]
        assert len(optimizer.param_groups) == 1, "several parameter groups"

    def test_the_captured_update_equals_the_eager_one_bit_for_bit(self) -> None:
        """Under learning rates that change from step to step."""
        losses, parameters = self.eager_run()
        model, optimizer = self.make()
        graph = capture(model, tiny_loss, tiny_batch(_BATCH_SIZE, 0), optimizer)
        states: Mapping[str, Tensor | Number] = initial_states(model, optimizer)
        for index, rate in enumerate(RATES):
            with torch.no_grad():
                found, states = run_graph(
                    graph, states, [tiny_batch(_BATCH_SIZE, index)], {"lr": rate}
                )
            assert_equal(f"the loss of step {index}", found["loss"], losses[index])
        for name, value in parameters.items():
            assert_equal(name, states[name], value)

    def test_capturing_changes_neither_model_nor_optimizer(self) -> None:
        """Parameters, and the states that the optimizer has."""
        model, optimizer = self.make()
        before = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        capture(model, tiny_loss, tiny_batch(_BATCH_SIZE, 0), optimizer)
        for name, value in before[0].items():
            assert_equal(name, model.state_dict()[name], value)
        assert optimizer.state_dict()["state"].keys() == before[1]["state"].keys()
        _check_no_gradients(model)

    def test_sharded_states_come_to_the_same_parameters(self) -> None:
        """Every state that can be is split over two ranks."""
        losses, parameters = self.eager_run()
        model, optimizer = self.make()
        batch = tiny_batch(_BATCH_SIZE, 0)
        graph = prepare_step(capture(model, tiny_loss, batch, optimizer))
        kinds = {entry.kind for entry in graph.inputs if graph.is_tensor(entry.name)}
        words = ["batch", "activations", "parameters", "gradients", "updates"]
        words += ["optimizer_states"] if InputKind.OPTIMIZER_STATE in kinds else []
        mesh = Placement.grid((2,), ("data",))
        request = PlanRequest(graph=graph, mesh=mesh, cluster=small_cluster(2))
        pins = dict.fromkeys(words, "S(0)")
        plan = compile_plan(graph, infer_strategy(request, planner="conformance", pins=pins))
        check(plan)
        runtime = ReferenceRuntime(ReferenceConfig())
        states = initial_states(model, optimizer)
        with runtime.start(plan, states, LocalBackend()) as session:
            for index, rate in enumerate(RATES):
                found = session.step(tiny_batch(_BATCH_SIZE, index), {"lr": rate}).loss
                assert_near(f"the loss of step {index}", found, losses[index], self.tolerance)
            whole = session.state_dict()
        for name, value in parameters.items():
            assert_near(name, whole[name], value, self.tolerance)


def _check_no_gradients(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        assert parameter.grad is None, f"{name} was left with a gradient"
