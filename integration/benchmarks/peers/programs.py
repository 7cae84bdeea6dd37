"""The models that are timed: plain PyTorch programs for one device, with their batches.

| model | what | parameters |
|---|---|---|
| gpt | 4 layers, hidden 256, 4 heads, 8 x 128 tokens of 8,192: 32.2 GFLOP a step | 7.4 M |
| deep gpt | 8 layers, a vocabulary of 1,024 tokens | 6.9 M |
| dlrm | a table of 1 M rows of 32, small MLPs, 512 samples | 32 M |
| face | 100,000 classes over 128 features, a small trunk, 64 samples | 13.5 M |
| cnn | ResNet-18 of half width on 64 images of 32 x 32, SGD with momentum | 2.8 M |

All models except the CNN train with fused AdamW. Gradients of the table are dense, as AdamW needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own name for it)

LEARNING_RATE = 3e-4
MOMENTUM = 0.9

SEQUENCE, VOCABULARY = 128, 8192
TABLE_ROWS, NUM_DENSE = 1_000_000, 13
NUM_CLASSES, NUM_FEATURES = 100_000, 128

Batch = dict[str, Tensor]


class Face(nn.Module):
    """A small trunk, and a head of very many classes."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, NUM_FEATURES))
        self.head = nn.Linear(NUM_FEATURES, NUM_CLASSES, bias=False)

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.head(self.trunk(batch["x"])), batch["labels"])


@dataclass(frozen=True, kw_only=True)
class Model:
    """The factories of a model, its optimizer and its batches.

    Args:
        make: Makes the model; its parameters depend on torch's seed only.
        batch: Makes a batch with a generator.
        options: Options of the optimizer except the learning rate.
    """

    make: Callable[[Any], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    options: Mapping[str, Any]

    def program(self, registry: Any) -> nn.Module:
        torch.manual_seed(0)
        return self.make(registry)

    def make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return self.optimizer(parameters, lr=LEARNING_RATE, **self.options)  # type: ignore[call-arg]

    def batch_of(self, index: int) -> Batch:
        return self.batch(torch.Generator().manual_seed(index))


def _gpt_batch(generator: torch.Generator, vocabulary: int = VOCABULARY) -> Batch:
    tokens = torch.randint(vocabulary, (8, SEQUENCE + 1), generator=generator)
    return {"tokens": tokens[:, :-1].clone(), "targets": tokens[:, 1:].clone()}


def _dlrm_batch(generator: torch.Generator) -> Batch:
    return {
        "dense": torch.randn(512, NUM_DENSE, generator=generator),
        "sparse": torch.randint(TABLE_ROWS, (512, 1, 1), generator=generator),
        "clicks": torch.randint(2, (512,), generator=generator).float(),
    }


def _face_batch(generator: torch.Generator) -> Batch:
    return {
        "x": torch.randn(64, 512, generator=generator),
        "labels": torch.randint(NUM_CLASSES, (64,), generator=generator),
    }


def _cnn_batch(generator: torch.Generator) -> Batch:
    return {
        "images": torch.randn(64, 3, 32, 32, generator=generator),
        "labels": torch.randint(10, (64,), generator=generator),
    }


GPT = {"vocabulary": VOCABULARY, "context": SEQUENCE, "num_layers": 4, "num_heads": 4}
DEEP_GPT = {**GPT, "vocabulary": 1024, "num_layers": 8, "hidden": 256}
DLRM = {"rows": [TABLE_ROWS], "hidden": 32, "bottom": [64], "top": [64], "lookup": "embedding"}
CNN = {"width": 32}
ADAMW = {"fused": True}

MODELS: Mapping[str, Model] = {
    "gpt": Model(
        make=lambda registry: registry.make("model", "gpt", {**GPT, "hidden": 256}),
        batch=_gpt_batch,
        options=ADAMW,
    ),
    "deep gpt": Model(
        make=lambda registry: registry.make("model", "gpt", DEEP_GPT),
        batch=partial(_gpt_batch, vocabulary=DEEP_GPT["vocabulary"]),
        options=ADAMW,
    ),
    "dlrm": Model(
        make=lambda registry: registry.make("model", "dlrm", DLRM),
        batch=_dlrm_batch,
        options=ADAMW,
    ),
    "face": Model(make=lambda _: Face(), batch=_face_batch, options=ADAMW),
    "cnn": Model(
        make=lambda registry: registry.make("model", "resnet", CNN),
        batch=_cnn_batch,
        optimizer=torch.optim.SGD,
        options={"momentum": MOMENTUM},
    ),
}


def model_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    return model.loss(batch)  # type: ignore[operator] # a method of all of them
