"""Kinds of training with two optimizers: GANs, and actor and critic; see `kinds_of_training`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from kinds_in_plain_pytorch import Adam, Batch, PlainStep, Start, Trained, found, made, normal
from torch import Tensor, nn
from torch.nn import functional

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
    step_g = step_d.add_step(_loss_g, {"noise": _images(0)["noise"]}, optimizer_g)
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
    step_g = step_d.add_step(_liked, {"noise": batch(0)["noise"]}, optimizer_g)
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
    step_actor = step_critic.add_step(_loss_actor, example, optimizer_actor)
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
