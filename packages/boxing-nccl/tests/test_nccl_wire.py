import pytest
import torch

from sbp_boxing_nccl.nccl.nccl_group import NATIVE, reducible, restored

REDUCE = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


@pytest.mark.parametrize("reduction", ["sum", "max", "min"])
@pytest.mark.parametrize("dtype", [*NATIVE, torch.bool, torch.int16])
def test_what_is_reduced_instead_has_the_result_of_the_dtype_itself(
    dtype: torch.dtype, reduction: str
) -> None:
    a, b = torch.tensor([0, 1, 0, 1]).to(dtype), torch.tensor([0, 0, 1, 1]).to(dtype)

    (one, chosen), (other, _) = reducible(a, reduction), reducible(b, reduction)
    result = restored(REDUCE[chosen](one, other), dtype)

    assert one.dtype in NATIVE
    assert result.dtype == dtype
    assert torch.equal(result, REDUCE[reduction](a, b))


def test_the_sum_of_many_truth_values_does_not_wrap_around() -> None:
    values, chosen = reducible(torch.ones(256, dtype=torch.bool), "sum")

    assert (values.dtype, chosen) == (torch.uint8, "max")


def test_complex_values_are_summed_as_pairs_of_real_ones() -> None:
    values = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)

    pairs, chosen = reducible(values, "sum")

    assert chosen == "sum"
    assert pairs.tolist() == [1.0, 2.0, 3.0, -4.0]
    assert torch.equal(restored(pairs, torch.complex64), values)


@pytest.mark.parametrize("dtype", list(NATIVE))
def test_a_dtype_that_nccl_knows_is_not_copied(dtype: torch.dtype) -> None:
    values = torch.zeros(4, dtype=dtype)

    assert reducible(values, "max")[0].data_ptr() == values.data_ptr()
