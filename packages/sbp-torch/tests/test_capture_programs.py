"""What users' programs hold, each captured and compared with eager PyTorch over some steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from sbp_core.errors import CaptureError
from sbp_core.graph import LogicalGraph, verify_graph
from sbp_core.graph.ir import OutputKind, Phase
from sbp_torch.graph_capture import capture, flatten_batch, initial_states
from sbp_torch.runtime.single import run_graph
from sbp_torch.testing.models import eager_states


class _Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return grad * (s + x * s * (1 - s))


@torch.library.custom_op("sbp_tests::cubed", mutates_args=())
def _cubed(x: Tensor) -> Tensor:
    return x**3


@_cubed.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


_cubed.register_autograd(
    lambda ctx, grad: grad * 3 * ctx.saved_tensors[0] ** 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


class _Lambda(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class _Keyword(nn.Module):
    """Takes a batch by position and by keyword, nested, with integers and booleans."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.head = nn.Linear(6, 4)
        self.unused = nn.Linear(3, 3)

    def forward(self, ids: Tensor, *, extra: dict[str, Any], scale: float) -> Tensor:
        kept = torch.where(extra["mask"].unsqueeze(-1), self.table(ids), 0.0)
        return self.head(kept.sum(1) * scale + extra["dense"][0])


class _Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self._block, x, use_reentrant=self.use_reentrant)
        return self.head(x)

    def _block(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(x))


def _lengths_batch() -> dict[str, Tensor]:
    targets, lengths = torch.randint(1, 8, (4, 3)), torch.tensor([3, 1, 2, 3])
    return {"x": torch.randn(4, 6), "targets": targets, "lengths": lengths}


def _aligned_loss(model: nn.Module, batch: Any) -> Tensor:
    scores = model(batch["x"][:, None] * torch.linspace(-1, 1, 7)[:, None])  # of 7 times
    times = torch.full((4,), 7)
    log = scores.log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(log, batch["targets"], times, batch["lengths"])


def _likely_loss(model: nn.Module, batch: Any) -> Tensor:
    made = torch.distributions.Normal(model(batch["x"]), 0.5)
    return -made.log_prob(batch["y"]).mean()


