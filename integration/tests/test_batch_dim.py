"""Batches whose samples lie along another dim than 0: they train as in plain PyTorch."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from sbp_core.errors import ConfigError, SbpTypeError, SbpValueError
from sbp_core.sbp import S
from sbp_launch import parallelize

#: Time steps of a batch.
LENGTH = 3

SPLIT = {"mesh": 2, "planner": "manual/data_parallel"}


class Sums(nn.Module):
    """Sums up what came before, for much less work than an LSTM: (time, samples, 4) -> itself."""

    def forward(self, x):
        return x.cumsum(0), None


class Tagger(nn.Module):
    """Finds a class for each word: (time, samples, 4) -> (time, samples, 3)."""

    def __init__(self, recurrent=None):
        super().__init__()
        self.recurrent, self.head = recurrent or Sums(), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.recurrent(x)[0])


def batch_of(index, size, length=LENGTH):
    generator = torch.Generator().manual_seed(index)
    return {
        "text": (torch.randn(length, size, 4, generator=generator, dtype=torch.double),),
        "weight": torch.rand(size, generator=generator, dtype=torch.double),
        "labels": torch.randint(3, (length, size), generator=generator),
    }


def loss_of(model, batch):
    labels = batch["labels"]
    found = model(*batch["text"]).view(-1, 3)  # as examples of PyTorch do it
    each = nn.functional.cross_entropy(found, labels.view(-1), reduction="none")
    each = each.view(labels.shape) * (labels >= 0)
    return (each.sum(0) * batch["weight"]).mean(), {"worst": each.amax().detach()}


def made(recurrent=None):
    torch.manual_seed(0)
    model = Tagger(recurrent).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def refused(match, error=ConfigError, loss=loss_of, **given):
    model, optimizer = made()
    with pytest.raises(error, match=match) as caught:
        parallelize(model, loss, batch_of(0, 8), optimizer, **given)
    return str(caught.value)


@pytest.mark.parametrize(
    ("recurrent", "given"),
    [
        (nn.LSTM(4, 4), {"batch_dim": 1}),
        (
            None,
            {
                "batch_dim": {"text.0": 1, "labels": 1, "weight": 0},
                "micro_batches": 2,
                "compare_steps": 2,
            },
        ),
        (
            None,
            {
                "batch_dim": 1,
                "pad_to": {"sizes": (2, 3), "values": {"text.0": 0, "labels": -100}, "dim": 0},
            },
        ),
    ],
    ids=["all tensors", "by name", "padded"],
)
def test_time_first_trains_as_plain_pytorch_does(recurrent, given, caplog):
    model, optimizer = made(copy.deepcopy(recurrent))
    plain, other = copy.deepcopy((model, optimizer))
    lengths = (3, 1) if "pad_to" in given else (3, 3)
    out = io.StringIO()

    with parallelize(model, loss_of, batch_of(0, 10), optimizer, **SPLIT, **given) as step:
        stored = step.strategy.storage
        assert all(stored[name].sbp == (S(0),) for name in ("text.0", "weight", "labels"))
        for index, (size, length) in enumerate(zip((10, 4), lengths, strict=True)):
            batch = batch_of(index, size, length)
            held_out = batch_of(9, 6, length)
            before = copy.deepcopy(batch)
            found = step(batch)
            other.zero_grad()
            wanted, metrics = loss_of(plain, batch)
            wanted.backward()
            other.step()
            assert abs(float(found) - wanted.item()) <= 1e-12
            torch.testing.assert_close(batch, before, rtol=0, atol=0)
            if "micro_batches" not in given:  # whose metrics are means of theirs
                assert abs(float(found.metrics["worst"]) - metrics["worst"].item()) <= 1e-12
            wanted = loss_of(plain, held_out)[0].item()
            assert abs(float(step.evaluate(held_out)) - wanted) <= 1e-12
        step.report(out, max_rows=0)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=1e-12)
    assert ("proved: a loss and gradients of" in out.getvalue()) == ("pad_to" in given)
    assert "numbers of samples" not in caplog.text


def test_a_single_tensor_and_a_second_program_have_dims_of_their_own():
    model = nn.Linear(4, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = batch_of(0, 8)["text"][0]
    losses = [lambda model, x: model(x).square().mean(), lambda model, x: model(x[0]).sum()]
    wanted = [losses[0](model, x).item(), losses[1](model, (x,)).item()]

    with parallelize(model, losses[0], x, optimizer, batch_dim={"batch": 1}, **SPLIT) as step:
        with pytest.raises(ConfigError, match="dim for 'batch', and the batch has no tensor"):
            step.add_step(losses[1], (x,), micro_batches=4)
        second = step.add_step(losses[1], (x,), micro_batches=4, batch_dim={"0": 1})
        with step.no_update(), second.no_update():
            assert abs(float(step(x)) - wanted[0]) <= 1e-12
        assert step.strategy.storage["batch"].sbp == (S(0),)
        assert abs(float(second.evaluate((x,))) - wanted[1]) <= 1e-11


def test_a_dim_or_name_that_is_not_there_is_refused():
    refused("batch_dim=-1", batch_dim=-1)
    refused("batch_dim='time'", batch_dim="time")
    refused("batch_dim=True", batch_dim=True)
    refused("batch_dim=3 is no dim of any tensor of the batch: 'text.0' .3, 8, 4.", batch_dim=3)
    refused("no dim of 'weight'", batch_dim={"weight": 1})
    said = refused("dim for 'label', and the batch has no tensor", batch_dim={"label": 1})
    assert "did you mean 'labels'?" in said
    refused("8 samples(.|\n)*these are time steps", batch_dim=1, micro_batches=3)
    values = {"sizes": (3,), "values": {"labels": 0}}
    refused("dim 1 of 'labels', which pad_to pads, is the dim of", batch_dim=1, pad_to=values)
    refused("loss takes .model.", SbpTypeError, loss=lambda model: model, batch_dim=1)


def test_a_batch_without_the_dim_takes_no_step():
    model, optimizer = made()
    batch, given = batch_of(0, 8), {"batch_dim": {"text.0": 1, "labels": 1}}
    flat = {**batch, "labels": batch["labels"][0]}

    with parallelize(model, loss_of, batch, optimizer, **SPLIT, **given) as step:
        for call in (step, step.evaluate):
            with pytest.raises(SbpValueError, match=r"'labels' of shape \(8,\) has no dim 1"):
                call(flat)
        with pytest.raises(SbpValueError, match="labels"):
            step({name: one for name, one in batch.items() if name != "labels"})
        assert step.steps_done == 0
        assert step(batch).loss.isfinite()
