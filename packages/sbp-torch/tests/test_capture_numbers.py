"""Numbers of Python as scalar inputs of a captured step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from sbp_core.errors import CaptureError
from sbp_core.graph import InputKind, Phase, Rate, Ref
from sbp_torch.graph_capture import NumberPlace, capture, check_numbers, placed


class Holder:
    beta = 0.3
    gamma = 0.3


def place(holder, name):
    return NumberPlace(
        label=f"holder.{name}",
        at=(id(holder), name),
        read=lambda: getattr(holder, name),
        write=lambda value: setattr(holder, name, value),
    )


def captured(use, holder, *names):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss(model, batch):
        return use(holder, model(batch["x"])).mean()

    numbers = {f"number.{name}": place(holder, name) for name in names}
    return capture(model, loss, {"x": torch.ones(2, 4)}, optimizer, numbers=numbers)


def _two(holder, y):
    return y * (1 - holder.beta) + 2 * holder.gamma * y.square()


def test_a_number_becomes_a_scalar_input_and_host_arithmetic():
    graph = captured(_two, Holder(), "beta", "gamma")

    inputs = [entry.name for entry in graph.inputs if entry.kind is InputKind.SCALAR]
    assert inputs == ["lr", "number.beta", "number.gamma"]
    hosts = [node for node in graph.nodes if node.is_host and "number." in repr(node.args)]
    assert [(node.op, node.phase, node.rate) for node in hosts] == [
        ("host.sub", Phase.FORWARD, Rate.MICRO),
        ("host.mul", Phase.FORWARD, Rate.MICRO),
    ]


def test_what_is_computed_of_rates_stays_in_the_update():
    graph = captured(_two, Holder(), "beta")

    late = [node for node in graph.nodes if node.is_host and "%lr" in repr(node.args)]
    assert late and all(node.rate is Rate.STEP for node in late)


def test_the_step_with_inputs_is_that_of_the_numbers():
    holder = Holder()
    graph, plain = captured(_two, holder, "beta", "gamma"), captured(_two, holder)

    check_numbers(graph, {"number.beta": 0.3, "number.gamma": 0.3}, plain)
    assert holder.beta == holder.gamma == 0.3


@pytest.mark.parametrize("values", [(0.3, 0.31), (0.31, 0.3), (float("nan"), 0.3), (0.3, -0.3)])
def test_other_numbers_are_another_step(values):
    holder = Holder()
    graph, plain = captured(_two, holder, "beta", "gamma"), captured(_two, holder)

    with pytest.raises(CaptureError, match=r"than a float does: .*test_capture_numbers\.py"):
        check_numbers(graph, dict(zip(("number.beta", "number.gamma"), values, strict=True)), plain)


def test_wrong_nodes_are_found():
    holder = Holder()
    graph, plain = captured(_two, holder, "beta", "gamma"), captured(_two, holder)
    at = next(i for i, node in enumerate(graph.nodes) if node.op == "host.sub")
    values = {"number.beta": 0.3, "number.gamma": 0.3}
    sub = graph.nodes[at]
    wrong = (
        replace(sub, op="host.add"),
        replace(sub, args=(2.0, Ref("number.beta"))),
        replace(sub, args=(Ref("number.beta"), 1.0)),
    )

    for node in wrong:
        nodes = (*graph.nodes[:at], node, *graph.nodes[at + 1 :])
        with pytest.raises(CaptureError, match="than a float does"):
            check_numbers(replace(graph, nodes=nodes), values, plain)
    with pytest.raises(CaptureError, match="operators, not"):
        check_numbers(replace(graph, nodes=graph.nodes[:-1]), values, plain)
    with pytest.raises(CaptureError, match="the outputs are others"):
        check_numbers(replace(graph, outputs=graph.outputs[:-1]), values, plain)


def test_arithmetic_that_fails_is_named():
    holder = Holder()
    graph = captured(lambda holder, y: y * (3 / holder.beta), holder, "beta")

    with pytest.raises(CaptureError, match=r"host\.truediv"):
        check_numbers(graph, {"number.beta": 0.0}, graph)


def test_a_number_that_is_not_used_is_no_input():
    graph = captured(lambda holder, y: y, Holder(), "beta")

    assert "number.beta" not in graph.input_kinds
    check_numbers(graph, {"number.beta": 0.5}, captured(lambda holder, y: y, Holder()))


@pytest.mark.parametrize(
    "use",
    [
        lambda holder, y: y if holder.beta > 0.5 else -y,
        lambda holder, y: y * torch.tensor(holder.beta),
        lambda holder, y: y * float(holder.beta),
        lambda holder, y: nn.functional.dropout(y, holder.beta),
    ],
)
def test_a_value_that_is_looked_at_cannot_be_an_input(use):
    holder = Holder()

    with pytest.raises(CaptureError, match=r"data-dependent|value of a tensor"):
        captured(use, holder, "beta")
    assert holder.beta == 0.3


def test_a_forward_that_writes_the_number_is_refused():
    def use(holder, y):
        holder.beta = holder.beta + 1.0
        return y * holder.beta

    holder = Holder()
    with pytest.raises(CaptureError, match=r"writes holder\.beta"):
        captured(use, holder, "beta")
    assert holder.beta == 0.3


def test_a_place_that_cannot_be_written_is_named_and_others_are_put_back():
    holder = Holder()

    def write(value):
        raise AttributeError("read-only")

    fixed = NumberPlace(label="x", at=(0, "x"), read=lambda: 1.0, write=write)
    places = {"a": place(holder, "beta"), "b": fixed}
    with (
        pytest.raises(CaptureError, match="x cannot be written: read-only"),
        placed(places, {"a": 1.0, "b": 2.0}),
    ):
        pass
    assert holder.beta == 0.3
