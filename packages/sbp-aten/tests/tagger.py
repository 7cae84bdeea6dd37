"""A model of tokens, batches of unequal parts for it, and how far micro-batches are off."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from torch import Tensor, nn

from sbp_aten.pass_options import LossMeaning
from sbp_aten.passes import prepare_step
from sbp_core.graph import LogicalGraph
from sbp_torch.graph_capture import UpdateOptions, capture, initial_states
from sbp_torch.runtime.single import run_graph
from sbp_torch.testing.programs import graph_states, split_batch

TOKENS, PLACES, IGNORED = 7, 5, -100
RATE = 0.05
WHOLE = LossMeaning.WHOLE_BATCH

Batch = Mapping[str, Tensor]
Loss = Callable[["Tagger", Batch], Any]


class Tagger(nn.Module):
    """Scores of each token of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, TOKENS)
        self.scale = nn.Linear(8, 1)
        self.register_buffer("classes", torch.linspace(0.5, 2.0, TOKENS))

    def trunk(self, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.embed(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))


def entropy(model: Tagger, batch: Batch, **how: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten(), **how)


def mask_of(batch: Batch) -> Tensor:
    return (batch["y"] != IGNORED).double()


def make_batch(masks: Tensor) -> Batch:
    """Return a batch whose valid targets are those of a mask of samples and places."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randint(0, TOKENS, masks.shape, generator=generator) for _ in range(2))
    return {"x": x, "y": y.masked_fill(~masks, IGNORED)}


def masks_of(samples: int) -> Tensor:
    """Return masks of very unequal parts; the last quarter has no valid token."""
    masks = torch.zeros(samples, PLACES, dtype=torch.bool)
    for index in range(samples * 3 // 4):
        masks[index, : 1 + index % PLACES] = True
    return masks


def make_model() -> Tagger:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return Tagger().double()


def captured(loss: Loss, samples: int) -> LogicalGraph:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    return capture(model, loss, make_batch(masks_of(samples)), optimizer)


def deviation(loss: Loss, count: int, batch: Batch, clip_norm: float | None = None) -> float:
    """Return how far two steps of micro-batches are off plain PyTorch on the whole batch."""
    model, eager = make_model(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    plain = torch.optim.SGD(eager.parameters(), lr=RATE, momentum=0.9)
    parts = split_batch(batch, count)
    update = UpdateOptions(clip_norm=clip_norm)
    graph = prepare_step(capture(model, loss, batch, optimizer, update=update), count, loss=WHOLE)
    states: Any = graph_states(graph, initial_states(model, optimizer))
    worst = 0.0
    for _ in range(2):
        made = loss(eager, batch)
        wanted, metrics = made if isinstance(made, tuple) else (made, {})
        plain.zero_grad()
        wanted.backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(eager.parameters(), clip_norm)
        plain.step()
        found, states = run_graph(graph, states, parts, {"lr": RATE})
        for name, value in {"loss": wanted, **metrics}.items():
            worst = max(worst, float((found[name] - value.detach()).abs()))
    for name, value in eager.state_dict().items():
        worst = max(worst, float((states[name] - value).abs().max()))
    return worst
