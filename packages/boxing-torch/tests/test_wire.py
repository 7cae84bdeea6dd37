import pytest
import torch

from sbp_boxing_torch.group import as_bytes, reducible


def test_bytes_are_the_values_themselves() -> None:
    values = torch.zeros(3, dtype=torch.bfloat16)

    as_bytes(values).fill_(255)

    assert as_bytes(values).shape == (6,)
    assert values.isnan().all()


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bfloat16, True), (torch.int64, True), (torch.bool, False), (torch.complex64, False)],
)
def test_only_what_transports_reduce_as_torch_does_is_left_to_them(
    dtype: torch.dtype, expected: bool
) -> None:
    assert reducible(dtype) is expected
