"""What a loop changes between steps equals plain PyTorch, or is refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from sbp_core.errors import ConfigError, RunError
from sbp_launch import parallelize
from sbp_torch.graph_capture import counted_random

LAYOUTS = (
    {},
    {"mesh": 4, "planner": "manual/zero"},
    {"mesh": (2, 2), "micro_batches": 2, "pins": {"body.weight": {"tensor": "S(0)"}}},
    {"mesh": {"pipe": 2}, "micro_batches": 4, "planner": "manual/pipeline"},
)

BETA = 1.0


class Network(nn.Module):
    """Two layers, a batch norm, a buffer that the loss reads, and numbers that forward reads."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.drop = nn.Dropout(0.0)
        self.temperature, self.calls = 1.0, 0
        self.register_buffer("weight", torch.ones((), dtype=torch.float64))

    def forward(self, x):
        if self.calls > 100:
            x = x * 2
        return self.head(self.drop(self.body(x).tanh())) / self.temperature


def loss_of(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean() * model.weight * BETA


def batch(index, size=8):
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(size, 6, generator=generator, dtype=torch.float64)
    return {"x": x, "y": x[:, :3].sin()}


class Twins:
    """One program by `parallelize`, and one by plain PyTorch, that go through the same."""

    def __init__(
        self, make=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ):
        torch.manual_seed(0)
        self.models = [Network().double()]
        self.models.append(copy.deepcopy(self.models[0]))
        self.optimizers = [make(model) for model in self.models]

    def start(self, **layout):
        return parallelize(self.models[0], loss_of, batch(0), self.optimizers[0], **layout)

    def steps(self, step, count, first=0, size=8):
        """Take steps with both; their losses are equal."""
        for index in range(first, first + count):
            found = float(step(batch(index, size)))
            self.optimizers[1].zero_grad()
            wanted = loss_of(self.models[1], batch(index, size))
            wanted.backward()
            self.optimizers[1].step()
            assert abs(found - wanted.item()) <= 1e-12

    def both(self, change):
        return [change(*pair) for pair in zip(self.models, self.optimizers, strict=True)]

    def assert_equal(self):
        assert_alike(*(model.state_dict() for model in self.models))
        assert_alike(*(one.state_dict() for one in self.optimizers))


def assert_alike(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def _write(model, optimizer):
    with torch.no_grad():
        model.head.weight.mul_(0.5)
        model.body.bias.data.clamp_(-0.1, 0.1)


def _momentum(model, optimizer):
    for held in optimizer.state.values():
        held["momentum_buffer"].zero_()


def _best_back(model, optimizer):
    model.load_state_dict({name: one * 0.9 for name, one in model.state_dict().items()})


def _one_more_step(model, optimizer):
    optimizer.zero_grad()
    loss_of(model, batch(77)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _forgotten(model, optimizer):
    optimizer.state.pop(model.head.weight)  # its counter begins anew, beside those of others


FOLLOWED = {
    "states of one parameter are forgotten": _forgotten,
    "weights are written": _write,
    "a buffer is filled": lambda model, optimizer: model.weight.fill_(0.5),
    "best weights come back": _best_back,
    "momentum is set to zero": _momentum,
    "states are cleared": lambda model, optimizer: optimizer.state.clear(),
    "states are loaded": lambda model, optimizer: optimizer.load_state_dict(
        copy.deepcopy(optimizer.state_dict())
    ),
    "the rate": lambda model, optimizer: optimizer.param_groups[0].update(lr=0.01),
    "a step by hand": _one_more_step,
    "a counter": lambda model, optimizer: setattr(model, "calls", 3),
    "nothing": lambda model, optimizer: (model.eval(), model.train()),
}


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("change", FOLLOWED)
def test_what_is_followed_equals_plain_pytorch(change, layout):
    twins = Twins()

    with twins.start(**layout) as step:
        twins.steps(step, 2)
        twins.both(FOLLOWED[change])
        twins.steps(step, 2, first=2)
        twins.assert_equal()
    twins.assert_equal()  # also behind the block


def test_a_counter_of_one_parameter_that_begins_anew_is_followed():
    twins = Twins(lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, eps=0.01))
    with twins.start(mesh=2, planner="manual/zero") as step:
        twins.steps(step, 2)
        twins.both(_forgotten)
        twins.steps(step, 2, first=2)
        twins.assert_equal()


def test_averages_and_files_are_those_of_plain_pytorch(tmp_path):
    twins = Twins()
    averages = twins.both(lambda model, optimizer: AveragedModel(model))

    with twins.start(mesh=2, planner="manual/zero") as step:
        for index in range(3):
            twins.steps(step, 1, first=index)
            for average, model in zip(averages, twins.models, strict=True):
                average.update_parameters(model)
        assert_alike(*(one.state_dict() for one in averages))
        torch.save(twins.models[0].state_dict(), tmp_path / "weights.pt")
        twins.steps(step, 1, first=3)

    read = torch.load(tmp_path / "weights.pt")
    assert not torch.equal(read["head.bias"], twins.models[0].head.bias)
    assert {type(one) for one in read.values()} == {torch.Tensor}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("kind", ["Adam", "SGD"])
def test_the_next_step_goes_on_with_model_and_optimizer(kind):
    made = {"lr": 0.01} if kind == "Adam" else {"lr": 0.01, "momentum": 0.9}
    twins = Twins(lambda model: getattr(torch.optim, kind)(model.parameters(), **made))
    layouts = ({"mesh": 2}, {"mesh": 4, "planner": "manual/zero"}, {})
    for index, (frozen, layout) in enumerate(zip(("body", "head", ""), layouts, strict=True)):
        twins.both(lambda model, optimizer: model.requires_grad_(True))
        if frozen:
            twins.both(lambda m, o, name=frozen: m.get_submodule(name).requires_grad_(False))
        with twins.start(**layout) as step:
            twins.steps(step, 2, first=2 * index)
    twins.assert_equal()


def test_a_model_is_trained_by_one_step_at_a_time():
    twins = Twins()
    with twins.start(mesh=2) as step:
        step(batch(0))
        with pytest.raises(ConfigError, match=r"another parallel step(.|\n)*copy\.deepcopy"):
            twins.start(mesh=2)
        other = copy.deepcopy(twins.models[0])
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        with parallelize(other, loss_of, batch(0), optimizer, mesh=2) as second:
            second(batch(1))
            assert not torch.equal(other.head.bias, twins.models[0].head.bias)


def _beta(value):
    globals()["BETA"] = value


def _hook(model, optimizer):
    model.head.register_forward_hook(lambda module, given, made: made * 2)


#: What makes another step of the program, over the same states.
FORMS = {
    "a global": lambda model, optimizer: _beta(2.0),
    "an attribute": lambda model, optimizer: setattr(model, "temperature", 2.0),
    "a branch": lambda model, optimizer: setattr(model, "calls", 101),
    "a probability": lambda model, optimizer: setattr(model.drop, "p", 1.0),
    "a mode": lambda model, optimizer: model.eval(),
    "frozen": lambda model, optimizer: model.head.requires_grad_(False),
    "a hook": _hook,
    "a setting": lambda model, optimizer: optimizer.param_groups[0].update(nesterov=True),
    "a state": lambda model, optimizer: optimizer.param_groups[0].update(dampening=0.5),
    "no momentum": lambda model, optimizer: optimizer.param_groups[0].update(momentum=0.0),
    "two groups": lambda model, optimizer: optimizer.add_param_group(
        {"params": [optimizer.param_groups[0]["params"].pop()], "lr": 0.01}
    ),
    "a buffer": lambda model, optimizer: setattr(
        model, "weight", torch.full((), 0.5, dtype=torch.float64)
    ),
}


@pytest.mark.slow(but=5)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("change", FORMS)
def test_another_form_of_the_step_equals_plain_pytorch(change, layout):
    twins = Twins()

    with twins.start(**layout) as step:
        twins.steps(step, 2)
        before = dict(step.session.store.values[0])
        twins.both(FORMS[change])
        twins.steps(step, 2, first=2)
        _beta(1.0)
        twins.steps(step, 1, first=4)
        assert step.steps_done == 5
        twins.assert_equal()
        held = step.session.store.values[0]
        assert all(held[name] is before[name] for name in held if name.startswith("body."))
    twins.assert_equal()


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_batches_of_other_sizes_are_other_forms(layout, tmp_path):
    twins = Twins()
    sizes = (8, 8, 4, 8, 12, 4, 8)

    with twins.start(**layout) as step:
        for index, size in enumerate(sizes):
            twins.steps(step, 1, first=index, size=size)
        assert len(step.forms) == 3
        step.save(tmp_path)
        twins.assert_equal()
    with Twins().start(mesh=2) as step:  # forms are nothing that a checkpoint knows of
        step.load(tmp_path)
        assert step.steps_done == len(sizes)
        twins.steps(step, 2, first=9, size=4)


def test_dropout_in_another_form_draws_as_one_device():
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 3)).double()
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, twin))
    loss = lambda model, batch: (model(batch["x"]) - batch["y"]).square().mean()  # noqa: E731

    with parallelize(model, loss, batch(0), optimizer, mesh=2) as step:
        for index, size in enumerate((8, 4, 8, 4)):
            found = float(step(batch(index, size)))
            other.zero_grad()
            with counted_random(0, index):
                wanted = loss(twin, batch(index, size))
            wanted.backward()
            other.step()
            assert abs(found - wanted.item()) <= 1e-12


