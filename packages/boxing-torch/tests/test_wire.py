import pytest
import torch

from sbp_boxing_torch.wire import as_bytes, from_reducible, reducible, to_reducible

REDUCE = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def test_bytes_are_the_values_themselves() -> None:
    values = torch.zeros(3, dtype=torch.bfloat16)

    as_bytes(values).fill_(255)

    assert as_bytes(values).shape == (6,)
    assert values.isnan().all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.float16, torch.int64])
@pytest.mark.parametrize("reduction", REDUCE)
def test_a_stand_in_reduces_to_what_the_dtype_itself_would(
    dtype: torch.dtype, reduction: str
) -> None:
    a = torch.tensor([0, 1, 0, 1]).to(dtype)
    b = torch.tensor([0, 0, 1, 1]).to(dtype)

    (first, renamed), (second, _) = to_reducible(a, reduction), to_reducible(b, reduction)
    result = from_reducible(REDUCE[renamed](first, second), dtype)

    assert reducible(first.dtype)
    assert torch.equal(result, REDUCE[reduction](a, b))


def test_complex_values_are_summed_as_pairs() -> None:
    values = torch.tensor([1 + 2j, 3 - 1j])

    pairs, _ = to_reducible(values, "sum")

    assert reducible(pairs.dtype) and not reducible(values.dtype)
    assert torch.equal(from_reducible(pairs + pairs, values.dtype), values + values)


def test_what_is_reduced_is_never_the_tensor_that_was_given() -> None:
    values = torch.ones(2)

    to_reducible(values, "sum")[0].zero_()

    assert torch.equal(values, torch.ones(2))
