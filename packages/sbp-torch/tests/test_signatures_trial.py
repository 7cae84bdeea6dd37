from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sbp_core.errors import SbpValueError  # noqa: E402 - after the check that torch is there
from sbp_core.graph.ir import Ref, Symbol  # noqa: E402
from sbp_core.placement import Placement  # noqa: E402
from sbp_core.sbp import NdSbp  # noqa: E402
from sbp_core.signatures import LocalCall, LocalProgramBuilder  # noqa: E402
from sbp_core.signatures.rule import LocalProgram  # noqa: E402
from sbp_core.strategy import Signature  # noqa: E402
from sbp_torch.signatures.pieces import (  # noqa: E402
    Pattern,
    cut,
    difference,
    partial_kinds,
    reduce,
    tolerance,
)
from sbp_torch.signatures.torch_call import (  # noqa: E402
    call_of,
    program_of_call,
    run_op,
    run_program,
)
from sbp_torch.signatures.trial import refutation, whole_sample  # noqa: E402

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def sampled(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1)
    if dtype.is_floating_point or dtype.is_complex:
        return (torch.randn(shape, dtype=torch.float64, generator=draw) * 3).to(dtype)
    return torch.randint(2 if dtype == torch.bool else 120, shape, generator=draw).to(dtype)


def pieces_of(tensor: torch.Tensor, sbp: str, pattern: Pattern, size: int = 3) -> Any:
    return cut(tensor, NdSbp.parse(sbp), (size,), pattern, torch.Generator().manual_seed(5))


def refuted(op: str, inputs: str, outputs: str, *args: Any, execute: Any = run_op) -> str:
    """Run an operator unchanged on two ranks; one entry an argument, `|` between them."""
    call, tensors = call_of(op, args, {}, execute=execute)
    sample = whole_sample(call, tensors, execute)
    signature = Signature(
        tuple(map(NdSbp.parse, inputs.split("|"))), tuple(map(NdSbp.parse, outputs.split("|")))
    )
    mesh = Placement.grid((2,) * len(signature.inputs[0]))
    return refutation(sample, signature, mesh, execute, lambda _rank: program_of_call(call))


@pytest.mark.parametrize("pattern", Pattern)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_partial_pieces_reduce_to_the_tensor(dtype: torch.dtype, pattern: Pattern) -> None:
    x = sampled(dtype, 4, 5)

    for kind in partial_kinds(dtype):
        made = pieces_of(x, f"P({kind})", pattern)
        summands = made if kind == "sum" else ()

        assert all(piece.dtype == dtype for piece in made)
        assert not difference(reduce(made, kind), x, relative=tolerance([dtype]), summands=summands)
        assert any(not torch.equal(piece, x) for piece in made)


@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64], ids=str)
def test_what_lies_beside_a_maximum_does_not_wrap(dtype: torch.dtype, kind: str) -> None:
    bounds = torch.iinfo(dtype)
    x = torch.tensor([bounds.min, bounds.min + 1, 7, bounds.max - 1, bounds.max] * 4, dtype=dtype)

    made = torch.stack(pieces_of(x, f"P({kind})", Pattern.NORMAL))

    assert bool((made <= x).all() if kind == "max" else (made >= x).all())


@pytest.mark.parametrize(("dtype", "kind"), [(torch.bool, "sum"), (torch.complex64, "max")])
def test_a_dtype_without_such_partial_values_is_refused(dtype: torch.dtype, kind: str) -> None:
    with pytest.raises(SbpValueError, match=str(dtype)):
        pieces_of(sampled(dtype, 4), f"P({kind})", Pattern.NORMAL)


def test_infinite_and_undefined_elements_survive_cutting() -> None:
    x = torch.tensor([float("inf"), float("-inf"), float("nan"), 1.0], dtype=torch.float64)

    for pattern in Pattern:
        for kind in ("sum", "max", "min"):
            made = reduce(pieces_of(x, f"P({kind})", pattern), kind)
            assert not difference(made, x, relative=1e-9, summands=[x])


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize(
    ("op", "before", "after"),
    [("relu", "P", "P"), ("abs", "P", "P"), ("floor", "P", "P"), ("neg", "P(max)", "P(max)")],
)
def test_one_element_of_any_magnitude_refutes(
    op: str, before: str, after: str, scale: float
) -> None:
    x = torch.tensor([0.7], dtype=torch.float64) * scale

    assert refuted(f"aten.{op}.default", before, after, x) or (op, scale) == ("floor", 1e6)


def test_an_affine_operator_is_refuted() -> None:
    assert "differs" in refuted("aten.add.Scalar", "P", "P", sampled(torch.float64, 1), 1.0)


@pytest.mark.parametrize("dtype", [entry for entry in DTYPES if entry != torch.bool], ids=str)
def test_a_linear_operator_passes_in_every_dtype(dtype: torch.dtype) -> None:
    x = sampled(dtype, 4, 6)

    assert not refuted("aten.clone.default", "S(0), P", "S(0), P", x)
    assert not refuted("aten.clone.default", "B, P", "B, P", x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int64], ids=str)
