"""The conformance suite of graph passes: subclass `GraphPassConformance` and supply one method.

    class TestMyPass(GraphPassConformance):
        def make_pass(self):
            return build(MyConfig())

A pass runs with other passes, before the accumulation over micro-batches. It is tested on the
captured step of a small MLP; `make_step` may be overridden. For a pass that reorders sums, set
`tolerance` above zero.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from functools import cache

import torch

from sbp_aten.passes import prepare_step, tie_step_counters
from sbp_core.graph import LogicalGraph, graph_hash, verify_graph
from sbp_core.plugins import GraphPass
from sbp_torch.graph_capture import capture
from sbp_torch.testing.programs import (
    OneDeviceStep,
    TinyMlp,
    assert_near,
    capture_tiny,
    one_device_run,
    tiny_batch,
    tiny_loss,
)

__all__ = ["GraphPassConformance", "captured_tiny"]


@cache
def captured_tiny() -> LogicalGraph:
    """Return the captured step of a `TinyMlp`, with all step counters merged into one (tied)."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = TinyMlp().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=False)
    return tie_step_counters(capture(model, tiny_loss, tiny_batch(6, 0), optimizer, name="tiny"))


class GraphPassConformance(ABC):
    """Tests of a graph pass. See the module's docstring for how to use it."""

    #: Largest deviation of losses and states, relative for values above 1; 0 demands equality.
    tolerance: float = 0.0

    @abstractmethod
    def make_pass(self) -> GraphPass:
        """Return the pass; called for every test."""

    def make_step(self) -> OneDeviceStep:
        """Return a step to test the pass on: a graph of one micro-batch."""
        return replace(capture_tiny(), graph=captured_tiny())

    def test_the_result_is_a_legal_graph(self) -> None:
        """The checks that run after every pass find no error."""
        verify_graph(self.make_pass()(self.make_step().graph))

    def test_losses_and_states_stay_what_they_are(self) -> None:
        """Losses and states are equal on one device, over several steps."""
        step = self.make_step()
        losses, states = one_device_run(step)
        changed = replace(step, graph=self.make_pass()(step.graph))
        found_losses, found_states = one_device_run(changed)
        for index, (found, loss) in enumerate(zip(found_losses, losses, strict=True)):
            assert_near(f"the loss of step {index}", found, loss, self.tolerance)
        assert set(found_states) == set(states), "the graph has other states"
        for name, wanted in states.items():
            assert_near(name, found_states[name], wanted, self.tolerance)

    def test_the_door_of_the_graph_stays_as_it_is(self) -> None:
        """The names of inputs, and the names and kinds of outputs, are unchanged."""
        graph = self.make_step().graph
        made = self.make_pass()(graph)
        assert {entry.name for entry in made.inputs} == {entry.name for entry in graph.inputs}
        assert {(out.name, out.kind) for out in made.outputs} == {
            (out.name, out.kind) for out in graph.outputs
        }

    def test_the_pass_is_a_pure_function(self) -> None:
        """It does not change its argument, and returns equal graphs for equal arguments."""
        graph = self.make_step().graph
        before = graph_hash(graph)
        first, again = self.make_pass()(graph), self.make_pass()(graph)
        assert graph_hash(graph) == before, "the pass changed its argument"
        assert graph_hash(first) == graph_hash(again), "the pass gave two graphs"

    def test_the_pass_fits_among_the_others(self) -> None:
        """It runs before the accumulation over three micro-batches."""
        prepared = prepare_step(self.make_step().graph, 3, extra=(self.make_pass(),))
        assert prepared.num_micro_batches == 3
