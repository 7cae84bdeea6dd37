from __future__ import annotations

import doctest
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from sbp_core.errors import SbpLookupError, SbpTypeError, SbpValueError
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, P, S
from sbp_torch.interchange import dtensor
from sbp_torch.interchange.dtensor import (
    check_mesh,
    from_placements,
    placement_of,
    to_dtensor,
    to_dtensors,
    to_placements,
    torch_part,
    whole_states,
)

ENTRIES = st.sampled_from([S(0), S(1), S(2), B, P, P("max"), P("min")])

#: What every rank of three tries: shape, nd-SBP.
CASES = (
    ((7, 4), NdSbp(S(0))),
    ((4, 7), NdSbp(S(1))),
    ((2, 3), NdSbp(S(0))),
    ((5,), NdSbp(B)),
    ((5, 2), NdSbp(P)),
    ((5, 2), NdSbp(P("max"))),
    ((), NdSbp(B)),
)


@given(st.lists(ENTRIES, max_size=4).map(lambda entries: NdSbp(*entries)))
def test_placements_come_back_as_they_went(sbp: NdSbp) -> None:
    assert from_placements(to_placements(sbp)) == sbp


class StridedLayout(Shard):
    """Stands for the shards of torch that mean something else."""


@pytest.mark.parametrize("entry", [Partial("avg"), Partial("product"), Shard(-1), StridedLayout(0)])
def test_a_placement_without_counterpart_is_refused(entry: Any) -> None:
    with pytest.raises(SbpValueError, match="on mesh axis 1 has no counterpart here"):
        from_placements([Replicate(), entry])


@given(
    st.integers(0, 12),
    st.integers(1, 5),
    st.integers(1, 4),
    st.lists(st.sampled_from([S(0), S(1), B]), min_size=2, max_size=2),
)
def test_parts_are_those_of_chunk(extent: int, rows: int, columns: int, entries: list[Any]) -> None:
    whole = torch.arange(extent * 6).reshape(extent, 6)
    sbp = NdSbp(*entries)

    for row in range(rows):
        for column in range(columns):
            expected = whole
            for entry, count, at in zip(sbp, (rows, columns), (row, column), strict=True):
                if entry is not B:
                    chunks = torch.chunk(expected, count, entry.dim)
                    empty = expected.narrow(entry.dim, 0, 0)
                    expected = chunks[at] if at < len(chunks) else empty
            part = torch_part(whole, sbp, (rows, columns), (row, column))
            assert torch.equal(part, expected)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "model"))
    finally:
        dist.destroy_process_group()


def test_states_become_dtensors_and_whole_again(mesh: DeviceMesh) -> None:
    states = {"w": torch.randn(3, 4).T, "step": torch.tensor(3.0)}

    made = to_dtensors(states, {"w": NdSbp(S(0), S(1))}, mesh)
    back = whole_states(made | {"plain": torch.ones(2)})

    assert made["w"].placements == (Shard(0), Shard(1))
    assert made["step"].placements == (Replicate(), Replicate())
    assert torch.equal(back["w"], states["w"])
    assert torch.equal(back["step"], states["step"])
    assert torch.equal(back["plain"], torch.ones(2))


def test_a_dtensor_does_not_share_memory_with_its_state(mesh: DeviceMesh) -> None:
    whole = torch.ones(2, 2)

    made = to_dtensor(whole, NdSbp(B, B), mesh)
    made.to_local().zero_()

    assert whole.sum() == 4


def test_what_does_not_fit_is_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(SbpValueError, match="1 entries for a mesh of 2 axes"):
        to_dtensor(torch.ones(2), NdSbp(B), mesh)
    with pytest.raises(SbpValueError, match="splits a dim"):
        to_dtensor(torch.ones(2), NdSbp(B, S(1)), mesh)
    with pytest.raises(SbpLookupError, match="no state is called 'v'"):
        to_dtensors({"w": torch.ones(2)}, {"v": NdSbp(B, B)}, mesh)
    with pytest.raises(SbpTypeError, match="'w' is a int"):
        whole_states({"w": 3})  # type: ignore[dict-item]


def test_meshes_are_compared_with_placements(mesh: DeviceMesh) -> None:
    check_mesh(mesh, Placement.grid((1, 1)))

    assert placement_of(mesh) == Placement([[0]], ["data", "model"], "cpu")
    with pytest.raises(SbpValueError, match=r"\[\[0\]\] is not the placement \[\[0, 1\]\]"):
        check_mesh(mesh, Placement.grid((1, 2)))


def _rank(rank: int, meet: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=3)
    mesh = init_device_mesh("cpu", (3,))
    for shape, sbp in CASES:
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        made = to_dtensor(whole, sbp, mesh)
        assert made.shape == whole.shape
        assert torch.equal(made.full_tensor(), whole), (shape, sbp)
        if not sbp.has_partial:
            theirs = DTensor.from_local(made.to_local(), mesh, made.placements, run_check=False,
                                        shape=made.shape, stride=made.stride())  # fmt: skip
            assert torch.equal((theirs + theirs).full_tensor(), 2 * whole), (shape, sbp)
            again = torch.distributed.tensor.distribute_tensor(whole, mesh, made.placements)
            assert torch.equal(again.to_local(), made.to_local()), (shape, sbp)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_three_ranks_hold_the_parts_that_torch_would_give_them(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    meet = f"file://{tmp_path}/meet"
    ranks = [context.Process(target=_rank, args=(rank, meet)) for rank in range(3)]

    for process in ranks:
        process.start()
    for process in ranks:
        process.join(100)

    assert [process.exitcode for process in ranks] == [0, 0, 0]


def test_the_example_in_the_docstring_holds() -> None:
    failed, attempted = doctest.testmod(dtensor)

    assert (failed, attempted) == (0, 4)
