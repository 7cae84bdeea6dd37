"""What no guard sees is found by execution, and what a loss does not read takes no capture."""

from __future__ import annotations

import queue

import pytest
import torch
from one_layer import Twins
from torch import nn

from sbp_core.errors import CaptureError, RunError
from sbp_launch import parallelize


class Hidden:
    """Keeps a number where no guard looks."""

    def __init__(self):
        self.queue = queue.Queue()
        self.put(1.0)

    def put(self, value):
        while not self.queue.empty():
            self.queue.get()
        self.queue.put(value)

    def read(self):
        value = self.queue.get()
        self.queue.put(value)
        return value


HIDDEN = Hidden()


def hidden_loss(model, batch):
    return model(batch).square().mean() * HIDDEN.read()


def test_a_change_that_nobody_sees_is_told_at_the_end():
    twins = Twins()
    HIDDEN.put(1.0)

    step = parallelize(twins.models[0], hidden_loss, twins.batch, twins.optimizers[0]).start()
    step(twins.batch)
    HIDDEN.put(3.0)
    step(twins.batch)
    with pytest.warns(RuntimeWarning, match=r"a different step from the captured one(.|\n)*mul"):
        step.close()


def test_a_change_that_nobody_sees_is_found_in_time(monkeypatch):
    monkeypatch.setattr("sbp_launch.step.unseen._PATIENCE", 0.0)
    twins = Twins()
    HIDDEN.put(1.0)

    with parallelize(twins.models[0], hidden_loss, twins.batch, twins.optimizers[0]) as step:
        step(twins.batch)
        step._forms._unseen._due_s = 0.0
        step(twins.batch)
        HIDDEN.put(3.0)
        step._forms._unseen._due_s = 0.0
        for _ in range(2):  # it is not forgotten
            with pytest.raises(RunError, match="a different step from the captured one"):
                step(twins.batch)
        HIDDEN.put(1.0)
        step(twins.batch)
        assert step.steps_done == 3


def test_what_changes_behind_the_last_step_is_no_change_of_it():
    twins = Twins()
    HIDDEN.put(1.0)

    with parallelize(twins.models[0], hidden_loss, twins.batch, twins.optimizers[0]) as step:
        step(twins.batch)
        twins.models[0].requires_grad_(False)
        twins.models[0].eval()


# False alarms


class Trainer:
    """Has a loss as a method, and counters that the loss does not read."""

    def __init__(self, optimizer):
        self.optimizer, self.history, self.best, self.steps = optimizer, [], 9.0, 0
        self.scale = 1.0

    def loss(self, model, batch):
        return model(batch).square().mean() * getattr(self, "scale", 1.0)

    def note(self, out):
        self.steps += 1
        self.history.append(float(out))
        self.best = min(self.best, float(out))


def test_what_the_loss_does_not_read_takes_no_capture(monkeypatch):
    twins = Twins()
    trainer = Trainer(twins.optimizers[0])

    def captures(*_):
        raise AssertionError("it is captured again")

    with parallelize(twins.models[0], trainer.loss, twins.batch, trainer.optimizer) as step:
        monkeypatch.setattr("sbp_launch.step.step_capture.StepCapture.__call__", captures)
        for _ in range(5):
            trainer.note(step(twins.batch))
        monkeypatch.undo()


def test_a_model_of_another_step_is_no_constant_also_where_nobody_sees_it():
    judge = nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(judge.parameters(), lr=0.1)
    twins = Twins()

    def loss(model, batch):
        return HIDDEN.read()(model(batch)).square().mean()

    with parallelize(judge, lambda m, b: m(b).mean(), twins.batch[:, :3], optimizer):
        HIDDEN.put(judge)
        with pytest.raises(CaptureError, match="'weight', which another step trains"):
            parallelize(twins.models[0], loss, twins.batch, twins.optimizers[0])


def test_an_attribute_of_a_tensor_of_the_batch_is_refused():
    twins = Twins()
    twins.batch.scale = 2.0

    def loss(model, batch):
        return model(batch).square().mean() * getattr(batch, "scale", 1.0)

    with pytest.raises(CaptureError, match="'batch' of the batch has an attribute 'scale'"):
        parallelize(twins.models[0], loss, twins.batch, twins.optimizers[0])
