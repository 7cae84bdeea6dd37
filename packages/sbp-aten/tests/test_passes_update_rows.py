"""Updates by row: the same numbers as PyTorch's, without work on rows that are not looked up."""

from __future__ import annotations

import copy
import logging
from functools import partial

import pytest
import torch
from torch import nn

from sbp_aten.pass_options import PassOptions, RowUpdates
from sbp_aten.passes import prepare_step, whole_tables
from sbp_core.compile import compile_plan
from sbp_core.graph import TensorType
from sbp_core.infer import infer_strategy
from sbp_core.placement import Placement
from sbp_core.planning import PlanRequest
from sbp_core.testing.graphs import cluster
from sbp_torch.graph_capture import UpdateOptions, capture, initial_states
from sbp_torch.runtime.single import run_graph
from sbp_torch.testing.models import graph_states

ROWS, WIDTH, BATCH, PLACES, STEPS = 23, 3, 4, 3, 3

NO_OPTIONS = UpdateOptions()
ALWAYS = PassOptions(update_rows=RowUpdates(when="always"))


def sgd(parameters, **settings):
    return torch.optim.SGD(parameters, lr=0.3, **settings)


def adagrad(parameters, **settings):
    return torch.optim.Adagrad(parameters, lr=0.3, **settings)


class Tables(nn.Module):
    """Two tables of one shape; the first is looked up twice."""

    def __init__(self, mode=None, padding=None, counts=False, rows=ROWS):
        super().__init__()
        make = {"padding_idx": padding, "scale_grad_by_freq": counts}
        kind = nn.Embedding if mode is None else partial(nn.EmbeddingBag, mode=mode)
        self.first, self.second = kind(rows, WIDTH, **make), kind(rows, WIDTH, **make)
        self.weighted, self.plain = mode == "sum", mode is None
        self.head = nn.Linear(WIDTH, 1)

    def look_up(self, table, places, weights):
        if self.plain:
            return table(places).sum(1)
        return table(places, per_sample_weights=weights if self.weighted else None)

    def forward(self, batch):
        x, weights = batch["x"], batch["w"]
        found = self.look_up(self.first, x, weights) + self.look_up(self.first, x + 1, weights)
        return self.head((found * self.look_up(self.second, x, weights)).tanh()).squeeze(1)


def loss(model, batch):
    return (model(batch) - batch["y"]).square().mean()


def batches(count, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [
        {
            "x": torch.randint(0, 5, (BATCH, PLACES), generator=draw),
            "w": torch.rand(BATCH, PLACES, generator=draw, dtype=torch.float64),
            "y": torch.randn(BATCH, generator=draw, dtype=torch.float64),
        }
        for _ in range(count)
    ]


def made(make=sgd, *, options=ALWAYS, micro=1, update=NO_OPTIONS, model=None, **settings):
    """Return a model, its optimizer, the captured graph, and the graph after the passes."""
    torch.manual_seed(0)
    model = (model or Tables)(**settings).double()
    optimizer = make(model.parameters())
    graph = capture(model, loss, batches(1)[0], optimizer, update=update)
    return model, optimizer, graph, prepare_step(graph, micro, options=options)


def ops(graph):
    return [node.op for node in graph.nodes]


def check_equal(model, optimizer, graph, micro=1, clip=None):
    """Compare a few steps of a graph with steps of PyTorch."""
    states = graph_states(graph, initial_states(model, optimizer))
    twin = copy.deepcopy(model)
    twin_optimizer = type(optimizer)(twin.parameters(), lr=optimizer.defaults["lr"])
    for step in range(STEPS):
        parts = batches(micro, seed=step)
        found, states = run_graph(graph, states, parts, {"lr": 0.3})
        twin_optimizer.zero_grad()
        wanted = sum(loss(twin, part) for part in parts) / micro
        wanted.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(twin.parameters(), clip)
        twin_optimizer.step()
        torch.testing.assert_close(found["loss"], wanted.detach(), rtol=1e-9, atol=1e-12)
        for name, value in twin.state_dict().items():
            torch.testing.assert_close(states[name], value, rtol=1e-9, atol=1e-12)
        for name, parameter in twin.named_parameters():
            for key, value in twin_optimizer.state[parameter].items():
                if f"{name}.{key}" in states:
                    torch.testing.assert_close(
                        states[f"{name}.{key}"], value, rtol=1e-9, atol=1e-12
                    )


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("mode", [None, "sum", "mean"])
@pytest.mark.parametrize("make", [sgd, adagrad])
def test_steps_equal_those_of_pytorch(make, mode, padding, micro):
    model, optimizer, _, graph = made(make, micro=micro, mode=mode, padding=padding)

    assert ops(graph).count("sbp.row_update") == 2
    assert not any("backward" in op and "embedding" in op for op in ops(graph))
    check_equal(model, optimizer, graph, micro)


@pytest.mark.parametrize("make", [sgd, adagrad])
def test_fused_updates_work_by_row(make):
    model, optimizer, _, graph = made(lambda p: make(p, fused=True))

    assert ops(graph).count("sbp.row_update") == 2
    check_equal(model, optimizer, graph)


@pytest.mark.parametrize("micro", [1, 2])
def test_the_norm_of_clipping_is_that_of_sums_by_row(micro):
    model, optimizer, _, graph = made(
        adagrad, micro=micro, update=UpdateOptions(clip_norm=0.05, report_norm=True)
    )

    assert ops(graph).count("sbp.row_update") == 2
    wide = [
        v
        for node in graph.nodes
        for v in node.outputs
        if isinstance(graph.types[v], TensorType) and graph.types[v].shape[:1] == (ROWS,)
    ]
    assert set(wide) <= set(graph.new_states.values())
    check_equal(model, optimizer, graph, micro, clip=0.05)


def test_no_node_but_the_update_makes_a_tensor_of_all_rows():
    *_, graph = made(adagrad)

    tall = {
        n.op
        for n in graph.nodes
        for v in n.outputs
        if graph.is_tensor(v) and ROWS in graph.tensor(v).shape
    }
    assert tall == {"sbp.row_update"}


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda p: sgd(p, momentum=0.9), "weight' changes in rows without a gradient"),
        (lambda p: sgd(p, weight_decay=0.1), "weight' changes in rows without a gradient"),
        (lambda p: adagrad(p, weight_decay=0.1), "changes in rows without a gradient"),
        (lambda p: torch.optim.Adam(p, lr=0.3), "changes in rows without a gradient"),
        (lambda p: torch.optim.RMSprop(p, lr=0.3), "changes in rows without a gradient"),
    ],
)
def test_an_update_of_all_rows_stays_as_it_is_and_says_why(make, why, caplog):
    with caplog.at_level(logging.INFO, logger="sbp_aten.passes.update_rows"):
        *_, graph = made(make)

    assert "sbp.row_update" not in ops(graph)
    assert "first.weight: every row is updated in each step: " in caplog.text
    assert why in caplog.text


