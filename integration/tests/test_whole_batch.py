"""Micro-batches train on the loss of the whole batch: on several ranks, and the zoo's models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from programs import registry
from torch import nn

from sbp_core.errors import ConfigError, GraphError
from sbp_launch import MicroBatches, parallelize

TOKENS, PLACES, SIZE, STEPS = 11, 6, 8, 2

LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {"micro_batches": 4},
    "data": {"mesh": 2, "micro_batches": 2, "planner": "manual/data_parallel"},
    "sharded states": {"mesh": 2, "micro_batches": 4, "planner": "manual/zero"},
    "sharded states, clipped": {
        "mesh": 2,
        "micro_batches": 2,
        "planner": "manual/zero",
        "update": {"clip_norm": 0.05},
    },
    "pipeline": {"mesh": {"pipe": 2}, "micro_batches": 4, "planner": "manual/pipeline"},
    "pipeline, data": {
        "mesh": {"pipe": 2, "data": 2},
        "micro_batches": 2,
        "planner": "manual/pipeline",
        "update": {"clip_norm": 0.05},
    },
    "data, tensor": {"mesh": (2, 2), "micro_batches": 2},
}


class Guesser(nn.Module):
    """Guesses masked tokens, with the embedding as the head: on two stages of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.embed(x)
        for block in self.blocks:
            found = found + torch.tanh(block(found))
        logits: torch.Tensor = self.head(found)
        return logits


def make_model() -> Guesser:
    torch.manual_seed(0)
    return Guesser().double()


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=False)


def batch_of(index: int) -> dict[str, torch.Tensor]:
    """Return a batch whose second quarter has no valid token, and its end has few of them."""
    generator = torch.Generator().manual_seed(index)
    x, y = (torch.randint(0, TOKENS, (SIZE, PLACES), generator=generator) for _ in range(2))
    chances = torch.linspace(0.9, 0.2, SIZE)[:, None]
    valid = torch.rand(SIZE, PLACES, generator=generator) < chances
    valid[2:4], valid[0, 0] = False, True
    return {"x": x, "y": y.masked_fill(~valid, -100)}


def entropy(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
    logits, valid = model(batch["x"]), batch["y"] != -100
    loss = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())
    right = (logits.argmax(-1) == batch["y"]) & valid
    return loss, {"accuracy": right.sum() / valid.sum()}


def squares(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
    mask = (batch["y"] != -100).double()
    errors = (model(batch["x"]) - 1).square().mean(-1)
    penalty = sum(p.square().sum() for p in model.parameters())
    return (errors * mask).sum() / mask.sum() + 1e-3 * penalty


def eager_step(
    model: nn.Module, optimizer: Any, loss_of: Any, index: int, clip_norm: float | None = None
) -> torch.Tensor:
    """Take a step of plain PyTorch on the whole batch; return its loss."""
    optimizer.zero_grad()
    made = loss_of(model, batch_of(index))
    loss: torch.Tensor = made[0] if isinstance(made, tuple) else made
    loss.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
    return loss.detach()


#: Loss, layout and runtime that every change is tested with; all of them take half a minute.
QUICK = {
    *(("entropy", layout, "actor") for layout in LAYOUTS),
    ("entropy", "pipeline", "reference"),
    ("squares", "pipeline, data", "actor"),
    ("squares", "sharded states, clipped", "reference"),
}


@pytest.mark.slow(but=3)
@pytest.mark.parametrize(
    ("loss_of", "layout", "runtime"),
    [
        pytest.param(
            loss_of,
            layout,
            runtime,
            id=f"{loss_of.__name__}, {layout}, {runtime}",
            marks=() if (loss_of.__name__, layout, runtime) in QUICK else pytest.mark.exhaustive,
        )
        for loss_of in (entropy, squares)
        for layout in LAYOUTS
        for runtime in ("actor", "reference")
    ],
)
def test_ranks_and_stages_train_on_the_loss_of_the_whole_batch(loss_of, layout, runtime):
    given, eager = LAYOUTS[layout], make_model()
    model, optimizer = make_model(), make_optimizer(eager)

    with parallelize(
        model, loss_of, batch_of(0), make_optimizer(model), runtime=runtime, **given
    ) as step:
        for index in range(STEPS):
            with torch.no_grad():
                made = loss_of(eager, batch_of(index))
            found = step(batch_of(index))
            wanted = eager_step(eager, optimizer, loss_of, index, **given.get("update", {}))
            assert abs(found.item() - wanted.item()) < 1e-9
            if isinstance(made, tuple):
                accuracy = made[1]["accuracy"].item()
                assert found.metrics["accuracy"].item() == pytest.approx(accuracy)
        states = step.state_dict()

    for name, value in eager.named_parameters():
        assert torch.allclose(states[name], value.detach(), rtol=0, atol=1e-9), name


def contrast(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    found = model(batch["x"]).mean(1)
    return F.cross_entropy(found @ found.T, torch.arange(len(found)))


def test_samples_that_meet_are_refused_or_trained_on_part_by_part():
    model = make_model()
    given = (model, contrast, batch_of(0), make_optimizer(model))

    with pytest.raises(
        GraphError, match=r"combines samples, or depends on.*\n.*test_whole_batch\.py:\d+"
    ):
        parallelize(*given, micro_batches=2)
    with parallelize(*given, micro_batches=MicroBatches(2, loss="mean_of_micro_batches")) as step:
        found = step(batch_of(0)).item()

    parts = ({name: value[at : at + 4] for name, value in batch_of(0).items()} for at in (0, 4))
    with torch.no_grad():
        wanted = torch.stack([contrast(make_model(), part) for part in parts]).mean()
    assert found == pytest.approx(wanted.item())


def test_a_metric_with_a_row_for_each_sample_is_not_averaged_over_others():
    model = make_model()

    def loss(model, batch):
        made = model(batch["x"])
        return made.square().mean(), {"made": made.detach()}

    given = (model, loss, batch_of(0), make_optimizer(model))
    with pytest.raises(GraphError, match=r"'made' has 4 rows(.|\n)*would mix samples"):
        parallelize(*given, micro_batches=MicroBatches(2, loss="mean_of_micro_batches"))
    with parallelize(*given) as step:
        assert step(batch_of(0)).metrics["made"].shape[0] == 8


def test_another_meaning_of_the_loss_is_refused():
    model = make_model()

    with pytest.raises(ConfigError, match="loss='mean'"):
        parallelize(
            model,
            entropy,
            batch_of(0),
            make_optimizer(model),
            micro_batches=MicroBatches(1, loss="mean"),
        )


@pytest.mark.slow
def test_masked_models_of_the_zoo_train_on_the_loss_of_the_whole_batch():
    torch.manual_seed(0)
    sizes = {"hidden": 8, "num_layers": 1, "num_heads": 2, "vocabulary": TOKENS}
    model = registry().make("model", "bert", {**sizes, "context": PLACES}).double()
    batch = {"tokens": batch_of(0)["x"], "targets": batch_of(0)["y"]}
    eager = copy.deepcopy(model)
    optimizer = make_optimizer(eager)

    def loss_of(model, batch):
        return model.loss(batch)

    with parallelize(model, loss_of, batch, make_optimizer(model), mesh=2, micro_batches=2) as step:
        found = step(batch).item()
        states = step.state_dict()

    loss = loss_of(eager, batch)
    loss.backward()
    optimizer.step()
    assert abs(found - loss.item()) < 1e-9
    for name, value in eager.named_parameters():
        assert torch.allclose(states[name], value.detach(), rtol=0, atol=1e-9), name
