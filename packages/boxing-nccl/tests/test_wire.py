from types import SimpleNamespace

import pytest
import torch

from sbp_boxing_nccl.wire import movable, operation, reducible, to_reducible

#: Stands in for `mpi4py.MPI`: every datatype and operation is its own name.
MPI = SimpleNamespace(
    **{
        name: name
        for name in (
            "UINT8_T", "INT16_T", "INT32_T", "INT64_T", "C_DOUBLE_COMPLEX", "FLOAT", "DOUBLE",
            "SUM", "MAX", "MIN",
        )
    }
)  # fmt: skip

REDUCE = {"SUM": torch.add, "MAX": torch.maximum, "MIN": torch.minimum}


@pytest.mark.parametrize(
    ("dtype", "datatype"),
    [
        (torch.bool, "UINT8_T"),
        (torch.bfloat16, "INT16_T"),
        (torch.float32, "INT32_T"),
        (torch.float64, "INT64_T"),
        (torch.complex128, "C_DOUBLE_COMPLEX"),
    ],
)
def test_values_are_moved_as_they_are_by_their_width(dtype: torch.dtype, datatype: str) -> None:
    values = torch.zeros(3, dtype=dtype)

    view, chosen = movable(values, MPI)
    view.fill_(1)

    assert chosen == datatype
    assert view.shape == (3,)
    assert values.view(torch.uint8).any()


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["sum", "max", "min"])
def test_a_stand_in_reduces_to_what_the_dtype_itself_would(
    dtype: torch.dtype, reduction: str
) -> None:
    a, b = torch.tensor([0, 1, 0, 1]).to(dtype), torch.tensor([0, 0, 1, 1]).to(dtype)

    reduce = REDUCE[operation(reduction, dtype, MPI)]
    result = reduce(to_reducible(a), to_reducible(b)).to(dtype)

    assert torch.equal(result, REDUCE[reduction.upper()](a, b))
    assert reducible(to_reducible(a), MPI)[1] == ("UINT8_T" if dtype == torch.bool else "FLOAT")


def test_what_is_reduced_is_never_the_tensor_that_was_given() -> None:
    values = torch.ones(2)

    to_reducible(values).zero_()

    assert torch.equal(values, torch.ones(2))
