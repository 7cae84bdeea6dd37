"""Loops over the samples of a batch, and other steps of micro-batches that take samples apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from torch import Tensor, nn

from sbp_aten.pass_options import LossMeaning
from sbp_aten.passes import prepare_step
from sbp_core.errors import GraphError
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.runtime.single import run_graph
from sbp_torch.testing.programs import graph_states, split_batch

SAMPLES, INPUTS, CLASSES = 8, 4, 5
RATE = 0.1

Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]


def make_model() -> nn.Module:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(INPUTS, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()


def make_batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, INPUTS, dtype=torch.float64, generator=generator)
    y = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    return {"x": x, "y": y, "ignored": y.masked_fill(y < 2, -100), "k": torch.tensor(0.7).double()}


#: A number between the largest scores of two samples.
with torch.no_grad():
    BETWEEN_LARGEST = float(make_model()(make_batch()["x"]).amax(1).sort().values[-2:].mean())


def prepared(loss: Loss, count: int) -> tuple[Any, Any]:
    """Return the step of so many micro-batches of a loss, and its states."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    graph = capture(model, loss, make_batch(), optimizer)
    made = prepare_step(graph, count, loss=LossMeaning.WHOLE_BATCH)
    return made, graph_states(made, initial_states(model, optimizer))


def deviation(loss: Loss, count: int) -> float:
    """Return how far a step of micro-batches is off plain PyTorch on the whole batch."""
    graph, states = prepared(loss, count)
    found, states = run_graph(graph, states, split_batch(make_batch(), count), {"lr": RATE})
    eager = make_model()
    wanted = loss(eager, make_batch())
    wanted.backward()
    torch.optim.SGD(eager.parameters(), lr=RATE).step()
    off = [float((states[name] - value).abs().max()) for name, value in eager.state_dict().items()]
    return max(*off, float((found["loss"] - wanted.detach()).abs()))


