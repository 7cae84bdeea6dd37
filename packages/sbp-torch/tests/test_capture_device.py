from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sbp_core.errors import CaptureError
from sbp_core.graph import LogicalGraph, Symbol, verify_graph
from sbp_torch.graph_capture import capture, device
from sbp_torch.ops import operators


class Attention(nn.Module):
    """One head dim of 8, 4 heads; the mask is of a batch entry and a head each, of all, or none."""

    def __init__(self, mask: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        q, k, v = (
            part.view(batch, time, 4, 8).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        mask = None
        if self.mask is not None:
            mask = torch.full(self.mask, -1.0, dtype=x.dtype, device=x.device)
        made = nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None
        )
        return made.transpose(1, 2).reshape(batch, time, 32)


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


def _captured(model: nn.Module, device: str, *shape: int, dtype: str = "float32") -> LogicalGraph:
    kind = getattr(torch, dtype)
    batch = {"x": torch.zeros(shape, dtype=kind)}
    model = model.to(kind)
    return capture(model, _loss, batch, torch.optim.SGD(model.parameters(), lr=0.1), device=device)


def _kinds(graph: LogicalGraph) -> set[str]:
    return {node.kind for node in graph.nodes if "attention" in node.kind}


def _devices(graph: LogicalGraph) -> set[str]:
    arguments = [a for node in graph.nodes for a in (*node.args, *node.kwargs.values())]
    return {a.name for a in arguments if isinstance(a, Symbol) and a.kind == "device"}


def test_a_step_for_gpus_has_the_kernels_and_devices_of_gpus() -> None:
    graph = verify_graph(_captured(Attention((16, 16)), "cuda", 2, 16, 32))

    efficient = "_scaled_dot_product_efficient_attention"
    assert _kinds(graph) == {efficient, f"{efficient}_backward"}
    assert _devices(graph) == {"cuda"}


def test_a_step_for_cpus_stays_as_it_is_captured() -> None:
    graph = _captured(Attention((16, 16)), "cpu", 2, 16, 32)

    assert _devices(graph) == {"cpu"}
    assert all(kind.endswith(("_for_cpu", "_for_cpu_backward")) for kind in _kinds(graph))


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("time", [16, 17])
@pytest.mark.parametrize("mask", [(), (1, 1), (2, 4)], ids=["of all", "broadcast", "of each"])
def test_masks_are_expanded_and_their_rows_aligned(mask: tuple[int, ...], time: int) -> None:
    graph = _captured(Attention((*mask, time, time)), "cuda", 2, time, 32)

    node = next(node for node in graph.nodes if node.kind.endswith("efficient_attention"))
    assert graph.tensor(node.args[3].name).shape == (2, 4, time, time)
    padded = [node for node in graph.nodes if node.kind == "constant_pad_nd"]
    assert [graph.tensor(node.outputs[0]).shape[-1] for node in padded] == [32] * (time == 17)


def test_what_an_operator_saves_has_the_shape_that_it_has_on_gpus() -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.EmbeddingBag(10, 4, mode="sum")

        def forward(self, x: Tensor) -> Tensor:
            return self.table(x.long())

    graphs = {device: _captured(Bags(), device, 8, 2) for device in ("cpu", "cuda")}

    saved = {
        device: [graph.tensor(name).shape for node in graph.nodes for name in node.outputs[1:]]
        for device, graph in graphs.items()
    }
    assert saved["cpu"] != saved["cuda"]
    verify_graph(graphs["cuda"])


def test_attention_in_float64_has_no_kernel_on_gpus() -> None:
    with pytest.raises(CaptureError, match="no fused attention in float64") as refused:
        _captured(Attention(), "cuda", 2, 16, 32, dtype="float64")

    assert "SDPBackend.MATH" in refused.value.todo
    assert any("test_capture_device.py" in line for line in refused.value.where)


def test_an_unknown_kind_of_device_is_refused() -> None:
    with pytest.raises(CaptureError, match="device='tpu'"):
        _captured(Attention(), "tpu", 2, 16, 32)


def test_an_operator_that_does_not_run_there_is_named() -> None:
    @torch.library.custom_op("sbp_test::cpu_only", mutates_args=())
    def cpu_only(x: Tensor) -> Tensor:
        return x.clone()

    @cpu_only.register_fake
    def _(x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            raise RuntimeError("tensors of CPUs only")
        return torch.empty_like(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + cpu_only(x)

    with pytest.raises(
        CaptureError, match=r"cpu_only.* does not run on cuda: tensors of CPUs"
    ) as refused:
        _captured(Model(), "cuda", 2, 4)

    assert any("test_capture_device.py" in line for line in refused.value.where)


class Layers(nn.Module):
    """Equal layers, with numbers that differ in type alone, and one that is wider."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention() for _ in range(3)])
        self.wide = nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x) * 2 + layer(x).mul(2.0)
        return self.wide(x)


@pytest.mark.slow
def test_equal_calls_are_made_once_and_say_what_each_of_them_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[str] = []
    run = operators.call
    monkeypatch.setattr(operators, "call", lambda op, *rest: called.append(op) or run(op, *rest))

    graph = _captured(Layers(), "cuda", 2, 16, 32)
    num_calls = len(called)
    monkeypatch.setattr(device, "_intern", lambda value, _: value)  # nothing lies alike
    each = _captured(Layers(), "cuda", 2, 16, 32)

    assert graph == each
    assert num_calls < len(graph.nodes) * 0.6 < len(called) - num_calls
