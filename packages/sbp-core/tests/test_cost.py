from dataclasses import replace

import pytest

from sbp_core.boxing.router import route
from sbp_core.boxing.step import StepKind
from sbp_core.cluster import Link
from sbp_core.cost import (
    boxing_time_s,
    fastest_route,
    local_bytes,
    op_time_s,
    rate_dtype,
    work_fraction,
)
from sbp_core.graph.ir import Ref, TensorType
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp
from sbp_core.signatures.call import OpCall
from sbp_core.strategy import Signature
from sbp_core.testing.graphs import cluster

MESH = Placement.grid((2,))


def tensor(*shape, dtype="float32"):
    return TensorType(shape, dtype)


def matmul(n, k, m):
    return OpCall(
        op="aten.mm.default",
        args=(Ref("x"), Ref("w")),
        inputs=(tensor(n, k), tensor(k, m)),
        tensor_names=("x", "w"),
        outputs=(tensor(n, m),),
    )


def signature(inputs, outputs):
    return Signature(tuple(map(NdSbp.parse, inputs)), tuple(map(NdSbp.parse, outputs)))


def test_a_large_product_takes_its_flop_over_the_rate():
    call = matmul(512, 512, 512)

    time = op_time_s(call, signature(["B", "B"], ["B"]), MESH, cluster())

    assert time == pytest.approx(2 * 512**3 / 1e10)


def test_splitting_halves_the_work_and_a_launch_stays():
    call = matmul(512, 512, 512)

    time = op_time_s(call, signature(["S(0)", "B"], ["S(0)"]), MESH, cluster(launch_s=1e-3))

    assert time == pytest.approx(512**3 / 1e10 + 1e-3)


def test_an_op_of_little_work_takes_its_bytes_over_the_bandwidth():
    call = matmul(64, 1, 64)

    time = op_time_s(call, signature(["B", "B"], ["B"]), MESH, cluster())

    assert time == pytest.approx(4 * (64 + 64 + 64 * 64) / 1e10)


def test_an_uneven_split_counts_the_largest_shard():
    assert work_fraction(matmul(3, 4, 4), signature(["S(0)", "B"], ["S(0)"]), (2,)) == 2 / 3


def test_two_axes_on_one_dim_divide_it_twice():
    both = signature(["S(0), S(0)", "B, B"], ["S(0), S(0)"])

    assert work_fraction(matmul(8, 4, 4), both, (2, 2)) == 1 / 4


def test_partial_values_do_not_divide_the_work():
    assert work_fraction(matmul(8, 4, 4), signature(["P", "B"], ["P"]), (2,)) == 1


def test_a_view_is_free():
    call = OpCall(
        op="aten.t.default",
        args=(Ref("x"),),
        inputs=(tensor(64, 64),),
        tensor_names=("x",),
        outputs=(tensor(64, 64),),
    )

    assert op_time_s(call, signature(["B"], ["B"]), MESH, cluster(launch_s=1.0)) == 0


def test_a_tensor_used_twice_is_read_once():
    call = OpCall(
        op="aten.mul.Tensor",
        args=(Ref("x"), Ref("x")),
        inputs=(tensor(1000), tensor(1000)),
        tensor_names=("x", "x"),
        outputs=(tensor(1000),),
        tags=("pointwise",),
    )

    assert op_time_s(call, signature(["B", "B"], ["B"]), MESH, cluster()) == pytest.approx(
        8000 / 1e10
    )


def test_an_unlisted_dtype_gets_the_slowest_rate():
    call = OpCall(
        op="aten.neg.default",
        args=(Ref("x"),),
        inputs=(tensor(4, dtype="bfloat16"),),
        tensor_names=("x",),
        outputs=(tensor(4, dtype="bfloat16"),),
        tags=("pointwise",),
    )

    assert rate_dtype(call) == "bfloat16"
    slow = replace(cluster().device, flop_per_s={"float32": 1e3, "float64": 2e3})
    machine = replace(cluster(), device=slow)
    assert op_time_s(call, signature(["B"], ["B"]), MESH, machine) == 4 / 1e3


def test_local_bytes_are_those_of_the_first_rank():
    assert local_bytes(tensor(3, 4), NdSbp.parse("S(0)"), (2,)) == 2 * 4 * 4


def test_boxing_is_the_route_its_handling_and_its_result():
    machine = cluster(launch_s=1e-3)
    found = route((8, 8), "float32", (MESH, NdSbp.parse("S(0)")), (MESH, NdSbp.parse("B")))

    time = boxing_time_s(found, machine)

    assert time == pytest.approx(found.time_s(machine) + 1e-3 + 256 / 1e10)


def test_a_runtime_starts_what_moves_data_but_no_slice():
    fast = cluster()
    slow = replace(fast, device=replace(fast.device, boxing_launch_s=1e-3))
    whole, split = (MESH, NdSbp.parse("B")), (MESH, NdSbp.parse("S(0)"))

    gathered = route((8, 8), "float32", split, whole)
    sliced = route((8, 8), "float32", whole, split)

    assert boxing_time_s(gathered, slow) == pytest.approx(boxing_time_s(gathered, fast) + 1e-3)
    assert boxing_time_s(sliced, slow) == boxing_time_s(sliced, fast) > 0


def test_a_route_without_steps_takes_no_time():
    same = route((8, 8), "float32", (MESH, NdSbp.parse("B")), (MESH, NdSbp.parse("B")))

    assert boxing_time_s(same, cluster(launch_s=1.0)) == 0


def test_between_slow_links_a_large_tensor_travels_in_parts():
    near = Link(latency_s=1e-6, bytes_per_s=1e11)
    far = Link(latency_s=1e-6, bytes_per_s=1e9)
    nodes = replace(cluster(), devices_per_node=4, intra_node=near, inter_node=far)
    ends = [(Placement(ranks, ("x",)), NdSbp.parse("B")) for ranks in ([0, 1, 2, 3], [4, 5, 6, 7])]

    large = fastest_route((4096, 1024), "float32", *ends, nodes)
    small = fastest_route((4, 4), "float32", *ends, nodes)
    anywhere = fastest_route((4096, 1024), "float32", *ends, None)

    assert [step.kind for step in large.steps] == [StepKind.TRANSFER, StepKind.ALL_GATHER]
    assert large.steps[0].size_bytes == 4096 * 1024 * 4
    assert [step.kind for step in small.steps] == [StepKind.TRANSFER]
    assert anywhere == route((4096, 1024), "float32", *ends)
    assert large.bytes == anywhere.bytes
    assert boxing_time_s(large, nodes) < boxing_time_s(anywhere, nodes) / 3
