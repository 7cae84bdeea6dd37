"""What a step changes beside its states: captured as eager does it, or refused with a remedy."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

from sbp_aten.passes import prepare_step
from sbp_core.errors import CaptureError
from sbp_core.graph import LogicalGraph
from sbp_core.passes import accumulate
from sbp_torch.deferred_init import deferred
from sbp_torch.graph_capture import (
    UpdateOptions,
    capture,
    counted_random,
    flatten_batch,
    initial_states,
    split_losses,
)
from sbp_torch.runtime.single import run_graph

_STEPS = 3


class _Model(nn.Module):
    """A layer, buffers, and whatever else a test lets its forward do."""

    def __init__(self, act: Callable[[Any, Tensor], Tensor] = lambda m, y: y) -> None:
        super().__init__()
        self.act = act
        self.layer = nn.Linear(4, 3)
        self.register_buffer("run", torch.zeros(3))
        self.register_buffer("other", torch.ones(3))
        self.plain = torch.zeros(3)
        self.count, self.table = 0, None
        self.cache: dict[str, Any] = {}
        self.kept = [torch.zeros(3)]

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self, self.layer(x))


def _mse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def _batches(count: int = _STEPS) -> list[dict[str, Tensor]]:
    torch.manual_seed(7)
    return [{"x": torch.randn(4, 4), "y": torch.randn(4, 3)} for _ in range(count)]


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _captured(model: nn.Module, loss: Any = _mse, batch: Any = None) -> LogicalGraph:
    return capture(model, loss, _batches(1)[0] if batch is None else batch, _sgd(model))


def _check_as_eager(
    model: nn.Module, loss: Any = _mse, batches: Any = None, num_micro_batches: int = 1
) -> None:
    """Train by the graph and by eager PyTorch, and compare every loss and every state."""
    twin = copy.deepcopy(model)
    given = _batches(_STEPS * num_micro_batches) if batches is None else batches
    graph = prepare_step(_captured(model, loss, given[0]), num_micro_batches)
    states: dict[str, Any] = initial_states(model)
    optimizer = _sgd(twin)
    counted = {"seed": 0} if any(entry.name == "seed" for entry in graph.inputs) else {}
    for step in range(len(given) // num_micro_batches):
        part = given[step * num_micro_batches : (step + 1) * num_micro_batches]
        scalars = {"lr": 0.1, **counted, **({"step": step} if counted else {})}
        with torch.no_grad():
            outputs, states = run_graph(graph, states, [flatten_batch(b) for b in part], scalars)
        optimizer.zero_grad()
        expected = torch.zeros(())
        for at, batch in enumerate(part):
            with counted_random(0, step * num_micro_batches + at):
                made, _ = split_losses(loss(twin, batch))
                (made / num_micro_batches).backward()
            expected = expected + made.detach() / num_micro_batches
        optimizer.step()
        torch.testing.assert_close(outputs["loss"], expected)
    for name, tensor in (*twin.named_parameters(), *twin.named_buffers()):
        torch.testing.assert_close(states[name].detach(), tensor.detach())


def _moved(model: Any, y: Tensor) -> Tensor:
    model.run = 0.9 * model.run + 0.1 * y.detach().mean(0)
    return y - model.run


def _swapped(model: Any, y: Tensor) -> Tensor:
    model.run, model.other = model.other, model.run + 1
    return y * model.run


def _halved(model: Any, y: Tensor) -> Tensor:
    model.plain = model.plain * 0.5 + 1
    return y * model.plain


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("act", [_moved, _swapped, _halved])
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_an_assigned_buffer_is_the_new_state(
    act: Callable[[Any, Tensor], Tensor], num_micro_batches: int
) -> None:
    _check_as_eager(_Model(act), num_micro_batches=num_micro_batches)


def _cached(model: Any, y: Tensor) -> Tensor:
    if model.table is None:
        model.table = torch.arange(3.0) * 0.1
    if "mask" not in model.cache:
        model.cache["mask"] = torch.ones(3) * 2
    return (y + model.table) * model.cache["mask"]


def _longest(model: Any, y: Tensor) -> Tensor:
    if len(y) > model.count:
        model.count = len(y)
        model.table = torch.arange(3.0)
    return y * model.table


def _there_and_back(model: Any, y: Tensor) -> Tensor:
    model.eval()
    model.train()
    return y


@pytest.mark.parametrize("act", [_cached, _longest, _there_and_back])
def test_what_is_set_once_and_for_all_is_computed_anew_and_the_model_stays_as_it_was(
    act: Callable[[Any, Tensor], Tensor],
) -> None:
    model = _Model(act)

    _check_as_eager(model)

    assert (model.count, model.table, model.cache) == (0, None, {})


def _counted(model: Any, y: Tensor) -> Tensor:
    model.count += 1
    return y / model.count


def _other_first(model: Any, y: Tensor) -> Tensor:
    factor = 2.0 if model.table is None else 1.0
    if model.table is None:
        model.table = torch.ones(3)
    return y * model.table * factor


def _summed(model: Any, y: Tensor) -> Tensor:
    model.table = torch.ones(3) if model.table is None else model.table + 1
    return y * model.table


def _last(model: Any, y: Tensor) -> Tensor:
    model.table = y.mean()
    return y


def _listed(model: Any, y: Tensor) -> Tensor:
    model.kept[0] = model.kept[0] + 1
    return y * model.kept[0]


def _listed_in_place(model: Any, y: Tensor) -> Tensor:
    return y * model.kept[0].add_(1)


def _by_data(model: Any, y: Tensor) -> Tensor:
    model.run.data = model.run + 1
    return y * model.run


def _made_one(model: Any, y: Tensor) -> Tensor:
    model.run = model.other
    return y * model.run


def _with_graph(model: Any, y: Tensor) -> Tensor:
    y = y + model.run
    model.run = y.mean(0)
    return y


def _wider(model: Any, y: Tensor) -> Tensor:
    model.run = torch.zeros(4)
    return y


def _registered(model: Any, y: Tensor) -> Tensor:
    model.register_buffer("new", torch.zeros(3))
    return y + model.new


def _own_parameter(model: Any, y: Tensor) -> Tensor:
    model.layer.bias = nn.Parameter(torch.zeros(3))
    return y


_CHANGES = {
    "a counter": (_counted, "changes 'count' from 0 to 1", "register_buffer('count'"),
    "another first step": (_other_first, "sets 'table'", "register_buffer('table'"),
    "a sum": (_summed, "sets 'table'", "register_buffer('table'"),
    "a value that is left": (_last, "sets 'table'", "metric"),
    "a tensor in a list": (_listed, "sets 'kept'", "register_buffer('kept'"),
    "a tensor in a list, in place": (_listed_in_place, "add_ changes a tensor", "register_buffer"),
    "data": (_by_data, "assigns to run.data", "run.copy_"),
    "one tensor under two names": (_made_one, "'run' the same tensor as 'other'", "clone"),
    "a buffer with a graph": (_with_graph, "that still has its graph to 'run'", "detach"),
    "a buffer of another shape": (
        _wider,
        r"of shape (4,) to the buffer 'run'",
        "shape",
    ),
    "a new buffer": (_registered, "registers or removes the buffer 'new'", "__init__"),
    "a new parameter": (_own_parameter, "replaces the parameter 'layer.bias'", "copy_"),
}


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("name", _CHANGES)
def test_a_change_that_no_state_carries_on_is_refused_and_undone(name: str) -> None:
    act, what, todo = _CHANGES[name]
    model = _Model(act)
    before = {key: id(value) for key, value in model.state_dict(keep_vars=True).items()}

    with pytest.raises(CaptureError) as caught:
        _captured(model)

    assert what in caught.value.what
    assert todo in caught.value.todo
    assert (model.count, model.table, model.cache) == (0, None, {})
    assert torch.equal(model.kept[0], torch.zeros(3)) and model.training
    assert before == {key: id(value) for key, value in model.state_dict(keep_vars=True).items()}


@pytest.mark.parametrize(
    ("draw", "name"), [(random.random, "random"), (np.random.rand, "numpy.random")]
)
def test_numbers_that_python_or_numpy_draws_are_refused(
    draw: Callable[[], float], name: str
) -> None:
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())

    with pytest.raises(CaptureError, match=f"draws from {name}:") as caught:
        _captured(_Model(lambda _, y: y * float(draw())))

    assert "torch.rand" in caught.value.todo
    assert before == (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
    )


def test_a_tensor_of_a_closure_that_is_written_to_is_refused_with_its_line() -> None:
    held = torch.zeros(1)

    with pytest.raises(CaptureError, match="no parameter, buffer or input") as caught:
        _captured(_Model(lambda _, y: y + held.add_(1)))

    assert "test_capture_side_effects.py:" in caught.value.where[0]


def test_a_parameter_that_the_loss_holds_otherwise_is_refused() -> None:
    model = _Model()
    held = list(model.parameters())

    with pytest.raises(CaptureError, match=r"'layer\.weight' outside of its module"):
        _captured(model, lambda m, b: _mse(m, b) + held[0].square().sum())


def _tied_by_data() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    model[1].weight = nn.Parameter(model[0].weight.data)  # type: ignore[union-attr]
    return model


def _part_of_a_parameter() -> nn.Module:
    model = _Model()
    model.register_buffer("first", model.layer.weight.data[:1])
    return model


@pytest.mark.parametrize("build", [_tied_by_data, _part_of_a_parameter])
def test_states_on_the_same_memory_are_refused_with_both_names(
    build: Callable[[], nn.Module],
) -> None:
    with pytest.raises(
        CaptureError, match=r"'.*weight' and '.*' are different tensors on the same"
    ):
        _captured(build())


def test_columns_of_one_matrix_share_no_memory() -> None:
    model = _Model(lambda m, y: y * m.left[0] + m.right[0])
    whole = torch.randn(3, 6)
    model.left, model.right = nn.Parameter(whole[:, :3]), nn.Parameter(whole[:, 3:])

    _check_as_eager(model)


def test_hooks_on_gradients_of_parameters_are_applied() -> None:
    model = _Model()
    model.layer.weight.register_hook(lambda grad: grad * 0.5)
    twin = copy.deepcopy(model)
    twin.layer.weight.register_hook(lambda grad: grad * 0.5)
    batch = _batches(1)[0]

    _, states = run_graph(_captured(model), dict(initial_states(model)), [batch], {"lr": 0.1})

    _mse(twin, batch).backward()
    _sgd(twin).step()
    assert torch.equal(states["layer.weight"], twin.layer.weight)


def test_hooks_after_gradients_were_added_up_are_refused() -> None:
    model = _Model()
    model.layer.weight.register_post_accumulate_grad_hook(lambda p: None)

    with pytest.raises(CaptureError, match=r"'layer.weight' has a hook") as caught:
        _captured(model)

    assert "register_hook" in caught.value.todo


def test_a_loss_that_calls_backward_is_refused() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        _mse(model, batch).backward()
        return _mse(model, batch)

    with pytest.raises(CaptureError, match=r"calls backward\(\)"):
        _captured(_Model(), loss)


@dataclass
class _Masked:
    x: Tensor
    y: Tensor
    mask: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        self.mask = None


class _Registered:
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


_pytree.register_pytree_node(
    _Registered, lambda batch: ([batch.x, batch.y], None), lambda parts, _: _Registered(*parts)
)


def test_batches_are_deques_dataclasses_and_registered_nodes_too() -> None:
    by_name = lambda m, b: F.mse_loss(m(b.x), b.y)  # noqa: E731 - twice
    pairs = [(b["x"], b["y"]) for b in _batches()]

    _check_as_eager(_Model(), by_name, [_Masked(*pair) for pair in pairs])
    _check_as_eager(_Model(), by_name, [_Registered(*pair) for pair in pairs])
    _check_as_eager(_Model(), lambda m, b: F.mse_loss(m(b[0]), b[1]), [deque(p) for p in pairs])


def test_a_metric_of_the_batch_is_averaged_over_micro_batches() -> None:
    batches = [{**b, "w": torch.tensor(float(at))} for at, b in enumerate(_batches(2))]
    model = _Model()
    graph = accumulate(_captured(model, lambda m, b: (_mse(m, b), {"w": b["w"]}), batches[0]), 2)

    outputs, _ = run_graph(graph, dict(initial_states(model)), batches, {"lr": 0.1})

    assert outputs["w"] == 0.5


def test_metrics_have_names_of_their_own_and_are_tensors() -> None:
    model, batch = _Model(), _batches(1)[0]
    optimizer, options = _sgd(model), UpdateOptions(report_norm=True)

    with pytest.raises(CaptureError, match="'grad_norm', which is what the update calls its own"):
        capture(
            model,
            lambda m, b: (_mse(m, b), {"grad_norm": b["x"]}),
            batch,
            optimizer,
            update=options,
        )
    for form in (lambda loss: (loss, {"n": 3}), lambda loss: {"loss": loss, "n": 3}):
        with pytest.raises(CaptureError, match="the metric 'n' is int"):
            _captured(model, lambda m, b, form=form: form(_mse(m, b)))


def test_a_constant_of_both_zeros_keeps_their_signs() -> None:
    _check_as_eager(_Model(lambda _, y: y.copysign(torch.tensor([0.0, -0.0, 0.0]))))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_dropout_in_a_checkpoint_draws_one_mask_in_eager_and_graph(*, use_reentrant: bool) -> None:
    def act(_: Any, y: Tensor) -> Tensor:
        made = checkpoint(lambda z: F.dropout(torch.tanh(z), 0.5), y, use_reentrant=use_reentrant)
        assert isinstance(made, Tensor)
        return made

    _check_as_eager(_Model(act))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_run_as_they_are_captured(kind: type[nn.Module]) -> None:
    model = _Model(lambda m, y: m.recurrent(y)[0])
    model.recurrent = kind(3, 3)

    _check_as_eager(model)


def test_a_dtype_that_autocast_does_not_know_is_refused() -> None:
    with pytest.raises(CaptureError, match="autocast='int8'"):
        capture(_Model(), _mse, _batches(1)[0], autocast="int8")


def test_names_of_inputs_of_every_step_are_refused() -> None:
    model = _Model()
    model.seed = nn.Parameter(torch.zeros(3))

    with pytest.raises(CaptureError, match="'seed' is the name of a parameter or buffer"):
        _captured(model)
    with pytest.raises(CaptureError, match="'step_counter' is the name of a batch tensor"):
        _captured(_Model(), batch={**_batches(1)[0], "step_counter": torch.zeros(1)})


def test_refusals_say_what_to_write_instead() -> None:
    own = torch.Generator()
    programs: dict[str, Callable[[Any, Tensor], Tensor]] = {
        "leave generator= out": lambda _, y: y + torch.rand(y.shape, generator=own),
        "torch.where(condition, a, b)": lambda _, y: torch.cond(
            y.sum() > 0, lambda z: z * 2, lambda z: z * 3, (y,)
        ),
    }
    for todo, act in programs.items():
        with pytest.raises(CaptureError) as caught:
            _captured(_Model(act))
        assert todo in caught.value.todo
        assert "test_capture_side_effects.py:" in caught.value.where[0]
    with pytest.raises(CaptureError) as caught:
        _captured(_Model(), lambda m, b: (_mse(m, b), _mse(m, b)))
    assert "add several losses up" in caught.value.todo


def test_constructors_format_numbers_and_may_not_share_memory_or_wait_for_inputs() -> None:
    def build(act: Callable[[nn.Linear], object]) -> nn.Module:
        layer = nn.Linear(2, 2)
        layer.made = act(layer)  # type: ignore[assignment]
        return layer

    made = deferred(lambda: build(lambda layer: f"{layer.bias[0]:.3f}"), 3)
    torch.manual_seed(3)

    assert made.model.made == build(lambda layer: f"{layer.bias[0]:.3f}").made
    with pytest.raises(CaptureError, match="shares memory"):
        deferred(lambda: build(lambda layer: layer.weight.share_memory_()), 3)
    with pytest.raises(CaptureError, match="has no shape yet"):
        deferred(lambda: build(lambda _: nn.LazyLinear(3)), 3)
