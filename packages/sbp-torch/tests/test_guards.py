"""What a program read is compared; what it did not read is not."""

from __future__ import annotations

import argparse
import functools
import random
import sys
import tracemalloc
import types
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest
import torch
from torch import nn

from sbp_torch.guards import Guard, modules_in_eval_mode
from sbp_torch.guards.functions import is_fixed_module
from sbp_torch.update_options import UpdateOptions

CONFIG = {"beta": 1.0, "layers": [1, 2]}
SETTINGS = argparse.Namespace(alpha=0.5, unread=1)
GLOBAL = 1.0
CONSTANT = torch.ones(2)
TABLE = list(range(20_000))


class Weights:
    gamma = 1.0
    unread = 1.0


@dataclass
class Options:
    scale: float = 1.0
    never: float = 1.0


OPTIONS = Options()


@dataclass(slots=True)
class Slotted:
    rate: float = 1.0


class Mode(Enum):
    FIRST, SECOND = 1, 2


SLOTTED, MODE, CRITERION = Slotted(), Mode.FIRST, nn.functional.mse_loss
TABLES = {"small": types.MappingProxyType(CONFIG)}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.1)
        self.temperature, self.calls, self.nan = 1.0, 0, float("nan")
        self.flags = {"scale": 1.0, "deep": [{"k": 1}]}
        self.plain = torch.ones(())
        self.hidden = None

    def forward(self, x):
        y = self.drop(self.norm(self.linear(x))) / self.temperature
        return y * self.flags["scale"] * self.plain + (0 if self.hidden is None else self.nan)


def helper(x):
    x = x * SLOTTED.rate if MODE is Mode.FIRST else CRITERION(x, x)
    x = x * helper.factor * TABLES["small"]["beta"]
    return x * SETTINGS.alpha * Weights.gamma * OPTIONS.scale * len(TABLE)


helper.factor = 1.0


