"""Mistakes that whole programs showed, each with its story, and compared with plain PyTorch."""

from __future__ import annotations

import pytest
from plain_training import assert_trained_alike, batch_of, eager_step, make_model, make_optimizer

from sbp_launch import parallelize


def _mean_loss(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()


@pytest.mark.slow(but=5)
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(
    "pins",
    [
        {"0.weight": {"data": "B", "tensor": "S(0)"}},
        {"0.bias": {"data": "B", "tensor": "S(0)"}},
        {name: {"data": "B", "tensor": "S(0)"} for name in ("0.weight", "4.weight")},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:the model is in eval mode")
def test_pinned_shards_are_sent_before_all_ranks_have_met(pins, micro_batches):
    """A parameter that is split on one axis, with its states on both, ended in an IndexError.

    The optimizer's part of the parameter is sent ahead of forward, before the first all-reduce of
    all ranks. Ranks 0 and 3 hold theirs, ranks 1 and 2 exchange them. Up to that all-reduce, the
    check lets rank 0 stand for all four, which do the same. But nobody hears of rank 0, so that its
    messages were not noted, and those of rank 2 were looked for in an empty list.
    """
    model, eager = make_model(), make_model()
    optimizer, eager_optimizer = make_optimizer(model), make_optimizer(eager)
    given = {"planner": "manual/zero", "mesh": (2, 2), "micro_batches": micro_batches}

    with parallelize(model.eval(), _mean_loss, batch_of(0), optimizer, pins=pins, **given) as step:
        for index in range(3):
            step(batch_of(index))
            eager_step(eager.eval(), eager_optimizer, batch_of(index))

        assert_trained_alike(step, eager, eager_optimizer)
