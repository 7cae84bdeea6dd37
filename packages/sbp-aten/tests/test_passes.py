from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from sbp_aten.passes import (
    fold_views,
    prepare_step,
    share_expressions,
    sum_losses,
    tie_step_counters,
)
from sbp_core.errors import GraphError
from sbp_core.graph import LogicalGraph, verify_graph
from sbp_core.graph.ir import (
    GraphInput,
    GraphOutput,
    InputKind,
    Node,
    OutputKind,
    Phase,
    Rate,
    Ref,
    ScalarType,
    TensorType,
)
from sbp_core.graph.rewrite import drop_dead
from sbp_core.passes import accumulate
from sbp_core.testing.graphs import Builder, mlp
from sbp_torch.graph_capture import initial_states
from sbp_torch.runtime.single import run_graph
from sbp_torch.testing.models import Program, graph_states, same_states

Pass = Callable[[LogicalGraph], LogicalGraph]


def _on_matrix(
    *ops: tuple[str, str, tuple[object, ...]], shape: tuple[int, int] = (2, 3)
) -> Builder:
    """Return a builder with input x, parameter w and the given (name, op, args), all of a shape."""
    b = Builder()
    b.add_input("x", InputKind.BATCH, shape)
    b.add_input("w", InputKind.PARAMETER, shape)
    for name, op, args in ops:
        transposed = op == "t.default" and args[0] in (Ref("x"), Ref("w"))
        b.op(name, op, args, shape[::-1] if transposed else shape)
    b.outputs.append(GraphOutput(name="out", kind=OutputKind.METRIC, value=ops[-1][0]))
    return b


def _texts(graph: LogicalGraph) -> list[str]:
    return [f"{node.name} = {node.kind}{node.args}" for node in graph.nodes]


def test_dead_nodes_are_dropped() -> None:
    b = _on_matrix(("dead", "neg.default", (Ref("x"),)), ("live", "relu.default", (Ref("x"),)))

    assert _texts(drop_dead(b.graph())) == ["live = relu(%x,)"]


def test_a_transpose_of_a_transpose_is_the_value_itself() -> None:
    b = _on_matrix(
        ("a", "t.default", (Ref("w"),)),
        ("b", "t.default", (Ref("a"),)),
        ("c", "add.Tensor", (Ref("x"), Ref("b"))),
    )

    assert _texts(fold_views(b.graph())) == ["c = add(%x, %w)"]


def test_two_reshapes_become_one() -> None:
    b = _on_matrix(
        ("a", "view.default", (Ref("x"), (6,))),
        ("b", "_unsafe_view.default", (Ref("a"), (3, 2))),
    )
    b.types["a"], b.types["b"] = TensorType((6,), "float32"), TensorType((3, 2), "float32")

    assert _texts(fold_views(b.graph())) == ["b = _unsafe_view(%x, (3, 2))"]


def test_a_view_of_a_reshape_may_have_to_copy() -> None:
    b = _on_matrix(
        ("a", "reshape.default", (Ref("x"), (6,))),
        ("b", "view.default", (Ref("a"), (3, 2))),
    )
    b.types["a"], b.types["b"] = TensorType((6,), "float32"), TensorType((3, 2), "float32")

    assert _texts(fold_views(b.graph())) == ["b = reshape(%x, (3, 2))"]


def test_a_reshape_to_the_same_shape_is_the_value_itself() -> None:
    b = _on_matrix(
        ("a", "relu.default", (Ref("x"),)),
        ("b", "view.default", (Ref("a"), (2, 3))),
    )

    folded = fold_views(b.graph())

    assert _texts(folded) == ["a = relu(%x,)"]
    assert folded.outputs[0].value == "a"


def test_a_reshape_of_another_phase_stays() -> None:
    b = Builder()
    b.add_input("x", InputKind.BATCH, (2, 3))
    b.op("a", "view.default", (Ref("x"), (6,)), (6,))
    b.op("b", "view.default", (Ref("a"), (3, 2)), (3, 2), phase=Phase.BACKWARD)
    b.outputs.append(GraphOutput(name="out", kind=OutputKind.METRIC, value="b"))

    assert len(fold_views(b.graph()).nodes) == 2