def test_there_is_a_bound_on_forms_that_is_told(caplog):
    twins = Twins()

    with twins.start() as step:
        for index in range(15):
            _beta(1 + index if index else 1.0)
            twins.steps(step, 1, first=index)
        assert caplog.text.count("the step has 5 forms by now") == 1
        assert "BETA is 4" in caplog.text
        _beta(25)
        twins.steps(step, 1, first=15)
        _beta(125)
        with pytest.raises(RunError, match=r"16 forms(.|\n)*BETA is 125(.|\n)*in the batch"):
            step(batch(16))
        _beta(3)
        twins.steps(step, 1, first=16)
    twins.assert_equal()


REFUSED = {
    "a module": (
        lambda model, optimizer: setattr(model, "head", nn.Linear(6, 3).double()),
        r"model\.head is another module",
    ),
    "a parameter": (
        lambda model, optimizer: setattr(model.head, "bias", nn.Parameter(torch.ones(3).double())),
        r"model\.head\.bias is another parameter",
    ),
    "a group": (
        lambda model, optimizer: optimizer.add_param_group(
            {"params": [nn.Parameter(torch.ones(1, dtype=torch.float64))]}
        ),
        "the optimizer has 2 parameter groups, and had 1",
    ),
    "a state": (
        lambda model, optimizer: optimizer.param_groups[0].update(amsgrad=True),
        r"amsgrad of parameter group 0 is True(.|\n)*has the state(.|\n)*trained without",
    ),
    "what cannot be captured": (
        lambda model, optimizer: setattr(model, "temperature", "high"),
        r"model\.temperature is 'high'(.|\n)*test_following\.py:\d+",
    ),
}


