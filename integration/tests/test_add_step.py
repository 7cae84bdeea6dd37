"""Several programs over one set of states: equal to plain PyTorch, in any order, on any layout."""

from __future__ import annotations

import copy

import pytest
import torch
from test_following import assert_alike
from torch import nn
from torch.nn import functional

from sbp_core.errors import CaptureError, ConfigError, PlanError, RunError, SbpLookupError
from sbp_launch import parallelize

LAYOUTS = (
    {},
    {"mesh": 2, "planner": "manual/zero"},
    {"mesh": 4, "planner": "osdp"},
    {"mesh": (2, 2), "micro_batches": 2},
)


class Gan(nn.Module):
    """A generator and a discriminator, each with a batch norm, as in DCGAN."""

    def __init__(self, norm=nn.BatchNorm1d):
        super().__init__()
        # Biases before a batch norm have gradients of rounding errors, which Adam makes large.
        self.generator = nn.Sequential(
            nn.Linear(4, 8, bias=False), norm(8), nn.ReLU(), nn.Linear(8, 6)
        )
        self.discriminator = nn.Sequential(
            nn.Linear(6, 8, bias=False), norm(8), nn.LeakyReLU(0.2), nn.Linear(8, 1)
        )


def score(model, x, wanted):
    found = model.discriminator(x).squeeze(1)
    return functional.binary_cross_entropy_with_logits(found, torch.full_like(found, wanted))


def loss_d(model, batch):
    fake = model.generator(batch["noise"]).detach()
    return score(model, batch["real"], 1.0) + score(model, fake, 0.0)


def loss_g(model, batch):
    return score(model, model.generator(batch["noise"]), 1.0)


def batch(index, size=8):
    generator = torch.Generator().manual_seed(index)
    one, other = (torch.randn(size, n, generator=generator, dtype=torch.float64) for n in (4, 6))
    return {"noise": one, "real": other}


def noise(index, size=8):
    return {"noise": batch(1000 + index, size)["noise"]}