def test_equal_expressions_are_computed_once() -> None:
    b = _on_matrix(
        ("a", "neg.default", (Ref("w"),)),
        ("b", "neg.default", (Ref("w"),)),
        ("c", "mul.Tensor", (Ref("x"), Ref("a"))),
        ("d", "mul.Tensor", (Ref("x"), Ref("b"))),
        ("e", "add.Tensor", (Ref("c"), Ref("d"))),
    )

    assert _texts(share_expressions(b.graph())) == [
        "a = neg(%w,)",
        "c = mul(%x, %a)",
        "e = add(%c, %c)",
    ]


def test_random_expressions_and_those_of_other_phases_are_not_shared() -> None:
    b = _on_matrix(
        ("a", "rand_like.default", (Ref("x"),)),
        ("b", "rand_like.default", (Ref("x"),)),
        ("c", "add.Tensor", (Ref("a"), Ref("b"))),
    )
    b.nodes = [replace(n, tags=("seeded",)) if n.kind == "rand_like" else n for n in b.nodes]
    b.op("d", "add.Tensor", (Ref("a"), Ref("b")), (2, 3), phase=Phase.BACKWARD)
    b.outputs.append(GraphOutput(name="other", kind=OutputKind.METRIC, value="d"))

    assert share_expressions(b.graph()).nodes == b.graph().nodes


def _clocks(steps: tuple[object, ...], extra_reader: bool = False) -> LogicalGraph:
    """Return a graph with one counter for each of `steps`, each read on the host."""
    b = Builder()
    for index, step in enumerate(steps):
        state, new = f"w{index}.step", f"new{index}"
        b.add_input(state, InputKind.OPTIMIZER_STATE, (), of=f"w{index}")
        b.op(new, "add.Tensor", (Ref(state), step), (), phase=Phase.OPTIMIZER)
        b.outputs.append(GraphOutput(name=state, kind=OutputKind.STATE, value=new))
        b.nodes.append(
            Node(
                name=f"n{index}",
                op="host.item",
                args=(Ref(new),),
                outputs=(f"n{index}",),
                phase=Phase.OPTIMIZER,
                rate=Rate.STEP,
            )
        )
        b.types[f"n{index}"] = ScalarType()
    if extra_reader:
        b.op("reader", "neg.default", (Ref("new0"),), (), phase=Phase.OPTIMIZER)
    b.nodes.append(
        Node(
            name="power",
            op="host.pow",
            args=(0.9, Ref(f"n{len(steps) - 1}")),
            outputs=("power",),
            phase=Phase.OPTIMIZER,
            rate=Rate.STEP,
        )
    )
    b.types["power"] = ScalarType()
    return verify_graph(b.graph())


def test_equal_counters_become_one_clock() -> None:
    tied = verify_graph(tie_step_counters(_clocks((1, 1, 1))))

    assert _texts(tied) == [
        "step_counter.add = add(%step_counter, 1)",
        "power = pow(0.9, %step_counter.add)",
    ]
    (step_counter,) = tied.inputs
    assert step_counter.stands_for == ("w0.step", "w1.step", "w2.step")
    assert tied.types["step_counter"] == ScalarType()
    assert tied.new_states == {"step_counter": "step_counter.add"}


def test_counters_that_are_not_equal_are_clocks_of_their_own() -> None:
    apart = verify_graph(tie_step_counters(_clocks((1, 2)), apart=True))

    assert [entry.stands_for for entry in apart.inputs] == [("w0.step",), ("w1.step",)]
    assert _texts(apart) == [
        "step_counter.w1.step.add = add(%step_counter.w1.step, 2)",
        "step_counter.w0.step.add = add(%step_counter.w0.step, 1)",
        "power = pow(0.9, %step_counter.w1.step.add)",
    ]


