"""The checker accepts no plan that does not run, or that reaches beyond its operators."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sbp_core.compile import PhysicalPlan
from sbp_core.compile.physical import PLAN
from sbp_core.errors import GraphError, PlanError
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.serialize import Document
from sbp_core.testing.plans import data_parallel_plan, pipeline_plan
from sbp_torch.ops.operators import operator_of

Json = dict[str, Any]


def calls(plan: Json, op: str = "") -> list[Json]:
    return [
        call
        for rank in plan["ranks"]
        for actor in rank["actors"]
        for call in actor.get("instructions", [])
        if not op or call["op"] == op
    ]


def actors(plan: Json, kind: str) -> list[Json]:
    return [one for rank in plan["ranks"] for one in rank["actors"] if one["type"] == kind]


def edited(plan: PhysicalPlan, edit: Callable[[Json], object]) -> PhysicalPlan:
    value = json.loads(json.dumps(Document.dump(PLAN, plan)))
    edit(value)
    return PLAN.load(value)


def one(value: Any) -> Any:
    """Return a call of which a plan of the test has some."""
    assert value
    return value[0]


PLANS = {
    "data parallel": data_parallel_plan,
    "pipeline": lambda: pipeline_plan(3, (2, 1)),
    "both": lambda: pipeline_plan(2, (2, 2), mesh=Placement.grid((2, 2), ("pipe", "data"))),
}


@pytest.mark.parametrize("name", PLANS)
def test_plans_of_the_compiler_are_accepted_with_their_types(name: str) -> None:
    plan = PLANS[name]()

    assert check(plan) == check(plan, types=False)


def replaces(op: str, /, **changes: Any) -> Callable[[Json], None]:
    return lambda plan: one(calls(plan, op)).update(changes)


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (replaces("aten.relu.default", op="aten.nothing.default"), "no operator is called"),
        (replaces("aten.relu.default", op="os.system"), "no operator is called"),
        (replaces("aten.relu.default", op="x; import os.y"), "is no operator name"),
        (replaces("aten.relu.default", op="relu"), "is no operator name"),
        (
            replaces(
                "aten.relu.default", op="aten.save.default", args=[{"ref": "layers.0.mm"}, "x"]
            ),
            "may not be called",
        ),
        (
            replaces("aten.relu.default", op="aten.from_file.default", args=["f", True, 8]),
            "may not be called by a graph or a plan: it takes a text and no tensor",
        ),
        (replaces("aten.relu.default", op="c10d.barrier.default", args=[]), "may not be called"),
        (
            replaces("aten.relu.default", op="aten.relu_.default", args=[{"ref": "x@0(B)"}]),
            r"aten.relu_.default writes over x@0\(B\)",
        ),
        (replaces("aten.relu.default", op="aten.resize_.default"), "writes over nothing"),
        (
            replaces(
                "aten.relu.default",
                op="aten.copy_.default",
                args=[{"ref": "layers.0.weight"}, {"ref": "layers.0.mm"}],
            ),
            "writes over layers.0.weight",
        ),
        (replaces("aten.relu.default", op="host.neg"), "and .* are named|is not known|host"),
        (replaces("aten.relu.default", outputs=["layers.0.relu", "b"]), "makes 1 values"),
        (replaces("aten.relu.default", kwargs={"nothing": 1}), "aten.relu.default"),
        (replaces("aten.mm.default", args=[{"ref": "x"}, {"ref": "x"}]), "mm"),
        (replaces("aten.mm.default", args=[{"ref": "x"}, 2**62]), "mm"),
    ],
)
def test_an_operator_that_cannot_be_called_is_refused(
    edit: Callable[[Json], None], what: str
) -> None:
    with pytest.raises(PlanError, match=what) as refused:
        check(edited(data_parallel_plan(), edit))

    assert "rank 0" in str(refused.value)


@pytest.mark.parametrize("training", [False, True])
def test_an_operator_that_hands_on_its_argument_is_refused_if_no_rule_says_so(
    training: bool,
) -> None:
    def edit(plan: Json) -> None:
        call = one(calls(plan, "aten.relu.default"))
        call.update(op="aten.dropout.default", args=[*call["args"], 0.5, training])

    plan = edited(data_parallel_plan(), edit)

    if training:
        check(plan)
        return
    # It is the argument itself, so what wrote over it in place would write over that.
    with pytest.raises(PlanError, match=r"aten.dropout.default hands on .* itself"):
        check(plan)


def _another_dtype(plan: Json) -> None:
    for step in plan["steps"]:
        step["dtype"] = "int32"


def _another_shape(plan: Json) -> None:
    for step in plan["steps"]:
        step["size_bytes"] *= 2 ** len(step["shape"])
        step["shape"] = [extent * 2 for extent in step["shape"]]


def _another_state(plan: Json) -> None:
    writes = [
        actor["writes"] for actor in actors(plan, "Compute") if len(actor.get("writes", [])) > 1
    ]
    first, *_, last = one(writes)
    first[1], last[1] = last[1], first[1]


def _a_slot_of_another_dtype(plan: Json) -> None:
    slot = next(slot for slot in plan["ranks"][1]["slots"] if slot["kind"] == "parameter")
    slot["dtype"] = "float64"


def _a_rank_less(plan: Json) -> None:
    plan["stages"][0]["ranks"] = [0, 1, 2]


def _a_state_in_place_that_is_not_written(plan: Json) -> None:
    one(actors(plan, "Compute"))["in_place"] = ["layers.A.w"]


def _another_mesh_behind_it(plan: Json) -> None:
    for step in plan["steps"]:
        step["target"][0]["ranks"] = [2, 3]


def _a_sum_of_whole_values(plan: Json) -> None:
    reduced = [step for step in plan["steps"] if step["kind"] == "all-reduce"]
    one(reduced)["source"][1] = "B"


def _unknown_devices(plan: Json) -> None:
    plan["stages"][0]["device"] = "tpu"


def _ties_of_a_tensor(plan: Json) -> None:
    state = next(s["name"] for s in plan["ranks"][0]["slots"] if s["kind"] == "parameter")
    plan["ties"] = {state: ["a"]}


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (_another_dtype, "boxes float32"),
        (_another_shape, "boxes float32"),
        (_another_state, "the new value of"),
        (_a_slot_of_another_dtype, "ranks hold different inputs"),
        (_a_rank_less, "has no plan|part of shape|different"),
        (_a_state_in_place_that_is_not_written, "in place"),
        (_another_mesh_behind_it, "one placement before and after|only a transfer"),
        (_a_sum_of_whole_values, "all-reduce from .B. to where it is"),
        (_unknown_devices, "devices of kind tpu"),
        (_ties_of_a_tensor, "is tied to"),
    ],
)
def test_a_plan_whose_parts_do_not_fit_is_refused(edit: Callable[[Json], None], what: str) -> None:
    with pytest.raises(PlanError, match=what):
        check(edited(data_parallel_plan(), edit))


@pytest.mark.parametrize(
    ("call", "what"),
    [
        ({"op": "host.eval", "args": [1.0]}, "no operator is called 'host.eval'"),
        ({"op": "host.add", "args": [1.0]}, "host.add cannot be called so"),
        ({"op": "host.add", "args": [1.0, "x"]}, "takes host numbers"),
        ({"op": "host.neg", "args": [1.0], "kwargs": {"x": 1}}, "takes host numbers"),
        ({"op": "host.item", "args": [{"ref": "layers.0.mm"}]}, "is no number"),
    ],
)
def test_arithmetic_of_the_host_that_cannot_be_done_is_refused(call: Json, what: str) -> None:
    def edit(plan: Json) -> None:
        for rank in plan["ranks"]:
            actor = next(a for a in rank["actors"] if a["name"] == "forward.0.1")
            actor["instructions"].append({"outputs": ["number"], **call})

    with pytest.raises(PlanError, match=what):
        check(edited(data_parallel_plan(), edit))


def test_a_sum_in_an_unknown_way_is_refused() -> None:
    def edit(plan: Json) -> None:
        one(one(actors(plan, "Accumulate"))["accumulates"])[2] = "average"

    with pytest.raises(PlanError, match="it sums by 'average'"):
        check(edited(pipeline_plan(3, (2, 1)), edit))


def test_pytorch_logs_no_trace_of_what_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    edit = replaces("aten.mm.default", args=[{"ref": "x@0(B)"}, {"ref": "x@0(B)"}])

    with pytest.raises(PlanError, match="must have same reduction dim"):
        check(edited(data_parallel_plan(), edit))

    assert caplog.records == []


def test_no_file_is_touched_by_the_check(tmp_path: Path) -> None:
    path = tmp_path / "of the attacker"

    def edit(plan: Json) -> None:
        one(calls(plan, "aten.relu.default")).update(
            op="aten.from_file.default", args=[str(path), True, 8]
        )

    with pytest.raises(PlanError):
        check(edited(data_parallel_plan(), edit))
    assert not path.exists()


@pytest.mark.parametrize(
    "op",
    [
        "aten.save.default",
        "aten.from_file.default",
        "aten._print.default",
        "aten.warn.default",
        "aten.set_.source_Tensor",
        "aten.resize_.default",
        "aten.add.out",
        "aten._sparse_coo_tensor_unsafe.default",
        "aten._foobar.default",
        "c10d.barrier.default",
        "_c10d_functional.all_reduce.default",
        "profiler._record_function_enter.default",
        "prim.Print.default",
        "host.eval",
        "host.__import__",
    ],
)
def test_what_is_no_computation_is_not_called(op: str) -> None:
    with pytest.raises(GraphError, match=r"may not be called|no operator"):
        operator_of(op)


@pytest.mark.parametrize(
    "op",
    [
        "aten.mm.default",
        "aten.relu.default",
        "aten.add_.Tensor",
        "aten.copy_.default",
        "aten._softmax.default",
        "aten.div.Tensor_mode",
        "aten.roll.default",
        "sbp.fused_sgd_.default",
        "sbp.random_uniform.default",
        "host.add",
    ],
)
def test_what_computes_is_called(op: str) -> None:
    assert callable(operator_of(op))


def test_an_operator_that_is_registered_may_be_called_if_it_is_functional() -> None:
    library = torch.library.Library("checked_by_this_test", "DEF")
    library.define("plain(Tensor x) -> Tensor")
    library.define("writes(Tensor(a!) x) -> Tensor")
    library.define("reads(str path) -> Tensor")
    library.define("says(Tensor x) -> ()")

    assert callable(operator_of("checked_by_this_test.plain"))
    for name in ("writes", "reads", "says"):
        with pytest.raises(GraphError, match="may not be called"):
            operator_of(f"checked_by_this_test.{name}.default")


@pytest.mark.parametrize(("base", "exponent"), [(2, 10), (0.9, 3), (2, -1), (3, 400)])
def test_powers_of_the_host_are_those_of_python(base: float, exponent: int) -> None:
    assert operator_of("host.pow")(base, exponent) == base**exponent


def test_a_power_of_the_host_takes_no_time() -> None:
    with pytest.raises(OverflowError):
        operator_of("host.pow")(10, 10**18)


def test_a_broken_power_of_a_number_below_zero_is_refused() -> None:
    assert operator_of("host.pow")(-2, 3) == -8

    with pytest.raises(ValueError, match=r"math domain error: -2.0 \*\* 0.5"):
        operator_of("host.pow")(-2.0, 0.5)


@pytest.mark.parametrize("op", ["host.mul", "host.pow"])
def test_numbers_of_the_host_do_not_grow_beyond_floats(op: str) -> None:
    number: int | float = 3

    for _ in range(100):  # each would double the digits, or have a hundred times as many
        try:
            number = operator_of(op)(number, number if op == "host.mul" else 100)
        except OverflowError:
            break
        if isinstance(number, float):
            break
        assert number < 2**1025
    else:
        pytest.fail("they grow on")
