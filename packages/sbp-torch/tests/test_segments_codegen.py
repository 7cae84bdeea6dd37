from __future__ import annotations

import builtins
import traceback
from dataclasses import replace
from typing import Any

import pytest
import torch

from sbp_aten.passes import prepare_step
from sbp_core.compile import compile_plan
from sbp_core.compile.actors import Actor, Compute, Instruction
from sbp_core.errors import SbpError
from sbp_core.graph import LogicalGraph
from sbp_core.graph.ir import Phase, Rate, Ref, Symbol
from sbp_core.infer import infer_strategy
from sbp_core.placement import Placement
from sbp_core.planning import PlanRequest
from sbp_core.testing.graphs import cluster
from sbp_core.testing.plans import diamond, strategy_of
from sbp_torch.graph_capture import initial_states
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceSession
from sbp_torch.segments.codegen import (
    keys_out,
    segment_function,
    segment_source,
    timed_segment_function,
)
from sbp_torch.testing.models import Program, same_states


def _segment(*instructions: Instruction, **fields: Any) -> Actor:
    return Compute(
        name="forward.0.0",
        stage=0,
        phase=Phase.FORWARD,
        rate=Rate.MICRO,
        thread="compute",
        instructions=instructions,
        **fields,
    )


def _call(op: str, *args: object, outputs: tuple[str, ...], **kwargs: object) -> Instruction:
    return Instruction(op=op, args=args, kwargs=kwargs, outputs=outputs, node=outputs[0])


def test_the_source_is_readable_and_frees_values_after_their_last_use() -> None:
    actor = _segment(
        _call("aten.mm.default", Ref("x"), Ref("w"), outputs=("a",)),
        _call("aten.relu.default", Ref("a"), outputs=("b",)),
        inputs=("x",),
        reads=("w",),
        outputs=("b",),
    )

    source, names = segment_source(actor)

    assert source.splitlines() == [
        "def segment(v0, v1):",
        "    v2 = aten_mm_default(v0, v1)  # a",
        "    del v0, v1",
        "    v3 = aten_relu_default(v2)  # b",
        "    del v2",
        "    return (v3, )",
    ]
    assert names == {
        "aten.mm.default": "aten_mm_default",
        "aten.relu.default": "aten_relu_default",
    }


def test_operators_whose_names_differ_in_dots_only_are_not_confused() -> None:
    actor = _segment(
        _call("mine.two_add.default", Ref("x"), outputs=("a",)),
        _call("mine_two.add.default", Ref("a"), outputs=("b",)),
        inputs=("x",),
        outputs=("b",),
    )
    with (
        torch.library._scoped_library("mine", "DEF") as first,
        torch.library._scoped_library("mine_two", "DEF") as second,
    ):
        first.define("two_add(Tensor x) -> Tensor")
        first.impl("two_add", lambda x: x + 2, "CPU")
        second.define("add(Tensor x) -> Tensor")
        second.impl("add", lambda x: x * 10, "CPU")

        (made,) = segment_function(actor, 0, ())(torch.tensor(1.0))

    assert made.item() == 30


def test_a_segment_takes_inputs_then_states_and_returns_what_leaves() -> None:
    actor = _segment(
        _call("aten.mm.default", Ref("x"), Ref("w"), outputs=("a",)),
        _call("aten.sum.default", Ref("a"), outputs=("loss",)),
        inputs=("x",),
        reads=("w",),
        outputs=("a",),
        emits=(("loss", "loss"),),
        writes=(("w", "a"),),
    )
    x, w = torch.randn(2, 3), torch.randn(3, 2)

    made = segment_function(actor, 0, ())(x, w)

    assert keys_out(actor) == ("a", "loss")
    assert torch.equal(made[0], x @ w)
    assert torch.equal(made[1], (x @ w).sum())


def test_every_kind_of_argument_can_be_written() -> None:
    actor = _segment(
        _call(
            "aten.full.default",
            (2, 2),
            float("-inf"),
            outputs=("a",),
            dtype=Symbol("dtype", "float64"),
            device=Symbol("device", "cpu"),
            layout=Symbol("layout", "strided"),
        ),
        _call("aten.cat.default", (Ref("a"), Ref("x")), 1, outputs=("b",)),
        _call("aten.clamp.default", Ref("b"), None, 1.5, outputs=("c",)),
        inputs=("x",),
        outputs=("c",),
    )

    (made,) = segment_function(actor, 0, ())(torch.full((2, 1), 2.0, dtype=torch.float64))

    infinite = float("-inf")
    expected = torch.tensor([[infinite, infinite, 1.5]] * 2, dtype=torch.float64)
    assert torch.equal(made, expected)


def test_not_a_number_can_be_written() -> None:
    actor = _segment(_call("aten.full.default", (2,), float("nan"), outputs=("a",)), outputs=("a",))

    (made,) = segment_function(actor, 0, ())()

    assert made.isnan().all()


def test_results_that_an_operator_leaves_out_are_skipped() -> None:
    x, grad = torch.randn(4, 3), torch.randn(4, 3)
    _, mean, rstd = torch.ops.aten.native_layer_norm.default(x, [3], None, None, 1e-5)
    mask = (True, False, False)
    actor = _segment(
        _call(
            "aten.native_layer_norm_backward.default",
            Ref("grad"), Ref("x"), (3,), Ref("mean"), Ref("rstd"), None, None, mask,
            outputs=("dx",),
        ),
        inputs=("grad", "x", "mean", "rstd"),
        outputs=("dx",),
    )  # fmt: skip

    (made,) = segment_function(actor, 0, ())(grad, x, mean, rstd)

    expected = torch.ops.aten.native_layer_norm_backward.default(
        grad, x, [3], mean, rstd, None, None, list(mask)
    )
    assert torch.equal(made, expected[0])