def test_a_counter_that_tensors_read_stays_a_tensor() -> None:
    tied = tie_step_counters(_clocks((1, 1), extra_reader=True))

    assert "w0.step" in tied.types
    assert tied.input_kinds["step_counter"].stands_for == ("w1.step",)


def test_counters_that_advance_differently_are_refused() -> None:
    with pytest.raises(GraphError, match="advance by different amounts: 1, 2"):
        tie_step_counters(_clocks((1, 2)))


def test_a_graph_without_counters_stays_as_it_is() -> None:
    graph = mlp()

    assert tie_step_counters(graph) is graph


def _mean_loss(reduction: int) -> LogicalGraph:
    b = Builder()
    b.add_input("logp", InputKind.BATCH, (4, 3))
    b.add_input("y", InputKind.BATCH, (4,), dtype="int64")
    args = (Ref("logp"), Ref("y"), None, reduction, -100)
    b.op("nll", "nll_loss_forward.default", args, ())
    b.nodes[-1] = replace(b.nodes[-1], outputs=("loss", "count"))
    b.types |= {"loss": TensorType((), "float32"), "count": TensorType((), "float32")}
    b.outputs.append(GraphOutput(name="loss", kind=OutputKind.LOSS, value="loss"))
    return b.graph()


def test_a_mean_loss_becomes_a_sum_over_a_count() -> None:
    rewritten = verify_graph(sum_losses(_mean_loss(1)))

    assert _texts(rewritten) == [
        "nll = nll_loss_forward(%logp, %y, None, 2, -100)",
        "nll.div = div(%nll.sum, %count)",
    ]
    assert rewritten.loss == "loss"


def test_a_summed_loss_stays_as_it_is() -> None:
    assert sum_losses(_mean_loss(2)).nodes == _mean_loss(2).nodes


def test_accumulation_is_put_between_micro_batches_and_step() -> None:
    b = Builder()
    b.add_input("x", InputKind.BATCH, (2,))
    b.add_input("w", InputKind.PARAMETER, (2,))
    b.op("g", "mul.Tensor", (Ref("x"), Ref("w")), (2,), phase=Phase.BACKWARD)
    b.op("new", "sub.Tensor", (Ref("w"), Ref("g")), (2,), phase=Phase.OPTIMIZER)
    b.outputs.append(GraphOutput(name="w", kind=OutputKind.STATE, value="new"))
    b.outputs.append(GraphOutput(name="m", kind=OutputKind.METRIC, value="g"))

    graph = verify_graph(accumulate(b.graph(), 4))

    assert _texts(graph) == [
        "g = mul(%x, %w)",
        "g.mean = accumulate(%g, 0.25)",
        "new = sub(%w, %g.mean)",
    ]
    assert graph.num_micro_batches == 4
    assert [out.value for out in graph.outputs] == ["new", "g.mean"]


def test_integers_that_the_optimizer_uses_have_no_mean_over_micro_batches() -> None:
    b = Builder()
    b.add_input("x", InputKind.BATCH, (2,))
    b.op("hits", "sum.default", (Ref("x"),), ())
    b.types["hits"] = TensorType((), "int64")
    b.op("new", "neg.default", (Ref("hits"),), (), phase=Phase.OPTIMIZER)
    b.outputs.append(GraphOutput(name="new", kind=OutputKind.METRIC, value="new"))

    assert accumulate(b.graph(), 1).outputs[0].value == "new"
    with pytest.raises(GraphError, match=r"'hits' is int64\[\]: the mean of 2 micro-batches"):
        accumulate(b.graph(), 2)