def test_a_plan_can_say_why_large_tables_are_updated_whole():
    tables = ("first.weight", "second.weight")
    asked = {
        "adam": made(torch.optim.Adam, options=PassOptions(), rows=500)[-1],
        "off": made(sgd, options=PassOptions(update_rows=None), rows=500)[-1],
        "by row": made(sgd, options=PassOptions(), rows=500)[-1],
        "small": made(torch.optim.Adam, options=PassOptions())[-1],
    }

    found = {name: whole_tables(graph) for name, graph in asked.items()}

    assert found["adam"] == {one: f"{one!r} changes in rows without a gradient" for one in tables}
    assert found["off"] == dict.fromkeys(tables, "compile.passes.update_rows is off")
    assert found["by row"] == found["small"] == {}


def test_averages_of_parameters_need_all_rows(caplog):
    with caplog.at_level(logging.INFO, logger="sbp_aten.passes.update_rows"):
        *_, graph = made(sgd, update=UpdateOptions(ema_decay=0.9))

    assert "sbp.row_update" not in ops(graph)
    assert "first.weight.ema' changes in rows without a gradient" in caplog.text


@pytest.mark.parametrize("settings", [{"counts": True}, {"mode": "max"}])
def test_gradients_that_are_no_sums_over_places_stay_whole(settings):
    *_, graph = made(sgd, **settings)

    assert "sbp.row_update" not in ops(graph)


def test_a_table_that_is_also_a_matrix_stays_whole():
    class Tied(Tables):
        def forward(self, batch):
            return super().forward(batch) + self.first.weight.tanh().sum()

    *_, graph = made(sgd, model=Tied)

    assert ops(graph).count("sbp.row_update") == 1


def test_small_tables_stay_whole_and_the_pass_can_be_switched_off():
    few = made(sgd, options=PassOptions())[-1]
    enough = made(sgd, options=PassOptions(update_rows=RowUpdates(factor=ROWS / 24)))[-1]
    off = made(sgd, options=PassOptions(update_rows=None))[-1]

    assert [ops(one).count("sbp.row_update") for one in (few, enough, off)] == [0, 2, 0]


def test_tables_and_states_are_updated_in_place():
    *_, graph = made(adagrad)
    request = PlanRequest(graph=graph, mesh=Placement.grid((1,)), cluster=cluster())
    strategy = infer_strategy(request, planner="test")
    plan = compile_plan(graph, strategy)

    found = [e.op for a in plan.ranks[0].actors for e in getattr(a, "instructions", ())]
    assert found.count("sbp.put_rows_.default") == 4
    assert "sbp.put_rows.default" not in found
