"""A model and its optimizer read as what ranks train, and what is written to them is found."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from sbp_core.errors import RunError
from sbp_torch.graph_capture import UpdateOptions, initial_states
from sbp_torch.guards import ConnectedStates, connected_elsewhere


class Trained:
    """Stands for a session: all states have one value, and are read by name."""

    def __init__(self, make_optimizer=torch.optim.Adam):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        self.optimizer = make_optimizer(self.model.parameters())
        self.states = initial_states(self.model, self.optimizer)
        self.asked = []
        self.connected = ConnectedStates(self.model, self.read)
        self.connected.add(self.optimizer, UpdateOptions(), self.states)
        self.connected.connect(lambda has_states: None)

    def read(self, names):
        self.asked.append(names)
        return {name: self.states[name] for name in names}

    def step(self, value):
        self.connected.taken_over()
        self.states = {name: torch.full_like(one, value) for name, one in self.states.items()}
        self.connected.note_step()


@pytest.fixture
def trained():
    found = Trained()
    found.step(7)
    return found


READERS = {
    "an operator": lambda m: m[0].weight.max(),
    "a list of tensors": lambda m: torch.stack([m[0].weight, m[0].weight]).mean(),
    "foreach": lambda m: torch._foreach_add([m[0].weight], 0.0)[0][0, 0],
    "item": lambda m: m[0].bias[0].item(),
    "numpy": lambda m: m[0].weight.detach().numpy()[0, 0],
    "data": lambda m: m[0].weight.data[0, 0],
    "a buffer": lambda m: m[1].running_mean[0],
    "state_dict": lambda m: m.state_dict()["0.weight"][0, 0],
    "a copy": lambda m: copy.deepcopy(m)[0].weight[0, 0],
    "a file": lambda m: _saved(m)[0].weight[0, 0],
    "vector": lambda m: nn.utils.parameters_to_vector(m.parameters())[0],
    "forward": lambda m: m[0](torch.zeros(1, 3))[0, 0],
}


def _saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("reader", READERS)
def test_a_tensor_that_is_read_has_its_state(reader, trained):
    assert READERS[reader](trained.model) == 7
    assert len(trained.asked) == 1
    trained.step(5)
    assert READERS[reader](trained.model) == 5
    assert not trained.connected.written_states()


def test_what_tells_nothing_of_values_reads_none(trained):
    model = trained.model
    for one in model.parameters():
        assert (one.is_leaf, one.requires_grad, one.dtype) == (True, True, torch.float32)
        assert isinstance(one, nn.Parameter) and len({one, one}) == 1
    assert sum(one.numel() for one in model.parameters()) == 12
    assert [tuple(one.shape) for one in model.parameters()] == [(2, 3), (2,), (2,), (2,)]
    made = [torch.zeros_like(model[0].weight), model[0].weight.new_zeros(2, 3)]
    assert [(type(one), one.sum().item()) for one in made] == [(torch.Tensor, 0.0)] * 2
    trained.optimizer.zero_grad()
    model.zero_grad()
    repr(model)

    assert not trained.asked and not trained.connected.written_states()


def test_averages_of_a_model_are_those_of_what_is_trained(trained):
    average = AveragedModel(trained.model)
    for value in (7, 3):
        trained.step(value)
        average.update_parameters(trained.model)

    assert {one.item() for one in average.module[0].weight.flatten()} == {5}
    assert type(average.module[0].weight) is nn.Parameter


WRITERS = {
    "in place": lambda m: m[0].weight.data.mul_(0.5),
    "under no_grad": lambda m: torch.no_grad()(m[0].weight.mul_)(0.5),
    "a view": lambda m: m[0].weight.detach().view(-1).mul_(0.5),
    "init": lambda m: nn.init.constant_(m[0].weight, 3.5),
    "data": lambda m: setattr(m[0].weight, "data", torch.full((2, 3), 3.5)),
    "foreach": lambda m: torch._foreach_mul_([m[0].weight.data], 0.5),
    "numpy": lambda m: m[0].weight.detach().numpy().__imul__(0.5),
}


NORMS = {
    "a module": lambda m, x: m[1](x),
    "the function": lambda m, x: nn.functional.batch_norm(
        x, m[1].running_mean, m[1].running_var, training=True
    ),
    "of torch": lambda m, x: torch.batch_norm(
        x, None, None, m[1].running_mean, m[1].running_var, True, 0.1, 1e-5, False
    ),
    "its statistics": lambda m, x: torch.batch_norm_update_stats(
        x, m[1].running_mean, m[1].running_var, 0.1
    ),
    "of each sample": lambda m, x: nn.functional.instance_norm(
        x.T[None], m[1].running_mean, m[1].running_var
    ),
}


@pytest.mark.parametrize("norm", NORMS)
def test_running_statistics_that_the_loop_moves_are_written(norm, trained):
    """PyTorch writes them without counting up their versions: the next step had those before."""
    with torch.no_grad():
        NORMS[norm](trained.model, torch.tensor([[0.0, 2.0], [2.0, 8.0]]))

    found = trained.connected.written_states()

    assert {"1.running_mean", "1.running_var"} <= {*found}
    assert not {"0.weight", "1.weight", "1.bias"} & {*found}
    torch.testing.assert_close(found["1.running_mean"], torch.tensor([6.4, 6.8]))
    trained.connected.taken_over()
    assert not trained.connected.written_states()


def test_running_statistics_in_evaluation_are_not_written(trained):
    trained.model.eval()(torch.zeros(2, 3))

    assert not trained.connected.written_states()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_what_a_fused_optimizer_of_the_loop_steps_is_written(kind, trained):
    head = trained.model[0]
    other = kind(head.parameters(), lr=0.5, fused=True)
    for parameter in head.parameters():
        parameter.grad = torch.ones_like(parameter)

    other.step()

    assert trained.connected.written_states().keys() == {"0.weight", "0.bias"}


@pytest.mark.parametrize("writer", WRITERS)
def test_what_is_written_is_found_once(writer, trained):
    WRITERS[writer](trained.model)

    found = trained.connected.written_states()

    assert found.keys() == {"0.weight"}
    torch.testing.assert_close(found["0.weight"], torch.full((2, 3), 3.5))
    assert all(type(one) is torch.Tensor for one in found.values())
    trained.connected.taken_over()
    assert not trained.connected.written_states()


def test_an_alias_of_before_is_written_and_read_as_the_tensor(trained):
    alias = trained.model[0].bias.data
    trained.step(3)
    assert alias.tolist() == [3, 3]
    trained.step(4)

    alias.add_(1)

    assert trained.connected.written_states()["0.bias"].tolist() == [5, 5]


def test_weights_that_are_loaded_are_those_of_the_next_step(trained):
    best = {name: torch.zeros_like(one) for name, one in trained.model.state_dict().items()}

    trained.model.load_state_dict(best)

    found = trained.connected.written_states()
    assert found.keys() == best.keys()
    assert not any(one.any() for one in found.values())


def test_what_is_written_to_the_model_says_nothing_of_the_optimizer(trained):
    trained.model.load_state_dict(trained.model.state_dict())
    assert trained.connected.written_states()
    trained.connected.taken_over()

    assert trained.optimizer.state[trained.model[0].weight]["exp_avg"][0, 0] == 7


def test_a_tensor_with_rules_of_its_own_is_left_alone_and_said_so(caplog):
    class Own(nn.Parameter):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return super().__torch_function__(func, types, args, kwargs or {})

    model = nn.Linear(2, 2)
    model.weight = Own(torch.ones(2, 2))
    ConnectedStates(model, lambda names: {}).connect(lambda _: None)

    assert type(model.weight) is Own and type(model.bias) is not nn.Parameter
    assert "'weight' is of a class with its own __torch_function__" in caplog.text


def test_the_states_of_an_optimizer_are_read_and_written(trained):
    optimizer, weight = trained.optimizer, trained.model[0].weight
    assert len(optimizer.state) == 4
    assert optimizer.state[weight]["exp_avg"][0, 0] == 7
    assert optimizer.state_dict()["state"][0]["exp_avg_sq"][0, 0] == 7
    assert not trained.connected.written_states()

    optimizer.state[weight]["exp_avg"].zero_()

    found = trained.connected.written_states()
    assert len(found) == 12 and not found["0.weight.exp_avg"].any()
    assert found["0.bias.exp_avg"].tolist() == [7, 7]
    trained.connected.taken_over()
    assert not trained.connected.written_states()


def test_states_of_an_optimizer_that_are_cleared_or_loaded_begin_anew(trained):
    optimizer = trained.optimizer
    kept = copy.deepcopy(optimizer.state_dict())

    optimizer.state.clear()
    assert {float(one.sum()) for one in trained.connected.written_states().values()} == {0}

    trained.step(3)
    optimizer.load_state_dict(kept)
    assert trained.connected.written_states()["0.weight.exp_avg"][0, 0] == 7
    trained.step(2)
    assert optimizer.state[trained.model[0].weight]["exp_avg"][0, 0] == 2


def test_a_gradient_is_refused_by_name(trained):
    for ask in (
        lambda: trained.model[0].weight.grad,
        lambda: nn.utils.clip_grad_norm_(trained.model.parameters(), 1.0),
    ):
        with pytest.raises(RunError, match=r"the gradient of '0\.weight' (.|\n)*clip_norm"):
            ask()


def test_a_gradient_that_somebody_made_is_theirs(trained):
    trained.model(torch.ones(4, 3)).sum().backward()

    assert trained.model[1].bias.grad.tolist() == [4, 4]
    trained.optimizer.step()
    assert "1.bias" in trained.connected.written_states()


def test_behind_its_end_a_model_is_an_ordinary_one(trained):
    assert connected_elsewhere(trained.model) is trained.connected
    trained.connected.read_all()
    trained.connected.disconnect()
    trained.states = {}
    trained.connected.note_step()

    assert connected_elsewhere(trained.model) is None
    assert {type(one) for one in trained.model.parameters()} == {nn.Parameter}
    assert {type(one) for one in trained.model.buffers()} == {torch.Tensor}
    assert trained.model[0].weight[0, 0] == 7
    assert trained.optimizer.state[trained.model[0].weight]["exp_avg"][0, 0] == 7
    assert type(trained.optimizer.state).__module__ == "collections"


def test_a_model_without_values_has_none_to_read():
    model = nn.Linear(2, 2, device="meta")
    optimizer = torch.optim.Adam(model.parameters())
    connected = ConnectedStates(model, lambda names: {})
    connected.add(optimizer, UpdateOptions(), initial_states(model, optimizer))
    connected.connect(lambda has_states: None)
    connected.note_step()

    assert model.weight.is_meta and connected_elsewhere(model) is None
    with pytest.raises(RunError, match=r"step\.optimizer_state_dict"):
        optimizer.state_dict()
    assert not connected.written_states()
