from __future__ import annotations

import copy
import doctest
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from sbp_core.errors import SbpLookupError, SbpValueError
from sbp_torch.graph_capture import initial_states
from sbp_torch.interchange import torch_states
from sbp_torch.interchange.torch_states import (
    copy_to_model,
    from_model_state,
    from_optimizer_state,
    to_model_state,
    to_optimizer_state,
)
from sbp_torch.optim import CombinedOptimizer
from sbp_torch.testing.models import PROGRAMS, Buffered, Gpt, Program, eager_step, token_loss


def trained(program: Program, num_steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = program.build()
    for batch in program.batches(num_steps):
        eager_step(program, model, optimizer, batch)
    return model, optimizer


def equal(left: Any, right: Any) -> bool:
    """Whether nested states are equal bit for bit, keys and types included."""
    if isinstance(left, Tensor):
        return torch.equal(left, right) and left.dtype == right.dtype
    if isinstance(left, Mapping):
        return left.keys() == right.keys() and all(equal(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(equal, left, right))
    return bool(left == right)


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_states_leave_as_pytorch_itself_would_write_them(program: Program) -> None:
    model, optimizer = trained(program)
    states = initial_states(model, optimizer)

    assert equal(to_model_state(states, model), dict(model.state_dict()))
    assert equal(to_optimizer_state(states, model, optimizer), optimizer.state_dict())


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_training_goes_on_in_pytorch_where_it_was_left(program: Program) -> None:
    states = initial_states(*trained(program))
    model, optimizer = program.build()
    model.load_state_dict(to_model_state(states, model))
    optimizer.load_state_dict(to_optimizer_state(states, model, optimizer))

    batch = program.batches(3)[2]
    losses = [eager_step(program, *pair, batch) for pair in (trained(program), (model, optimizer))]

    assert torch.equal(*losses)
    assert equal(initial_states(model, optimizer), initial_states(*trained_once_more(program)))


def trained_once_more(program: Program) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = trained(program)
    eager_step(program, model, optimizer, program.batches(3)[2])
    return model, optimizer


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_states_come_back_by_the_names_of_the_graph(program: Program) -> None:
    model, optimizer = trained(program)
    fresh, unstepped = program.build()

    back = from_model_state(model.state_dict(), fresh)
    back |= from_optimizer_state(optimizer.state_dict(), fresh, unstepped)

    assert equal(back, initial_states(model, optimizer))


def test_tied_parameters_have_each_of_their_names() -> None:
    model = Gpt(tied=True)
    states = initial_states(model)

    made = to_model_state(states, model)

    assert "head.weight" not in states
    assert made["head.weight"] is made["tokens.weight"]


def test_tied_parameters_that_differ_are_refused() -> None:
    model = Gpt(tied=True)
    state = dict(model.state_dict()) | {"head.weight": torch.zeros(32, 8)}

    with pytest.raises(SbpValueError, match=r"'tokens\.weight' and 'head\.weight' are one"):
        from_model_state(state, model)


class Hidden(nn.Module):
    """A buffer that is not written, and a tensor that is not even registered."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mask", torch.ones(2), persistent=False)
        self.scale = torch.full((2,), 3.0)

    def get_extra_state(self) -> object:
        return {"version": 3}

    def set_extra_state(self, state: object) -> None:
        assert state == {"version": 3}


def test_what_a_state_dict_leaves_out_comes_from_the_model() -> None:
    model = Hidden()
    states = initial_states(model)

    made = to_model_state(states, model)
    model.load_state_dict(made)

    assert {"mask", "scale"} < states.keys()
    assert made.keys() == {"layer.weight", "layer.bias", "_extra_state"}
    assert equal(from_model_state(made, model), states)


def renaming(model: nn.Module) -> None:
    def rename(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
        for name in [*state]:
            state[f"net.{name}"] = state.pop(name)

    model.register_state_dict_post_hook(rename)


def splitting(model: nn.Module) -> None:
    def split(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
        state["upper"], state["lower"] = state.pop("0.weight").chunk(2)

    model.register_state_dict_post_hook(split)


def wrapping(model: nn.Module) -> None:
    model[0] = checkpoint_wrapper(model[0])


@pytest.mark.parametrize("change", [renaming, splitting, wrapping])
def test_a_state_dict_has_the_names_that_hooks_and_wrappers_give(
    change: Callable[[nn.Module], None],
) -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
    change(model)
    states = {name: value + 1 for name, value in initial_states(model).items()}
    before = {name: value.clone() for name, value in model.state_dict().items()}

    made = to_model_state(states, model)

    assert equal(made, {name: value + 1 for name, value in before.items()})
    assert equal(dict(model.state_dict()), before)
    if change is splitting:
        with pytest.raises(
            SbpValueError, match=r"'upper' of model\.state_dict\(\) is no parameter"
        ):
            from_model_state(made, model)
    else:
        assert equal(from_model_state(made, model), states)
    copy_to_model(states, model)
    assert equal(dict(model.state_dict()), made)


def test_a_name_that_a_hook_gives_to_another_tensor_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def swap(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
        state["0.bias"], state["1.bias"] = state["1.bias"], state["0.bias"]

    model.register_state_dict_post_hook(swap)

    with pytest.raises(SbpValueError, match=r"calls '1\.bias' '0\.bias', and"):
        from_model_state(model.state_dict(), model)


def test_a_tensor_of_extra_state_is_the_models_own() -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Tensor:
            return torch.ones(3)

        def set_extra_state(self, state: object) -> None:
            """Ignore it."""

    model = Extra(2, 2)
    states = initial_states(model)

    made = to_model_state(states, model)

    assert torch.equal(made["_extra_state"], torch.ones(3))
    assert equal(from_model_state(made, model), states)


def test_a_model_without_values_gives_the_names_of_values_and_takes_none() -> None:
    states = initial_states(nn.Linear(2, 2))
    with torch.device("meta"):
        model, other = nn.Linear(2, 2), nn.Linear(2, 3)

    assert equal(to_model_state(states, model), states)
    with pytest.raises(SbpValueError, match="'weight' of the model has no values"):
        copy_to_model(states, model)
    with pytest.raises(SbpValueError, match=r"'weight' of the model has shape \(3, 2\)"):
        copy_to_model(states, other.to_empty(device="cpu"))


def test_what_comes_back_is_a_copy() -> None:
    model = Buffered()

    back = from_model_state(model.state_dict(), model)
    back["head.weight"].zero_()

    assert model.head.weight.abs().sum() > 0


def test_a_state_that_is_missing_or_unknown_is_named() -> None:
    model = Gpt()
    states, state = initial_states(model), dict(model.state_dict())
    states.pop("norm.weight")
    fewer = {name: value for name, value in state.items() if name != "norm.bias"}

    with pytest.raises(SbpLookupError, match=r"no state is called 'norm\.weight'"):
        to_model_state(states, model)
    with pytest.raises(SbpLookupError, match=r"'norm\.bias' is missing"):
        from_model_state(fewer, model)
    with pytest.raises(SbpLookupError, match=r"'nrm\.bias'(.*\n)*.*did you mean 'norm\.bias'"):
        from_model_state(state | {"nrm.bias": torch.zeros(8)}, model)


def test_groups_and_frozen_parameters_keep_their_numbers() -> None:
    model = Gpt()
    model.norm.weight.requires_grad_(False)
    first = list(model.norm.parameters())
    rest = [p for p in model.parameters() if all(p is not other for other in first)]
    optimizer = torch.optim.AdamW([{"params": rest}, {"params": first, "lr": 0.5}])
    program = PROGRAMS["gpt"]
    optimizer.zero_grad()
    token_loss(model, program.batches(1)[0]).backward()
    optimizer.step()

    made = to_optimizer_state(initial_states(model, optimizer), model, optimizer)

    assert equal(made, optimizer.state_dict())
    assert len(made["state"]) == len(rest) + 1


def test_moving_averages_are_no_state_of_an_optimizer() -> None:
    model, optimizer = trained(PROGRAMS["mlp"])
    states = initial_states(model, optimizer)
    averages = {f"{name}.ema": value for name, value in model.named_parameters()}

    made = to_optimizer_state(states | averages, model, optimizer)

    assert equal(made, optimizer.state_dict())


def test_the_state_of_another_optimizer_is_refused() -> None:
    model, optimizer = trained(PROGRAMS["mlp"])
    state = optimizer.state_dict()
    fewer = torch.optim.SGD(list(model.parameters())[1:], lr=0.1)
    reshaped = copy.deepcopy(state)
    reshaped["state"][0]["momentum_buffer"] = torch.zeros(3, 3)
    foreign = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)

    with pytest.raises(SbpValueError, match=r"groups of \[5\] parameters, and the state of \[6\]"):
        from_optimizer_state(state, model, fewer)
    with pytest.raises(SbpValueError, match=r"momentum_buffer' has shape \(3, 3\)"):
        from_optimizer_state(reshaped, model, optimizer)
    with pytest.raises(SbpLookupError, match=r"of shape \(2, 2\) that the model does not have"):
        to_optimizer_state({}, model, foreign)


def test_the_example_in_the_docstring_holds() -> None:
    failed, attempted = doctest.testmod(torch_states)

    assert (failed, attempted) == (0, 9)


def several(model: nn.Module) -> CombinedOptimizer:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return CombinedOptimizer(
        [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]
    )


def test_states_of_several_optimizers_leave_and_come_back() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = several(model)
    model(torch.ones(2, 3)).square().mean().backward()
    optimizer.step()
    states = initial_states(model, optimizer)

    left = to_optimizer_state(states, model, several(model))

    assert equal(left, optimizer.state_dict())
    back = from_optimizer_state(left, model, optimizer)
    assert equal(back, {name: states[name] for name in back})
    assert set(back) == set(states) - set(dict(model.named_parameters()))
    with pytest.raises(SbpValueError, match="states of 1 optimizers"):
        from_optimizer_state({"optimizers": left["optimizers"][:1]}, model, optimizer)
