from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sbp_core.compile import Compute, Instruction
from sbp_core.graph import Phase, Rate, Ref
from sbp_torch.runtime import BadValueWatch
from sbp_torch.runtime.bad_values import INFINITY, NAN
from sbp_torch.segments import segment_function


def found_in(work: Callable[[], object], rank: int = 0) -> dict[str, str]:
    """Return the operator of the first bad value of each kind."""
    watch = BadValueWatch()
    with watch(rank):
        work()
    return {kind: bad.op for (of, kind), bad in watch.found.items() if of == rank}


def test_the_operator_that_makes_a_nan_of_numbers_is_found_not_those_behind_it() -> None:
    def work() -> Tensor:
        return torch.sqrt(torch.tensor([-1.0])).exp() + 1

    assert found_in(work) == {NAN: "aten.sqrt.default"}


def test_an_overflow_is_found_and_the_nan_that_comes_of_it() -> None:
    def work() -> Tensor:
        large = torch.tensor([1e30, 1.0])
        return (large * large) * torch.zeros(2)

    assert found_in(work) == {INFINITY: "aten.mul.Tensor", NAN: "aten.mul.Tensor"}


@pytest.mark.parametrize(
    "work",
    [
        lambda: torch.full((3,), -torch.inf).softmax(0).isnan(),
        lambda: torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1).bool(), -torch.inf),
        lambda: torch.where(torch.ones(2).bool(), torch.zeros(2), torch.tensor(-torch.inf)),
        lambda: nn.functional.scaled_dot_product_attention(*torch.ones(3, 2, 4, 8), is_causal=True),
        lambda: torch.ones(4).sum() / 4,
        lambda: torch.zeros(0).sum(),
        lambda: torch.full((4,), 3e38).double().sum(),
    ],
)
def test_infinities_that_are_asked_for_are_no_bad_values(work: Callable[[], object]) -> None:
    assert INFINITY not in found_in(work)


def test_inputs_are_described_by_type_shape_and_range() -> None:
    watch = BadValueWatch()
    with watch(2):
        torch.log(torch.tensor([[4.0, -2.0]]))

    assert watch.found[2, NAN].inputs == ("float32 (1, 2) from -2 to 4",)


def test_of_a_segment_the_node_and_the_micro_batch_are_known() -> None:
    log = Instruction(
        op="aten.log.default", args=(Ref("x"),), outputs=("head.log",), node="head.log"
    )
    actor = Compute(
        name="forward.0",
        stage=0,
        phase=Phase.FORWARD,
        rate=Rate.MICRO,
        thread="compute",
        reads=("x",),
        outputs=("head.log",),
        instructions=(log,),
    )
    run, watch = segment_function(actor, 3, ()), BadValueWatch()

    for x in (torch.ones(2), torch.ones(2), -torch.ones(2)):
        with watch(3):
            run(x)

    (bad,) = watch.found.values()
    assert (bad.rank, bad.kind, bad.node, bad.micro_batch) == (3, NAN, "head.log", 2)
