"""What `parallelize` and its step refuse, and what they say then."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
from plain_training import SIZE, batch_of, loss_of, make_model, make_optimizer
from torch import nn

from sbp_core.errors import (
    CaptureError,
    ConfigError,
    RunError,
    SbpLookupError,
    SbpTypeError,
    SbpValueError,
)
from sbp_launch import parallelize

#: The rest of the first batch.
LABELS = {name: value for name, value in batch_of(0).items() if name != "x"}


def refused(match, error=ConfigError, **given):
    model = given.pop("model", None) or make_model()
    optimizer = given.pop("optimizer", None) or make_optimizer(model)
    batch = given.pop("batch", None) or batch_of(0)
    with pytest.raises(error, match=match) as caught:
        parallelize(model, loss_of, batch, optimizer, **given)
    return str(caught.value)


def test_what_cannot_be_meant_is_refused_before_anything_starts():
    refused("not divide into micro_batches=3(.|\n)*if these are time steps", micro_batches=3)
    refused("micro_batches=0", micro_batches=0)
    refused("batch_is='whole'", batch_is="whole")
    refused("mesh=0 has no ranks", mesh=0)
    refused("an axis without a name", mesh={"": 2})
    refused("4 axes without names", mesh=(1, 1, 1, 2))
    assert "did you mean planner='osdp'" in refused("planner='osdpp'", planner="osdpp")
    refused("planner.memory_byte", planner={"name": "osdp", "memory_byte": 1})
    axis = {"name": "osdp", "axis": "batch"}
    assert "or mesh={'data': 4}" in refused("which is missing", mesh=(2, 2), planner=axis)
    refused("planner is of type NoneType", SbpTypeError, planner=None)
    refused("runtime is the class int", SbpTypeError, runtime=int)
    refused("has no name", cluster={"cores": 2})
    refused("which parallelize takes as its own argument", cluster={"name": "local", "mesh": [2]})
    refused("connects one process a rank", boxing="torch", mesh=2)
    refused("update.clip_norm", update={"clip_norm": -1.0})
    refused("'int8'", compile={"autocast": "int8"})
    refused("compile.bucket_byte", compile={"bucket_byte": 1})
    refused("model is wrapped", SbpTypeError, model=nn.DataParallel(make_model()))
    other = make_optimizer(make_model())
    refused("a parameter that the model does not have", RuntimeError, optimizer=other)


def test_arguments_of_another_type_are_refused():
    model = make_model()
    optimizer = make_optimizer(model)
    refused("model is of type list", model=[model], optimizer=optimizer)
    refused("optimizer is of type list", model=model, optimizer=[optimizer])
    refused("mesh='2x2' is of type str", mesh="2x2")
    refused("the batch has no samples", batch={name: v[:0] for name, v in batch_of(0).items()})
    step = parallelize(model, loss_of, batch_of(0), optimizer)
    with pytest.raises(ConfigError, match="optimizer is the class SGD"):
        step.add_step(loss_of, batch_of(0), torch.optim.SGD)
    with pytest.raises(ConfigError, match="loss is None"):
        step.add_step(None, batch_of(0))


def test_states_that_do_not_fit_are_refused():
    model = make_model()
    step = parallelize(
        model, loss_of, batch_of(0), make_optimizer(model), states={"0.wieght": torch.zeros(1)}
    )
    with pytest.raises(SbpLookupError, match="wieght"):
        step.start()
    with torch.device("meta"):
        model = make_model()
    step = parallelize(model, loss_of, batch_of(0), make_optimizer(model))
    with pytest.raises(SbpValueError, match="has no values"):
        step.start()


def test_a_batch_that_does_not_fit_says_what_to_do():
    model = make_model()
    with parallelize(model, loss_of, batch_of(0), make_optimizer(model), mesh=2) as step:
        with pytest.raises(CaptureError, match=r"same reduction dim(.|\n)*plain_training\.py"):
            step({**batch_of(0), "x": torch.zeros(SIZE, 5, dtype=torch.float64)})
        with pytest.raises(SbpValueError, match="'y' is missing"):
            step({"x": batch_of(0)["x"]})
        with pytest.raises(SbpValueError, match="the example was a mapping with 'x', 'y'"):
            step(tuple(batch_of(0).values()))
        with pytest.raises(SbpValueError, match="the example was a mapping with 'x', 'y'"):
            step.evaluate(tuple(batch_of(0).values()))
        with pytest.raises(CaptureError, match="same reduction dim"):
            step.evaluate({**batch_of(0), "x": torch.zeros(SIZE, 5, dtype=torch.float64)})
        with pytest.raises(
            SbpValueError, match=r"float32(.|\n)*convert it: \.to\(torch\.float64\)$"
        ):
            step({name: value.float() for name, value in batch_of(0).items()})
        with pytest.raises(ConfigError, match="the batch has no samples: 'x' is of shape"):
            step({name: value[:0] for name, value in batch_of(0).items()})
        with pytest.raises(SbpValueError, match="no scalar 'momentum'"):
            step(batch_of(0), momentum=0.5)
        with step.no_update(), pytest.raises(SbpValueError, match="leaves that out"):
            step(batch_of(0), lr=0.5)
        step(batch_of(0))  # none of that ended it


@pytest.mark.parametrize(
    ("environment", "mesh", "match"),
    [
        ({"RANK": "0", "WORLD_SIZE": "3"}, (2, 2), "4 ranks, and torchrun started 3 processes"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, 2, "torchrun started 2 processes"),
    ],
)
def test_the_world_of_processes_has_to_fit(monkeypatch, environment, mesh, match):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    refused(match, mesh=mesh, boxing="local")


def words_loss(model, batch):
    return model(batch["words"]).square().mean()


@pytest.mark.parametrize("in_evaluation", [False, True])
def test_a_step_that_fails_names_the_line_of_the_model(in_evaluation):
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
    good = {"words": torch.zeros(4, dtype=torch.int64)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with (
        pytest.raises(RunError) as caught,
        parallelize(model, words_loss, good, optimizer, mesh=2) as step,
    ):
        (step.evaluate if in_evaluation else step)({"words": torch.full((4,), 7)})

    assert "module '0'" in caught.value.where[0] and Path(__file__).name in caught.value.where[0]
    assert isinstance(caught.value.__cause__, IndexError)


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (CaptureError, lambda step: step({"x": batch_of(0)["x"].to_sparse(), **LABELS})),
        (SbpValueError, lambda step: step({"x": batch_of(0)["x"].to("meta"), **LABELS})),
        (SbpValueError, lambda step: step.evaluate({"x": batch_of(0)["x"].to("meta"), **LABELS})),
        (CaptureError, lambda step: step.evaluate({"x": batch_of(0)["x"].float(), **LABELS})),
        (SbpValueError, lambda step: step(batch_of(0), lr="x")),
        (SbpTypeError, lambda step: step(batch_of(0)["x"], batch_of(0))),
        (ConfigError, lambda step: step.save("a\0b")),
        (CaptureError, torch.inference_mode()(lambda step: step(batch_of(0)))),
    ],
)
def test_what_a_step_refuses_leaves_the_session_as_it_was(error, call):
    model = make_model()
    with parallelize(model, loss_of, batch_of(0), make_optimizer(model), mesh=2) as step:
        before = step.state_dict()
        with pytest.raises(error):
            call(step)

        assert all(torch.equal(before[name], one) for name, one in step.state_dict().items())
        assert step(batch_of(0)).loss.isfinite()


def sequence_loss(model, batch):
    hidden = model(batch["x"])[0][-1]
    return (hidden - batch["y"]).square().mean()


def samples_first(model, batch):
    return sequence_loss(model, batch | {"x": batch["x"].transpose(0, 1)})


@pytest.mark.parametrize(
    ("loss", "time_first", "warned", "given"),
    [
        (sequence_loss, True, True, {"mesh": 2, "planner": "manual/data_parallel"}),
        (sequence_loss, True, False, {}),
        (samples_first, False, False, {"mesh": 2, "planner": "manual/data_parallel"}),
    ],
)
def test_a_batch_whose_time_would_be_cut_is_warned_about(loss, time_first, warned, given, caplog):
    torch.manual_seed(0)
    lstm = nn.LSTM(4, 4).double()
    x, y = torch.randn(6, 8, 4, dtype=torch.double), torch.randn(8, 4, dtype=torch.double)
    wanted = sequence_loss(lstm, {"x": x, "y": y}).item()
    batch = {"x": x if time_first else x.transpose(0, 1), "y": y}
    optimizer = torch.optim.SGD(lstm.parameters(), lr=0.1)

    with parallelize(lstm, loss, batch, optimizer, **given) as step:
        assert abs(float(step(batch)) - wanted) < 1e-12

    assert ("different numbers of samples: 'x' 6, 'y' 8" in caplog.text) == warned


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # multi-threaded, and forks
def test_a_child_that_is_forked_in_the_block_is_refused_and_leaves_the_ranks_to_its_parent():
    model = make_model()
    context = multiprocessing.get_context("fork")
    said = context.SimpleQueue()

    def run(step):
        for call in (
            lambda: step(batch_of(0)),
            lambda: step.evaluate(batch_of(0)),
            lambda: step.load_state_dict({}),
            lambda: step.session.step({}, {}),
        ):
            try:
                call()
                said.put("went on")
            except Exception as error:
                said.put(f"{type(error).__name__}: {error}")
        step.close()

    with parallelize(model, loss_of, batch_of(0), make_optimizer(model), mesh=2) as step:
        step(batch_of(0))
        child = context.Process(target=run, args=(step,))
        child.start()
        found = [said.get() for _ in range(4)]
        child.join()
        step(batch_of(0))
        step(batch_of(0))

    assert all(one.startswith("RunError: the ranks of this session are in") for one in found), found
    assert step.steps_done == 3


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # multi-threaded, and forks
def test_a_child_may_start_what_its_parent_has_planned():
    model = make_model()
    step = parallelize(model, loss_of, batch_of(0), make_optimizer(model), mesh=2)
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()

    def run():
        with step:
            found.put([float(step(batch_of(index))) for index in range(2)])

    child = context.Process(target=run)
    child.start()
    child.join()
    with step:
        assert found.get() == [float(step(batch_of(index))) for index in range(2)]
