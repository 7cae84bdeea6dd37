from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_segments_host_parts import MIXED, call, segment
from torch import Tensor, fx

from sbp_core.compile.actors import Actor, Compute
from sbp_core.errors import ConfigError, RunError
from sbp_core.graph.ir import Ref
from sbp_torch import _torch_compat
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceSession
from sbp_torch.segments import inductor
from sbp_torch.segments.codegen import segment_function
from sbp_torch.segments.execution import segment_maker
from sbp_torch.segments.inductor import InductorSegments
from sbp_torch.testing.cases import CASES, compile_case


class Tracer:
    """Stands in for Inductor: runs the traced graph, and counts."""

    def __init__(self) -> None:
        self.modules: list[fx.GraphModule] = []

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
        self.modules.append(module)
        return lambda *given: module(*given)


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch) -> Tracer:
    monkeypatch.setattr(inductor, "cpp_compiler_problem", lambda: "")
    return Tracer()


def optimizer_segment() -> Actor:
    return segment(
        call("host.add", Ref("step_counter"), 1, outputs=("n",)),
        call("host.pow", 0.9, Ref("n"), outputs=("p",)),
        call("aten.mul.Tensor", Ref("x"), Ref("p"), outputs=("a",)),
        call("aten.add.Tensor", Ref("w"), Ref("a"), outputs=("y",), alpha=Ref("lr")),
        reads=("w", "step_counter", "lr"),
        outputs=(),
        writes=(("w", "y"), ("step_counter", "n")),
    )


def test_numbers_that_change_compile_nothing_anew(tracer: Tracer) -> None:
    actor = optimizer_segment()
    compiled = InductorSegments(compiler=tracer)(actor, 0, ())
    eager = segment_function(actor, 0, ())

    for step in range(4):
        given = [torch.randn(3), torch.randn(3), float(step), 0.1 / (step + 1)]
        y, n = compiled(list(given))
        expected = eager(*given)
        assert torch.allclose(y, expected[0], rtol=1e-6)
        assert n == expected[1]

    assert len(tracer.modules) == 1


def test_other_shapes_and_strides_are_compiled_once_each(tracer: Tracer) -> None:
    compiled = InductorSegments(compiler=tracer)(MIXED, 0, ())
    square = torch.randn(2, 2)

    for x in (square, square.T, square, torch.randn(3, 2), square.T):
        y, _ = compiled([x, 1, 7])
        assert torch.allclose(y, 2 * x + torch.ops.sbp.random_uniform([2], 7, 3, 0))

    assert len(tracer.modules) == 3


def test_equal_segments_of_layers_and_ranks_are_compiled_once(tracer: Tracer) -> None:
    def layer(name: str) -> Actor:
        return segment(
            call("aten.mm.default", Ref("x"), Ref(f"{name}.w"), outputs=(f"{name}.y",)),
            inputs=("x",), reads=(f"{name}.w",), outputs=(f"{name}.y",),
        )  # fmt: skip

    maker = InductorSegments(compiler=tracer)
    functions = [maker(layer(name), rank, ()) for name in "ab" for rank in range(2)]
    x, w = torch.randn(2, 2), torch.randn(2, 2)

    made = [function([x, w])[0] for function in functions]

    assert all(torch.equal(y, x @ w) for y in made)
    assert (len(tracer.modules), maker.num_compiled) == (1, 1)


def test_a_segment_lets_go_of_what_it_takes(tracer: Tracer) -> None:
    values = [torch.randn(2), 1, 7]

    InductorSegments(compiler=tracer)(MIXED, 0, ())(values)

    assert values == []


def failing(module: fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
    raise RuntimeError("no such kernel\nand so on\nand on\nand more")


def test_a_segment_that_cannot_be_compiled_is_named(tracer: Tracer) -> None:
    compiled = InductorSegments(compiler=failing)(MIXED, 3, ())

    with pytest.raises(RunError) as caught:
        compiled([torch.ones(2), 1, 7])

    text = str(caught.value)
    assert "Inductor cannot compile segment 'forward.0.0': RuntimeError: no such kernel" in text
    assert "rank 3, 2 operators of 'a' to 'y'" in text
    assert "compile_fallback=true" in text
    assert "and more" not in text


def test_a_segment_that_cannot_be_compiled_runs_op_by_op_if_that_is_allowed(
    tracer: Tracer,
) -> None:
    compiled = InductorSegments(compiler=failing, fallback=True)(MIXED, 0, ())

    with pytest.warns(UserWarning, match=r"'forward\.0\.0'.*(\n.*)*runs operator by operator"):
        first = compiled([torch.ones(2), 1, 7])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = compiled([torch.ones(2), 1, 7])

    expected = segment_function(MIXED, 0, ())(torch.ones(2), 1, 7)
    assert torch.equal(first[0], expected[0])
    assert torch.equal(second[0], expected[0])


def test_a_machine_without_a_compiler_is_told_so_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inductor, "cpp_compiler_problem", lambda: "no g++ here")

    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler: no g\+\+ here"):
        segment_maker("inductor")


def test_a_compiler_that_is_missing_is_noticed() -> None:
    from torch._inductor import config

    with config.patch({"cpp.cxx": ("no-such-compiler",)}):
        problem = _torch_compat.cpp_compiler_problem()

    assert problem


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("case", list(CASES))
def test_a_plan_of_traced_segments_trains_as_the_eager_one(case: str, tracer: Tracer) -> None:
    step, plan = CASES[case].step, compile_case(case)
    eager = ReferenceSession(plan, step.states, ReferenceConfig())
    traced = ReferenceSession(plan, step.states, ReferenceConfig())
    maker = InductorSegments(compiler=tracer)
    traced.segments = {
        (part.rank, actor.name): maker(actor, part.rank, plan.steps)
        for part in plan.ranks
        for actor in part.actors
        if isinstance(actor, Compute)
    }

    for batch in step.batches[:2]:
        expected = eager.step(batch, step.scalars).loss
        assert torch.allclose(traced.step(batch, step.scalars).loss, expected, rtol=1e-9)

    states = traced.state_dict()
    for name, value in eager.state_dict().items():
        assert torch.allclose(states[name], value, rtol=1e-6, atol=1e-9), name


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning")  # torch's own
def test_inductor_compiles_a_training_step() -> None:
    case = "data parallel"
    step, plan = CASES[case].step, compile_case(case)
    eager = ReferenceSession(plan, step.states, ReferenceConfig())
    compiled = ReferenceSession(plan, step.states, ReferenceConfig(compile="inductor"))

    for batch in step.batches[:2]:
        expected = eager.step(batch, step.scalars).loss
        assert torch.allclose(compiled.step(batch, step.scalars).loss, expected, rtol=1e-5)
