"""Random models of blocks under sharded parameters: buckets change no bit and no byte."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sbp_aten.passes import prepare_step
from sbp_core.compile import CompileOptions, compile_plan
from sbp_core.graph.ir import InputKind
from sbp_core.infer import infer_strategy
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.planning import PlanRequest
from sbp_core.testing.graphs import cluster
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceSession

_SPLIT = ("batch", "activations", "parameters", "optimizer_states", "gradients", "updates")
_MESHES = (((2,), ("data",)), ((3,), ("data",)), ((2, 2), ("data", "replica")))
_ROWS = 48


class _Block(nn.Module):
    """Two layers with a norm or a scale before them, of drawn width."""

    def __init__(self, width: int, inner: int, has_norm: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if has_norm else nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return found


class _Net(nn.Module):
    def __init__(self, width: int, blocks: Sequence[tuple[int, bool]]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(width, inner, norm) for inner, norm in blocks)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x)
        return found


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found: Tensor = model(batch["x"]).square().mean()
    return found


def _made(width: int, blocks: Sequence[tuple[int, bool]]) -> tuple[nn.Module, torch.optim.Adam]:
    torch.manual_seed(0)
    model = _Net(width, blocks).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)


def _buckets_change_nothing(data: st.DataObject) -> int:
    """Return how many calls fewer there are."""
    draw = data.draw
    width = draw(st.sampled_from((4, 6, 12)), "width")
    inner = st.sampled_from((5, 6, 12))
    blocks = draw(st.lists(st.tuples(inner, st.booleans()), min_size=1, max_size=3), "blocks")
    ranks, axes = draw(st.sampled_from(_MESHES), "mesh")
    micro_batches = draw(st.integers(1, 2), "micro-batches")
    weights = draw(st.sampled_from(("S(0)", "S(1)", "B")), "weights of layers")
    pins = {**{word: {"data": "S(0)"} for word in _SPLIT}, "*.up.weight": {"data": weights}}
    model, optimizer = _made(width, blocks)
    batch = {"x": torch.randn(_ROWS, width, dtype=torch.float64)}
    graph = prepare_step(capture(model, _loss, batch, optimizer), micro_batches)
    request = PlanRequest(graph=graph, mesh=Placement.grid(ranks, axes), cluster=cluster(), pins={})
    strategy = infer_strategy(request, planner="test", pins=pins)
    own_thread, prefetch = draw(st.booleans(), "own thread"), draw(st.integers(0, 2), "prefetch")
    size = draw(st.sampled_from((None, 200, 1000)), "bucket bytes")

    alone, together = (
        compile_plan(
            graph,
            strategy,
            CompileOptions(bucket_bytes=most, boxing_thread=own_thread, prefetch=prefetch),
        )
        for most in (0, size)
    )

    check(together)
    assert together.boxing_bytes == alone.boxing_bytes
    states = initial_states(model, optimizer)
    ran = [ReferenceSession(plan, states, ReferenceConfig()) for plan in (alone, together)]
    for _ in range(2):
        rows = {"x": torch.randn(_ROWS * micro_batches, width, dtype=torch.float64)}
        wanted, found = (session.step(rows, {"lr": 0.01}).loss for session in ran)
        assert torch.equal(found, wanted)
    for part in together.ranks:
        for slot in part.slots:
            if InputKind(slot.kind).is_state:
                one, other = (torch.as_tensor(s.shard(slot.name, part.rank)) for s in ran)
                assert torch.equal(one, other), slot.name
    return len(alone.steps) - len(together.steps)


@pytest.mark.exhaustive
def test_gathering_blocks_together_changes_no_bit() -> None:
    saved: list[int] = []

    @settings(max_examples=12, deadline=None, derandomize=True)
    @given(st.data())
    def draws(data: st.DataObject) -> None:
        saved.append(_buckets_change_nothing(data))

    draws()
    assert max(saved) > 10


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_gathering_very_many_blocks_together_changes_no_bit(data: st.DataObject) -> None:
    assert _buckets_change_nothing(data) >= 0
