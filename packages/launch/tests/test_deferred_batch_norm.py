"""`compile.passes.deferred_batch_norm` through `parallelize`: proved, and compared with PyTorch."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn
from torch.nn import functional

from sbp_core.errors import GraphError
from sbp_launch import MicroBatches, parallelize
from sbp_launch.planning import proving
from sbp_launch.planning.one_device import DeferredBatchNorm

pytest.importorskip("sbp_planner", reason="parallelize asks for a planner")

DEFERRED = {"passes": {"deferred_batch_norm": True}}

LAYOUTS = {
    "data": {"mesh": 2, "planner": "manual/zero"},
    "stages": {"mesh": {"pipe": 2}, "planner": "manual/pipeline"},
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def program():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.BatchNorm1d(4), nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
    ).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(model, batch):
    weights = batch["t"].square()
    return ((model(batch["x"]) - 1).square() * weights).sum() / weights.sum()


def data(at):
    generator = torch.Generator().manual_seed(at)
    draw = {"generator": generator, "dtype": torch.float64}
    return {"x": torch.randn(16, 4, **draw) + at, "t": torch.randn(16, 3, **draw)}


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss_is", ["whole_batch", "mean_of_micro_batches", "each_micro_batch"])
def test_a_step_is_proved_and_its_losses_are_those_of_one_device(loss_is, layout):
    model, optimizer = program()
    per_update = 2 if loss_is == "each_micro_batch" else 1
    cut = MicroBatches(4, loss=loss_is, per_update=per_update)
    text, how = io.StringIO(), dict(LAYOUTS[layout])
    if per_update > 1 and layout == "stages":
        how["planner"] = {"name": "manual/pipeline", "pipeline": "2bw"}

    with parallelize(
        model,
        loss_of,
        data(0),
        optimizer,
        **how,
        micro_batches=cut,
        compile=DEFERRED,
        compare_steps=3,
    ) as step:
        for at in range(3):
            step(data(at))
        states = step.model_state_dict()
        step.report(text, max_rows=0)

    told = " ".join(text.getvalue().split())
    assert "proved in" in told and "not proved" not in told
    assert float(told.partition("3 steps: ")[2].split()[0]) < 1e-12
    norm, num_updates = nn.BatchNorm1d(4).double(), 4 // per_update if per_update > 1 else 1
    for at in range(3):
        for mini_batch in data(at)["x"].chunk(num_updates):
            norm(mini_batch)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(states[f"0.{name}"], norm.state_dict()[name])


def test_a_proof_knows_what_is_meant(monkeypatch):
    model, optimizer = program()
    monkeypatch.setattr(proving, "_meant", lambda captured, settings: captured)

    with pytest.raises(GraphError, match="gives another"):
        parallelize(model, loss_of, data(0), optimizer, micro_batches=2, compile=DEFERRED)


def test_without_the_setting_the_whole_batch_is_refused_with_the_way_out():
    model, optimizer = program()

    with pytest.raises(GraphError, match="deferred_batch_norm") as caught:
        parallelize(model, loss_of, data(0), optimizer, micro_batches=2)

    assert "compile={'passes': {'deferred_batch_norm': True}}" in str(caught.value)


def test_one_device_normalises_micro_batches_apart_and_tracks_the_whole():
    norm, other = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    x = torch.randn(8, 4)

    with DeferredBatchNorm(2):
        found = norm(x)
        norm.eval()(x)

    parts = [functional.batch_norm(one, None, None, training=True) for one in x.chunk(2)]
    torch.testing.assert_close(found, torch.cat(parts))
    other(x)
    for name, value in other.state_dict().items():
        torch.testing.assert_close(norm.state_dict()[name], value)
