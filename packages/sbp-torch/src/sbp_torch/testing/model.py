"""The conformance suite of models: subclass `ModelConformance` and supply two methods.

    class TestMyModel(ModelConformance):
        def make_model(self):
            return build(MyConfig(hidden=8))
        def make_batch(self, batch_size):
            return {"x": torch.ones(batch_size, 3), "y": torch.arange(batch_size)}

Batches should have samples that differ. A model that also implements `LanguageModel` gets further
tests; for these, set `vocabulary` to its number of tokens.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import cast
from unittest import SkipTest

import torch
from torch import Tensor, nn

from sbp_aten.passes import prepare_step
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.kinds import LanguageModel, TrainableModel
from sbp_torch.runtime.single import run_graph
from sbp_torch.testing.programs import assert_equal, assert_near

__all__ = ["ModelConformance"]


def model_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the model's own loss of a batch."""
    return cast(TrainableModel, model).loss(batch)


class ModelConformance(ABC):
    """Tests of a model. See the module's docstring for how to use it."""

    #: Number of samples in a batch; even.
    batch_size: int = 4

    #: Number of tokens of a language model; None leaves the last dim of logits unchecked.
    vocabulary: int | None = None

    #: Largest deviation of the loss of a batch from the mean of its halves; relative above 1.
    tolerance: float = 1e-5

    @abstractmethod
    def make_model(self) -> nn.Module:
        """Build the model, small, with torch's global random state."""

    @abstractmethod
    def make_batch(self, batch_size: int) -> Mapping[str, Tensor]:
        """Return a batch of that many samples, equal on every call."""

    def seeded(self, seed: int = 0) -> nn.Module:
        """Build the model after seeding torch; torch's random state is unchanged afterwards."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            return self.make_model()

    def test_equal_seeds_build_equal_models(self) -> None:
        """Same names, shapes and values of parameters and buffers."""
        first, again = self.seeded().state_dict(), self.seeded().state_dict()
        assert list(first) == list(again), "names differ"
        for name, value in first.items():
            assert_equal(name, again[name], value)

    def test_the_loss_is_one_floating_number(self) -> None:
        """The loss is a 0-d floating-point tensor, is finite, and requires gradients."""
        loss = model_loss(self.seeded(), self.make_batch(self.batch_size))
        assert isinstance(loss, Tensor), f"the loss is a {type(loss).__name__}"
        assert loss.shape == (), f"the loss has shape {tuple(loss.shape)}"
        assert loss.dtype.is_floating_point, f"the loss is {loss.dtype}"
        assert bool(torch.isfinite(loss)), f"the loss is {loss.item()}"
        assert loss.requires_grad, "the loss does not depend on parameters"

    def test_the_loss_is_a_mean_over_samples(self) -> None:
        """The loss of a batch is the mean of the losses of its halves."""
        model, batch = self.seeded(), self.make_batch(self.batch_size)
        half = self.batch_size // 2
        parts = (
            {name: value[:half] for name, value in batch.items()},
            {name: value[half:] for name, value in batch.items()},
        )
        with torch.no_grad():
            whole = model_loss(model, batch)
            first, second = (model_loss(model, part) for part in parts)
        assert_near("the loss", whole, (first + second) / 2, self.tolerance)

    def test_a_gradient_reaches_every_parameter(self) -> None:
        """Every parameter that requires a gradient gets one, and it is finite."""
        model = self.seeded()
        model_loss(model, self.make_batch(self.batch_size)).backward()  # type: ignore[no-untyped-call]
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None, f"{name} has no gradient"
                assert bool(torch.isfinite(parameter.grad).all()), f"{name} has a bad gradient"

    def test_the_captured_step_equals_the_eager_one_bit_for_bit(self) -> None:
        """Two steps of forward, backward and AdamW: losses, parameters and buffers."""
        model, batch = self.seeded(), self.make_batch(self.batch_size)
        eager = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        graph = capture(model, model_loss, batch, optimizer)
        found: Mapping[str, Tensor | float | int] = initial_states(model, optimizer)
        twin = torch.optim.AdamW(eager.parameters(), lr=1e-2, foreach=False)
        for index in range(2):
            twin.zero_grad()
            loss = model_loss(eager, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            twin.step()
            with torch.no_grad():
                results, found = run_graph(graph, found, [batch], {"lr": 1e-2})
            assert_equal(f"the loss of step {index}", results["loss"], loss.detach())
        for name, value in (*eager.named_parameters(), *eager.named_buffers()):
            assert_equal(name, found[name], value.detach())

    def test_the_captured_step_can_be_planned(self) -> None:
        """The passes that run on every step accept it."""
        model, batch = self.seeded(), self.make_batch(self.batch_size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        prepared = prepare_step(capture(model, model_loss, batch, optimizer), 2)
        assert prepared.num_micro_batches == 2

    def test_a_language_model_gives_logits_for_every_token(self) -> None:
        """Shape (batch, time, vocabulary), for full contexts and shorter ones."""
        model = self.seeded()
        if not isinstance(model, LanguageModel):
            raise SkipTest("this is no language model")
        for time in (model.context, 1):
            with torch.no_grad():
                logits = model.logits(torch.zeros(2, time, dtype=torch.int64))
            assert logits.shape[:2] == (2, time), f"logits of shape {tuple(logits.shape)}"
            assert logits.dim() == 3, f"logits of shape {tuple(logits.shape)}"
            if self.vocabulary is not None:
                assert logits.shape[2] == self.vocabulary, f"{logits.shape[2]} tokens"
