import pytest
import torch
from fake_mpi import MPI

from sbp_boxing_nccl.mpi.tensors import chunks, memory


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float64, torch.complex128])
def test_the_memory_of_a_tensor_is_its_own_and_counts_in_bytes(dtype: torch.dtype) -> None:
    values = torch.zeros(6, dtype=dtype)[2:5]

    given = memory(values, MPI)
    given[:] = bytes(torch.ones(3, dtype=dtype).view(torch.uint8).tolist())

    assert len(given) == 3 * dtype.itemsize
    assert torch.equal(values, torch.ones(3, dtype=dtype))


def test_a_tensor_without_elements_has_no_memory() -> None:
    assert len(memory(torch.empty(0), MPI)) == 0


def test_chunks_of_a_tensor_follow_each_other_some_of_them_empty() -> None:
    values = torch.arange(5, dtype=torch.uint8)

    found = chunks(values, (2, 0, 3), MPI)

    assert [list(chunk) for chunk in found] == [[0, 1], [], [2, 3, 4]]
