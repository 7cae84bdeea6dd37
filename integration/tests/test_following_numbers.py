"""Floats that a loop changes and forward reads are inputs of the step, or forms by their value."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from sbp_core.errors import CaptureError, RunError
from sbp_launch import parallelize

LAYOUTS = (
    {},
    {"mesh": 4, "planner": "manual/zero"},
    {"mesh": (2, 2), "micro_batches": 2, "pins": {"body.weight": {"tensor": "S(0)"}}},
    {"mesh": {"pipe": 2}, "micro_batches": 4, "planner": "manual/pipeline"},
)


def batch(index, size=8):
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(size, 6, generator=generator, dtype=torch.float64)
    return {"x": x, "noise": torch.randn(size, 3, generator=generator, dtype=torch.float64)}


class Vae(nn.Module):
    """A small variational autoencoder, and a temperature of its own."""

    def __init__(self):
        super().__init__()
        self.body, self.mean, self.scale = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 3)
        self.head = nn.Linear(3, 6)
        self.temperature = 1.0

    def forward(self, x, noise):
        hidden = self.body(x).tanh()
        mean, log_scale = self.mean(hidden), self.scale(hidden)
        made = self.head((mean + noise * log_scale.exp()).tanh()) / self.temperature
        return made, (mean.square() + (2 * log_scale).exp() - 2 * log_scale - 1) / 2


class Twins:
    """One program by `parallelize`, and one by plain PyTorch; they share the numbers `of`."""

    def __init__(self, loss=None):
        torch.manual_seed(0)
        self.of = SimpleNamespace(beta=0.0, gamma=1.0)
        self.models = [Vae().double()]
        self.models.append(copy.deepcopy(self.models[0]))
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in self.models]
        of = self.of

        def elbo(model, batch):
            made, divergence = model(batch["x"], batch["noise"])
            error = (made - batch["x"]).square().mean()
            return of.gamma * error + of.beta * divergence.mean()

        self.loss = elbo if loss is None else lambda model, batch: loss(of, model, batch)

    def start(self, **layout):
        return parallelize(self.models[0], self.loss, batch(0), self.optimizers[0], **layout)

    def step(self, step, index, size=8):
        """Take a step with both, whose losses are equal."""
        found = float(step(batch(index, size)))
        self.optimizers[1].zero_grad()
        wanted = self.loss(self.models[1], batch(index, size))
        wanted.backward()
        self.optimizers[1].step()
        assert found == pytest.approx(wanted.item(), rel=0, abs=1e-12, nan_ok=True)

    def assert_equal(self):
        found, wanted = (model.state_dict() for model in self.models)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_annealing_takes_two_forms(layout):
    twins = Twins()

    with twins.start(**layout) as step:
        for index in range(200):
            twins.of.beta = min(1.0, index / 100)
            twins.step(step, index)
        assert len(step.forms) == 2
        assert step.evaluate(batch(0)).loss == pytest.approx(
            twins.loss(twins.models[1], batch(0)).item(), abs=1e-11
        )
        twins.assert_equal()
    twins.assert_equal()


def _noise(of, model, batch):
    return model(batch["x"], batch["noise"])[0]


#: What a loss may do with a number, and whether that makes one form for all its values.
USES = {
    "times": (lambda beta, y: y * beta, True),
    "two times": (lambda beta, y: y * (2 * beta), True),
    "one minus": (lambda beta, y: y * beta + y.square() * (1 - beta), True),
    "minus": (lambda beta, y: y * -beta - beta, True),
    "a third": (lambda beta, y: y * (beta / 3), True),
    "squared": (lambda beta, y: y * beta**2, True),
    "a power of two": (lambda beta, y: y * 2**beta, True),
    "divided": (lambda beta, y: y / beta, True),
    "subtracted from": (lambda beta, y: (beta - y).square(), True),
    "softmax": (lambda beta, y: functional.softmax(y / beta, -1).square(), True),
    "mul": (lambda beta, y: y.mul(beta), True),
    "in place": (lambda beta, y: y.clone().mul_(beta), True),
    "full_like": (lambda beta, y: y * torch.full_like(y, beta), True),
    "clamp": (lambda beta, y: y.clamp(max=beta), True),
    "masked_fill": (lambda beta, y: y.masked_fill(y > beta, beta).square(), True),
    "leaky_relu": (lambda beta, y: functional.leaky_relu(y, beta), True),
    "a sum": (lambda beta, y: y * sum([beta, abs(beta), 1.0]), True),
    "autocast": (lambda beta, y: _in_bfloat16(y * beta, beta).to(y.dtype), True),
    "text that nobody reads": (lambda beta, y: (f"{beta:.3f}" and y) * beta, False),
    "alpha": (lambda beta, y: torch.add(y, y.square(), alpha=beta), False),
    "a tensor": (lambda beta, y: y * torch.tensor(beta), False),
    "full": (lambda beta, y: y * torch.full((), beta), False),
    "min": (lambda beta, y: y * min(beta, 0.9), False),
    "an exponent": (lambda beta, y: y.abs() ** beta, False),
    "exp": (lambda beta, y: y * math.exp(beta), False),
    "a branch": (lambda beta, y: y * beta if beta > 0.5 else y, False),
    "its type": (lambda beta, y: y * beta if isinstance(beta, float) else y, False),
    "its type, hidden": (lambda beta, y: y * (beta if isinstance(beta, float) else 0.6), False),
    "its type, then its value": (
        lambda beta, y: y * 2 if isinstance(beta, float) and beta > 0.8 else y * beta,
        False,
    ),
    "float": (lambda beta, y: y * float(beta), False),
    "rounded": (lambda beta, y: y * round(beta, 1), False),
    "a length of text": (lambda beta, y: y * beta * len(f"{beta}"), False),
    "label smoothing": (
        lambda beta, y: functional.cross_entropy(y, y.softmax(-1), label_smoothing=beta / 2),
        False,
    ),
}


def _in_bfloat16(y, beta):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return functional.linear(y.float(), torch.eye(6) * beta) * beta


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("use", USES)
def test_a_number_is_an_input_or_another_form(use):
    calculate, is_input = USES[use]
    twins = Twins(lambda of, model, batch: calculate(of.beta, _noise(of, model, batch)).mean())
    twins.of.beta = 0.25

    with twins.start() as step:
        # Symbols have names of four characters, too.
        for index, beta in enumerate((0.25, 0.75, 1.0, 0.5, 0.75)):
            twins.of.beta = beta
            twins.step(step, index)
        assert len(step.forms) == 2 if is_input else len(step.forms) > 2
    twins.assert_equal()


def test_floats_of_numpy_are_inputs_wherever_they_are():
    twins = Twins(lambda of, model, batch: of.betas[0] * of.beta * _noise(of, model, batch).mean())
    twins.of.betas = [np.float64(1.0)]
    twins.of.beta = np.float64(1.0)

    with twins.start(mesh=2) as step:
        for index, beta in enumerate(np.linspace(0.1, 1.0, 20)):
            twins.of.beta = twins.of.betas[0] = beta
            twins.step(step, index)
        assert len(step.forms) == 2
    twins.assert_equal()


def test_numbers_meet_what_is_known_once_a_step():
    """The mean over a batch with ignored targets is divided once, with the number beside it."""

    def loss(of, model, batch):
        made = _noise(of, model, batch)
        labels = (batch["x"][:, 0] > 0).long() * 101 - 100  # 1, or what is ignored
        smooth = functional.cross_entropy(made, labels)
        return (1 - of.beta) * smooth + of.beta**2 * made.square().mean()

    twins = Twins(loss)

    with twins.start(mesh=2, micro_batches=2) as step:
        for index in range(20):
            twins.of.beta = index / 30
            twins.step(step, index)
        assert len(step.forms) == 2
    twins.assert_equal()


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -2.5, 1e300, math.inf, -math.inf, math.nan])
def test_every_value_is_one_of_the_form(value):
    twins = Twins()

    with twins.start() as step:
        twins.step(step, 0)
        twins.of.beta = 0.5
        twins.step(step, 1)
        twins.of.beta = value
        twins.step(step, 2)
        assert len(step.forms) == 2


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("value", [0.0, 1.0, math.inf, math.nan])
def test_a_form_begins_with_every_value(value):
    twins = Twins()
    twins.of.beta = 0.5

    with twins.start() as step:
        twins.step(step, 0)
        twins.of.beta = value
        twins.step(step, 1)
        assert len(step.forms) == 2


class Slotted:
    __slots__ = ("beta",)


def _places():
    """Return, for each kind of place, what reads and what writes it."""
    config, table, rows, slotted = SimpleNamespace(beta=0.3), {"beta": 0.3}, [1.0, 0.3], Slotted()
    slotted.beta, cell = 0.3, 0.3

    class Holder:
        beta = 0.3

    def set_cell(value):
        nonlocal cell
        cell = value

    return {
        "a variable": (lambda: cell, set_cell),
        "a global": (lambda: BETA, lambda value: globals().update(BETA=value)),
        "an attribute": (lambda: config.beta, lambda value: setattr(config, "beta", value)),
        "an entry": (lambda: table["beta"], lambda value: table.update(beta=value)),
        "an element": (lambda: rows[1], lambda value: rows.__setitem__(1, value)),
        "a slot": (lambda: slotted.beta, lambda value: setattr(slotted, "beta", value)),
        "a class": (lambda: Holder.beta, lambda value: setattr(Holder, "beta", value)),
    }


BETA = 0.3


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("place", _places())
def test_a_number_is_followed_wherever_it_is(place):
    read, write = _places()[place]
    write(0.3)
    twins = Twins(lambda of, model, batch: (_noise(of, model, batch) * read()).mean())

    with twins.start() as step:
        for index in range(8):
            twins.step(step, index)
            write(0.1 * index)
        assert len(step.forms) == 2
        twins.assert_equal()
    assert read() == pytest.approx(0.7)


def test_an_attribute_of_the_model_is_followed_and_not_left_behind():
    twins = Twins()

    with twins.start(mesh=2) as step:
        for index in range(6):
            for model in twins.models:
                model.temperature = 1.0 + index
            twins.step(step, index)
            assert type(twins.models[0].temperature) is float
        assert len(step.forms) == 2


@pytest.mark.slow
def test_two_numbers_that_begin_to_change_one_after_the_other_take_three_forms():
    twins = Twins()

    with twins.start(mesh=2, planner="manual/zero") as step:
        for index in range(12):
            twins.of.beta = index / 12
            if index > 5:
                twins.of.gamma = 1 + index / 10
            twins.step(step, index)
        assert len(step.forms) == 3
    twins.assert_equal()


@pytest.mark.slow
def test_a_number_that_is_looked_at_does_not_hold_up_another():
    def loss(of, model, batch):
        return _noise(of, model, batch).square().mean() * of.beta * (1 if of.gamma > 2 else 3)

    twins = Twins(loss)
    with twins.start() as step:
        for index in range(8):
            twins.of.beta, twins.of.gamma = 0.1 + index, 1.0 + index // 3
            twins.step(step, index)
        assert len(step.forms) <= 4
    twins.assert_equal()


def test_batches_of_other_sizes_go_with_numbers():
    twins = Twins()

    with twins.start(mesh=2) as step:
        for index, size in enumerate((8, 8, 4, 8, 4, 8, 12, 4, 12)):
            twins.of.beta = index / 4
            twins.step(step, index, size)
        assert len(step.forms) == 4
    twins.assert_equal()


def test_a_changed_program_is_met_again_with_the_first_size():
    """A form for another size was noted as that of the program, and the first size had none."""
    twins = Twins(lambda of, model, batch: _noise(of, model, batch).mean() * int(of.gamma))

    with twins.start() as step:
        twins.step(step, 0)
        twins.of.gamma = 2
        twins.step(step, 1, size=4)
        twins.step(step, 2)


@pytest.mark.slow
def test_a_number_may_become_something_else_and_come_back():
    twins = Twins()

    with twins.start() as step:
        values = (0.0, 0.5, 1, 0.25, torch.tensor(0.75, dtype=torch.float64), 0.5, 0.3, 0.2)
        for index, value in enumerate(values):
            twins.of.beta = value
            twins.step(step, index)
        twins.of.beta = None
        with pytest.raises(RunError, match="beta is None"):
            step(batch(9))
        twins.of.beta = 0.1
        twins.step(step, 10)
    twins.assert_equal()


def test_a_number_that_the_loss_counts_up_is_refused_as_ever():
    def loss(of, model, batch):
        of.beta = of.beta + 1.0
        return _noise(of, model, batch).mean() * of.gamma

    twins = Twins(loss)
    with pytest.raises(Exception, match="the loss changes what it reads"):
        twins.start()


def test_an_evaluation_reads_what_the_number_is_now():
    twins = Twins()

    with twins.start() as step:
        for index in range(4):
            twins.of.beta = float(index)
            twins.step(step, index)
            twins.of.beta = index + 0.5
            wanted = twins.loss(twins.models[1], batch(0)).item()
            assert step.evaluate(batch(0)).loss == pytest.approx(wanted, abs=1e-11)
            with step.no_update():
                assert step(batch(0)).loss == pytest.approx(wanted, abs=1e-11)
        assert len(step.forms) == 2


@pytest.mark.slow
def test_a_checkpoint_knows_nothing_of_numbers(tmp_path):
    twins = Twins()
    with twins.start(mesh=2, planner="manual/zero") as step:
        for index in range(3):
            twins.of.beta = float(index)
            twins.step(step, index)
        step.save(tmp_path)
    again = Twins()
    again.models[1], again.optimizers[1] = twins.models[1], twins.optimizers[1]
    with again.start() as step:
        step.load(tmp_path)
        for index in range(3):
            again.of.beta = float(index)
            again.step(step, index)


def test_what_cannot_be_followed_is_named_with_the_reason(caplog):
    twins = Twins(lambda of, model, batch: _noise(of, model, batch).mean() * math.exp(of.beta))

    with twins.start() as step:
        for index in range(16):
            twins.of.beta = index / 100
            twins.step(step, index)
        assert len(caplog.messages) == 1
        assert "the program looks at its value, in " in caplog.text
        twins.of.beta = 2.0
        with pytest.raises(RunError, match=r"16 forms(.|\n)*looks at its value"):
            step(batch(17))


@pytest.mark.parametrize("number", [0.0, 1e-200], ids=["division by 0", "overflow"])
def test_a_number_with_which_nothing_can_be_computed_takes_no_step(number):
    twins = Twins(lambda of, model, batch: _noise(of, model, batch).mean() * (1 / of.gamma) ** 2)

    with twins.start(mesh=2) as step:
        for index, gamma in enumerate((1.0, 0.5)):
            twins.of.gamma = gamma
            twins.step(step, index)
        twins.of.gamma = number
        with pytest.raises(CaptureError, match=r"(truediv|pow) of .*: .*(zero|too large|range)"):
            step(batch(2))
        assert step.steps_done == 2
        twins.of.gamma = 0.25
        twins.step(step, 2)
        assert len(step.forms) == 2
        twins.assert_equal()


def test_many_forms_are_told_with_all_that_varies_and_the_ways_out(caplog):
    length = {"now": 0}

    def loss(model, batch):
        return model(batch if length["now"] < 0 else batch[:, :, :99]).square().mean()

    model = nn.Conv1d(1, 1, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with parallelize(model, loss, torch.ones(2, 1, 8), optimizer) as step:
        for size in range(9, 14):
            length["now"] = size
            step(torch.ones(2, 1, size))

    told = caplog.messages[-1]
    assert "batches 'batch' [2, 1, 12]; length['now'] is 12, and was 11" in told
    assert "To have fewer: pad batches to few sizes" in told
    assert "scheduled" not in told