class Twins:
    """Two optimizers over one model, by `parallelize` and by plain PyTorch."""

    def __init__(
        self,
        make=lambda parameters: torch.optim.Adam(parameters, lr=0.01, eps=0.01),
        norm=nn.BatchNorm1d,
    ):
        torch.manual_seed(0)
        self.models = [Gan(norm).double()]
        self.models.append(copy.deepcopy(self.models[0]))
        self.d, self.g = (
            [make(getattr(model, name).parameters()) for model in self.models]
            for name in ("discriminator", "generator")
        )

    def start(self, **layout):
        step = parallelize(self.models[0], loss_d, batch(0), self.d[0], **layout)
        return step, step.add_step(loss_g, noise(0), self.g[0])

    def step(self, step, loss, given, optimizers):
        found = float(step(given))
        optimizers[1].zero_grad()
        wanted = loss(self.models[1], given)
        wanted.backward()
        optimizers[1].step()
        assert abs(found - wanted.item()) <= 1e-12

    def rounds(self, step_d, step_g, count, first=0, size=8):
        for index in range(first, first + count):
            self.step(step_d, loss_d, batch(index, size), self.d)
            self.step(step_g, loss_g, noise(index, size), self.g)

    def assert_equal(self):
        assert_alike(*(model.state_dict() for model in self.models))
        for pair in (self.d, self.g):
            assert_alike(*(one.state_dict() for one in pair))


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", ["Adam", "SGD"])
def test_a_generator_and_a_discriminator_equal_plain_pytorch(kind, layout):
    make = {
        "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, eps=0.01),
        "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    }
    # The statistics of a batch norm are of the whole batch, and not of micro-batches.
    norm = nn.LayerNorm if "micro_batches" in layout else nn.BatchNorm1d
    twins = Twins(make[kind], norm)
    step, step_g = twins.start(**layout)

    with step:
        twins.rounds(step, step_g, 3)
        twins.assert_equal()
        twins.rounds(step, step_g, 2, first=3, size=4)  # each has forms
        twins.step(step_g, loss_g, noise(9), twins.g)
        twins.rounds(step, step_g, 1, first=10)
        assert step.steps_done == 13
    twins.assert_equal()


def test_heads_of_one_body_may_be_trained_beside_each_other_in_a_pipeline():
    def make():
        torch.manual_seed(0)
        sizes = {"body": (6, 8), "first": (8, 2), "second": (8, 3)}
        model = nn.ModuleDict({key: nn.Linear(*size) for key, size in sizes.items()}).double()
        first = [*model["body"].parameters(), *model["first"].parameters()]
        return (
            model,
            torch.optim.SGD(first, lr=0.1),
            torch.optim.SGD(model["second"].parameters(), lr=0.1),
        )

    def loss(head):
        return lambda model, batch: model[head](model["body"](batch["x"])).square().mean()

    example = {"x": torch.randn(8, 6, dtype=torch.float64)}
    (model, *optimizers), (eager, *eager_optimizers) = make(), make()
    layout = {"mesh": {"pipe": 2}, "planner": "manual/pipeline", "micro_batches": 2}
    with parallelize(model, loss("first"), example, optimizers[0], **layout) as step:
        steps = step, step.add_step(loss("second"), example, optimizers[1])
        for _ in range(2):
            for head, one, optimizer in zip(
                ("first", "second"), steps, eager_optimizers, strict=True
            ):
                eager.zero_grad()
                wanted = loss(head)(eager, example)
                wanted.backward()
                optimizer.step()
                assert abs(float(one(example)) - wanted.item()) <= 1e-12
        assert_alike(model.state_dict(), eager.state_dict())


def test_no_state_moves_or_is_there_twice():
    twins = Twins()
    step, step_g = twins.start(mesh=2, planner="manual/zero")

    with step:
        held = step.session.store.values
        before = {rank: dict(values) for rank, values in held.items()}
        twins.rounds(step, step_g, 2)
        held = step.session.store.values
        names = [name for name in before[0] if name.startswith("discriminator.0")]
        assert all(held[rank][name] is before[rank][name] for rank in held for name in names)
        moments = [name for name in held[0] if name.startswith("generator") and "exp_avg" in name]
        assert len(moments) == 10
        whole = step.state_dict()
        sharded = [name for name in moments if held[0][name].numel() < whole[name].numel()]
        assert sharded  # as the planner says of the states of the first program


@pytest.mark.slow
def test_a_program_may_come_later_and_evaluate(tmp_path):
    twins = Twins()
    step = parallelize(twins.models[0], loss_d, batch(0), twins.d[0], mesh=2)

    with step:
        twins.step(step, loss_d, batch(0), twins.d)
        step_g = step.add_step(loss_g, noise(0), twins.g[0])
        twins.rounds(step, step_g, 2, first=1)
        step.save(tmp_path)
        twins.models[1].eval()
        with torch.no_grad():
            wanted = loss_g(twins.models[1], noise(7, 6))
        assert abs(float(step_g.evaluate(noise(7, 6))) - wanted.item()) <= 1e-12
        twins.models[1].train()
        at_the_save = copy.deepcopy((twins.models[1], twins.d[1], twins.g[1]))
        states = step.state_dict()

    other = Twins()
    step, step_g = other.start(mesh=4, planner="manual/zero")
    with step:
        step.load(tmp_path)
        assert step.steps_done == 5
        assert_alike(step.state_dict(), states)
        other.models[1].load_state_dict(at_the_save[0].state_dict())
        other.d[1].load_state_dict(at_the_save[1].state_dict())
        other.g[1].load_state_dict(at_the_save[2].state_dict())
        other.rounds(step, step_g, 2, first=3)
        other.assert_equal()


@pytest.mark.slow
def test_two_losses_may_have_one_optimizer():
    twins = Twins()
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in twins.models]

    def pull(model, batch):
        return model.generator(batch["noise"]).square().mean()

    with parallelize(twins.models[0], loss_d, batch(0), optimizers[0], mesh=2) as step:
        second = step.add_step(pull, noise(0))
        for index in range(3):
            twins.step(step, loss_d, batch(index), optimizers)
            twins.step(second, pull, noise(index), optimizers)
        assert_alike(*(one.state_dict() for one in optimizers))
        assert_alike(*(model.state_dict() for model in twins.models))