@pytest.fixture(autouse=True)
def _beta_as_before():
    yield
    _beta(1.0)


@pytest.mark.parametrize("change", REFUSED)
def test_what_cannot_be_followed_is_refused_by_name(change):
    make = {"a state": lambda model: torch.optim.Adam(model.parameters(), lr=0.01)}
    twins = Twins(*[make[change]] if change in make else [])
    apply, told = REFUSED[change]

    with twins.start(mesh=2) as step:
        twins.steps(step, 2)
        apply(twins.models[0], twins.optimizers[0])
        for _ in range(2):  # and again
            with pytest.raises(RunError, match=told):
                step(batch(2))
        assert step.steps_done == 2


def test_what_is_read_and_makes_the_same_step_is_no_other_form():
    twins = Twins()

    with twins.start(mesh=2) as step:
        for index, calls in enumerate((0, 50, 100)):
            for model in twins.models:
                model.calls = calls
            twins.steps(step, 1, first=index)
        assert len(step.forms) == 1


def test_an_evaluation_sees_what_the_program_is_now():
    twins = Twins()

    with twins.start(mesh=2) as step:
        twins.steps(step, 1)
        for value in (1.0, 2.0, 0.5):
            _beta(value)
            for model in twins.models:
                model.weight.fill_(value)
            found = float(step.evaluate(batch(5, size=6)))
            with torch.no_grad():
                wanted = float(loss_of(twins.models[1].eval(), batch(5, size=6)))
            twins.models[1].train()
            assert abs(found - wanted) <= 1e-12
        twins.models[0].head = nn.Linear(6, 3).double()
        with pytest.raises(RunError, match="another module"):
            step.evaluate(batch(5, size=6))