@pytest.mark.parametrize(
    ("dtype", "summed"), [("int64", "int64"), ("int32", "int32"), ("bool", "int64")]
)
def test_metrics_that_count_are_summed_over_micro_batches(dtype: str, summed: str) -> None:
    b = Builder()
    b.add_input("x", InputKind.BATCH, ())
    b.op("hits", "neg.default", (Ref("x"),), ())
    b.types["x"] = b.types["hits"] = TensorType((), dtype)
    b.outputs.append(GraphOutput(name="hits", kind=OutputKind.METRIC, value="hits"))

    graph = verify_graph(accumulate(b.graph(), 2))

    assert _texts(graph) == ["hits = neg(%x,)", "hits.sum = accumulate(%hits, 1)"]
    assert [(out.name, out.value) for out in graph.outputs] == [("hits", "hits.sum")]
    assert graph.types["hits.sum"] == TensorType((), summed)


def test_a_state_replaced_for_each_micro_batch_stays_so_and_the_optimizer_takes_the_last() -> None:
    b = Builder()
    b.add_input("x", InputKind.BATCH, (2,))
    b.add_input("mean", InputKind.BUFFER, (2,))
    b.add_input("ema", InputKind.OPTIMIZER_STATE, (2,))
    b.op("moved", "lerp.Scalar", (Ref("mean"), Ref("x"), 0.1), (2,))
    b.op("smooth", "lerp.Scalar", (Ref("ema"), Ref("moved"), 0.1), (2,), phase=Phase.OPTIMIZER)
    b.outputs.append(GraphOutput(name="mean", kind=OutputKind.STATE, value="moved"))
    b.outputs.append(GraphOutput(name="ema", kind=OutputKind.STATE, value="smooth"))
    b.outputs.append(GraphOutput(name="seen", kind=OutputKind.METRIC, value="moved"))

    graph = verify_graph(accumulate(b.graph(), 4))

    assert _texts(graph) == [
        "moved = lerp(%mean, %x, 0.1)",
        "moved.last = accumulate(%moved, None)",
        "moved.mean = accumulate(%moved, 0.25)",
        "smooth = lerp(%ema, %moved.last, 0.1)",
    ]
    assert [out.value for out in graph.outputs] == ["moved", "smooth", "moved.mean"]
    assert dict(graph.carried) == {"mean": "moved"}


def test_host_numbers_are_computed_again_where_the_optimizer_uses_them() -> None:
    b = Builder()
    b.add_input("x", InputKind.BATCH, (2,))
    b.add_input("w", InputKind.SCALAR, ())
    b.op("n", "host.sub", (1, Ref("w")), ())
    b.op("twice", "host.mul", (Ref("n"), 2.0), ())
    b.types |= dict.fromkeys(("w", "n", "twice"), ScalarType())
    b.op("y", "mul.Tensor", (Ref("x"), Ref("n")), (2,))
    b.op("z", "mul.Tensor", (Ref("y"), Ref("twice")), (2,), phase=Phase.OPTIMIZER)
    b.outputs.append(GraphOutput(name="z", kind=OutputKind.METRIC, value="z"))
    graph = b.graph()
    graph = graph.with_nodes(
        tuple(
            replace(node, op=node.op.removeprefix("aten."), rate=Rate.MICRO)
            if "host." in node.op
            else node
            for node in graph.nodes
        )
    )

    graph = accumulate(graph, 2)

    assert _texts(graph) == [
        "n = sub(1, %w)",
        "twice = mul(%n, 2.0)",
        "y = mul(%x, %n)",
        "y.mean = accumulate(%y, 0.5)",
        "n.again = sub(1, %w)",
        "twice.again = mul(%n.again, 2.0)",
        "z = mul(%y.mean, %twice.again)",
    ]
    assert [node.rate for node in graph.nodes if node.name.endswith(".again")] == [Rate.STEP] * 2


def test_a_result_with_a_row_for_each_sample_is_refused() -> None:
    b = Builder()
    b.add_input("x", InputKind.BATCH, (4, 3))
    b.op("y", "neg.default", (Ref("x"),), (4, 3))
    b.outputs.append(GraphOutput(name="y", kind=OutputKind.METRIC, value="y"))

    with pytest.raises(GraphError, match="'y' has 4 rows, as many as a micro-batch has samples"):
        accumulate(b.graph(), 2)


