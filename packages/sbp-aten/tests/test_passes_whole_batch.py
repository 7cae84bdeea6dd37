from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from hypothesis import given, settings
from hypothesis import strategies as st
from tagger import (
    IGNORED,
    PLACES,
    RATE,
    WHOLE,
    Batch,
    Loss,
    Tagger,
    captured,
    deviation,
    entropy,
    make_batch,
    make_model,
    mask_of,
    masks_of,
)
from torch import Tensor, nn

from sbp_aten.passes import prepare_step
from sbp_core.errors import GraphError
from sbp_core.graph import Phase, Rate
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.runtime.single import run_graph
from sbp_torch.testing.programs import graph_states, split_batch


def of_places(model: Tagger, batch: Batch) -> Tensor:
    """Return a loss of each place: samples, places."""
    return (model(batch["x"]) - 1).square().mean(-1)


def masked_squares(model: Tagger, batch: Batch) -> Tensor:
    mask = mask_of(batch)
    return (of_places(model, batch) * mask).sum() / mask.sum().clamp(min=1)


def of_each_dim(model: Tagger, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]).transpose(1, 2), batch["y"])


def weights_that_add_up_to_one(model: Tagger, batch: Batch) -> Tensor:
    mask = mask_of(batch)
    return (of_places(model, batch) * (mask / mask.sum())).sum()


def a_mean_over_a_mean(model: Tagger, batch: Batch) -> Tensor:
    mask = mask_of(batch)
    return (of_places(model, batch) * mask).mean() / mask.mean()


def with_penalties(model: Tagger, batch: Batch) -> Tensor:
    penalty = model.head.weight.square().sum() + model.scale.weight.square().mean()
    return entropy(model, batch) + 0.01 * penalty + 0.1 * model.embed.weight.abs().mean()


def two_of_one_mask(model: Tagger, batch: Batch) -> Tensor:
    mask, scores = mask_of(batch), model(batch["x"])
    squares, sizes = scores.square().mean(-1), scores.abs().mean(-1)
    return (squares * mask).sum() / mask.sum() + 0.3 * (sizes * mask).sum() / mask.sum()


def two_passes(model: Tagger, batch: Batch) -> Tensor:
    return entropy(model, batch) + 0.5 * model.scale(model.trunk(batch["x"])).square().mean()


def a_learned_factor(model: Tagger, batch: Batch) -> Tensor:
    return entropy(model, batch) * model.scale.bias.exp().sum()


def of_chosen_places(model: Tagger, batch: Batch) -> Tensor:
    losses, mask = of_places(model, batch), mask_of(batch)
    return torch.where(mask > 0, losses, torch.zeros_like(losses)).sum() / mask.sum()


def weights_twice(model: Tagger, batch: Batch) -> Tensor:
    weights = mask_of(batch) / mask_of(batch).sum()
    return (of_places(model, batch) * weights * weights).sum()


def behind_zeros(model: Tagger, batch: Batch) -> Tensor:
    first = torch.zeros(len(batch["x"]), 1, 8, dtype=torch.float64)
    states = torch.cat([first, model.trunk(batch["x"])[:, :-1]], 1)
    return F.cross_entropy(model.head(states).flatten(0, 1), batch["y"].flatten())


