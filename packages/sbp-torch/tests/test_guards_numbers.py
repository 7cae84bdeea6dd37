"""Floats that a guard does not compare, wherever they are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sbp_torch.guards import Guard

FACTOR = 1.0


class Held:
    gamma = 1.0


class Slotted:
    __slots__ = ("rate",)


CONFIG, ROWS, HELD, OF, SLOTTED = {"beta": 1.0}, [1.0, 2.0], Held(), SimpleNamespace(a=1.0), None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.temperature, self.flags = 1.0, {"scale": 1.0}

    def forward(self, x):
        return self.linear(x) / self.temperature * self.flags["scale"]


def again(x):
    return x * FACTOR  # a second function that reads the same place


def make():
    beta = 1.0
    slotted = Slotted()
    slotted.rate = 1.0

    def loss(model, batch):
        y = again(model(batch)) * FACTOR * CONFIG["beta"] * HELD.gamma * OF.a * slotted.rate
        return y.sum() * beta * ROWS[1]

    def set_beta(value):
        nonlocal beta
        beta = value

    return loss, set_beta, slotted


#: What writes a number: of the model m, by the cell c, in the slots s.
WRITES = {
    "beta": lambda m, c, s, value: c(value),
    "FACTOR": lambda m, c, s, value: globals().update(FACTOR=value),
    "CONFIG['beta']": lambda m, c, s, value: CONFIG.update(beta=value),
    "ROWS[1]": lambda m, c, s, value: ROWS.__setitem__(1, value),
    "Held.gamma": lambda m, c, s, value: setattr(Held, "gamma", value),
    "OF.a": lambda m, c, s, value: setattr(OF, "a", value),
    "slotted.rate": lambda m, c, s, value: setattr(s, "rate", value),
    "model.temperature": lambda m, c, s, value: setattr(m, "temperature", value),
    "model.flags['scale']": lambda m, c, s, value: m.flags.update(scale=value),
}


@pytest.fixture
def program():
    model = Model()
    loss, set_beta, slotted = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def write(name, value):
        WRITES[name](model, set_beta, slotted, value)

    yield Guard(model, loss, optimizer), write
    for name in WRITES:
        write(name, 1.0)


@pytest.mark.parametrize("name", WRITES)
def test_another_float_is_a_number_with_its_place(name, program):
    guard, write = program

    write(name, 2.5)

    numbers = {one.number.at: one.number for one in guard.changes()}
    (number,) = numbers.values()
    assert (number.label, number.read()) == (name, 2.5)
    number.write(3.5)
    assert number.read() == 3.5


@pytest.mark.parametrize("name", WRITES)
def test_a_number_that_is_not_compared_may_be_any_float(name, program):
    guard, write = program
    write(name, 2.5)
    numbers = [one.number for one in guard.changes()]
    guard.renew(numbers)

    for value in (0.5, float("nan"), -0.0, 2.5):
        write(name, value)
        assert guard.holds() and not guard.changes()
    for value in (1, True, None, torch.ones(())):
        write(name, value)
        assert not guard.holds()
        (found, *_) = guard.changes()
        assert name.partition("[1]")[0] in found.what and found.number is None
        write(name, 1.5)
    other = "beta" if name != "beta" else "FACTOR"
    write(other, 7.0)
    assert not guard.holds()
    assert {one.number.label for one in guard.changes()} == {other}


@pytest.mark.parametrize("value", [1, True, None, "1.0", torch.ones(())])
def test_what_is_no_float_is_no_number(value, program):
    guard, write = program

    write("beta", value)

    assert [one.number for one in guard.changes()] == [None]


def test_elements_of_a_list_that_also_changes_otherwise_are_no_numbers(program):
    guard, _ = program

    ROWS.append(3.0)
    try:
        assert [one.number for one in guard.changes()] == [None]
    finally:
        ROWS.pop()


def test_a_number_in_a_mapping_that_gets_more_entries_is_found(program):
    guard, write = program
    write("CONFIG['beta']", 2.0)
    guard.renew([one.number for one in guard.changes()])

    CONFIG["loss"] = 1.0
    try:
        write("CONFIG['beta']", 3.0)
        write("OF.a", 3.0)
        assert "OF.a" in {one.what.split()[0] for one in guard.changes()}
    finally:
        del CONFIG["loss"]
