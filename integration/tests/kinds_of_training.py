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
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from sbp_core.errors import SbpError
from sbp_launch import parallelize
from sbp_launch.parallelize import LengthBuckets
from sbp_torch.capture import counted_random

Batch = dict[str, Tensor]

#: `parallelize` with its layout, or `plain`.
Start = Callable[..., Any]

#: Where gradients are near zero, Adam would make rounding errors of them large.
Adam = partial(torch.optim.Adam, eps=0.01)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What came of a kind of training.

    Args:
        losses: Of all steps and evaluations, in their order.
        states: What `state_dict` of the model, of its optimizers, and of what a loop has beside
            them returns, by a name.
        num_forms: Of the first program; 1 in plain PyTorch.
    """

    losses: list[float]
    states: dict[str, Any]
    num_forms: int


class PlainStep:
    """A step of plain PyTorch, called as one of `parallelize`."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Any], Tensor],
        optimizer: torch.optim.Optimizer,
        count: list[int],
    ) -> None:
        self._model, self._loss, self._optimizer, self._count = model, loss, optimizer, count
        self.forms = (None,)

    def __enter__(self) -> PlainStep:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def __call__(self, batch: Any) -> float:
        self._optimizer.zero_grad()
        with counted_random(0, self._count[0]):
            loss = self._loss(self._model, batch)
        loss.backward()
        self._optimizer.step()
        self._count[0] += 1
        return loss.item()

    def evaluate(self, batch: Any) -> float:
        """Return the loss in evaluation mode."""
        modes = {module: module.training for module in self._model.modules()}
        self._model.eval()
        with torch.no_grad():
            loss = self._loss(self._model, batch)
        for module, mode in modes.items():
            module.training = mode
        return loss.item()

    def beside(
        self,
        loss: Callable[[nn.Module, Any], Tensor],
        batch: Any,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> PlainStep:
        """Return the step of another loss, or of another optimizer."""
        return PlainStep(self._model, loss, optimizer or self._optimizer, self._count)

    def copy_to(self, *_: object) -> None:
        """Do nothing: the model is what is trained."""


def plain(
    model: nn.Module, loss: Any, batch: Any, optimizer: torch.optim.Optimizer, **_: Any
) -> PlainStep:
    """Return the step of plain PyTorch; it needs no padding."""
    return PlainStep(model, loss, optimizer, [0])


def made(model: Callable[[], nn.Module]) -> Any:
    """Return a seeded model in float64."""
    torch.manual_seed(0)
    return model().double()


def normal(index: int, *shape: int) -> Tensor:
    """Return random numbers that are the same in all processes."""
    generator = torch.Generator().manual_seed(index)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def found(
    step: Any, losses: list[float], model: nn.Module, *optimizers: Any, **more: Any
) -> Trained:
    """Return what came of a kind, where its `with` block is about to end; all processes call it."""
    for optimizer in optimizers:
        step.copy_to(model, optimizer)
    states = {"model": model, **{f"optimizer {at}": one for at, one in enumerate(optimizers)}}
    return Trained(
        losses=losses,
        states={name: copy.deepcopy(one.state_dict()) for name, one in (states | more).items()},
        num_forms=len(step.forms),
    )


# A generator and a discriminator.

NOISE, WIDTH = 6, 4


class DCGAN(nn.Module):
    """As in the example of PyTorch: images of 16 x 16, of convolutions and batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(NOISE, 2 * WIDTH, 4, 1, 0, bias=False),
            nn.BatchNorm2d(2 * WIDTH),
            nn.ReLU(True),
            nn.ConvTranspose2d(2 * WIDTH, WIDTH, 4, 2, 1, bias=False),
            nn.BatchNorm2d(WIDTH),
            nn.ReLU(True),
            nn.ConvTranspose2d(WIDTH, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, WIDTH, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(WIDTH, 2 * WIDTH, 4, 2, 1, bias=False),
            nn.BatchNorm2d(2 * WIDTH),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(2 * WIDTH, 1, 4, 1, 0, bias=False),
            nn.Flatten(0),
        )


def _score(model: nn.Module, images: Tensor, wanted: float) -> Tensor:
    scores = model.discriminator(images)
    return functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, wanted))


def _loss_d(model: nn.Module, batch: Batch) -> Tensor:
    fake = model.generator(batch["noise"]).detach()
    return _score(model, batch["real"], 1.0) + _score(model, fake, 0.0)


def _loss_g(model: nn.Module, batch: Batch) -> Tensor:
    return _score(model, model.generator(batch["noise"]), 1.0)


def _optimizers(model: Any) -> list[torch.optim.Optimizer]:
    """Return that of the discriminator, and that of the generator."""
    networks = model.discriminator, model.generator
    return [Adam(one.parameters(), lr=0.002, betas=(0.5, 0.999)) for one in networks]


NUM_ROUNDS = 3


def _images(index: int) -> Batch:
    return {"real": normal(index, 8, 1, 16, 16), "noise": normal(100 + index, 8, NOISE, 1, 1)}


def gan(start: Start) -> Trained:
    """Train discriminator and generator in turn."""
    model, losses = made(DCGAN), []
    optimizer_d, optimizer_g = _optimizers(model)
    step_d = start(model, _loss_d, _images(0), optimizer_d)
    step_g = step_d.beside(_loss_g, {"noise": _images(0)["noise"]}, optimizer_g)
    with step_d:
        for index in range(NUM_ROUNDS):
            batch = _images(index)
            losses += [float(step_d(batch)), float(step_g({"noise": batch["noise"]}))]
        return found(step_d, losses, model, optimizer_d, optimizer_g)


def gan_of_the_example() -> Trained:
    """Train as the example does: images of the first step are used in the second one, too."""
    model, losses = made(DCGAN), []
    optimizer_d, optimizer_g = _optimizers(model)
    for index in range(NUM_ROUNDS):
        batch = _images(index)
        optimizer_d.zero_grad()
        loss_real = _score(model, batch["real"], 1.0)
        loss_real.backward()
        fake = model.generator(batch["noise"])
        loss_fake = _score(model, fake.detach(), 0.0)
        loss_fake.backward()
        optimizer_d.step()
        optimizer_g.zero_grad()
        loss_g = _score(model, fake, 1.0)
        loss_g.backward()
        optimizer_g.step()
        losses += [loss_real.item() + loss_fake.item(), loss_g.item()]
    return found(
        PlainStep(model, _loss_d, optimizer_d, []), losses, model, optimizer_d, optimizer_g
    )


def _penalised(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of a critic whose gradients are to have norm 1, at random points between."""
    real, fake = batch["real"], model.generator(batch["noise"]).detach()
    share = torch.rand(len(real), 1, 1, 1, dtype=real.dtype)
    between = (share * real + (1 - share) * fake).requires_grad_(True)
    scores = model.discriminator(between).sum()
    (slopes,) = torch.autograd.grad(scores, between, create_graph=True)
    penalty = (slopes.flatten(1).norm(dim=1) - 1).square().mean()
    return model.discriminator(fake).mean() - model.discriminator(real).mean() + 10 * penalty


def _liked(model: nn.Module, batch: Batch) -> Tensor:
    return -model.discriminator(model.generator(batch["noise"])).mean()


def _small_gan() -> nn.Module:
    model = nn.Module()
    model.generator = nn.Sequential(nn.Flatten(), nn.Linear(NOISE, 16), nn.Unflatten(1, (1, 4, 4)))
    model.discriminator = nn.Sequential(
        nn.Conv2d(1, WIDTH, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * WIDTH, 1)
    )
    return model


def wasserstein_gan(start: Start) -> Trained:
    """Take two steps of the critic, with a gradient penalty, for each of the generator."""
    model, losses = made(_small_gan), []
    optimizer_d, optimizer_g = _optimizers(model)

    def batch(index: int) -> Batch:
        return {"real": normal(index, 8, 1, 4, 4), "noise": normal(100 + index, 8, NOISE)}

    step_d = start(model, _penalised, batch(0), optimizer_d)
    step_g = step_d.beside(_liked, {"noise": batch(0)["noise"]}, optimizer_g)
    with step_d:
        for index in range(3):
            losses += [float(step_d(batch(2 * index))), float(step_d(batch(2 * index + 1)))]
            losses += [float(step_g({"noise": normal(200 + index, 8, NOISE)}))]
        return found(step_d, losses, model, optimizer_d, optimizer_g)


# An actor and a critic.


class ActorCritic(nn.Module):
    """Two networks, of which the one chooses between three actions; and a slow critic."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.target = copy.deepcopy(self.critic).requires_grad_(False)


def _returns(model: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        return batch["reward"] + 0.9 * model.target(batch["next"]).squeeze(1)


def _loss_critic(model: nn.Module, batch: Batch) -> Tensor:
    value = model.critic(batch["seen"]).squeeze(1)
    return functional.smooth_l1_loss(value, _returns(model, batch))


def _loss_actor(model: nn.Module, batch: Batch) -> Tensor:
    advantage = _returns(model, batch) - model.critic(batch["seen"]).squeeze(1).detach()
    chances = model.actor(batch["seen"]).log_softmax(1)
    chosen = chances.gather(1, batch["actions"][:, None]).squeeze(1)
    entropy = -(chances.exp() * chances).sum(1).mean()
    return -(advantage * chosen).mean() - 0.01 * entropy


def actor_critic(start: Start) -> Trained:
    """Let the actor act, as it is, between steps; the target network follows the critic."""
    model, losses = made(ActorCritic), []
    optimizer_actor = Adam(model.actor.parameters(), lr=0.01)
    optimizer_critic = Adam(model.critic.parameters(), lr=0.02)

    def play(index: int) -> Batch:
        seen = normal(index, 16, 4)
        with torch.no_grad():
            chances = model.actor(seen).softmax(1)
        generator = torch.Generator().manual_seed(index)
        actions = torch.multinomial(chances, 1, generator=generator).squeeze(1)
        reward = seen.sum(1) * (actions - 1)
        return {"seen": seen, "actions": actions, "reward": reward, "next": seen + reward[:, None]}

    example = play(0)
    step_critic = start(model, _loss_critic, example, optimizer_critic)
    step_actor = step_critic.beside(_loss_actor, example, optimizer_actor)
    with step_critic:
        for index in range(4):
            step_critic.copy_to(model)
            rollout = play(index)
            losses += [float(step_actor(rollout))]
            losses += [float(step_critic(rollout)) for _ in range(2)]
            step_critic.copy_to(model)
            with torch.no_grad():
                pairs = zip(model.target.parameters(), model.critic.parameters(), strict=True)
                for slow, fast in pairs:
                    slow.lerp_(fast, 0.1)
        return found(step_critic, losses, model, optimizer_actor, optimizer_critic)


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


def assert_equal(one: Trained, other: Trained) -> None:
    """See that losses and states are the same."""
    for what in ("losses", "states"):
        torch.testing.assert_close(getattr(one, what), getattr(other, what), rtol=0, atol=1e-12)


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