def test_one_of_several_results_may_be_all_that_there_is() -> None:
    actor = _segment(
        _call("aten.unbind.int", Ref("x"), outputs=("row",)), inputs=("x",), outputs=("row",)
    )

    (made,) = segment_function(actor, 0, ())(torch.ones(1, 3))

    assert torch.equal(made, torch.ones(3))


def test_host_numbers_are_computed_in_the_segment() -> None:
    actor = _segment(
        _call("host.add", Ref("step_counter"), 1, outputs=("n",)),
        _call("host.pow", 0.5, Ref("n"), outputs=("p",)),
        _call("aten.mul.Tensor", Ref("x"), Ref("p"), outputs=("y",)),
        inputs=("x",),
        reads=("step_counter",),
        outputs=("y",),
    )

    (made,) = segment_function(actor, 0, ())(torch.ones(2), 2)

    assert torch.equal(made, torch.full((2,), 0.125))


def test_a_local_boxing_takes_the_part_of_the_rank() -> None:
    graph = diamond()
    plan = compile_plan(graph, strategy_of(graph, signatures={"a": "S(0) -> S(0)"}))
    x, w = torch.randn(4, 4), torch.eye(4)

    actor = plan.by_rank[1].by_name["forward.0.0"]
    made = dict(zip(keys_out(actor), segment_function(actor, 1, plan.steps)(x, w), strict=False))

    assert "sbp_local_box(v2, 0)  # y@0(S(0))" in segment_source(actor)[0]
    assert torch.equal(made["y"], x)


def test_a_failing_line_is_shown_in_the_traceback() -> None:
    actor = _segment(
        _call("aten.mm.default", Ref("x"), Ref("x"), outputs=("a",)), inputs=("x",), outputs=("a",)
    )

    with pytest.raises(RuntimeError) as caught:
        segment_function(actor, 3, ())(torch.ones(2, 3))

    text = "".join(traceback.format_exception(caught.value))
    assert "<segment forward.0.0 of rank 3>" in text
    assert "aten_mm_default(v0, v0)" in text


@pytest.mark.slow
def test_generated_code_agrees_with_the_interpreter_bit_for_bit(
    gpt: Program, gpt_graph: LogicalGraph
) -> None:
    graph = prepare_step(gpt_graph, 2)
    mesh = Placement.grid((2, 2), ("pipe", "data"))
    request = PlanRequest(graph=graph, mesh=mesh, cluster=cluster())
    plan = compile_plan(graph, infer_strategy(request, planner="test", pins={"batch": "S(0)"}))
    states = initial_states(*gpt.build(torch.float64))
    batch = gpt.batches(1, 8)[0]
    interpreted = ReferenceSession(plan, states, ReferenceConfig())
    expected = interpreted.step(batch, {"lr": 1e-2}).loss

    session = ReferenceSession(plan, states, ReferenceConfig())
    session.segments = {
        (part.rank, actor.name): segment_function(actor, part.rank, plan.steps, owns=True)
        for part in plan.ranks
        for actor in part.actors
        if isinstance(actor, Compute)
    }
    loss = session.step(batch, {"lr": 1e-2}).loss

    assert torch.equal(loss, expected)
    assert same_states(session.state_dict(), interpreted.state_dict())


_RUN = "__import__('sys').modules['builtins'].sbp_was_here = True"


@pytest.mark.parametrize(
    "changes",
    [
        {"op": f"aten.relu.default(v0); {_RUN}; v9.a"},
        {"op": "load_library"},
        {"op": "aten.import_module"},
        {"kwargs": {f"a={_RUN}, b": 1}},
        {"args": (Ref("x"), Symbol("dtype", f"float32, {_RUN}"))},
        {"args": (Ref("x"), Symbol("dtype", "load"))},
        {"args": (Ref("x"), [Ref(_RUN)])},
    ],
    ids=["operator", "function", "packet", "keyword", "symbol", "other symbol", "list"],
)
def test_names_in_a_plan_become_no_code(changes: dict[str, Any]) -> None:
    entry = _call("aten.relu.default", Ref("x"), outputs=("y",))
    actor = _segment(replace(entry, **changes), inputs=("x",), outputs=("y",))

    with pytest.raises(SbpError):
        segment_function(actor, 0, ())
    assert not hasattr(builtins, "sbp_was_here")


def test_the_name_of_a_node_stays_a_comment() -> None:
    entry = replace(_call("aten.relu.default", Ref("x"), outputs=("y",)), node=f"n\n    {_RUN}")
    actor = _segment(entry, inputs=("x",), outputs=("y",))

    segment_function(actor, 0, ())(torch.ones(2))

    assert not hasattr(builtins, "sbp_was_here")


def test_a_timed_segment_makes_the_same_and_looks_at_the_clock_between_operators() -> None:
    actor = _segment(
        _call("aten.mm.default", Ref("x"), Ref("w"), outputs=("a",)),
        _call("aten.relu.default", Ref("a"), outputs=("b",)),
        inputs=("x",),
        reads=("w",),
        outputs=("b",),
    )
    x, w = torch.randn(3, 4), torch.randn(4, 2)
    clock = iter(range(100, 200))
    given = [x, w]

    (made,), times_ns = timed_segment_function(actor, 0, ())(given, lambda: next(clock))

    (wanted,) = segment_function(actor, 0, (), owns=True)([x, w])
    assert torch.equal(made, wanted)
    assert times_ns == (100, 101, 102)
    assert given == []
