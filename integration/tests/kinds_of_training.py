"""Kinds of training, each written once: as plain PyTorch runs it, and as `parallelize` does.

A kind takes `start`, which is `parallelize` with a layout, or `plain`, and returns the losses of
its steps and the states that it ends with. As a program it runs kinds as one rank of several, under
the planners that it is given, and prints how far each is from plain PyTorch, as a line of JSON.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable
from functools import partial

import torch
from kinds_in_plain_pytorch import (
    Adam,
    Batch,
    Start,
    Trained,
    assert_equal,
    found,
    made,
    normal,
    plain,
)
from kinds_with_two_networks import actor_critic, gan, wasserstein_gan
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from sbp_core.errors import SbpError
from sbp_launch import parallelize
from sbp_launch.parallel import LengthBuckets

# Layers that are unfrozen one after the other.


def _squared(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def _vectors(index: int, rows: int = 8) -> Batch:
    x = normal(index, rows, 6)
    return {"x": x, "y": x[:, :3].sin()}


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def gradual_unfreezing(start: Start) -> Trained:
    """Train the head, then one more layer in each epoch."""
    model, losses = made(_layers), []
    optimizer = Adam(model.parameters(), lr=0.01)
    for layer in (model[0], model[2]):
        layer.requires_grad_(False)
    with start(model, _squared, _vectors(0), optimizer) as step:
        for epoch, layer in enumerate((model[4], model[2], model[0])):
            layer.requires_grad_(True)
            losses += [float(step(_vectors(2 * epoch + index))) for index in range(2)]
        return found(step, losses, model, optimizer)


# A divergence whose weight grows.


class VAE(nn.Module):
    """An encoder and a decoder of vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(z), mean, log_variance


def kl_annealing(start: Start) -> Trained:
    """Let the weight, a float that the loss closes over, grow in each step."""
    model, losses, beta = made(VAE), [], 0.0
    optimizer = Adam(model.parameters(), lr=0.01)

    def elbo(model: nn.Module, batch: Batch) -> Tensor:
        seen, mean, log_variance = model(batch["x"])
        divergence = -(1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean() / 2
        return (seen - batch["x"]).square().sum(1).mean() + beta * divergence

    with start(model, elbo, {"x": normal(0, 8, 6)}, optimizer) as step:
        for index in range(24):
            beta = min(1.0, index / 20)
            losses.append(float(step({"x": normal(index, 8, 6)})))
        return found(step, losses, model, optimizer)


# An average, and the best weights.


def _normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def averages_and_best_weights(start: Start) -> Trained:
    """Average after each step, evaluate, and go back to the best weights now and then."""
    model, losses = made(_normed), []
    optimizer = Adam(model.parameters(), lr=0.5)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    lowest, best = float("inf"), {}
    with start(model, _squared, _vectors(0), optimizer) as step:
        for index in range(9):
            losses.append(float(step(_vectors(index))))
            step.copy_to(model, optimizer)
            average.update_parameters(model)
            losses.append(float(step.evaluate(_vectors(50))))
            if losses[-1] < lowest:
                lowest, best = losses[-1], copy.deepcopy(model.state_dict())
            if index % 3 == 2:
                model.load_state_dict(best)
        return found(step, losses, model, optimizer, average=average)


# Sentences.

WORDS = 11


class Tagger(nn.Module):
    """A convolution over each word and the two before it, that says a word for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 6)
        self.convolution = nn.Conv1d(6, 6, 3)
        self.head = nn.Linear(6, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = functional.pad(self.embed(words).transpose(1, 2), (2, 0))
        return self.head(self.convolution(x).tanh().transpose(1, 2))


def _cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["words"])
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def _sentences(index: int, length: int, *, is_full: bool = False) -> Batch:
    """Return 8 sentences of which the longest has that many words; or all of them have."""
    generator = torch.Generator().manual_seed(index)
    words = torch.randint(1, WORDS, (8, length), generator=generator)
    lengths = torch.randint(1, length + 1, (8, 1), generator=generator)
    lengths[index % 8] = length
    is_padding = torch.arange(length) >= (length if is_full else lengths)
    labels = (words * 3 % WORDS).masked_fill(is_padding, -100)
    return {"words": words.masked_fill(is_padding, 0), "labels": labels}


def padding_to_the_longest(start: Start) -> Trained:
    """Give batches of many lengths, which `parallelize` pads to two."""
    model, losses = made(Tagger), []
    optimizer = Adam(model.parameters(), lr=0.01)
    pad_to = LengthBuckets(sizes=(4, 8), values={"words": 0, "labels": -100})
    with start(model, _cross_entropy, _sentences(0, 5), optimizer, pad_to=pad_to) as step:
        for index, length in enumerate((5, 2, 8, 3, 7, 6)):
            losses.append(float(step(_sentences(index, length))))
        return found(step, losses, model, optimizer)


def curriculum(start: Start) -> Trained:
    """Give longer sentences in each epoch."""
    model, losses = made(Tagger), []
    optimizer = Adam(model.parameters(), lr=0.01)
    with start(model, _cross_entropy, _sentences(0, 3, is_full=True), optimizer) as step:
        for epoch, length in enumerate((3, 5, 9)):
            for index in range(2):
                batch = _sentences(2 * epoch + index, length, is_full=True)
                losses.append(float(step(batch)))
        return found(step, losses, model, optimizer)


# A text that is read part by part.


class LanguageModel(nn.Module):
    """A recurrent network that goes on where the last part of the text ended."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 6)
        self.rnn = nn.GRU(6, 6, batch_first=True)
        self.head = nn.Linear(6, WORDS)
        self.register_buffer("hidden", torch.zeros(1, 8, 6))

    def forward(self, words: Tensor) -> Tensor:
        made, hidden = self.rnn(self.embed(words), self.hidden)
        self.hidden = hidden.detach()
        return self.head(made)


def truncated_backpropagation(start: Start) -> Trained:
    """Read a text twice, from the beginning, and then parts of it by the model itself."""
    model, losses = made(LanguageModel), []
    optimizer = Adam(model.parameters(), lr=0.01)
    text = torch.randint(WORDS, (8, 10), generator=torch.Generator().manual_seed(1))

    def part(at: int) -> Batch:
        return {"words": text[:, at : at + 3], "labels": text[:, at + 1 : at + 4]}

    with start(model, _cross_entropy, part(0), optimizer) as step:
        for _ in range(2):
            step.copy_to(model)
            model.hidden.zero_()
            losses += [float(step(part(at))) for at in (0, 3, 6)]
            step.copy_to(model)
            model.eval()
            with torch.no_grad():
                losses += [_cross_entropy(model, part(at)).item() for at in (6, 0)]
            model.train()
        return found(step, losses, model, optimizer)


KINDS: dict[str, Callable[[Start], Trained]] = {
    "GAN": gan,
    "Wasserstein GAN": wasserstein_gan,
    "actor and critic": actor_critic,
    "gradual unfreezing": gradual_unfreezing,
    "KL annealing": kl_annealing,
    "averages and best weights": averages_and_best_weights,
    "padding to the longest": padding_to_the_longest,
    "truncated back-propagation": truncated_backpropagation,
    "curriculum": curriculum,
}


if __name__ == "__main__":
    rank = int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
    planner, *names = sys.argv[1:]
    for name in names:
        said = ""
        try:
            assert_equal(KINDS[name](partial(parallelize, planner=planner)), KINDS[name](plain))
        except (AssertionError, SbpError) as error:
            said = f"{type(error).__name__}: {error}"
        print(json.dumps({"rank": rank, "kind": name, "said": said}), flush=True)
