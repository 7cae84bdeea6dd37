"""The suite of models: passed by a small model and a language model, failed by broken ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sbp_core.errors import CaptureError
from sbp_torch.testing.model import ModelConformance
from sbp_torch.testing.programs import TinyMlp, tiny_batch


class TestTinyMlp(ModelConformance):
    def make_model(self) -> nn.Module:
        return TinyMlp()

    def make_batch(self, batch_size: int) -> Mapping[str, Tensor]:
        return tiny_batch(batch_size, 0, torch.float32)


class Bigram(nn.Module):
    """The smallest language model there is."""

    context = 5

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 7)

    def logits(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.table(tokens)
        return found

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        logits = self.logits(batch["tokens"])
        return cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def tokens(batch_size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randint(0, 7, (batch_size, 5), generator=generator)
        for name in ("tokens", "targets")
    }


class TestBigram(ModelConformance):
    vocabulary = 7

    def make_model(self) -> nn.Module:
        return Bigram()

    def make_batch(self, batch_size: int) -> Mapping[str, Tensor]:
        return tokens(batch_size)


class SumsItsLoss(TinyMlp):
    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        return super().loss(batch) * len(batch["features"])


class GivesOneLossASample(TinyMlp):
    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        return super().loss(batch).expand(len(batch["features"]))


class HasAParameterToSpare(TinyMlp):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.zeros(3))


class DrawsFromItsOwnState(TinyMlp):
    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.up.weight.copy_(
                torch.randn(10, 6, generator=torch.Generator().manual_seed(_seed()))
            )


class BranchesOnValues(TinyMlp):
    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        loss = super().loss(batch)
        return loss * 2 if loss > 1 else loss


class ForgetsTime(Bigram):
    def logits(self, tokens: Tensor) -> Tensor:
        return super().logits(tokens).mean(dim=1)

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        return cross_entropy(self.logits(batch["tokens"]), batch["targets"][:, 0])


def _seed() -> int:
    return int(torch.seed() % 2**31)


def suite_of(make: Callable[[], nn.Module]) -> ModelConformance:
    class Suite(ModelConformance):
        def make_model(self) -> nn.Module:
            return make()

        def make_batch(self, batch_size: int) -> Mapping[str, Tensor]:
            return {**tiny_batch(batch_size, 0, torch.float32), **tokens(batch_size)}

    return Suite()


Test = Callable[[ModelConformance], None]

BROKEN: list[tuple[Callable[[], nn.Module], Test, type[Exception]]] = [
    (SumsItsLoss, ModelConformance.test_the_loss_is_a_mean_over_samples, AssertionError),
    (GivesOneLossASample, ModelConformance.test_the_loss_is_one_floating_number, AssertionError),
    (
        HasAParameterToSpare,
        ModelConformance.test_a_gradient_reaches_every_parameter,
        AssertionError,
    ),
    (DrawsFromItsOwnState, ModelConformance.test_equal_seeds_build_equal_models, AssertionError),
    (
        BranchesOnValues,
        ModelConformance.test_the_captured_step_equals_the_eager_one_bit_for_bit,
        CaptureError,
    ),
    (
        ForgetsTime,
        ModelConformance.test_a_language_model_gives_logits_for_every_token,
        AssertionError,
    ),
]


@pytest.mark.parametrize(("make", "test", "error"), BROKEN)
def test_a_broken_model_fails_the_suite(
    make: Callable[[], nn.Module], test: Test, error: type[Exception]
) -> None:
    suite = suite_of(make)

    with pytest.raises(error):
        test(suite)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("make", [TinyMlp, Bigram])
def test_an_unbroken_model_passes_what_the_broken_ones_fail(make: Callable[[], nn.Module]) -> None:
    suite = suite_of(make)

    for _, test, _ in BROKEN:
        if "language" not in test.__name__ or make is Bigram:
            test(suite)
