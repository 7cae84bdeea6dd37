"""Batches whose dim 0 is time, where nobody has said so: warned about, or refused; never wrong."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from sbp_core.errors import ConfigError
from sbp_launch import MicroBatches, parallelize

SPLIT = {"mesh": 2, "planner": "manual/data_parallel"}

#: (time, samples, features).
BATCH = torch.randn(6, 10, 4, dtype=torch.double, generator=torch.Generator().manual_seed(0))

KINDS = {
    "nn.LSTM": lambda: nn.LSTM(4, 4, num_layers=2),
    "nn.GRU": lambda: nn.GRU(4, 4, bidirectional=True),
    "nn.RNN": lambda: nn.RNN(4, 4),
    "nn.MultiheadAttention": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0),
}


class Front(nn.Module):
    """A layer before a sequence model, as an embedding, with or without exchanged dims."""

    def __init__(self, inner: nn.Module, transposes: bool) -> None:
        super().__init__()
        self.first, self.inner, self.transposes = nn.Linear(4, 4), inner, transposes

    def forward(self, x):
        x = torch.relu(self.first(x))
        found = self.inner(x.transpose(0, 1) if self.transposes else x)
        return found[0] if isinstance(found, tuple) else found


def loss_of(model, batch):
    return model(batch).square().mean()


def made(kind: str, transposes: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Front(KINDS[kind](), transposes).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def assert_trained_as_plain(model, optimizer, batch, **given) -> None:
    plain, other = copy.deepcopy((model, optimizer))
    with parallelize(model, loss_of, batch, optimizer, **given) as step:
        for _ in range(3):
            other.zero_grad()
            wanted = loss_of(plain, batch)
            wanted.backward()
            other.step()
            assert abs(float(step(batch)) - wanted.item()) <= 1e-12
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_time_that_ranks_cut_is_warned_about_once_and_the_numbers_are_right(kind, caplog):
    assert_trained_as_plain(*made(kind), BATCH, **SPLIT)

    (told,) = (one.message for one in caplog.records if "as time" in one.message)
    path = "inner.self_attn" if kind == "nn.MultiheadAttention" else "inner"
    assert told.startswith(f"{kind} {path!r} takes dim 0 of the batch as time (")
    assert "ranks split this dim" in told
    assert told.endswith("give the dim of the samples, such as batch_dim=1")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["transposed", "batch_dim", "one rank", "batch_first"])
def test_what_cuts_no_time_is_not_warned_about(kind, how, caplog):
    model, optimizer = made(kind, transposes=how == "transposed")
    given = {"one rank": {}, "batch_dim": {**SPLIT, "batch_dim": 1}}.get(how, SPLIT)
    if how == "batch_first":
        inner = getattr(model.inner, "self_attn", model.inner)
        inner.batch_first = True

    assert_trained_as_plain(model, optimizer, BATCH, **given)

    assert "as time" not in caplog.text


@pytest.mark.parametrize("loss_is", ["whole_batch", "mean_of_micro_batches", "each_micro_batch"])
def test_micro_batches_that_would_cut_a_recurrent_state_are_refused(loss_is):
    model, optimizer = made("nn.LSTM")

    with pytest.raises(ConfigError, match="micro_batches=2 would cut it") as refused:
        parallelize(model, loss_of, BATCH, optimizer, micro_batches=MicroBatches(2, loss=loss_is))

    assert "nn.LSTM 'inner' takes dim 0 of the batch as time" in refused.value.what
    assert refused.value.todo.startswith("give the dim of the samples, such as batch_dim=1")
    given = {"micro_batches": 2, "batch_dim": 1}
    if loss_is != "each_micro_batch":  # which trains otherwise
        assert_trained_as_plain(model, optimizer, BATCH, **SPLIT, **given)


def test_positions_that_micro_batches_cut_are_warned_about(caplog):
    model, optimizer = made("nn.MultiheadAttention")
    given = {"micro_batches": MicroBatches(2, loss="mean_of_micro_batches")}

    parallelize(model, loss_of, BATCH, optimizer, **given)

    assert "micro-batches split this dim, so each sees only some of the time steps" in caplog.text