class _Experts(nn.Module):
    """A grouped product in float32: tokens are sorted by their expert."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.experts = nn.Parameter(torch.randn(3, 8, 4))

    def forward(self, x: Tensor) -> Tensor:
        expert = x.argmax(-1) % 3
        order = expert.argsort(stable=True)
        ends = (expert.unsqueeze(-1) == torch.arange(3)).sum(0).cumsum(0).int()
        made = F.grouped_mm(self.first(x)[order], self.experts, offs=ends)
        return made[order.argsort()]


def _dense(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.Linear(8, 4))


def _images(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), *middle, nn.Flatten(), nn.Linear(64, 4))


def _xy(*shape: int) -> dict[str, Tensor]:
    return {"x": torch.randn(4, *(shape or (6,))), "y": torch.randn(4, 4)}


def _keyword_batch() -> tuple[Any, ...]:
    extra = {"mask": torch.rand(4, 3) > 0.3, "dense": [torch.randn(4, 6)]}
    return (
        torch.randint(0, 9, (4, 3)),
        {"extra": extra},
        torch.randn(4, 4),
    )


def _mse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def _keyword_loss(model: nn.Module, batch: Any) -> Tensor:
    ids, given, wanted = batch
    return F.mse_loss(model(ids, **given, scale=0.5), wanted)


def _autocast_loss(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = model(batch["x"])
    return F.mse_loss(made.float(), batch["y"])


@dataclass(frozen=True)
class _Case:
    model: Callable[[], nn.Module]
    batch: Callable[[], Any] = _xy
    loss: Callable[[nn.Module, Any], Any] = _mse


CASES = {
    "batch norm": _Case(lambda: _dense(nn.BatchNorm1d(8), nn.ReLU())),
    "batch norm of images": _Case(
        lambda: _images(nn.BatchNorm2d(4), nn.ReLU()), lambda: _xy(2, 6, 6)
    ),
    "group norm": _Case(lambda: _images(nn.GroupNorm(2, 4), nn.SiLU()), lambda: _xy(2, 6, 6)),
    "max pool": _Case(lambda: _images(nn.MaxPool2d(1), nn.Hardswish()), lambda: _xy(2, 6, 6)),
    "autograd function": _Case(lambda: _dense(_Lambda(_Swish.apply))),
    "custom op": _Case(lambda: _dense(_Lambda(lambda x: torch.ops.sbp_tests.cubed(x)))),
    "in-place ops": _Case(lambda: _dense(_Lambda(lambda x: x.clone().mul_(2).relu_()))),
    "python constants": _Case(
        lambda: _dense(_Lambda(lambda x: x * torch.tensor([0.5, 2.0] * 4) + torch.tensor(1.5)))
    ),
    "positions and keywords": _Case(_Keyword, _keyword_batch, _keyword_loss),
    "checkpoint": _Case(lambda: _Checkpointed(use_reentrant=False)),
    "reentrant checkpoint": _Case(lambda: _Checkpointed(use_reentrant=True)),
    "autocast": _Case(lambda: _dense(nn.GELU()), _xy, _autocast_loss),
    "grouped product": _Case(_Experts),
    "alignment": _Case(_dense, _lengths_batch, _aligned_loss),
    "distribution": _Case(_dense, _xy, _likely_loss),
    "spectral norm": _Case(
        lambda: _dense(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Tanh())
    ),
}


def _captured(case: _Case) -> tuple[LogicalGraph, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return verify_graph(capture(model, case.loss, case.batch(), optimizer)), model, optimizer


@pytest.mark.slow(but=5)
@pytest.mark.parametrize("name", CASES)
def test_a_captured_program_trains_as_eager_does(name: str) -> None:
    case = CASES[name]
    graph, model, optimizer = _captured(case)
    states: dict[str, Any] = initial_states(model, optimizer)

    for _ in range(3):
        batch = case.batch()
        outputs, states = run_graph(graph, states, [flatten_batch(batch)], {"lr": 1e-2})
        optimizer.zero_grad()
        expected = case.loss(model, batch)
        expected.backward()
        optimizer.step()

        assert torch.equal(outputs["loss"], expected.detach())
    eager = eager_states(model, optimizer)
    for key in set(eager) - {k for k in eager if k.endswith(".step")}:
        torch.testing.assert_close(states[key], eager[key], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["checkpoint", "reentrant checkpoint"])
def test_checkpointed_ops_are_marked_and_not_traced_twice(name: str) -> None:
    graph, _, _ = _captured(CASES[name])

    marked = [node for node in graph.nodes if "recompute" in node.tags]
    assert [node.kind for node in marked].count("tanh") == 2
    assert {node.phase for node in marked} == {Phase.FORWARD}
    assert {tag for node in marked for tag in node.tags if ":" in tag} == {
        "recompute:1",
        "recompute:2",
    }
    assert not any(node.kind == "tanh" for node in graph.nodes if node.phase is Phase.BACKWARD)


@pytest.mark.slow
def test_every_backward_node_belongs_to_a_forward_node() -> None:
    for name, case in CASES.items():
        graph, _, _ = _captured(case)
        backward = [node for node in graph.nodes if node.phase is Phase.BACKWARD]

        lost = [node.name for node in backward if node.forward not in graph.by_name]
        # The gradient of the loss itself, 1, is nobody's.
        assert lost in ([], ["grad.ones_like"]), (name, lost)


def _with_metrics(made: Callable[[Tensor, Tensor], Any]) -> Callable[[nn.Module, Any], Any]:
    def loss(model: nn.Module, batch: Any) -> Any:
        y = model(batch["x"])
        return made(F.mse_loss(y, batch["y"]), y)

    return loss


def test_a_loss_comes_with_metrics() -> None:
    forms = {
        "pair": lambda loss, y: (loss, {"largest": y.max(), "right": (y > 0).sum(), "y": y}),
        "mapping": lambda loss, y: {
            "loss": loss,
            "largest": y.max(),
            "right": (y > 0).sum(),
            "logits": y,
        },
    }
    for form, made in forms.items():
        torch.manual_seed(0)
        model, batch = _dense(), _xy()
        graph = capture(model, _with_metrics(made), batch, torch.optim.SGD(model.parameters()))

        outputs, _ = run_graph(graph, initial_states(model), [batch], {"lr": 0.1})

        metrics = {out.name for out in graph.outputs if out.kind is OutputKind.METRIC}
        assert metrics == {"largest", "right"} | ({"y"} if form == "pair" else set())
        y = model(batch["x"])
        assert torch.equal(outputs["largest"], y.max())
        assert outputs["right"] == (y > 0).sum()


def test_autocast_around_the_forward_is_an_option() -> None:
    torch.manual_seed(0)
    model, batch = _dense(nn.GELU()), _xy()
    graph = capture(model, _mse, batch, autocast="bfloat16")

    outputs, _ = run_graph(graph, initial_states(model), [batch], {})

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(outputs["loss"], _mse(model, batch))
    assert any(graph.tensor(v).dtype == "bfloat16" for n in graph.nodes for v in n.outputs)


class _Leaky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.head(x)
        return self.last


class _Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(1, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.ones(x.shape[0], dtype=torch.int64)
        packed = nn.utils.rnn.pack_padded_sequence(x[..., None], lengths, batch_first=True)
        last: Tensor = self.layer(packed)[1][0][0]
        return last


_REFUSED = {
    "a tensor left on a module": (_Leaky, "sets 'last', which outlives the step", "del, or"),
    "a mask as index": (
        lambda: _dense(_Lambda(lambda x: x[x > 0].sum() + x)),
        "the shape of a tensor depends on the values",
        "torch.where",
    ),
    "a number read from a tensor": (
        lambda: _dense(_Lambda(lambda x: x * x.sum().item())),
        "depends on the value of a tensor",
        "instead of .item()",
    ),
    "a cumulative batch norm": (
        lambda: _dense(nn.BatchNorm1d(8, momentum=None)),
        "depends on the value of a tensor",
        "keep the value a tensor",
    ),
    "a layer skipped by chance": (
        lambda: _dense(_Lambda(lambda x: x if torch.rand([]) < 0.5 else x * 2)),
        "depends on the value of a tensor",
        "torch.where instead of if",
    ),
    "a number read by a function of PyTorch": (
        lambda: _dense(_Lambda(lambda x: x + F.gaussian_nll_loss(x, x * 2, x.exp()))),
        "depends on the value of a tensor",
        "gaussian_nll_loss (",
    ),
    "a number read by an operator": (
        lambda: _dense(_Lambda(lambda x: x + torch.cov(x.T).sum())),
        "depends on the value of a tensor",
        "keep the value a tensor",
    ),
    "a packed sequence": (_Packed, "a size is read from a tensor", "the padded one"),
    "a list read from a tensor": (
        lambda: _dense(_Lambda(lambda x: x * x.sum(0).tolist()[0])),
        "depends on the value of a tensor",
        ".tolist()",
    ),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_what_cannot_be_captured_is_refused_with_line_and_remedy(name: str) -> None:
    make, what, todo = _REFUSED[name]
    torch.manual_seed(0)

    with pytest.raises(CaptureError) as caught:
        capture(make(), _mse, _xy(), None)

    assert what in caught.value.what
    assert todo in caught.value.todo
    if name != "a tensor left on a module":
        assert "test_capture_programs.py:" in caught.value.where[-1]


class _Handled(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_lines_are_those_that_call_an_op_not_those_of_a_mode_that_hears_of_it() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        with _Handled():
            return _mse(model, batch)

    def read(model: nn.Module, batch: Any) -> Tensor:
        with _Handled():
            return model(batch["x"]).sum() * batch["y"].sum().item()

    graph = capture(_dense(), loss, _xy())
    with pytest.raises(CaptureError) as caught:
        capture(_dense(), read, _xy())

    mode, line = _Handled.__torch_function__.__code__, read.__code__.co_firstlineno + 2
    own = {f"{mode.co_firstlineno + 1}"}
    assert not own & {node.source.rpartition(":")[2] for node in graph.nodes}
    assert caught.value.where[-1] == f"tests/test_capture_programs.py:{line}"


def test_what_is_refused_says_nothing_of_remedies_that_are_none() -> None:
    by_value = _Lambda(lambda x: x * 2 if x.sum() > 0 else x)
    by_chance = _Lambda(lambda x: x * 2 if torch.rand([]) > 0.5 else x)
    for module in (by_value, by_chance):
        with pytest.raises(CaptureError) as caught:
            capture(_dense(module), _mse, _xy())

        assert "make_fx" not in str(caught.value)
        assert "unhinted" not in str(caught.value)


def test_an_error_is_raised_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(CaptureError):
        capture(_dense(_Lambda(lambda x: x + torch.ones(3))), _mse, _xy())

    assert not caplog.records


def test_a_loss_without_parameters_is_refused() -> None:
    model = _dense()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            return _mse(model, batch)

    with pytest.raises(CaptureError, match="depends on no parameter that is trained"):
        capture(model, loss, _xy(), torch.optim.SGD(model.parameters()))


def test_a_batch_tensor_that_bears_the_name_of_a_parameter_is_refused() -> None:
    model = _dense()

    with pytest.raises(CaptureError, match=r"'0.weight' is the name of a batch tensor"):
        capture(model, _mse, {**_xy(), "0.weight": torch.ones(1)})


def test_capture_leaves_the_model_as_it_was() -> None:
    torch.manual_seed(0)
    model = _dense(nn.BatchNorm1d(8))
    before = copy.deepcopy(model.state_dict())

    capture(model, _mse, _xy(), torch.optim.SGD(model.parameters()))

    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    assert torch.compiler.is_compiling() is False
    y = checkpoint(lambda x: x * 2, torch.ones(2, requires_grad=True), use_reentrant=False)
    assert y.grad_fn is not None