def test_what_a_loop_changes_is_followed_in_all_programs():
    twins = Twins()
    step, step_g = twins.start(mesh=2)

    with step:
        twins.rounds(step, step_g, 1)
        for model in twins.models:
            with torch.no_grad():
                model.generator[0].weight.mul_(0.5)
            model.discriminator[0].requires_grad_(False)
        for pair in (*zip(twins.d, strict=True), *zip(twins.g, strict=True)):
            for optimizer in pair:
                optimizer.param_groups[0]["lr"] = 0.003
        twins.rounds(step, step_g, 2, first=1)
        for model in twins.models:
            model.discriminator[0].requires_grad_(True)
        twins.rounds(step, step_g, 2, first=3)
        twins.assert_equal()


def test_what_does_not_go_together_is_refused_by_name():
    twins = Twins()
    step, _ = twins.start(mesh=2)
    model = twins.models[0]

    with pytest.raises(ConfigError, match=r"a state(.|\n)*exp_avg(.|\n)*optimizer\.state\.clear"):
        step.add_step(loss_g, noise(0), torch.optim.Adam(model.parameters()))
    with pytest.raises(ConfigError, match="micro_batches=0"):
        step.add_step(loss_g, noise(0), twins.g[0], micro_batches=0)
    with step:
        pass
    with pytest.raises(RunError, match="over"):
        step.add_step(loss_g, noise(0))


def test_an_optimizer_is_started_anew_by_clearing_its_state():
    """As the refusal of a second optimizer over the same parameters says."""
    twins = Twins()
    step, step_g = twins.start(mesh=2, planner="manual/zero")

    with step:
        twins.rounds(step, step_g, 2)
        for optimizer in twins.g:
            optimizer.state.clear()
        twins.rounds(step, step_g, 2, first=2)
        for made, plain in (twins.d, twins.g):
            made.load_state_dict(type(made)(made.param_groups).state_dict())
            plain.load_state_dict(type(plain)(plain.param_groups).state_dict())
        twins.rounds(step, step_g, 2, first=4)
        twins.assert_equal()


def test_programs_fit_their_memory_together():
    """Each by itself fits; with the moments of the other, it does not."""
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(200, 200, bias=False) for name in "ab"})
    first, second = (torch.optim.Adam(model[name].parameters()) for name in "ab")
    losses = [lambda m, batch, n=name: m[n](batch["x"]).square().mean() for name in "ab"]
    given = {"x": torch.ones(4, 200)}
    step = parallelize(model, losses[0], given, first, mesh=2)
    cluster = {"name": "local", "memory_bytes": step._planned.memory.peak + 1000}

    step = parallelize(model, losses[0], given, first, mesh=2, cluster=cluster)
    with pytest.raises(ConfigError, match=r"memory(.|\n)*memory_bytes"):
        step.add_step(losses[1], given, second)


def test_pins_of_another_program_hold_or_are_refused():
    twins = Twins()
    step = parallelize(twins.models[0], loss_d, batch(0), twins.d[0], mesh=2)
    pins = {"generator.0.weight.exp_avg": "S(0)"}

    step_g = step.add_step(loss_g, noise(0), twins.g[0], pins=pins)
    assert str(step_g.strategy.storage["generator.0.weight.exp_avg"].sbp) == "S(0)"
    with pytest.raises(ConfigError, match="generatr"):
        step.add_step(loss_g, noise(0), twins.g[0], pins={"generatr.*": "S(0)"})
    with pytest.raises(PlanError, match=r"stored as \(B\), and the pins move it to \(S\(0\)\)"):
        step.add_step(loss_g, noise(0), twins.g[0], pins={"generator.3.weight": "S(0)"})
    with step:
        twins.rounds(step, step_g, 2)
        twins.assert_equal()