def with_metrics(model: Tagger, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    loss, valid = entropy(model, batch), batch["y"] != IGNORED
    right = (model(batch["x"]).argmax(-1) == batch["y"]) & valid
    accuracy = right.sum() / valid.sum()
    return loss, {"accuracy": accuracy, "perplexity": loss.exp(), "tokens": valid.sum()}


RATIOS: Mapping[str, Loss] = {
    "ignored targets": entropy,
    "class weights": lambda m, b: entropy(m, b, weight=m.classes),
    "label smoothing": lambda m, b: entropy(m, b, label_smoothing=0.1),
    "weights, smoothed": lambda m, b: entropy(m, b, weight=m.classes, label_smoothing=0.1),
    "a loss of each token": lambda m, b: (
        entropy(m, b, reduction="none").sum() / (b["y"] != IGNORED).sum()
    ),
    "targets of two dims": of_each_dim,
    "masked squares": masked_squares,
    "normed weights": weights_that_add_up_to_one,
    "a mean over a mean": a_mean_over_a_mean,
    "penalties": with_penalties,
    "two terms of one mask": two_of_one_mask,
    "two passes": two_passes,
    "a learned factor": a_learned_factor,
    "chosen places": of_chosen_places,
    "normed weights twice": weights_twice,
    "states that begin with zeros": behind_zeros,
    "metrics": with_metrics,
}


def of_the_root(model: Tagger, batch: Batch) -> Tensor:
    return of_places(model, batch).mean().sqrt()


def a_learned_divisor(model: Tagger, batch: Batch) -> Tensor:
    gate = model.scale(model.trunk(batch["x"])).sigmoid().squeeze(-1)
    return (of_places(model, batch) * gate).sum() / gate.sum()


def of_two_masks(model: Tagger, batch: Batch) -> Tensor:
    scores = model(batch["x"])
    squares, mask = scores.square().mean(-1), mask_of(batch)
    other = (batch["x"] > 2).double()
    return (squares * mask).sum() / mask.sum() + (squares * other).sum() / (other.sum() + 1)


def of_two_views(model: Tagger, batch: Batch) -> Tensor:
    first, second = model(torch.cat([batch["x"], batch["x"].flip(1)])).chunk(2)
    return (first - second).square().mean() + entropy(model, batch, reduction="sum") / 7


def of_last_places(model: Tagger, batch: Batch) -> Tensor:
    last = (batch["y"] != IGNORED).sum(1).clamp(min=1) - 1
    return model(batch["x"])[torch.arange(len(last)), last].square().mean()


#: Losses that are no mean of those of micro-batches, nor one ratio of sums.
OTHERS: Mapping[str, Loss] = {
    "a root of a mean": of_the_root,
    "a learned divisor": a_learned_divisor,
    "two masks": of_two_masks,
    "a number of Python": lambda m, b: of_places(m, b).sum() / len(b["x"]),
    "one sample less": lambda m, b: of_places(m, b).sum() / (len(b["x"]) - 1),
    "a sum and a mean": lambda m, b: of_places(m, b).sum() + of_places(m, b).mean(),
    "two views": of_two_views,
    "last places": of_last_places,
    "cross-entropy and a mean": lambda m, b: entropy(m, b) + 0.1 * m(b["x"]).square().mean(),
    "scores over a number": lambda m, b: F.cross_entropy(
        (m(b["x"]) / 30).tanh().flatten(0, 1) * 30, b["y"].flatten()
    ),
}

#: Those of which PyTorch computes no gradients where no target counts.
FILLED = ("ignored targets", "class weights", "label smoothing", "weights, smoothed")

MEANS: Mapping[str, Loss] = {
    "squares": lambda m, b: m(b["x"]).square().mean(),
    "a mean of means of samples": lambda m, b: (
        (of_places(m, b) * mask_of(b)).sum(1) / mask_of(b).sum(1).clamp(min=1)
    ).mean(),
    "a penalty": lambda m, b: of_places(m, b).mean() + m.head.weight.square().sum(),
}


@pytest.mark.slow(but=8)
@pytest.mark.parametrize("samples", [4, 8], ids="{} samples".format)
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", [*RATIOS, *OTHERS])
def test_micro_batches_train_on_the_loss_of_the_whole_batch(name, count, samples):
    batch = make_batch(masks_of(samples))

    assert deviation({**RATIOS, **OTHERS}[name], count, batch) < 1e-9


def test_the_mean_of_micro_batches_is_another_number():
    batch, model = make_batch(masks_of(8)), make_model()
    parts = split_batch(batch, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    graph = prepare_step(captured(entropy, 4), 2)
    states = graph_states(graph, initial_states(model, optimizer))

    found, _ = run_graph(graph, states, parts, {"lr": RATE})

    with torch.no_grad():
        mean = torch.stack([entropy(model, part) for part in parts]).mean()
        whole = entropy(model, batch)
    assert float(found["loss"]) == pytest.approx(float(mean))
    assert abs(float(mean - whole)) > 1e-3


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("samples", [1, 2])
def test_means_are_those_of_the_whole_batch(name, samples):
    assert deviation(MEANS[name], 4, make_batch(masks_of(4 * samples))) < 1e-9


def test_gradients_of_the_whole_batch_are_clipped():
    batch = make_batch(masks_of(8))

    assert deviation(with_penalties, 4, batch, clip_norm=0.05) < 1e-9


def test_a_sum_over_the_batch_is_that_of_the_whole_batch():
    batch = make_batch(masks_of(8))

    assert deviation(lambda m, b: 0.3 * of_places(m, b).sum(), 4, batch) < 1e-9


@pytest.mark.slow
@settings(deadline=None, max_examples=20)
@given(data=st.data(), count=st.sampled_from([2, 3, 4]), name=st.sampled_from(sorted(RATIOS)))
def test_random_masks_train_on_the_loss_of_the_whole_batch(data, count, name):
    size = 2 * count * PLACES
    drawn = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    masks = torch.tensor(drawn).view(2 * count, PLACES)
    masks[data.draw(st.integers(0, 2 * count - 1)), 0] = True

    assert deviation(RATIOS[name], count, make_batch(masks)) < 1e-9


@pytest.mark.parametrize("name", FILLED)
def test_a_batch_without_a_valid_token_has_no_loss_and_changes_nothing_as_in_pytorch(name):
    batch = make_batch(torch.zeros(4, PLACES, dtype=torch.bool))
    graph, model = prepare_step(captured(RATIOS[name], 4), 2, loss=WHOLE), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    states = graph_states(graph, initial_states(model, optimizer))

    found, new = run_graph(graph, states, split_batch(batch, 2), {"lr": RATE})

    assert bool(found["loss"].isnan()) and bool(entropy(model, batch).isnan())
    assert all(torch.equal(new[name], value) for name, value in model.named_parameters())


def test_denominators_of_narrow_floats_do_not_make_gradients_larger():
    graph = prepare_step(captured(entropy, 4), 2, loss=WHOLE)

    filled = [n.args[2] for n in graph.nodes if n.outputs[0].endswith(".nominal")]

    # What a micro-batch divides by is near the number of targets of the whole batch, and not one.
    assert filled == [16] and 16 <= 4 * PLACES < 32


def contrast(model: Tagger, batch: Batch) -> Tensor:
    found = model.trunk(batch["x"]).mean(1)
    return F.cross_entropy(found @ found.T, torch.arange(len(found)))


def clipped_on_the_way(model: Tagger, batch: Batch) -> Tensor:
    found = model.trunk(batch["x"])
    found.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return F.cross_entropy(model.head(found).flatten(0, 1), batch["y"].flatten())


def centred(model: Tagger, batch: Batch) -> Tensor:
    losses = of_places(model, batch)
    return (losses - losses.mean()).square().mean()


def later_samples_more(model: Tagger, batch: Batch) -> Tensor:
    return (of_places(model, batch).sum(1) * torch.arange(len(batch["x"]))).mean()


def of_some(model: Tagger, batch: Batch) -> Tensor:
    return of_places(model, batch)[: len(batch["x"]) // 2].mean()


def normalised(model: Tagger, batch: Batch) -> Tensor:
    return F.batch_norm(of_places(model, batch), None, None, training=True).square().mean()


def a_product_of_centred(model: Tagger, batch: Batch) -> Tensor:
    losses = of_places(model, batch)
    apart = losses - losses.mean()
    return (apart * (losses - losses.mean(1).mean())).mean()


def in_reverse(model: Tagger, batch: Batch) -> Tensor:
    last = torch.zeros_like(batch["x"][:, 0])
    return model(batch["x"])[torch.arange(len(last) - 1, -1, -1), last].square().mean()


_MEET, _KNOWN = "combines samples, or depends on", "combines samples with a result of the whole"

REFUSED: Mapping[str, tuple[Loss, str, str]] = {
    "samples are compared": (contrast, _MEET, "aten.mm.default"),
    "samples of which the mean is taken away": (centred, _KNOWN, "aten.pow"),
    "numbers of samples": (later_samples_more, _MEET, "aten.mul.Tensor"),
    "a hook that is not linear": (clipped_on_the_way, _KNOWN, "aten.clamp"),
    "a product of what may cancel": (a_product_of_centred, _KNOWN, "aten.mul.Tensor"),
    "samples in reverse": (in_reverse, _MEET, "aten.index.Tensor"),
    "some samples": (of_some, _MEET, "aten.slice.Tensor"),
    "batch normalisation": (normalised, "uses statistics of all samples", "batch_norm"),
}


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_of_the_whole_batch_is_refused_with_its_line(name):
    loss, what, op = REFUSED[name]
    graph = captured(loss, 4)

    with pytest.raises(GraphError) as caught:
        prepare_step(graph, 2, loss=WHOLE)

    text = str(caught.value)
    assert what in text and op in text
    assert re.search(r"tests/(test_passes_whole_batch|tagger)\.py:\d", text)
    assert "trainer.loss=mean_of_micro_batches" in text
    assert prepare_step(graph, 2).num_micro_batches == 2
    assert prepare_step(graph, 1, loss=WHOLE).num_micro_batches == 1


def test_a_metric_that_is_none_of_the_whole_batch_is_refused_by_name():
    def loss(model: Tagger, batch: Batch) -> Any:
        losses = of_places(model, batch)
        return losses.mean(), {"spread": losses.std()}

    with pytest.raises(GraphError, match="metric 'spread' of the whole batch cannot be computed"):
        prepare_step(captured(loss, 4), 2, loss=WHOLE)


def test_a_buffer_with_an_entry_for_each_sample_is_refused():
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("last", torch.zeros(4, 2))

        def forward(self, x: Tensor) -> Tensor:
            found = self.layer(x)
            self.last = found.detach()
            return found

    model, batch = Remembers().double(), {"x": torch.randn(4, 3, dtype=torch.float64)}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    graph = capture(model, lambda m, b: m(b["x"]).square().mean(), batch, optimizer)

    with pytest.raises(GraphError, match=r"the new value of 'last' .* a number for each sample"):
        prepare_step(graph, 2, loss=WHOLE)


def test_zero_over_zero_is_that_of_pytorch_where_a_mask_is_a_factor():
    def loss(model: Tagger, batch: Batch) -> Tensor:
        mask = batch["y"] != IGNORED
        return (of_places(model, batch) * mask).sum() / mask.sum()

    batch, model = make_batch(torch.zeros(4, PLACES, dtype=torch.bool)), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    graph = prepare_step(captured(loss, 4), 2, loss=WHOLE)
    states = graph_states(graph, initial_states(model, optimizer))

    _, new = run_graph(graph, states, split_batch(batch, 2), {"lr": RATE})

    loss(model, batch).backward()
    assert bool(model.head.weight.grad.isnan().all()) and bool(new["head.weight"].isnan().all())


def test_a_buffer_is_that_of_the_whole_batch():
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("steps", torch.zeros(()))
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            self.steps = self.steps + 1
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            return self.layer(x) * torch.exp(-self.steps)

    model, batch = Counts().double(), {"x": torch.randn(6, 3, dtype=torch.float64)}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"]).square().mean()

    graph = prepare_step(capture(model, loss, batch, optimizer), 3, loss=WHOLE)
    states = graph_states(graph, initial_states(model, optimizer))
    for _ in range(2):
        _, states = run_graph(graph, states, split_batch(batch, 3), {"lr": RATE})
        loss(model, batch)

    assert float(states["steps"]) == 2.0
    assert torch.allclose(states["mean"], model.mean, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_micro_batches_draw_the_random_numbers_of_the_whole_batch():
    def loss(model: Tagger, batch: Batch) -> Tensor:
        noise = 1 + torch.rand(8, dtype=torch.float64)
        return F.cross_entropy(
            model.head(F.dropout(model.trunk(batch["x"]) * noise)).flatten(0, 1),
            batch["y"].flatten(),
        )

    model, batch = make_model(), make_batch(masks_of(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    made = {}
    for count in (1, 2, 8):
        graph = prepare_step(capture(model, loss, batch, optimizer), count, loss=WHOLE)
        states = graph_states(graph, initial_states(model, optimizer))
        scalars = {"lr": RATE, "seed": 3, "step": 5}
        made[count] = run_graph(graph, states, split_batch(batch, count), scalars)

    whole, wanted = made.pop(1)
    for found, states in made.values():
        assert torch.allclose(found["loss"], whole["loss"], rtol=0, atol=1e-12)
        for name, value in model.named_parameters():
            assert torch.allclose(states[name], wanted[name], rtol=0, atol=1e-12), value.shape


def test_counts_are_accumulated_as_integers():
    graph = prepare_step(captured(with_metrics, 4), 2, loss=WHOLE)

    sums = [node for node in graph.nodes if node.op == "sbp.accumulate"]
    counts = [n.args[1] for n in sums if graph.tensor(n.outputs[0]).dtype == "int64"]
    assert counts and all(isinstance(how, int) for how in counts)


def test_what_corrects_the_gradients_is_computed_where_the_total_is_before_the_update():
    # On several stages all others would wait for the update of the one that computes it.
    graph = prepare_step(captured(entropy, 4), 2, loss=WHOLE)

    ratios = {
        maker.name: maker
        for node in graph.nodes
        if node.phase is Phase.OPTIMIZER and node.op == "aten.div.Tensor"
        for value in node.inputs()
        if (maker := graph.producers.get(value)) and graph.tensor(value).shape == ()
    }

    (ratio,) = ratios.values()
    assert (ratio.phase, ratio.rate) == (Phase.FORWARD, Rate.STEP)
