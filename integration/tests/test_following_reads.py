"""A number that a loss reads, in whatever way of Python: the loss follows what the loop changes."""

from __future__ import annotations

import contextvars
import copy
import ctypes
import functools
import multiprocessing
import operator
import threading
import types
import weakref
from dataclasses import dataclass, field

import numpy
import pytest
import torch
from one_layer import Twins
from torch import nn
from torch.utils.data import TensorDataset

from sbp_core.errors import RunError
from sbp_launch import parallelize

BETA, LAMBDA = 1.0, 1.0
BYTES = bytearray([1])
WEIGHTS = numpy.array([1.0, 2.0])
ONE_WEIGHT = numpy.array(1.0)
CONTEXT = contextvars.ContextVar("beta", default=1.0)
LOCAL = threading.local()
LOCAL.beta = 1.0
SHARED, NUMBER = multiprocessing.Value("d", 1.0), ctypes.c_double(1.0)
HOLDER = types.SimpleNamespace(beta=1.0)
FIND = operator.attrgetter("beta")


class Special:
    """Read by operators and statements alone."""

    def __init__(self):
        self.first, self.second = 1.0, 0.5

    def __iter__(self):
        return iter((self.first, self.second))

    def __mul__(self, other):
        return self.first * other

    def __float__(self):
        return self.first

    def __enter__(self):
        return self.first

    def __exit__(self, *_):
        return None

    def __len__(self):
        return round(self.first)

    def __contains__(self, name):
        return self.first > 2

    def __str__(self):
        return str(self.first)

    def get(self):
        return self.first


class ByClass(type):
    @property
    def value(cls):
        return cls.kept


class Kept(metaclass=ByClass):
    kept = 1.0


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -LAMBDA * gradient


class Made:
    """Reads a number where it is made."""

    def __init__(self):
        self.value = BETA


@dataclass
class Fields:
    value: float = field(default_factory=lambda: BETA)


class Weight(float):
    """A number that has more to it."""


class Kinds:
    """Reads by entries of a class that are no plain functions."""

    shown = property(operator.attrgetter("kept"))

    def __init__(self):
        self.kept = 1.0

    def scaled(self, factor):
        return self.kept * factor

    twice = functools.partialmethod(scaled, 2.0)


class Patched:
    def __float__(self):
        return 1.0


class Other(Patched):
    def __float__(self):
        return 3.0


SPECIAL, KINDS, PATCHED, SWAPPED = Special(), Kinds(), Patched(), Patched()
WEIGHT, DATA = Weight(1.0), TensorDataset(torch.ones(2))
HELPER = types.ModuleType("helper")
HELPER.beta = 1.0
REFERENCE, CALL = weakref.ref(SPECIAL), operator.methodcaller("get")


@functools.lru_cache
def remembered():
    return HOLDER.beta


def _entered():
    with SPECIAL as value:
        return value


def _weight(value):
    WEIGHT.more = value


def _appears(value):
    globals().pop("LATE", None)
    if value > 1:
        globals()["LATE"] = value


def late():
    try:
        return LATE
    except NameError:
        return 1.0


def _class_of(value):
    SWAPPED.__class__ = Other if value > 1 else Patched


def _data(value):
    DATA.tensors[0].fill_(value)


def by_keyword(*, beta=1.0):
    return beta


def _special(value):
    SPECIAL.first = value


def _global(name):
    def change(value):
        globals()[name] = value

    return change


def _holder(value):
    HOLDER.beta = value
    remembered.cache_clear()


#: What a loss is multiplied by, and what changes that.
READ = {
    "unpacked": (lambda: sum(SPECIAL), _special),
    "an operator": (lambda: SPECIAL * 2.0, _special),
    "float()": (lambda: float(SPECIAL), _special),
    "with": (_entered, _special),
    "len()": (lambda: len(SPECIAL), _special),
    "in": (lambda: 2.0 if "beta" in SPECIAL else 1.0, _special),
    "an f-string": (lambda: float(f"{SPECIAL}"), _special),
    "a weak reference": (lambda: REFERENCE().first, _special),
    "methodcaller": (lambda: CALL(SPECIAL), _special),
    "attrgetter": (lambda: FIND(HOLDER), _holder),
    "lru_cache": (remembered, _holder),
    "a metaclass": (lambda: Kept.value, lambda value: setattr(Kept, "kept", value)),
    "a keyword default": (by_keyword, lambda value: by_keyword.__kwdefaults__.update(beta=value)),
    "globals()": (lambda: globals()["BETA"], _global("BETA")),
    "shared memory": (lambda: SHARED.value, lambda value: setattr(SHARED, "value", value)),
    "ctypes": (lambda: NUMBER.value, lambda value: setattr(NUMBER, "value", value)),
    "a context variable": (CONTEXT.get, CONTEXT.set),
    "of a thread": (lambda: LOCAL.beta, lambda value: setattr(LOCAL, "beta", value)),
    "a constructor": (lambda: Made().value, _global("BETA")),
    "a default factory": (lambda: Fields().value, _global("BETA")),
    "a subclass of float": (lambda: getattr(WEIGHT, "more", 1.0), _weight),
    "a property of a getter": (lambda: KINDS.shown, lambda value: setattr(KINDS, "kept", value)),
    "a partial method": (lambda: KINDS.twice(), lambda value: setattr(KINDS, "kept", value)),
    "a class that is patched": (
        lambda: float(PATCHED),
        lambda value: setattr(Patched, "__float__", lambda self: value),
    ),
    "another class": (lambda: float(SWAPPED), _class_of),
    "a module of Python": (lambda of=HELPER: of.beta, lambda value: setattr(HELPER, "beta", value)),
    "a global that comes to be": (late, _appears),
    "a dataset": (lambda: DATA[0][0], _data),
    "bytes": (lambda: BYTES[0], lambda value: BYTES.__setitem__(0, int(value))),
    "an array": (lambda: float(WEIGHTS[1]), lambda value: WEIGHTS.__setitem__(1, value)),
    "an array without dims": (lambda: float(ONE_WEIGHT), ONE_WEIGHT.fill),
}


