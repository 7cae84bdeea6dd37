import pytest
import torch

from sbp_boxing_nccl.mpi.tensors import reduce_into

#: 2**24 + 1 is no float32: the order of the sum matters.
LARGE = float(2**24)


def test_a_sum_is_made_in_the_order_of_the_parts() -> None:
    parts = [torch.tensor([value]) for value in (1.0, LARGE, -LARGE, 1.0)]
    out = torch.empty(1)

    reduce_into(out, parts, "sum")

    assert out.item() == 1.0  # ((1 + LARGE) - LARGE) + 1, where the first sum is LARGE


@pytest.mark.parametrize("reduction", ["sum", "max", "min"])
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("place", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_the_result_may_lie_where_any_part_is(
    reduction: str, count: int, place: int | None, dtype: torch.dtype
) -> None:
    parts = [torch.arange(6).roll(shift).mul(3 - shift).to(dtype) for shift in range(count)]
    before = [part.clone() for part in parts]
    out = parts[place % count] if place is not None else torch.empty(6, dtype=dtype)

    reduce_into(out, parts, reduction)

    together = torch.stack(before)
    expected = {"sum": together.sum(0), "max": together.amax(0), "min": together.amin(0)}
    assert torch.equal(out, expected[reduction])
    for part, given in zip(parts[1:], before[1:], strict=True):
        assert part is out or torch.equal(part, given)
    assert (place or 0) % count or parts[0] is out or torch.equal(parts[0], before[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_in_half_precision_are_rounded_once(dtype: torch.dtype) -> None:
    step = {torch.bfloat16: 256.0, torch.float16: 2048.0}[dtype]
    parts = [torch.tensor([value]).to(dtype) for value in (step, 1.0, 1.0)]

    reduce_into(parts[0], parts, "sum")

    assert parts[0].item() == step + 2  # step + 1 alone is rounded to step


def test_a_maximum_of_something_that_is_no_number_is_none_either() -> None:
    for parts in ([1.0, torch.nan], [torch.nan, 1.0]):
        out = torch.empty(1)
        reduce_into(out, [torch.tensor([value]) for value in parts], "max")
        assert out.isnan().all()


def test_truth_values_are_reduced_as_such() -> None:
    a, b, out = torch.tensor([False, True]), torch.tensor([True, True]), torch.empty(2).bool()

    reduce_into(out, [a, b], "min")

    assert out.tolist() == [False, True]