def test_one_micro_batch_needs_no_accumulation() -> None:
    graph = mlp()

    assert accumulate(graph, 1) is graph


def test_no_micro_batch_is_refused() -> None:
    with pytest.raises(GraphError, match="num_micro_batches=0"):
        accumulate(mlp(), 0)


def test_extra_passes_run_and_are_verified() -> None:
    seen = []

    def breaks(graph: LogicalGraph) -> LogicalGraph:
        seen.append(graph.name)
        return replace(graph, nodes=graph.nodes[::-1])

    with pytest.raises(GraphError, match="used before it is made"):
        prepare_step(mlp(), extra=[breaks])
    assert seen == ["mlp"]


_LR = {"lr": 1e-2}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    "apply",
    [tie_step_counters, fold_views, share_expressions, sum_losses, prepare_step],
    ids=lambda function: function.__name__,
)
def test_every_pass_keeps_a_captured_step_bit_for_bit(
    apply: Pass, gpt: Program, gpt_graph: LogicalGraph
) -> None:
    states = initial_states(*gpt.build(torch.float64))
    (batch,) = gpt.batches(1)
    outputs, expected = run_graph(gpt_graph, states, [batch], _LR)

    rewritten = verify_graph(apply(gpt_graph))
    found, new = run_graph(rewritten, graph_states(rewritten, states), [batch], _LR)

    assert rewritten != gpt_graph
    assert torch.equal(found["loss"], outputs["loss"])
    assert same_states(new, graph_states(rewritten, expected))


def test_adamw_of_a_captured_step_has_one_clock(gpt_graph: LogicalGraph) -> None:
    tied = tie_step_counters(gpt_graph)

    parameters = [e.name for e in gpt_graph.inputs if e.kind is InputKind.PARAMETER]
    assert set(tied.input_kinds["step_counter"].stands_for) == {
        f"{name}.step" for name in parameters
    }
    assert not any(name.endswith(".step") for name in tied.types)


def test_passes_take_work_away(gpt_graph: LogicalGraph) -> None:
    prepared = prepare_step(gpt_graph)

    assert len(prepared.nodes) < 0.9 * len(gpt_graph.nodes)


def test_two_micro_batches_of_one_batch_are_that_batch_bit_for_bit(
    gpt: Program, gpt_graph: LogicalGraph
) -> None:
    once, twice = prepare_step(gpt_graph), prepare_step(gpt_graph, 2)
    states = graph_states(once, initial_states(*gpt.build(torch.float64)))
    (batch,) = gpt.batches(1)

    outputs, expected = run_graph(once, states, [batch], _LR)
    found, new = run_graph(twice, states, [batch, batch], _LR)

    assert torch.equal(found["loss"], outputs["loss"])
    assert same_states(new, expected)


def test_micro_batches_give_the_mean_over_the_whole_batch(
    gpt: Program, gpt_graph: LogicalGraph
) -> None:
    model, optimizer = gpt.build(torch.float64)
    batches = gpt.batches(2)
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    graph = prepare_step(gpt_graph, 2)
    states = graph_states(graph, initial_states(model, optimizer))

    found, new = run_graph(graph, states, batches, _LR)
    loss = gpt.loss(model, whole)
    loss.backward()
    optimizer.step()

    torch.testing.assert_close(found["loss"], loss.detach(), rtol=1e-12, atol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(new[name], parameter.detach(), rtol=1e-9, atol=1e-9)


def test_a_clock_keeps_its_place_in_a_graph_with_a_learning_rate() -> None:
    graph = _clocks((1,))
    graph = replace(
        graph,
        inputs=(*graph.inputs, GraphInput(name="lr", kind=InputKind.SCALAR)),
        types={**graph.types, "lr": ScalarType()},
    )

    assert [entry.name for entry in tie_step_counters(graph).inputs] == ["lr", "step_counter"]