def test_optimizers_without_states_may_be_beside_each_other():
    twins = Twins(lambda parameters: torch.optim.SGD(parameters, lr=0.05))
    step, step_g = twins.start(mesh=2)

    with step:
        twins.rounds(step, step_g, 3)
        twins.assert_equal()


def test_two_optimizers_over_one_parameter_are_refused_also_if_it_is_frozen():
    twins = Twins()
    model = twins.models[0]
    model.discriminator[0].requires_grad_(False)
    step = parallelize(model, loss_d, batch(0), twins.d[0], mesh=2)
    both = torch.optim.Adam([*model.generator.parameters(), *model.discriminator[0].parameters()])

    with pytest.raises(ConfigError, match=r"two optimizers have a state 'discriminator\.0"):
        step.add_step(loss_g, noise(0), both)
    step_g = step.add_step(loss_g, noise(0), twins.g[0])
    with step:
        step(batch(0))
        step_g(noise(0))
        twins.g[0].add_param_group({"params": [*model.discriminator[3].parameters()]})
        with pytest.raises(RunError, match="two optimizers have a state"):
            step_g(noise(1))


def test_a_program_that_could_not_begin_is_forgotten():
    twins = Twins()
    step = parallelize(twins.models[0], loss_d, batch(0), twins.d[0], mesh=2)

    with step:
        with pytest.raises(CaptureError, match="no loss today"):
            step.add_step(lambda model, given: _no_loss(), noise(0), twins.g[0])
        step_g = step.add_step(loss_g, noise(0), twins.g[0])
        twins.rounds(step, step_g, 2)
        twins.assert_equal()


def test_a_program_of_which_one_size_fails_is_forgotten():
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(6, 3).double() for name in "ab"})
    optimizers = [torch.optim.Adam(model[name].parameters()) for name in "ab"]
    first = lambda model, given: model["a"](given["x"]).square().mean()  # noqa: E731
    pad_to = {"sizes": (4, 8), "values": {"x": 0.0}}

    def second(model, given):
        if given["x"].shape[1] == 4:
            _no_loss()
        return model["b"](given["x"]).square().mean()

    given = {"x": torch.ones(8, 6, 6, dtype=torch.float64)}
    with parallelize(model, first, given, optimizers[0], mesh=2, compile={"prove": False}) as step:
        with pytest.raises(CaptureError, match="no loss today"):
            step.add_step(second, given, optimizers[1], pad_to=pad_to)
        again = torch.optim.Adam(model["b"].parameters())
        other = step.add_step(second, given, again)
        other(given)
        step(given)
        assert set(step.state_dict()) >= {"a.bias.exp_avg", "b.bias.exp_avg"}


def _no_loss():
    raise ValueError("no loss today")


def test_given_states_and_weights_are_those_of_all_programs(tmp_path):
    twins = Twins()
    step, step_g = twins.start(mesh=2)
    with step:
        twins.rounds(step, step_g, 2)
        states = step.state_dict()
        step.save(tmp_path)

    model, d, g = twins.models[0], twins.d[0], twins.g[0]
    step = parallelize(model, loss_d, batch(0), d, mesh=4, planner="manual/zero", states=states)
    step_g = step.add_step(loss_g, noise(0), g)
    with step:
        twins.rounds(step, step_g, 2, first=2)
        twins.assert_equal()

    other = Twins()
    step, step_g = other.start(mesh=2)
    with step:
        step.load_model(tmp_path)
        other.models[1].load_state_dict(copy.deepcopy(_weights(other.models[1], states)))
        other.rounds(step, step_g, 2)
        other.assert_equal()


