from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from alive_bytes import AliveBytes
from constructors import CONSTRUCTORS, Held
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sbp_core.errors import CaptureError
from sbp_torch.deferred_init import deferred
from sbp_torch.graph_capture import LossScaling, UpdateOptions, initial_states
from sbp_torch.graph_capture.step import model_tensors
from sbp_torch.optim.combined import CombinedOptimizer
from sbp_torch.testing.models import PROGRAMS, same_states

SEED = 5


def _eager(build: Callable[[], nn.Module]) -> dict[str, Tensor]:
    torch.manual_seed(SEED)
    return {name: tensor.detach() for name, tensor in model_tensors(build()).items()}


def _layouts(states: Mapping[str, Tensor]) -> dict[str, tuple[object, ...]]:
    return {name: (value.dtype, value.shape, value.stride()) for name, value in states.items()}


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_deferred_states_are_those_of_one_device_bit_for_bit(name: str) -> None:
    build = CONSTRUCTORS[name]
    expected = _eager(build)

    made = dict(deferred(build, SEED).states().items())

    assert same_states(made, expected)
    assert _layouts(made) == _layouts(expected)


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_a_deferred_state_can_be_asked_for_at_any_time(name: str) -> None:
    build = CONSTRUCTORS[name]
    expected = _eager(build)

    states = deferred(build, SEED).states()
    made = {key: states[key] for key in reversed(list(states))}

    assert same_states(made, expected)


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_some_of_the_states_are_as_they_are_among_all(name: str) -> None:
    build = CONSTRUCTORS[name]
    expected = _eager(build)
    wanted = list(expected)[1::2]

    made = dict(deferred(build, SEED).states().each(wanted))

    assert same_states(made, {key: expected[key] for key in wanted})


def test_the_default_generator_is_left_as_it_was() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()

    made = deferred(CONSTRUCTORS["interleaved"], SEED)
    dict(made.states().items())
    made.whole_model()

    assert torch.equal(torch.get_rng_state(), before)


def test_a_deferred_model_holds_no_values() -> None:
    made = deferred(CONSTRUCTORS["refilled"], SEED)

    assert {tensor.device.type for tensor in model_tensors(made.model).values()} == {"meta"}


def test_while_it_is_built_a_model_thinks_that_it_is_on_the_cpu() -> None:
    seen: list[object] = []

    def build() -> nn.Module:
        model = nn.Linear(2, 2)
        seen.extend((model.weight.device.type, model.weight.is_meta, torch.tensor([]).device.type))
        return model

    deferred(build, SEED)

    assert seen == ["cpu", False, "cpu"]


def test_the_whole_model_is_that_of_one_device() -> None:
    build = CONSTRUCTORS["copies"]

    model = deferred(build, SEED).whole_model()

    assert same_states(model_tensors(model), _eager(build))


def test_a_model_can_be_built_whole_instead() -> None:
    build = CONSTRUCTORS["copies"]

    made = deferred(build, SEED, whole=True)

    assert same_states(dict(made.states().items()), _eager(build))


def test_tensors_in_lists_of_modules_have_values() -> None:
    def build() -> nn.Module:
        model = nn.LSTM(3, 2)
        model.tables = [torch.arange(3.0), {"two": torch.rand(2)}]
        return model

    made = deferred(build, SEED)

    torch.manual_seed(SEED)
    expected = build()
    assert torch.equal(made.model.tables[0], expected.tables[0])
    assert torch.equal(made.model.tables[1]["two"], expected.tables[1]["two"])
    assert all(weight.is_meta for weight in made.model._flat_weights)


def test_states_are_a_mapping_of_all_names() -> None:
    states = deferred(CONSTRUCTORS["rotary"], SEED).states()

    assert (
        set(states) == set(_eager(CONSTRUCTORS["rotary"])) == {name for name, _ in states.items()}
    )
    assert len(states) == len(set(states))
    assert "scale" in states and "other" not in states


@pytest.mark.parametrize("name", PROGRAMS)
def test_states_of_the_optimizer_come_along(name: str) -> None:
    program = PROGRAMS[name]
    made = deferred(program.model, 0)

    states = made.states(program.optimizer(made.model))

    assert same_states(dict(states.items()), initial_states(*program.build()))


_OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adagrad": lambda held: torch.optim.Adagrad(held, initial_accumulator_value=0.25),
    "rmsprop": lambda held: torch.optim.RMSprop(held, momentum=0.9, centered=True),
    "adafactor": torch.optim.Adafactor,
    "muon and adamw": lambda held: CombinedOptimizer(
        [
            torch.optim.Muon([p for p in held if p.dim() == 2]),
            torch.optim.AdamW([p for p in held if p.dim() != 2], amsgrad=True),
        ]
    ),
}


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_states_of_any_optimizer_start_as_on_one_device(name: str) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(7, 5), nn.Conv2d(2, 3, 1), nn.LayerNorm(1)).double()

    make = _OPTIMIZERS[name]
    made = deferred(build, SEED)
    update = UpdateOptions(ema_decay=0.9, loss_scaling=LossScaling(init_scale=8.0))

    states = made.states(make(list(made.model.parameters())), update)

    torch.manual_seed(SEED)
    model = build()
    expected = initial_states(model, make(list(model.parameters())), update)
    assert same_states(dict(states.items()), expected)
    assert _dtypes(states) == _dtypes(expected)


