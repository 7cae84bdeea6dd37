from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from sbp_torch._torch_compat import OpOverload, fake_mode, is_mutable, trace_graph
from sbp_torch.graph_capture.trace import make_functional, retrace, rewrite_mutations

Program = Callable[[list[Tensor]], list[Tensor]]


def _traced(program: Program, count: int = 2) -> fx.GraphModule:
    mode = fake_mode()
    fakes = [mode.from_tensor(torch.zeros(3, 4), static_shapes=True) for _ in range(count)]
    return trace_graph(program, mode, (fakes,))


def _values(count: int = 2) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.rand(3, 4) + 0.5 for _ in range(count)]


def _run(module: fx.GraphModule, values: list[Tensor]) -> list[Tensor]:
    made = fx.Interpreter(module).run(*values, enable_io_processing=False)
    return list(_leaves(made))


def _leaves(made: object) -> list[Tensor]:
    parts = made if isinstance(made, list | tuple) else [made]
    return [leaf for p in parts for leaf in ([p] if isinstance(p, Tensor) else _leaves(p))]


def _writes(module: fx.GraphModule) -> list[str]:
    return [
        str(node.target)
        for node in module.graph.nodes
        if isinstance(node.target, OpOverload) and is_mutable(node.target)
    ]


RENAMED: dict[str, Program] = {
    "a write to an input": lambda v: [v[0].mul_(2), v[0]],
    "two writes": lambda v: [v[0].mul_(2).add_(v[1]), v[1]],
    "a write to a result": lambda v: [(v[0] + v[1]).relu_(), v[0]],
    "a copy": lambda v: [v[0].copy_(v[1] * 3), v[0]],
    "a view read before the write": lambda v: [v[0].t() @ v[1], v[0].mul_(2)],
    "a view taken after the write": lambda v: [v[0].mul_(2), v[0].t() @ v[1]],
    "a broadcast copy": lambda v: [v[0].copy_(v[1][0]), v[0]],
    "a number filled in": lambda v: [v[0].fill_(2.0), v[0] + v[1]],
}
DECLINED: dict[str, Program] = {
    "a write through a view": lambda v: [v[0].t().mul_(2).sum(), v[0]],
    "a view read after the write": lambda v: _late_view(v),
    "a write to a row": lambda v: [v[0][1].zero_().sum(), v[0]],
}


def _late_view(v: list[Tensor]) -> list[Tensor]:
    turned = v[0].t()
    v[0].mul_(2)
    return [turned @ v[1], v[0]]


@pytest.mark.parametrize("name", RENAMED)
def test_simple_writes_are_renamed(name: str) -> None:
    first = _traced(RENAMED[name])
    expected = RENAMED[name](_values())

    second = rewrite_mutations(first)

    assert second is not None and not _writes(second)
    values = _values()
    for made, wanted in zip(_run(second, values), expected, strict=True):
        assert torch.equal(made, wanted)
    assert all(map(torch.equal, values, _values())), "an input was written to"


@pytest.mark.parametrize("name", DECLINED)
def test_writes_that_others_see_are_declined_and_left_to_a_second_trace(name: str) -> None:
    first = _traced(DECLINED[name])
    before = str(first.graph)

    assert rewrite_mutations(first) is None
    assert str(first.graph) == before
    second = make_functional(first, 2)

    assert not _writes(second)
    values = _values()
    for made, wanted in zip(_run(second, values), DECLINED[name](_values()), strict=True):
        assert torch.equal(made, wanted)
    assert all(map(torch.equal, values, _values()))


_STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul_": lambda a, b: a.mul_(0.5),
    "add_": lambda a, b: a.add_(b, alpha=0.1),
    "copy_": lambda a, b: a.copy_(b),
    "addcmul_": lambda a, b: a.addcmul_(b, b, value=0.1),
    "lerp_": lambda a, b: a.lerp_(b, 0.3),
    "plus": lambda a, b: a + b,
    "view": lambda a, b: a.view(4, 3).t().t().reshape(3, 4),
    "row": lambda a, b: a + b[0],
    "row_": lambda a, b: a[0].add_(b[0]) + a,
}


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(_STEPS)), st.integers(0, 9), st.integers(0, 9)),
        min_size=1,
        max_size=7,
    )
)
def test_any_program_computes_the_same_without_mutations(steps: list[tuple[str, int, int]]) -> None:
    def program(inputs: list[Tensor]) -> list[Tensor]:
        held = list(inputs)
        for name, a, b in steps:
            held.append(_STEPS[name](held[a % len(held)], held[b % len(held)]))
        return [value.clone() for value in held]

    first = _traced(program)
    slow = retrace(_traced(program), 2)

    second = make_functional(first, 2)

    expected = program(_values())
    for module in (second, slow):
        assert not _writes(module)
        for made, wanted in zip(_run(module, _values()), expected, strict=True):
            torch.testing.assert_close(made, wanted, rtol=0, atol=0)