def noted(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


@noted
def penalty(model):
    return model.linear.weight.square().sum()


def make_loss():
    beta = 1.0

    def loss(model, batch, power=CONFIG["layers"]):
        return helper(model(batch)).sum() * GLOBAL + CONFIG["beta"] * penalty(model) + beta

    def set_beta(value):
        nonlocal beta
        beta = value

    return loss, set_beta


@pytest.fixture
def program(monkeypatch):
    torch.manual_seed(0)
    model = Model()
    loss, set_beta = make_loss()
    optimizer = torch.optim.Adam([{"params": [one]} for one in model.parameters()])
    monkeypatch.setitem(CONFIG, "beta", 1.0)
    return model, loss, set_beta, optimizer


def _global(value, name="GLOBAL"):
    globals()[name] = value


#: What is changed (model m, cell c, optimizer o), and what is said of it.
CHANGES = {
    "attribute": (lambda m, c, o: setattr(m, "temperature", 2.0), "model.temperature is 2.0, and"),
    "attribute of a layer": (lambda m, c, o: setattr(m.norm, "eps", 0.5), "model.norm.eps is 0.5"),
    "probability": (lambda m, c, o: setattr(m.drop, "p", 0.5), "model.drop.p is 0.5"),
    "entry": (lambda m, c, o: m.flags.update(scale=2.0), "model.flags['scale'] is 2.0"),
    "another mapping": (lambda m, c, o: setattr(m, "flags", {"scale": 2.0}), "model.flags is"),
    "state kept": (lambda m, c, o: setattr(m, "hidden", torch.ones(2)), "model.hidden is a tensor"),
    "negative zero": (lambda m, c, o: CONFIG.update(beta=-0.0), "CONFIG['beta'] is -0.0"),
    "entry of a global": (lambda m, c, o: CONFIG.update(beta=2.0), "CONFIG['beta'] is 2.0"),
    "cell": (lambda m, c, o: c(2.0), "beta is 2.0, and was 1.0"),
    "global": (lambda m, c, o: _global(2.0), "GLOBAL is 2.0"),
    "setting": (lambda m, c, o: setattr(SETTINGS, "alpha", 2.0), "SETTINGS.alpha is 2.0"),
    "dataclass": (lambda m, c, o: setattr(OPTIONS, "scale", 2.0), "OPTIONS.scale is 2.0"),
    "class": (lambda m, c, o: setattr(Weights, "gamma", 2.0), "Weights.gamma is 2.0"),
    "slot": (lambda m, c, o: setattr(SLOTTED, "rate", 2.0), "SLOTTED.rate is 2.0"),
    "enum": (lambda m, c, o: _global(Mode.SECOND, "MODE"), "MODE is <Mode.SECOND: 2>"),
    "function": (lambda m, c, o: _global(nn.functional.l1_loss, "CRITERION"), "CRITERION is <func"),
    "attribute of a function": (lambda m, c, o: setattr(helper, "factor", 2.0), "helper['factor']"),
    "order": (
        lambda m, c, o: m.flags.update(scale=m.flags.pop("scale")),
        "the entries of model.flags are in another order",
    ),
    "autocast": (
        lambda m, c, o: torch.set_autocast_enabled("cpu", True),
        "the default dtype, and the dtypes of torch.autocast",
    ),
    "hook on a gradient": (
        lambda m, c, o: m.linear.weight.register_hook(lambda g: g),
        "a hook was registered on, or removed from, 'linear.weight'",
    ),
    "hook on the optimizer": (
        lambda m, c, o: o.register_step_post_hook(print),
        "a hook was registered on the optimizer",
    ),
    "large list": (lambda m, c, o: TABLE.append(0), "TABLE"),
    "default": (
        lambda m, c, o: CONFIG["layers"].append(3),
        "the defaults of make_loss.<locals>.loss[0] is [1, 2, 3]",
    ),
    "method of a class": (
        lambda m, c, o: setattr(Weights, "gamma", property(lambda self: 2)),
        "Weights.gamma is <property",
    ),
    "forward": (lambda m, c, o: setattr(m, "forward", lambda x: x), "model.forward is"),
    "mode": (lambda m, c, o: m.norm.eval(), "model.norm is in eval mode"),
    "hook": (lambda m, c, o: m.linear.register_forward_hook(print), "a hook was registered on"),
    "module": (
        lambda m, c, o: setattr(m, "linear", nn.Linear(4, 4)),
        "model.linear is another mod",
    ),
    "parameter": (
        lambda m, c, o: setattr(m.linear, "bias", nn.Parameter(torch.zeros(4))),
        "model.linear.bias is another parameter",
    ),
    "new module": (lambda m, c, o: m.add_module("more", nn.Linear(4, 4)), "model.more is a new"),
    "frozen": (lambda m, c, o: m.linear.requires_grad_(False), "'linear.weight' is frozen"),
    "eps": (lambda m, c, o: o.param_groups[1].update(eps=0.1), "eps of parameter group 1 is 0.1"),
    "beta2": (
        lambda m, c, o: o.param_groups[0].update(betas=(0.9, 0.5)),
        "betas of parameter group 0 is (0.9, 0.5)",
    ),
    "group": (lambda m, c, o: o.param_groups.pop(), "the optimizer has 3 parameter groups"),
    "member": (
        lambda m, c, o: o.param_groups[0]["params"].append(o.param_groups[1]["params"].pop()),
        "parameter group 0 has 'linear.bias' that it did not have",
    ),
}

#: What no step reads, or what is an input of it.
KEPT = {
    "hook that changes no step": lambda m, c, o: m.register_load_state_dict_pre_hook(print),
    "counter": lambda m, c, o: setattr(m, "calls", 7),
    "new attribute": lambda m, c, o: setattr(m, "history", [1]),
    "unread setting": lambda m, c, o: setattr(SETTINGS, "unread", 7),
    "unread attribute of a class": lambda m, c, o: setattr(Weights, "unread", 7),
    "unread field": lambda m, c, o: setattr(OPTIONS, "never", 7),
    "equal number": lambda m, c, o: setattr(m, "temperature", float("1.0")),
    "equal mapping": lambda m, c, o: setattr(m, "flags", {"scale": 1.0, "deep": [{"k": 1}]}),
    "not a number": lambda m, c, o: setattr(m, "nan", float("nan")),
    "lr": lambda m, c, o: o.param_groups[0].update(lr=7.0),
    "key of a schedule": lambda m, c, o: o.param_groups[0].update(initial_lr=7.0),
    "weights": lambda m, c, o: m.linear.weight.data.zero_(),
    "buffer": lambda m, c, o: m.norm.running_mean.zero_(),
    "tensor of a module": lambda m, c, o: m.plain.zero_(),
    "there and back": lambda m, c, o: (m.eval(), m.train()),
}


@pytest.fixture(autouse=True)
def _as_before():
    before = dict(vars(SETTINGS)), dict(vars(OPTIONS)), dict(CONFIG), list(CONFIG["layers"])
    yield
    vars(SETTINGS).update(before[0])
    vars(OPTIONS).update(before[1])
    CONFIG.update(before[2])
    CONFIG["layers"][:] = before[3]
    torch.set_autocast_enabled("cpu", False)
    SLOTTED.rate = helper.factor = 1.0
    _global(Mode.FIRST, "MODE")
    _global(nn.functional.mse_loss, "CRITERION")
    del TABLE[20_000:]
    Weights.gamma = 1.0
    _global(1.0)


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_read_is_compared(change, program):
    model, loss, set_beta, optimizer = program
    guard = Guard(model, loss, optimizer)
    assert guard.holds()
    apply, told = CHANGES[change]

    apply(model, set_beta, optimizer)

    assert not guard.holds()
    found = guard.changes()
    assert found[0].what.startswith(told), found
    assert all(one.todo for one in found)
    guard.renew()
    assert guard.holds() and not guard.changes()


@pytest.mark.parametrize("change", KEPT)
def test_what_is_not_read_may_change(change, program):
    model, loss, set_beta, optimizer = program
    guard = Guard(model, loss, optimizer)

    KEPT[change](model, set_beta, optimizer)

    assert not guard.changes()


def test_a_change_names_the_line_that_reads_it_and_the_way_out(program):
    model, loss, _, optimizer = program
    guard = Guard(model, loss, optimizer)

    model.temperature = 3.0

    (found,) = guard.changes()
    assert found.where.startswith(f"{__file__}:")
    line = int(found.where.rpartition(":")[2])
    assert "/ self.temperature" in Path(__file__).read_text().splitlines()[line - 1]
    assert "torch.tensor(3.0)" in found.todo


def test_a_tensor_outside_of_the_model_is_compared_by_what_it_holds(program):
    model, _, _, optimizer = program
    held = torch.ones(3)
    guard = Guard(model, lambda model, batch: model(batch).sum() * held.sum(), optimizer)

    held.data[0] = 2.0  # which no version counts

    assert [one.what for one in guard.changes()] == ["the tensor held was written"]


def test_evaluation_does_not_ask_for_modes_and_the_optimizer(program):
    model, loss, _, optimizer = program
    guard = Guard(model, loss, optimizer)

    model.eval()
    optimizer.param_groups[0]["eps"] = 0.1

    assert len(guard.changes()) > 3
    assert not guard.changes(training=False)
    model.temperature = 2.0
    assert [one.what[:17] for one in guard.changes(training=False)] == ["model.temperature"]


def test_an_evaluation_forgets_no_mode(program):
    model, loss, _, optimizer = program
    guard = Guard(model, loss, optimizer)

    model.norm.eval()
    assert not guard.changes(training=False)

    assert [one.what[:10] for one in guard.changes()] == ["model.norm"]


class Registry(OrderedDict):
    """As `ACT2FN` of transformers: an entry is made of what is kept."""

    def __getitem__(self, key):
        raise AssertionError("a guard asks for no entry")


class Lazy:
    def __init__(self):
        self._modules = {"one": 1}


def test_objects_of_libraries_are_only_looked_at(program):
    registry, lazy = Registry(one=1), Lazy()

    def loss(model, batch):
        scale = len(registry) * len(lazy._modules) * hash(torch._C.ScriptModule)
        return model(batch).mean() * scale

    model, _, _, optimizer = program
    guard = Guard(model, loss, optimizer)

    lazy._modules["two"] = 2
    registry["three"] = 3
    found = guard.changes()
    assert sorted(one.what[:14] for one in found) == ["lazy._modules[", "registry['thre"]
    assert not any(one.is_structure for one in found)


def test_a_module_of_the_users_may_have_a_name_of_pythons(monkeypatch, tmp_path):
    own = types.ModuleType("sched")
    own.__file__ = str(tmp_path / "sched.py")
    monkeypatch.setitem(sys.modules, "sched", own)
    is_fixed_module.cache_clear()

    assert not is_fixed_module("sched")
    assert is_fixed_module("json") and is_fixed_module("itertools")

    is_fixed_module.cache_clear()


def test_an_attribute_that_is_set_on_a_parameter_is_a_change(program):
    model, loss, _, optimizer = program
    guard = Guard(model, loss, optimizer)

    model.linear.bias.scale = 2.0

    assert [one.what for one in guard.changes()] == [
        "attributes were set on 'linear.bias', or taken from it"
    ]


def test_a_guard_that_holds_keeps_no_memory(program):
    model, loss, _, optimizer = program
    guard = Guard(model, loss, optimizer)
    tracemalloc.start()
    try:
        for _ in range(50):
            guard.changes()
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(200):
            guard.changes()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert after - before < 200  # a byte of each comparison would be more


def test_scheduled_settings_may_change_and_their_neighbours_may_not(program):
    model, loss, _, optimizer = program
    guard = Guard(model, loss, optimizer, UpdateOptions(scheduled=("beta1", "weight_decay")))

    optimizer.param_groups[0].update(betas=(0.5, 0.999), weight_decay=0.1)
    assert not guard.changes()
    optimizer.param_groups[0].update(betas=(0.5, 0.5))

    assert [one.what[:26] for one in guard.changes()] == ["betas of parameter group 0"]


def test_an_optimizer_of_ones_own_is_compared_by_what_its_code_names():
    class Clipped(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})
            self.limit, self.steps = 1.0, 0

        def step(self, closure=None):
            for group in self.param_groups:
                for one in group["params"]:
                    one.sub_(one.grad.clamp(-self.limit, group["limit"]))

    model = nn.Linear(2, 2)
    optimizer = Clipped([{"params": model.parameters(), "limit": 1.0, "name": "a"}])
    guard = Guard(model, lambda model, batch: model(batch).sum(), optimizer)

    optimizer.param_groups[0]["name"], optimizer.steps = "b", 3
    assert not guard.changes()
    optimizer.param_groups[0]["limit"], optimizer.limit = 2.0, 2.0

    assert [one.what.partition(",")[0] for one in guard.changes()] == [
        "Clipped.limit is 2.0",
        "limit of parameter group 0 is 2.0",
    ]


