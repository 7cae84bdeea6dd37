"""States that a step begins to have, or no longer trains, while it goes on: equal to plain PyTorch.

Layers that are unfrozen have moments that the first form of the step had not, and count their own
steps. They are added where the others are, and checkpoints have all of them.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from test_following import LAYOUTS, Twins, assert_alike, batch, loss_of
from torch import nn

from sbp_core.errors import SbpError
from sbp_core.infer import infer_strategy
from sbp_launch import parallelize

OPTIMIZERS = {
    "Adam": {"lr": 0.01},
    "SGD": {"lr": 0.01, "momentum": 0.9},
    "AdamW": {"lr": 0.01, "amsgrad": True},
    "Adagrad": {"lr": 0.01},
    "RMSprop": {"lr": 0.01},
}
#: Without any state of their own.
PLAIN = {"lr": 0.01}


def twins_of(kind):
    if kind == "plain SGD":
        return Twins(lambda model: torch.optim.SGD(model.parameters(), **PLAIN))
    make = getattr(torch.optim, kind)
    return Twins(lambda model: make(model.parameters(), **OPTIMIZERS[kind]))


def trains(name, is_trained):
    return lambda model, optimizer: model.get_submodule(name).requires_grad_(is_trained)


@pytest.mark.slow(but=5)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_layers_are_unfrozen_and_frozen_again(kind, layout):
    twins = twins_of(kind)
    twins.both(trains("body", False))

    with twins.start(**layout) as step:
        twins.steps(step, 2)
        for index, (name, is_trained) in enumerate(
            [("body", True), ("head", False), ("head", True), ("body", False)], start=1
        ):
            twins.both(trains(name, is_trained))
            twins.steps(step, 2, first=2 * index)
            twins.assert_equal()
        twins.both(trains("body", True))
        twins.steps(step, 1, first=20)
        assert len(step.forms) <= 3
    twins.assert_equal()


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)
def test_an_optimizer_without_states_unfreezes(layout):
    """There is nothing to add, and other parameters are overwritten from then on."""
    twins = twins_of("plain SGD")
    twins.both(trains("body", False))

    with twins.start(**layout) as step:
        twins.steps(step, 2)
        twins.both(trains("body", True))
        twins.steps(step, 2, first=2)
    twins.assert_equal()


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)
def test_a_layer_is_frozen_under_adam_by_the_first_step(layout):
    """Its counter stands still while those of others go on."""
    twins = twins_of("Adam")

    with twins.start(**layout) as step:
        twins.steps(step, 2)
        twins.both(trains("body", False))
        twins.steps(step, 2, first=2)
        twins.both(trains("body", True))
        twins.steps(step, 2, first=4)
        counts = {name: float(one) for name, one in step.state_dict().items() if "step" in name}
        twins.assert_equal()

    assert counts["body.weight.step"] == 4 and counts["head.weight.step"] == 6


def test_a_program_that_changed_is_not_taken_for_the_first_one():
    """The first batch behind a change may have another shape than the one that comes next."""
    twins = Twins()

    with twins.start(mesh=2) as step:
        twins.steps(step, 2)
        twins.both(trains("body", False))
        twins.steps(step, 1, first=2, size=4)
        twins.steps(step, 1, first=3, size=8)
    twins.assert_equal()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_group_is_added(layout):
    twins = Twins(lambda model: torch.optim.Adam(model.head.parameters(), lr=0.01))

    with twins.start(**layout) as step:
        twins.steps(step, 2)
        twins.both(
            lambda model, optimizer: optimizer.add_param_group(
                {"params": model.body.parameters(), "lr": 0.001}
            )
        )
        twins.steps(step, 2, first=2)
        twins.assert_equal()
    twins.assert_equal()


@pytest.mark.slow
def test_checkpoints_do_not_know_of_what_was_frozen(tmp_path):
    twins = twins_of("Adam")
    twins.both(trains("body", False))

    def load(step, name):
        step.load(tmp_path / name)
        twins.models[1].load_state_dict(saved[name][0])
        twins.optimizers[1].load_state_dict(copy.deepcopy(saved[name][1]))

    saved = {}

    def save(step, name):
        step.save(tmp_path / name)
        model, optimizer = twins.models[1], twins.optimizers[1]
        copied = {key: one.clone() for key, one in model.state_dict().items()}
        saved[name] = copied, copy.deepcopy(optimizer.state_dict())

    with twins.start(mesh=4, planner="manual/zero") as step:
        twins.steps(step, 2)
        save(step, "frozen")
        twins.both(trains("body", True))
        twins.steps(step, 2, first=2)
        save(step, "trained")
        load(step, "frozen")  # where its moments had not begun
        twins.steps(step, 2, first=4)
        twins.assert_equal()
        load(step, "trained")
        assert step.steps_done == 4
        twins.steps(step, 1, first=6)
        twins.assert_equal()

    other = twins_of("Adam")
    other.both(trains("body", False))
    twins = other
    with twins.start(mesh=2) as step:
        load(step, "trained")  # whose moments are kept
        twins.steps(step, 1)
        save(step, "kept")
        twins.both(trains("body", True))
        twins.steps(step, 2, first=1)
        twins.assert_equal()
        load(step, "kept")
        twins.both(trains("body", False))
        twins.steps(step, 1, first=3)
        load(step, "frozen")  # also while they are frozen again
        twins.both(trains("body", True))
        twins.steps(step, 2, first=4)
        twins.assert_equal()


def test_a_checkpoint_that_is_being_written_is_of_its_own_step(tmp_path):
    """The update of the next step overwrites parameters that no update before has overwritten."""
    twins = twins_of("Adam")
    twins.both(trains("body", False))

    with twins.start(mesh=2, planner="manual/zero") as step:
        twins.steps(step, 2)
        wanted = step.state_dict()
        step.save(tmp_path, wait=False)
        twins.both(trains("body", True))
        twins.steps(step, 3, first=2)
        step.finish_saving()
        step.load(tmp_path)
        found = step.state_dict()

    assert_alike({name: found[name] for name in wanted}, wanted)


def test_a_snapshot_keeps_what_a_later_form_overwrites():
    """Nobody copies what no update so far overwrites, until one does."""
    twins = twins_of("Adam")
    twins.both(trains("body", False))

    with twins.start(mesh=2, planner="manual/zero") as step:
        twins.steps(step, 2)
        wanted = [(one.name, one.bounds, one.value) for one in _copied(step.session.pieces())]
        snapshot = step.session.snapshot()
        twins.both(trains("body", True))
        twins.steps(step, 2, first=2)
        found = {(one.name, one.bounds): one.value for one in snapshot.pieces()}
        snapshot.release()

    for name, bounds, value in wanted:
        assert_alike(found[name, bounds], value)


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)
def test_a_part_that_the_loss_begins_to_use_and_leaves_again(layout):
    """Its counter stands still as a tensor first, and counts as a host number from then on."""
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(6, 3) for name in ("first", "second")}).double()
    model.uses_both = False
    models = [model, copy.deepcopy(model)]
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.01) for one in models]

    def loss(model, given):
        made = model["first"](given["x"])
        if model.uses_both:
            made = made + model["second"](given["x"])
        return (made - given["y"]).square().mean()

    with parallelize(models[0], loss, batch(0), optimizers[0], **layout) as step:
        for index, (uses_both, size) in enumerate(
            [(False, 8), (False, 4), (True, 8), (True, 4), (False, 4), (False, 8), (True, 8)]
        ):
            for one in models:
                one.uses_both = uses_both
            found = float(step(batch(index, size)))
            optimizers[1].zero_grad()
            wanted = loss(models[1], batch(index, size))
            wanted.backward()
            optimizers[1].step()
            assert abs(found - wanted.item()) <= 1e-12
    assert_alike(*(one.state_dict() for one in models))


def _copied(pieces):
    return [copy.deepcopy(one) for one in pieces]


class Fickle:
    """A planner that stores moments otherwise each time, where it may."""

    def __init__(self):
        self.calls = 0

    def plan(self, request):
        self.calls += 1
        moments = [e.name for e in request.graph.inputs if e.name == "body.weight.exp_avg"]
        own = dict.fromkeys(moments, "S(0)" if self.calls % 2 else "B")
        return infer_strategy(replace(request, pins={**own, **request.pins}), planner="fickle")


def test_states_that_were_added_stay_where_they_are():
    twins = twins_of("Adam")
    twins.both(trains("body", False))

    with twins.start(mesh=2, planner=Fickle()) as step:
        twins.steps(step, 1)
        twins.both(trains("body", True))
        twins.steps(step, 1, first=1)
        twins.steps(step, 1, first=2, size=4)
        twins.both(lambda model, optimizer: setattr(model, "calls", 101))
        twins.steps(step, 1, first=3)
        assert len(step.forms) == 3
    twins.assert_equal()


def test_states_of_a_run_that_trained_all_are_gone_on_with():
    twins = twins_of("Adam")
    twins.both(trains("body", False))
    with twins.start() as step:
        twins.steps(step, 1)
        twins.both(trains("body", True))
        twins.steps(step, 1, first=1)
        states = step.state_dict()

    assert {"body.weight.exp_avg", "head.weight.exp_avg"} <= states.keys()
    model, optimizer = twins.models[0], twins.optimizers[0]
    with parallelize(model, loss_of, batch(0), optimizer, mesh=2, states=states) as step:
        twins.steps(step, 1, first=2)
    twins.assert_equal()


def test_states_of_frozen_layers_are_written_as_others():
    twins = twins_of("Adam")

    def fill(model, optimizer):
        for parameter in model.body.parameters():
            optimizer.state[parameter]["exp_avg"].fill_(0.7)

    with twins.start(mesh=2, planner="manual/zero") as step:
        twins.steps(step, 2)
        best = [copy.deepcopy(one.state_dict()) for one in twins.optimizers]
        twins.both(trains("body", False))
        twins.steps(step, 2, first=2)
        twins.both(fill)
        twins.steps(step, 1, first=4)
        twins.both(trains("body", True))
        twins.steps(step, 1, first=5)
        twins.assert_equal()
        twins.both(trains("body", False))
        twins.steps(step, 1, first=6)
        for optimizer, states in zip(twins.optimizers, best, strict=True):
            optimizer.load_state_dict(states)
        twins.steps(step, 1, first=7)
        twins.both(trains("body", True))
        twins.steps(step, 2, first=8)
        twins.assert_equal()


def test_states_that_do_not_fit_are_refused_before_anything_becomes_of_those_there():
    trained = twins_of("Adam")
    with trained.start() as step:
        trained.steps(step, 2)
        good = step.state_dict()
    twins = twins_of("Adam")
    twins.both(trains("body", False))

    with twins.start(mesh=2) as step:
        twins.steps(step, 2)
        with pytest.raises(SbpError, match=r"head\.weight"):
            step.load_state_dict({**good, "head.weight": torch.zeros(1)})
        with pytest.raises(SbpError, match="no state is called 'nobody'"):
            step.load_state_dict({**good, "nobody": torch.zeros(1)})
        twins.both(trains("body", True))
        twins.steps(step, 2, first=2)
        twins.assert_equal()


def test_a_checkpoint_of_a_frozen_layer_is_loaded_where_all_is_trained(tmp_path):
    """Its moments begin anew, and its steps are counted apart from those of others."""
    frozen = twins_of("Adam")
    frozen.both(trains("body", False))
    with frozen.start(mesh=2) as step:
        frozen.steps(step, 2)
        step.save(tmp_path)
    twins = twins_of("Adam")

    with twins.start(mesh=2) as step:
        twins.steps(step, 1, first=5)
        step.load(tmp_path)
        twins.models[1].load_state_dict(frozen.models[1].state_dict())
        twins.optimizers[1].load_state_dict(copy.deepcopy(frozen.optimizers[1].state_dict()))
        twins.steps(step, 3, first=2)
        twins.assert_equal()


def test_states_that_are_given_may_be_of_a_layer_that_is_frozen_now():
    trained = twins_of("Adam")
    with trained.start() as step:
        trained.steps(step, 2)
        states = step.state_dict()
    model, optimizer = trained.models[0], trained.optimizers[0]
    trained.both(trains("body", False))

    with parallelize(model, loss_of, batch(0), optimizer, mesh=2, states=states) as step:
        trained.steps(step, 1, first=2)
        assert step.state_dict().keys() == states.keys()
        trained.both(trains("body", True))
        trained.steps(step, 2, first=3)
    trained.assert_equal()
