"""A masked transformer and batches of many lengths, for `test_buckets`; also one rank of two.

As a program it trains on parts of batches whose lengths differ between the processes, and prints
what it found as a line of JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sbp_core.errors import SbpError
from sbp_launch import parallelize

WORDS, SIZE, HEADS = 11, 8, 2

Batch = dict[str, Tensor]

PAD_TO = {
    "sizes": (4, 8, 12),
    "values": {"input_ids": 0, "attention_mask": 0, "labels": -100},
}


class Block(nn.Module):
    """Attention to positions that are not masked, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(SIZE), nn.Linear(SIZE, 3 * SIZE)
        self.out = nn.Linear(SIZE, SIZE)
        self.up, self.down = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows, length, _ = x.shape
        qkv = self.qkv(self.norm(x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        scores = query @ key.transpose(-1, -2) / key.shape[-1] ** 0.5
        scores = scores.masked_fill(mask[:, None, None, :] == 0, -1e30)
        x = x + self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(x)))


class Network(nn.Module):
    """Says a word for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(WORDS, SIZE), Block()
        self.head = nn.Linear(SIZE, WORDS)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.block(self.embed(words), mask))


class Pooled(nn.Module):
    """Says a word for each position by itself and the mean of those that are not masked."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, SIZE), nn.Linear(SIZE, WORDS)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        x, valid = self.embed(words), mask[:, :, None]
        return self.head(x + (x * valid).sum(1, keepdim=True) / valid.sum(1, keepdim=True))


def made(model: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return model().double()


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["input_ids"], batch["attention_mask"])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def batch_of(index: int, length: int, rows: int = 8) -> Batch:
    """Return samples of 1 to `length` words, padded to the longest, which has `length`."""
    generator = torch.Generator().manual_seed(index)
    lengths = torch.randint(1, length + 1, (rows,), generator=generator)
    lengths[index % rows] = length
    mask = (torch.arange(length) < lengths[:, None]).long()
    words = torch.randint(1, WORDS, (rows, length), generator=generator) * mask
    return {
        "input_ids": words,
        "attention_mask": mask,
        "labels": (words * 3 % WORDS).masked_fill(mask == 0, -100),
    }


def joined(parts: list[Batch]) -> Batch:
    """Return the whole batch of parts, padded to the longest."""
    length = max(part["labels"].shape[1] for part in parts)
    values: dict[str, int] = PAD_TO["values"]  # type: ignore[assignment]
    return {
        name: torch.cat(
            [
                nn.functional.pad(part[name], (0, length - part[name].shape[1]), value=value)
                for part in parts
            ]
        )
        for name, value in values.items()
    }


def main(rank: int) -> dict[str, Any]:
    """Train as one rank of two; return how far it is from plain PyTorch, and what was refused."""
    model, plain = made(Network), made(Network)
    optimizer, other = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain))
    lengths = ((3, 7), (2, 2), (12, 1), (5, 6), (4, 9))
    example = batch_of(rank, 3 + 2 * rank, rows=4)
    step = parallelize(
        model, loss_of, example, optimizer, planner="manual/zero", batch_is="local", pad_to=PAD_TO
    )
    off, said = 0.0, ""
    with step:
        for index, pair in enumerate(lengths):
            parts = [batch_of(7 * index + at, length, rows=4) for at, length in enumerate(pair)]
            found = float(step(parts[rank]))
            other.zero_grad()
            wanted = loss_of(plain, joined(parts))
            wanted.backward()
            other.step()
            off = max(off, abs(found - wanted.item()))
        evaluated = float(step.evaluate(batch_of(50 + rank, 3 + 6 * rank, rows=4)))
        parts = [batch_of(50 + at, 3 + 6 * at, rows=4) for at in (0, 1)]
        off = max(off, abs(evaluated - loss_of(plain, joined(parts)).item()))
        try:
            step(batch_of(60, 2 if rank == 0 else 13, rows=4))
        except SbpError as error:
            said = str(error)
        num_forms = len(step.forms)
        step(batch_of(61, 2, rows=4))  # a refused step was none
        steps = step.steps_done
    return {"rank": rank, "off": off, "said": said, "forms": num_forms, "steps": steps}


if __name__ == "__main__":
    found = main(int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))))
    print(json.dumps(found), flush=True)
