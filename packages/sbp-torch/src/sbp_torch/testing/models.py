"""Small models with loss, batches and optimizer, for our own tests of capture and runtimes.

`PROGRAMS` lists them; `eager_step` and `eager_states` train them with plain PyTorch. The
conformance suites use `testing.programs` instead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from torch import Tensor, nn

from sbp_core.graph import LogicalGraph

__all__ = [
    "PROGRAMS",
    "Attention",
    "Batch",
    "Block",
    "Buffered",
    "Gpt",
    "Mlp",
    "NormWithoutBias",
    "Optimizer",
    "Program",
    "adamw",
    "eager_states",
    "eager_step",
    "graph_states",
    "momentum",
    "same_states",
    "square_batch",
    "square_loss",
    "token_batch",
    "token_loss",
]

Batch = Mapping[str, Tensor]
Optimizer = torch.optim.Optimizer

VOCABULARY, CONTEXT = 32, 6


class Attention(nn.Module):
    """Causal attention with two heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, time, width) of `x`, of the same shape."""
        batch, time, width = x.shape
        heads = self.qkv(x).view(batch, time, 2, 3 * width // 2).transpose(1, 2)
        q, k, v = heads.chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        made: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return made


class Block(nn.Module):
    """Attention and a multilayer perceptron, each with a norm before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, time, width) of `x`, of the same shape."""
        x = x + self.attention(self.norm1(x))
        wide: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + wide


class Gpt(nn.Module):
    """A GPT of two blocks."""

    def __init__(self, width: int = 8, *, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, time, VOCABULARY) of int64 `tokens` (batch, time)."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Mlp(nn.Module):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, 4) of `x`, (n, 6)."""
        made: Tensor = self.layers(x)
        return made


class NormWithoutBias(nn.Module):
    """A layer norm whose backward operator has no gradient of the bias."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6, bias=False)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, 4) of `x`, (n, 6)."""
        made: Tensor = self.head(self.norm(x))
        return made


class Buffered(nn.Module):
    """A linear layer with a constant buffer, and a buffer that each forward updates."""

    scale: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 4)
        self.register_buffer("scale", torch.linspace(0.5, 2.0, 6))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, 4) of `x`, (n, 6)."""
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        made: Tensor = self.head(x * self.scale)
        return made


def token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of the next token."""
    logits = model(batch["tokens"])
    return F.cross_entropy(logits.view(-1, VOCABULARY), batch["targets"].view(-1))


def square_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean squared error."""
    return F.mse_loss(model(batch["x"]), batch["y"])


def token_batch(size: int) -> dict[str, Tensor]:
    """Return `tokens` and `targets`: int64 (size, CONTEXT)."""
    return {name: torch.randint(0, VOCABULARY, (size, CONTEXT)) for name in ("tokens", "targets")}


def square_batch(size: int) -> dict[str, Tensor]:
    """Return `x`, (size, 6), and `y`, (size, 4), both float32."""
    return {"x": torch.randn(size, 6), "y": torch.randn(size, 4)}


def adamw(model: nn.Module) -> Optimizer:
    """Return AdamW for a model's parameters."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def momentum(model: nn.Module) -> Optimizer:
    """Return SGD with momentum for a model's parameters."""
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A one-device program: model, loss, batches, optimizer."""

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor]
    batch: Callable[[int], dict[str, Tensor]]
    optimizer: Callable[[nn.Module], Optimizer]

    def build(self, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Optimizer]:
        """Return a new model, always with the same weights, and its optimizer."""
        torch.manual_seed(0)
        model = self.model().to(dtype)
        return model, self.optimizer(model)

    def batches(
        self, count: int, size: int = 4, dtype: torch.dtype = torch.float32
    ) -> list[dict[str, Tensor]]:
        """Return batches, always the same."""
        torch.manual_seed(1)
        found = [self.batch(size) for _ in range(count)]
        return [
            {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
            for batch in found
        ]


PROGRAMS = {
    "gpt": Program(model=Gpt, loss=token_loss, batch=token_batch, optimizer=adamw),
    "tied gpt": Program(
        model=lambda: Gpt(tied=True), loss=token_loss, batch=token_batch, optimizer=adamw
    ),
    "mlp": Program(model=Mlp, loss=square_loss, batch=square_batch, optimizer=momentum),
    "norm without bias": Program(
        model=NormWithoutBias, loss=square_loss, batch=square_batch, optimizer=adamw
    ),
    "buffers": Program(model=Buffered, loss=square_loss, batch=square_batch, optimizer=momentum),
}


def eager_step(program: Program, model: nn.Module, optimizer: Optimizer, batch: Batch) -> Tensor:
    """Take one step as a user would, and return the loss."""
    optimizer.zero_grad()
    loss = program.loss(model, batch)
    loss.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
    optimizer.step()
    return loss.detach()


def graph_states(graph: LogicalGraph, states: Mapping[str, Tensor]) -> dict[str, Tensor | float]:
    """Return the states of a graph, with one number for step counters that were merged (tied)."""
    found: dict[str, Tensor | float] = {}
    for entry in graph.inputs:
        if entry.kind.is_state:
            name = entry.stands_for[0] if entry.stands_for else entry.name
            value = states[name]
            found[entry.name] = value if graph.is_tensor(entry.name) else value.item()
    return found


def same_states(left: Mapping[str, object], right: Mapping[str, object]) -> bool:
    """Whether two sets of states are equal bit for bit."""
    return left.keys() == right.keys() and all(
        torch.equal(torch.as_tensor(left[name]), torch.as_tensor(right[name])) for name in left
    )


def eager_states(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return copies of the states of a program by the names of the graph."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, parameter in model.named_parameters():
        held = optimizer.state[parameter]
        found |= {f"{name}.{k}": v for k, v in held.items() if isinstance(v, Tensor)}
    return {name: copy.deepcopy(value.detach()) for name, value in found.items()}