def of_rows(model: nn.Module, rows: list[Tensor], batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(torch.cat([model(row) for row in rows]), batch["ignored"])


def added_up(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores, total = model(batch["x"]), torch.zeros((), dtype=torch.float64)
    for row, target in zip(scores, batch["y"], strict=True):
        total = total + F.cross_entropy(row, target)
    return total / len(scores)


def taken_away(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores, total = model(batch["x"]), 0
    for at in range(len(scores)):
        total = total - scores[at].square().sum()
    return -total


def over_a_total(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores, mask = model(batch["x"]), (batch["y"] > 1).double()
    return sum(scores[at].logsumexp(0) * mask[at] for at in range(len(mask))) / mask.sum()


def beside_means(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores = model(batch["x"])
    rows = sum(row.exp().sum() for row in scores) / len(scores)
    return rows + 0.1 * scores.square().mean() + F.cross_entropy(scores, batch["ignored"])


def twice_in_a_turn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return torch.stack([model(row).tanh() * model(2 * row) for row in batch["x"]]).square().sum()


def after_a_penalty(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    total = 0.1 * sum(weight.square().sum() for weight in model.parameters()) + 0.5
    for row, target in zip(batch["x"], batch["y"], strict=True):
        total = total + F.cross_entropy(model(row), target)
    return total


def with_less_of_each(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    total = model[0].weight.sum()
    for row in batch["x"]:
        total = total - model(row).square().sum() - model[2].bias.exp().sum()
    return -total


def from_a_parameter(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    total = model[2].bias  # an input of the graph, which nothing makes
    for row in batch["x"]:
        total = total + model(row)
    return total.sum() + total.detach().square().sum()


#: Loops, and the pieces of the samples that they take.
FOLLOWED: dict[str, tuple[Loss, int]] = {
    "after a penalty": (after_a_penalty, 8),
    "with less of each": (with_less_of_each, 8),
    "from a parameter": (from_a_parameter, 8),
    "rows": (lambda m, b: F.cross_entropy(torch.stack([m(row) for row in b["x"]]), b["y"]), 8),
    "parts of one": (lambda m, b: of_rows(m, list(b["x"].split(1)), b), 8),
    "parts of two": (lambda m, b: of_rows(m, list(b["x"].split(2)), b), 4),
    "slices of two": (lambda m, b: of_rows(m, [b["x"][n : n + 2] for n in (0, 2, 4, 6)], b), 4),
    "slices from behind": (
        lambda m, b: of_rows(m, [b["x"][-8:-4], b["x"][-4:]], b),
        2,
    ),
    "indices": (lambda m, b: of_rows(m, [b["x"][n][None] for n in range(len(b["x"]))], b), 8),
    "along another dim": (
        lambda m, b: (torch.stack([m(row) for row in b["x"]], 1) * torch.ones(CLASSES, 1)).sum(),
        8,
    ),
    "losses that are added": (added_up, 8),
    "losses that are taken away": (taken_away, 8),
    "over a total": (over_a_total, 8),
    "beside means": (beside_means, 8),
    "twice in a turn": (twice_in_a_turn, 8),
}


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("name", FOLLOWED)
def test_a_loop_over_samples_trains_as_on_the_whole_batch(name, count):
    loss, pieces = FOLLOWED[name]
    if pieces % count:
        with pytest.raises(GraphError, match="depends on their positions in the batch"):
            prepared(loss, count)
    else:
        assert deviation(loss, count) < 1e-12


@pytest.mark.slow
def test_a_micro_batch_takes_the_turns_of_its_own_samples():
    turns = [
        sum(node.kind == "tanh" for node in prepared(FOLLOWED["rows"][0], count)[0].nodes)
        for count in (1, 2, 8)
    ]

    assert turns == [8, 4, 1]


def in_reverse(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    rows = [model(row) for row in reversed(batch["x"].unbind())]
    return F.cross_entropy(torch.stack(rows), batch["y"])


def with_neighbours(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    rows = model(batch["x"]).unbind()
    return sum((row * rows[at - 1]).sum() for at, row in enumerate(rows))


APART: dict[str, Loss] = {
    "one": lambda m, b: m(b["x"])[0].square().mean(),
    "one of a later micro-batch": lambda m, b: m(b["x"])[5].square().mean() + m(b["x"]).mean(),
    "all but one": lambda m, b: sum(row.exp().sum() for row in m(b["x"])[1:].unbind()),
    "by their numbers": lambda m, b: sum(
        (at + 1) * row.exp().sum() for at, row in enumerate(m(b["x"]))
    ),
    "the first one twice": lambda m, b: sum(row.exp().sum() for row in (*m(b["x"]), m(b["x"])[0])),
    "in reverse": in_reverse,
    "with neighbours": with_neighbours,
    "halves": lambda m, b: m(b["x"])[:4].square().mean() + m(b["x"])[4:].mean(),
}


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("name", APART)
def test_samples_that_are_not_treated_alike_are_refused_where_they_are_taken(name, count):
    with pytest.raises(GraphError, match="depends on their positions in the batch") as caught:
        prepared(APART[name], count)

    assert "test_whole_batch_pieces.py:" in str(caught.value)
    assert any(op in str(caught.value) for op in ("aten.select", "aten.slice", "aten.unbind"))


def of_a_sum_of_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    total = F.cross_entropy(model(batch["x"]), batch["ignored"])
    return torch.where(total > 0.1, total, 0.5 * total)


def of_two_copies(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    errors = model(batch["x"]).std(-1)
    return torch.cat([errors, errors]).square().sum() / len(errors)


def of_masked_sorted_scores(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores, mask = model(batch["x"]).sort(-1).values, (batch["y"] > 1).double()
    masked = (scores.square() * mask.unsqueeze(-1)).sum() / mask.sum()
    return masked + scores[:, 0].square().sum() / len(scores)


OTHERS: dict[str, Loss] = {
    "a branch on the loss": of_a_sum_of_losses,
    "two copies of the samples": of_two_copies,
    "zeros like a gradient of two terms": of_masked_sorted_scores,
    "a loss times a number of the batch": lambda m, b: (
        F.cross_entropy(m(b["x"]), b["ignored"]) * b["k"]
    ),
}


@pytest.mark.slow(but=5)
@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("name", OTHERS)
def test_micro_batches_train_on_the_loss_of_the_whole_batch(name, count):
    assert deviation(OTHERS[name], count) < 1e-12


def with_maxima(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores = model(batch["x"])
    total = scores.detach().amax()
    for row in scores:
        total = total + row.square().sum()
    return total + (-scores.detach()).amax()


def without_a_maximum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores = model(batch["x"])
    largest = (scores.detach() > BETWEEN_LARGEST).double()  # of one sample
    total = scores[0].square().sum() - (10 * largest).amax()
    for at in range(1, len(scores)):
        total = total + scores[at].square().sum()
    return total


def over_itself(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores = model(batch["x"])
    total = sum(row.detach().sum() for row in scores)
    return scores.square().mean() * (total / total) + (total / total)


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("loss", [with_maxima, without_a_maximum, over_itself])
def test_sums_with_maxima_are_those_of_the_whole_batch_or_refused(loss, count):
    try:
        off = deviation(loss, count)
    except GraphError as error:
        assert "cannot be computed from its micro-batches" in str(error)
    else:
        assert off < 1e-12
