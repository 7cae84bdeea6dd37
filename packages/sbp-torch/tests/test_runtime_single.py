from __future__ import annotations

import pytest
import torch

from sbp_core.errors import GraphError
from sbp_core.graph.ir import Ref, Symbol
from sbp_core.passes import accumulate
from sbp_core.testing.graphs import chain, mlp
from sbp_torch.ops.operators import bind, operator_of, results_of
from sbp_torch.runtime.single import run_graph


def test_a_graph_runs_op_by_op() -> None:
    w, x = torch.randn(4, 4), torch.randn(8, 4)

    outputs, states = run_graph(chain(), {"w": w}, [{"x": x}], {})

    assert torch.equal(outputs["loss"], (x @ w).relu().sum())
    assert states == {"w": w}


def test_micro_batches_are_summed_with_their_scale() -> None:
    w = torch.randn(4, 4)
    batches = [{"x": torch.randn(8, 4)} for _ in range(3)]

    outputs, _ = run_graph(accumulate(chain(), 3), {"w": w}, batches, {})

    expected = sum((batch["x"] @ w).relu().sum() for batch in batches) / 3
    torch.testing.assert_close(outputs["loss"], expected)


def test_new_states_replace_old_ones_and_inputs_stay() -> None:
    torch.manual_seed(0)
    graph = mlp()
    states = {
        entry.name: torch.rand(graph.tensor(entry.name).shape)
        for entry in graph.inputs
        if entry.kind.is_state
    }
    before = {name: value.clone() for name, value in states.items()}

    _, new = run_graph(graph, states, [{"x": torch.rand(8, 4)}], {})

    assert all(torch.equal(states[name], before[name]) for name in states)
    assert all(not torch.equal(new[name], before[name]) for name in states)


def test_operators_come_from_torch_and_python() -> None:
    assert operator_of("aten.mm.default") is torch.ops.aten.mm.default
    assert operator_of("host.pow")(2, 3) == 8
    assert operator_of("host.item")(torch.tensor(2.5)) == 2.5


@pytest.mark.parametrize("op", ["aten.mmm.default", "nowhere.mm.default", "host.sin"])
def test_an_operator_that_there_is_not_is_named(op: str) -> None:
    with pytest.raises(GraphError, match=f"no operator is called '{op}'"):
        operator_of(op)


def test_results_leave_out_what_the_operator_left_out() -> None:
    tensor = torch.zeros(1)

    assert results_of(tensor) == (tensor,)
    assert results_of((tensor, None, tensor)) == (tensor, tensor)


def test_arguments_are_bound_to_values_and_to_names_of_torch() -> None:
    bound = bind((Ref("a"), (Ref("b"), 1), Symbol("dtype", "float16"), None), {"a": 7, "b": 8}.get)

    assert bound == [7, [8, 1], torch.float16, None]
    assert bind(Symbol("device", "cpu"), {}.get) == torch.device("cpu")
    assert bind(Symbol("memory_format", "contiguous_format"), {}.get) is torch.contiguous_format