@pytest.fixture(autouse=True)
def _as_before():
    yield
    for _, change in READ.values():
        change(1.0)
    _global("LAMBDA")(1.0)
    WEIGHTS[1] = 2.0


@pytest.mark.slow(but=8)
@pytest.mark.parametrize("how", READ)
def test_a_number_is_followed_however_it_is_read(how):
    read, change = READ[how]

    def loss(model, batch):
        return model(batch).square().mean() * read()

    Twins().trains([loss, loss], lambda: change(3.0), lambda: change(7.0))


def test_a_number_that_only_a_backward_reads_is_followed():
    def loss(model, batch):
        return Reverse.apply(model(batch)).square().mean()

    Twins().trains([loss, loss], lambda: _global("LAMBDA")(5.0))


def test_a_number_that_a_hook_on_a_gradient_reads_is_followed():
    def hook(model):
        model.weight.register_hook(lambda gradient: gradient * LAMBDA)

    def loss(model, batch):
        return model(batch).square().mean()

    Twins(hook).trains([loss, loss], lambda: _global("LAMBDA")(5.0))


@pytest.mark.parametrize("key", ["lr", "factor"])
def test_a_setting_of_a_group_that_the_loss_reads_is_followed(key):
    twins = Twins()
    for one in twins.optimizers:
        one.param_groups[0]["factor"] = 1.0

    def loss_of(optimizer):
        def loss(model, batch):
            return model(batch).square().mean() * optimizer.param_groups[0][key]

        return loss

    def change():
        for one in twins.optimizers:
            one.param_groups[0][key] = 0.01

    twins.trains([loss_of(one) for one in twins.optimizers], change)


def test_an_attribute_that_somebody_has_set_on_a_parameter_is_read():
    def prepare(model):
        model.weight.decay = 2.0

    def loss(model, batch):
        decays = (getattr(one, "decay", 0.5) * one.square().sum() for one in model.parameters())
        return model(batch).square().mean() + sum(decays)

    twins = Twins(prepare)

    def change(value):
        for model in twins.models:
            model.weight.decay = value

    def set_another():
        for model in twins.models:
            model.bias.decay = 3.0

    twins.trains([loss, loss], set_another, lambda: change(1.0), lambda: change(4.0))


@pytest.mark.parametrize("attribute", ["forward", "__call__"])
def test_a_layer_whose_class_is_patched_or_swapped_is_followed(attribute):
    class Layer(nn.Module):
        def forward(self, x):
            return x.tanh()

    class Another(Layer):
        def forward(self, x):
            return x.sigmoid()

    def patch():
        setattr(Layer, attribute, lambda self, x: x.sin())

    def loss(model, batch):
        return model.layer(model(batch)).square().mean()

    twins = Twins(lambda model: model.add_module("layer", Layer()))

    def swap():
        for model in twins.models:
            model.layer.__class__ = Another

    twins.trains([loss, loss], patch, swap)


# Models of other steps


def test_a_model_that_another_step_trains_is_no_constant():
    judge, maker = nn.Linear(3, 1), nn.Linear(6, 3)
    batch = torch.randn(8, 6)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (judge, maker)]

    def judged(model, batch):
        return model(maker(batch).detach()).square().mean()

    def made(model, batch):
        return model(batch).square().mean()

    def made_for_judge(model, batch):
        return judge(model(batch)).square().mean()

    with parallelize(judge, judged, batch, optimizers[0]) as step:
        with pytest.raises(RunError, match=r"reads 'judge\.weight', which another step trains"):
            parallelize(maker, made_for_judge, batch, optimizers[1])
        step(batch)
        with parallelize(maker, made, batch, optimizers[1]) as other:
            other(batch)
            with pytest.raises(RunError, match=r"'maker\.weight', which another step") as caught:
                step(batch)
    assert "step.add_step(loss, batch, optimizer)" in str(caught.value)


def test_a_model_whose_training_is_over_is_a_constant_again():
    teachers = [nn.Linear(6, 3).double()]
    teachers.append(copy.deepcopy(teachers[0]))
    twins = Twins()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in teachers]

    def taught(model, batch):
        return (model(batch) - 1).square().mean()

    with parallelize(teachers[0], taught, twins.batch, optimizers[0], mesh=2) as step:
        step(twins.batch)
    taught(teachers[1], twins.batch).backward()
    optimizers[1].step()

    def learns_from(teacher):
        return lambda model, batch: (model(batch) - 2 * teacher(batch).detach()).square().mean()

    twins.trains([learns_from(one) for one in teachers])