def _dtypes(states: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
    return {name: value.dtype for name, value in states.items()}


def test_states_of_the_optimizer_take_the_memory_of_one_number() -> None:
    made = deferred(lambda: nn.Linear(100, 100), SEED)

    states = dict(made.states(torch.optim.AdamW(made.model.parameters())).items())

    assert states["weight.exp_avg"].shape == (100, 100)
    assert states["weight.exp_avg"].untyped_storage().nbytes() == 4


def test_a_constructor_on_another_device_is_refused_with_its_line() -> None:
    def build() -> nn.Module:
        return nn.Linear(2, 2, device="mps")

    with pytest.raises(CaptureError, match=r"mps(.|\n)*test_deferred_init\.py:\d+(.|\n)*leave"):
        deferred(build, SEED)


def test_random_numbers_into_a_tensor_from_outside_are_refused_with_the_line() -> None:
    outside = torch.zeros(3)

    def build() -> nn.Module:
        model = nn.Linear(2, 2)
        model.register_buffer("noise", outside.normal_())
        return model

    with pytest.raises(CaptureError, match=r"normal_(.|\n)*test_deferred_init\.py:\d+(.|\n)*whole"):
        deferred(build, SEED)


def test_an_error_of_the_constructor_comes_out_as_it_is() -> None:
    def build() -> nn.Module:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        deferred(build, SEED)

    assert torch.empty(1).device.type == "cpu"


def test_states_are_let_go_of_one_by_one() -> None:
    made = deferred(lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))), SEED)
    states = made.states()

    with AliveBytes() as alive:
        for _, value in states.items():
            del value

    assert 64 * 64 * 4 <= alive.peak <= 64 * 64 * 4 + 1_000


@pytest.mark.parametrize("name", ["interleaved", "refilled", "copies"])
def test_numbers_that_are_filled_over_are_not_kept(name: str) -> None:
    made = deferred(CONSTRUCTORS[name], SEED)
    sizes = [tensor.nbytes for tensor in model_tensors(made.model).values()]
    states = made.states()

    with AliveBytes() as alive:
        for _, value in states.items():
            del value

    assert alive.peak <= 3 * max(sizes) + 200


def test_draws_of_others_are_dropped_before_a_tensor_is_made() -> None:
    def build() -> nn.Module:
        held = Held((1_000,), (10_000,))
        held.p0.data.normal_()
        held.p1.data.normal_()
        held.p0.data.add_(torch.randn(1_000))
        return held

    states = deferred(build, SEED).states()

    with AliveBytes() as alive:
        for _, value in states.items():
            del value

    assert 4 * 10_000 <= alive.peak <= 4 * 10_000 + 100


def test_values_are_taken_as_they_were_when_they_were_used() -> None:
    outside = torch.empty(2, 3)

    def build() -> nn.Module:
        model = nn.Linear(3, 2)
        outside.fill_(1.0)
        with torch.no_grad():
            model.weight.mul_(outside)
            outside.fill_(2.0)
            model.bias.mul_(outside[:, 0])
        return model

    made = dict(deferred(build, SEED).states().items())

    assert same_states(made, _eager(build))


class _Program:
    """A constructor of random steps on a few tensors; the same each time it is called."""

    def __init__(self, steps: list[tuple[int, int, int]]) -> None:
        self.steps = steps

    def __call__(self) -> nn.Module:
        held = Held((4, 6), (6,), (17,), (3, 4, 2))
        values = [parameter.data for parameter in held.parameters()]
        for value in values:
            value.zero_()
        saved = torch.get_rng_state()
        for kind, at, seed in self.steps:
            if kind == 0:
                saved = torch.get_rng_state()
            elif kind == 1:
                torch.set_rng_state(saved)
            elif kind == 2:
                torch.manual_seed(seed)
            else:
                _STEPS[kind - 3](values[at], values[seed])
        return held


def _read(left: Tensor, right: Tensor) -> None:
    left.mul_(0.5 if right.sum().item() > 0 else 2.0)


def _replace(left: Tensor, right: Tensor) -> None:
    left.set_((left + right.flatten()[0]).contiguous())


_STEPS: tuple[Callable[[Tensor, Tensor], object], ...] = (
    lambda left, right: left.normal_(),
    lambda left, right: left.uniform_(-1, 1),
    lambda left, right: nn.init.trunc_normal_(left),
    lambda left, right: left.flatten()[1:3].normal_(),
    lambda left, right: left.bernoulli_(0.5),
    lambda left, right: left.copy_(torch.bernoulli(torch.rand(left.shape))),
    lambda left, right: left.flatten()[:2].copy_(right.clone().flatten()[1:3]),
    lambda left, right: left.copy_(right.clone().flatten()[:1]),
    lambda left, right: left.add_(torch.randn_like(left)),
    lambda left, right: left.flatten().random_(0, 9),
    lambda left, right: torch.randperm(7),
    _read,
    _replace,
)


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.integers(0, 2 + len(_STEPS)), st.integers(0, 3), st.integers(0, 3)),
        max_size=12,
    )
)
@settings(max_examples=60, deadline=None)
def test_any_constructor_is_made_bit_for_bit(steps: list[tuple[int, int, int]]) -> None:
    build = _Program(steps)
    expected = _eager(build)

    states = deferred(build, SEED).states()

    assert same_states(dict(states.items()), expected)
    assert same_states(dict(states), expected)
    assert same_states(dict(states.each(["p1", "p3"])), {k: expected[k] for k in ("p1", "p3")})