def test_generators_of_numbers_and_iterators_are_compared():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    numbers, turns = random.Random(0), iter([1.0, 2.0])
    drawing = Guard(model, lambda model, batch: model(batch).sum() * numbers.random(), optimizer)
    assert drawing.holds()

    before = numbers.getstate()
    numbers.random()

    assert [one.what.partition(" is ")[0] for one in drawing.changes()] == ["numbers"]
    assert numbers.getstate() != before
    taking = Guard(model, lambda model, batch: model(batch).sum() * next(turns), optimizer)
    assert taking.holds()
    next(turns)
    assert [one.what.partition(" is ")[0] for one in taking.changes()] == ["turns"]


def test_a_constant_that_is_no_number_is_what_it_was():
    model, held = nn.Linear(2, 2), torch.tensor([1.0, float("nan")])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, lambda model, batch: model(batch).sum() * held[0], optimizer)

    assert guard.holds() and not guard.changes()


def test_what_a_loss_has_changed_is_set_back(program):
    model, _, _, optimizer = program
    kept, count = {"h": torch.zeros(2)}, 0

    def loss(model, batch):
        nonlocal count
        count += 1
        kept["h"] = model(batch)
        return kept["h"].sum()

    guard, before = Guard(model, loss, optimizer), kept["h"]
    loss(model, torch.ones(3, 4))
    assert {one.what.partition(" is ")[0] for one in guard.changes()} == {"kept['h']", "count"}

    guard.restore()

    assert (kept["h"] is before, count, guard.holds()) == (True, 0, True)


def test_modules_that_do_something_else_in_eval_mode_are_found():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), nn.LayerNorm(2), nn.BatchNorm1d(2))

    assert modules_in_eval_mode(model) == []
    assert modules_in_eval_mode(model.eval()) == ["1", "3"]
    assert modules_in_eval_mode(nn.Linear(2, 2).eval()) == []