def test_a_contraction_passes_on_two_axes(dtype: torch.dtype) -> None:
    x = sampled(dtype, 4, 6)

    assert not refuted("aten.sum.dim_IntList", "P, S(1)", "P, P", x, [1])
    assert not refuted("aten.sum.dim_IntList", "S(1), S(1)", "P, P", x, [1])
    assert refuted("aten.sum.dim_IntList", "S(1), S(1)", "P, B", x, [1])


def test_widening_is_not_linear_where_sums_wrap() -> None:
    x = sampled(torch.uint8, 4, 6)

    assert refuted("aten.sum.dim_IntList", "P", "P", x, [1])


@pytest.mark.parametrize(("op", "kind"), [("any", "max"), ("all", "min")])
def test_a_bool_is_reduced_by_or_and_and(op: str, kind: str) -> None:
    x = sampled(torch.bool, 4, 6)
    other = {"max": "min", "min": "max"}[kind]

    assert not refuted(f"aten.{op}.dim", "S(1)", f"P({kind})", x, 1)
    assert not refuted(f"aten.{op}.dim", f"P({kind})", f"P({kind})", x, 1)
    assert refuted("aten.logical_not.default", f"P({kind})", f"P({kind})", x)
    assert not refuted("aten.logical_not.default", f"P({kind})", f"P({other})", x)


def test_a_rank_that_makes_too_few_outputs_is_refuted() -> None:
    def halves(_op: str, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Any:
        return list(args[0].split(2))

    x = sampled(torch.float64, 4)

    assert refuted("my.halves.default", "S(0)", "S(0)|S(0)", x, execute=halves) == (
        "rank 0 makes 1 outputs instead of 2"
    )


def test_a_program_is_run_call_by_call() -> None:
    builder = LocalProgramBuilder()
    low, high = builder.several(2, "aten.aminmax.default", Ref("x"))
    wide = builder("aten._to_copy.default", high, dtype=Symbol("dtype", "float64"))
    program = builder.program(wide, low)

    made = run_program(program, {"x": torch.tensor([1.0, 3.0, 2.0])}, run_op)

    assert [tensor.item() for tensor in made] == [3.0, 1.0]
    assert [tensor.dtype for tensor in made] == [torch.float64, torch.float32]


def test_a_program_may_give_its_shard_back() -> None:
    x = torch.ones(2)
    noop = LocalCall(op="aten.neg.default", args=(Ref("x"),), outputs=("~0",))

    (made,) = run_program(LocalProgram(calls=(noop,), results=(Ref("x"),)), {"x": x}, run_op)

    assert made is x


@pytest.mark.parametrize("count", [5, 4])
def test_a_mean_by_program_is_held_to_the_global_count(count: int) -> None:
    x = sampled(torch.float64, 5)
    call, tensors = call_of("aten.mean.default", (x,), {})
    builder = LocalProgramBuilder()
    total = builder("aten.sum.default", Ref("input0"))
    program = builder.program(builder("aten.div.Scalar", total, count))

    reason = refutation(
        whole_sample(call, tensors, run_op),
        Signature((NdSbp.parse("S(0)"),), (NdSbp.parse("P"),)),
        Placement.grid((2,)),
        run_op,
        lambda _rank: program,
    )

    assert bool(reason) == (count != 5)


def test_infinities_and_nan_have_to_be_where_they_belong() -> None:
    inf, nan = float("inf"), float("nan")
    differs = partial(difference, relative=1e-4)

    assert not differs(torch.tensor([inf, nan, 1.0]), torch.tensor([inf, nan, 1.0 + 1e-6]))
    assert "infinite" in differs(torch.tensor([inf, 1.0]), torch.tensor([-inf, 1.0]))
    assert "infinite" in differs(torch.tensor([nan, 1.0]), torch.tensor([1.0, 1.0]))
    assert "infinite" in differs(torch.tensor([1e30, 1.0]), torch.tensor([inf, 1.0]))
    assert "by up to 1" in differs(torch.tensor([inf, 1.0]), torch.tensor([inf, 2.0]))


def test_small_numbers_are_compared_by_their_own_magnitude() -> None:
    found, expected = torch.tensor([1.1e-8, 3e-8]), torch.tensor([1e-8, 3e-8])

    assert difference(found, expected, relative=1e-4)
    assert not difference(found, expected, relative=1e-4, floor=1.0)
    assert not difference(found, expected, relative=1e-4, summands=[torch.ones(2), torch.ones(2)])


def test_integers_and_complex_numbers_are_compared() -> None:
    assert difference(torch.tensor([1, 2]), torch.tensor([1, 3]), relative=0.0) == (
        "1 of 2 elements differ"
    )
    assert difference(torch.tensor([1 + 1j]), torch.tensor([1 + 2j]), relative=1e-4)
    assert not difference(torch.tensor([1 + 1j]), torch.tensor([1 + 1.000001j]), relative=1e-4)
    assert "instead of" in difference(torch.ones(2), torch.ones(3), relative=0.0)
