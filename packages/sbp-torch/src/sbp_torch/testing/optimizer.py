"""The conformance suite of optimizers: subclass `OptimizerConformance` and supply one method.

    class TestMyOptimizer(OptimizerConformance):
        def make_factory(self):
            return build(MyConfig())

The update is captured in the step of a small MLP, and compared with the eager update: bit for bit,
unless `eager_tolerance` allows a deviation.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sbp_aten.passes import prepare_step
from sbp_core.compile import compile_plan
from sbp_core.graph import InputKind
from sbp_core.infer import infer_strategy
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.planning import PlanRequest
from sbp_core.runtime import Number
from sbp_torch.boxing.local import LocalBackend
from sbp_torch.graph_capture import capture, initial_states, scalar_values
from sbp_torch.kinds import OptimizerFactory
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceRuntime
from sbp_torch.runtime.single import run_graph
from sbp_torch.testing.programs import (
    TinyMlp,
    assert_equal,
    assert_near,
    small_cluster,
    tiny_batch,
    tiny_loss,
)

__all__ = ["LR_FACTORS", "OptimizerConformance"]

#: Factors of the learning rates in the steps: a schedule.
LR_FACTORS = (1.0, 0.5, 2.0, 0.25, 1.5, 1.0, 0.1)

_BATCH_SIZE = 6


class OptimizerConformance(ABC):
    """Tests of an optimizer. See the module's docstring for how to use it."""

    #: Largest deviation of a sharded run from one device, in float64; relative for values above 1.
    tolerance: float = 1e-9

    #: Largest deviation of the captured update from the eager one; 0: equal bit for bit.
    eager_tolerance: float = 0.0

    @abstractmethod
    def make_factory(self) -> OptimizerFactory:
        """Return the result of `build(config)`."""

    def make(self) -> tuple[TinyMlp, torch.optim.Optimizer]:
        """Return a model and its optimizer, equal on every call."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            model = TinyMlp().double()
        return model, self.make_factory()(model.parameters())

    def rates(self) -> list[dict[str, float]]:
        """Return the learning rates of all groups by name, for each step."""
        first = scalar_values(*self.make())
        return [{name: rate * factor for name, rate in first.items()} for factor in LR_FACTORS]

    def eager_run(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return losses and parameters of the eager program."""
        model, optimizer = self.make()
        losses = []
        for index, rates in enumerate(self.rates()):
            for group, rate in zip(optimizer.param_groups, rates.values(), strict=True):
                group["lr"] = rate
            optimizer.zero_grad()
            loss = model.loss(tiny_batch(_BATCH_SIZE, index))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.detach())
        return losses, {name: value.detach() for name, value in model.named_parameters()}

    def graph_run(self) -> tuple[list[Tensor], Mapping[str, Tensor | Number]]:
        """Return losses and states of the captured program, on one device."""
        model, optimizer = self.make()
        graph = capture(model, tiny_loss, tiny_batch(_BATCH_SIZE, 0), optimizer)
        states: Mapping[str, Tensor | Number] = initial_states(model, optimizer)
        losses = []
        for index, rates in enumerate(self.rates()):
            with torch.no_grad():
                found, states = run_graph(graph, states, [tiny_batch(_BATCH_SIZE, index)], rates)
            losses.append(found["loss"])
        return losses, states

    def test_it_optimizes_the_parameters_that_it_is_given(self) -> None:
        """It has all of them, each once."""
        model, optimizer = self.make()
        held = [id(value) for group in optimizer.param_groups for value in group["params"]]
        assert sorted(held) == sorted(id(value) for value in model.parameters())

    def test_the_captured_update_equals_the_eager_one(self) -> None:
        """From the first step on, with learning rates that change from step to step."""
        losses, parameters = self.eager_run()
        found, states = self.graph_run()
        wanted = {f"the loss of step {index}": loss for index, loss in enumerate(losses)}
        made: dict[str, object] = {f"the loss of step {at}": loss for at, loss in enumerate(found)}
        for name, value in (wanted | parameters).items():
            one = made[name] if name in made else states[name]
            if self.eager_tolerance:
                assert_near(name, one, value, self.eager_tolerance)
            else:
                assert_equal(name, one, value)

    def test_capturing_changes_neither_model_nor_optimizer(self) -> None:
        """Parameters, and the states of the optimizer, are unchanged."""
        model, optimizer = self.make()
        before = copy.deepcopy(model.state_dict()), _state_keys(optimizer)
        capture(model, tiny_loss, tiny_batch(_BATCH_SIZE, 0), optimizer)
        for name, value in before[0].items():
            assert_equal(name, model.state_dict()[name], value)
        assert _state_keys(optimizer) == before[1], "the optimizer has other states"
        _check_no_gradients(model)

    def test_sharded_states_come_to_the_same_parameters(self) -> None:
        """Every state that can be split is split, over two ranks and, unevenly, over three."""
        for num_ranks in (2, 3):
            self._check_sharded(num_ranks)

    def _check_sharded(self, num_ranks: int) -> None:
        losses, wanted = self.graph_run()
        model, optimizer = self.make()
        batch = tiny_batch(_BATCH_SIZE, 0)
        graph = prepare_step(capture(model, tiny_loss, batch, optimizer))
        kinds = {entry.kind for entry in graph.inputs if graph.is_tensor(entry.name)}
        words = ["batch", "activations", "parameters", "gradients", "updates"]
        words += ["optimizer_states"] if InputKind.OPTIMIZER_STATE in kinds else []
        mesh = Placement.grid((num_ranks,), ("data",))
        request = PlanRequest(graph=graph, mesh=mesh, cluster=small_cluster(num_ranks))
        pins = dict.fromkeys(words, "S(0)")
        plan = compile_plan(graph, infer_strategy(request, planner="conformance", pins=pins))
        check(plan)
        runtime = ReferenceRuntime(ReferenceConfig())
        states = initial_states(model, optimizer)
        with runtime.start(plan, states, LocalBackend()) as session:
            for index, rates in enumerate(self.rates()):
                found = session.step(tiny_batch(_BATCH_SIZE, index), rates).loss
                assert_near(f"the loss of step {index}", found, losses[index], self.tolerance)
            whole = session.state_dict()
            for name, value in model.named_parameters():
                held = [session.shard(name, rank) for rank in range(num_ranks)]
                parts = [part for part in held if isinstance(part, Tensor)]
                if value.dim():
                    assert_equal(f"the parts of {name}", torch.cat(parts), whole[name])
        for name, wants in wanted.items():
            assert_near(name, whole[name], wants, self.tolerance)


def _state_keys(optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the keys of the states of every parameter, also of a combined optimizer."""
    parts = getattr(optimizer, "optimizers", (optimizer,))
    return [sorted(kept) for part in parts for kept in part.state.values()]


def _check_no_gradients(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        assert parameter.grad is None, f"{name} was left with a gradient"