def _weights(model, states):
    return {name: states[name] for name in model.state_dict()}


@pytest.mark.slow
def test_checkpoints_of_fewer_and_of_more_programs_say_so(tmp_path):
    twins = Twins()
    step, step_g = twins.start(mesh=2)
    with step:
        twins.rounds(step, step_g, 1)
        step.save(tmp_path / "two")
    twins = Twins()
    step = parallelize(twins.models[0], loss_d, batch(0), twins.d[0], mesh=2)

    with step:
        step(batch(0))
        step.save(tmp_path / "one")
        with pytest.raises(SbpLookupError, match=r"no state is called 'generator(.|\n)*add_step"):
            step.load(tmp_path / "two")
        step_g = step.add_step(loss_g, noise(0), twins.g[0])
        with pytest.raises(ConfigError, match=r"optimizer of program 2(.|\n)*step\.add_step"):
            step.load(tmp_path / "one")
        step.load(tmp_path / "two")
        step_g(noise(3))


def test_a_mode_that_one_loss_sets_and_another_reads_is_refused_by_name():
    twins = Twins()
    step = parallelize(twins.models[0], loss_d, batch(0), twins.d[0], mesh=2)

    def loss(model, given):
        model.discriminator.eval()
        return loss_g(model, given)

    with pytest.raises(CaptureError, match=r"puts module 'discriminator' into eval mode"):
        step.add_step(loss, noise(0), twins.g[0])


def test_steps_that_are_compared_are_of_one_program():
    twins = Twins()
    step = parallelize(twins.models[0], loss_d, batch(0), twins.d[0], mesh=2, compare_steps=2)

    with pytest.raises(ConfigError, match="compare_steps"):
        step.add_step(loss_g, noise(0), twins.g[0])


def test_beside_is_the_former_name_of_add_step():
    twins = Twins()
    step = parallelize(twins.models[0], loss_d, batch(0), twins.d[0], mesh=2, compare_steps=2)

    with (
        pytest.warns(FutureWarning, match=r"step\.beside has a new name: step\.add_step"),
        pytest.raises(ConfigError, match="compare_steps"),
    ):
        step.beside(loss_g, noise(0), twins.g[0])


def test_gradients_are_clipped_of_what_the_optimizer_trains():
    twins = Twins(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    model, twin = twins.models
    step = parallelize(model, loss_d, batch(0), twins.d[0], mesh=2, update={"clip_norm": 0.05})
    step_g = step.add_step(loss_g, noise(0), twins.g[0], update={"clip_norm": 0.05})

    with step:
        for index in range(3):
            for taken, loss, given, part, optimizer in (
                (step, loss_d, batch(index), twin.discriminator, twins.d[1]),
                (step_g, loss_g, noise(index), twin.generator, twins.g[1]),
            ):
                found = taken(given)
                twin.zero_grad()
                loss(twin, given).backward()
                norm = nn.utils.clip_grad_norm_(part.parameters(), 0.05)
                optimizer.step()
                assert abs(found.metrics["grad_norm"].item() - norm.item()) <= 1e-12
        twins.assert_equal()


def test_a_loss_of_another_optimizer_is_refused_by_name():
    twins = Twins()
    step = parallelize(twins.models[0], loss_d, batch(0), twins.d[0], mesh=2)

    with pytest.raises(ConfigError, match="no gradient to a parameter of the optimizer"):
        step.add_step(loss_d, batch(0), twins.g[0])


def test_a_step_that_is_over_says_so():
    twins = Twins()
    step, step_g = twins.start(mesh=2)
    with step:
        twins.rounds(step, step_g, 1)

    for call in (lambda: step(batch(1)), lambda: step_g(noise(1)), lambda: step.evaluate(batch(1))):
        with pytest.raises(RunError, match="this parallel step is over"):
            call()
    twins.assert_equal()