@pytest.mark.parametrize(
    "warnings_are",
    [pytest.param(one, marks=pytest.mark.filterwarnings(one)) for one in ("error", "ignore")],
)
def test_a_state_that_a_loss_keeps_is_refused_and_is_as_it_was(warnings_are):
    """PyTorch warns of it, and goes on to an error of its own."""
    model = nn.LSTM(4, 4)
    kept = {"h": (torch.zeros(1, 8, 4), torch.zeros(1, 8, 4))}
    before = kept["h"]

    def loss(model, batch):
        made, kept["h"] = model(batch, tuple(one.detach() for one in kept["h"]))
        return made.square().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"kept\['h'\](.|\n)*register_buf(.|\n)*restore"):
        parallelize(model, loss, torch.zeros(5, 8, 4), optimizer, mesh=2)
    assert kept["h"] is before


def test_an_evaluation_does_not_hide_a_mode_from_the_next_step():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = torch.arange(8.0).reshape(4, 2)

    with parallelize(model, lambda m, b: m(b).square().mean(), given, optimizer) as step:
        step(given)
        model.eval()
        step.evaluate(given)
        step(given)
        assert (len(step.forms), int(model[1].num_batches_tracked)) == (2, 1)


def test_what_a_loss_keeps_once_is_harmless():
    model, kept = nn.Linear(4, 4), {}

    def loss(model, batch):
        kept.setdefault("scale", batch.shape[-1] ** -0.5)
        return (model(batch) * kept["scale"]).square().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with parallelize(model, loss, torch.ones(8, 4), optimizer, mesh=2) as step:
        assert not kept
        found = float(step(torch.ones(8, 4)))
        assert abs(found - loss(model, torch.ones(8, 4)).item()) <= 1e-6
        assert float(step(torch.ones(8, 4))) == found and len(step.forms) == 1


def test_a_step_without_an_update_is_in_the_mode_of_the_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = torch.arange(8.0).reshape(4, 2).exp()  # so that no two masks give one sum

    with parallelize(model, lambda m, b: m(b).sum(), given, optimizer) as step:
        step(given)
        model.eval()
        wanted = float(step.evaluate(given))
        with step.no_update():
            assert float(step(given)) == wanted
            model.train()
            assert abs(float(step(given)) - wanted) > 1


def test_a_model_in_eval_mode_is_trained_in_it_and_said_so():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.warns(UserWarning, match=r"in eval mode, and is trained in this(.|\n)*\.train\("):
        parallelize(model, lambda m, b: m(b).square().mean(), torch.ones(4, 2), optimizer)


def test_settings_of_groups_come_back_with_a_checkpoint(tmp_path, caplog):
    def make():
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, betas=(0.8, 0.9))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
        loss = lambda model, batch: model(batch).square().mean()  # noqa: E731
        step = parallelize(model, loss, torch.ones(4, 3), optimizer, mesh=2)
        return step, optimizer, schedule

    step, optimizer, schedule = make()
    with step:
        for index in range(4):
            step(torch.full((4, 3), index + 1.0))
            schedule.step()
        step.save(tmp_path)
        wanted = float(step(torch.ones(4, 3))), float(step(torch.ones(4, 3)))

    step, other, later = make()
    with step:
        step.load(tmp_path)
        later.load_state_dict(schedule.state_dict())
        assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] != 0.1
        assert other.param_groups[0]["betas"] == (0.8, 0.9)
        assert (float(step(torch.ones(4, 3))), float(step(torch.ones(4, 3)))) == wanted
        other.param_groups.append({**other.param_groups[0], "params": []})
        step.load(tmp_path)
    assert "has the settings of 1 parameter groups, and there are 2" in caplog.text


def test_a_weight_that_begins_in_the_memory_of_another_gets_its_own():
    """Before its first call, the older spectral norm has `weight` as `weight_orig.data`."""
    torch.manual_seed(0)
    models = [
        nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 4)), nn.Tanh(), nn.Linear(4, 3))
        for _ in range(2)
    ]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    loss = lambda model, batch: model(batch["x"]).square().mean()  # noqa: E731
    given = {"x": batch(0)["x"].float()}

    with parallelize(models[0], loss, given, optimizers[0], mesh=2) as step:
        for _ in range(3):
            step(given)
            optimizers[1].zero_grad()
            loss(models[1], given).backward()
            optimizers[1].step()
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict(), rtol=0, atol=1e-6)
