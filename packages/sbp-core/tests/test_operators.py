from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbp_core.calibration import Calibration, Measurement
from sbp_core.cluster import Cluster
from sbp_core.cost import local_call, op_time_s, operator_work
from sbp_core.errors import SbpValueError
from sbp_core.graph.ir import Ref, TensorType
from sbp_core.operators import MeasuredOperator
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.derivations import work_flop
from sbp_core.strategy import Signature
from sbp_core.testing.graphs import cluster

MESH = Placement.grid((2,))
WHOLE = Signature((NdSbp.parse("B"),) * 2, (NdSbp.parse("B"),))
ROWS = Signature((NdSbp.parse("S(0)"), NdSbp.parse("B")), (NdSbp.parse("S(0)"),))


def matmul(n, k=64, m=64, dtype="float32"):
    return OpCall(
        op="aten.mm.default",
        args=(Ref("x"), Ref("w")),
        inputs=(TensorType((n, k), dtype), TensorType((k, m), dtype)),
        tensor_names=("x", "w"),
        outputs=(TensorType((n, m), dtype),),
    )


def measured(call, signature, time_s):
    work = operator_work(call, signature, MESH.mesh_shape, work_flop(call))
    return MeasuredOperator(
        call=local_call(call, signature, MESH.mesh_shape),
        dtype=work.dtype,
        flop=work.flop,
        num_bytes=work.num_bytes,
        time_s=time_s,
    )


def machine(*operators, launch_s=0.0):
    plain = cluster(launch_s=launch_s)
    return replace(plain, device=replace(plain.device, operators=operators))


def test_a_call_is_known_by_its_operator_and_the_types_on_a_rank():
    assert (
        local_call(matmul(128), ROWS, (2,))
        == "aten.mm.default(float32[64,64], float32[64,64])->float32[64,64]"
    )


def test_truth_values_tell_calls_apart_and_sizes_do_not():
    def backward(mask, stride):
        return OpCall(
            op="aten.convolution_backward.default",
            args=(Ref("x"), stride, False, mask),
            inputs=(TensorType((2,), "float32"),),
            tensor_names=("x",),
            outputs=(TensorType((2,), "float32"),),
        )

    signature = Signature((NdSbp.parse("B"),), (NdSbp.parse("B"),))
    texts = [
        local_call(backward(mask, stride), signature, (2,))
        for mask, stride in (((True, False), 1), ((False, True), 1), ((True, False), 3))
    ]

    assert texts[0] == "aten.convolution_backward.default(float32[2]; ftf)->float32[2]"
    assert texts[0] != texts[1]
    assert texts[0] == texts[2]


def test_a_measured_call_takes_its_time_in_every_layout_that_leaves_a_rank_the_same():
    known = machine(measured(matmul(128), ROWS, 0.5))

    assert op_time_s(matmul(128), ROWS, MESH, known) == 0.5
    assert op_time_s(matmul(64), WHOLE, MESH, known) == 0.5


def test_a_view_takes_what_was_measured_of_it_and_nothing_otherwise():
    call = replace(matmul(64), tags=("view",))

    assert op_time_s(call, WHOLE, MESH, machine(measured(call, WHOLE, 2e-6))) == 2e-6
    assert op_time_s(call, WHOLE, MESH, machine(measured(matmul(32), WHOLE, 2e-6))) == 0.0


def test_another_size_is_off_its_roofline_as_the_nearest_measured_one():
    plain = machine()
    small_s, large_s = (op_time_s(matmul(n), WHOLE, MESH, plain) for n in (64, 4096))
    known = machine(
        measured(matmul(64), WHOLE, 3 * small_s), measured(matmul(4096), WHOLE, 2 * large_s)
    )

    assert op_time_s(matmul(96), WHOLE, MESH, known) == pytest.approx(
        3 * op_time_s(matmul(96), WHOLE, MESH, plain)
    )
    assert op_time_s(matmul(3000), WHOLE, MESH, known) == pytest.approx(
        2 * op_time_s(matmul(3000), WHOLE, MESH, plain)
    )


def test_of_another_operator_or_dtype_the_roofline_stays():
    known = machine(measured(matmul(64), WHOLE, 5.0))
    added = replace(matmul(64), op="aten.add.Tensor", tags=("pointwise",))
    others = (matmul(64, dtype="float64"), added)

    for call in others:
        assert op_time_s(call, WHOLE, MESH, known) == op_time_s(call, WHOLE, MESH, machine())


@given(
    st.lists(st.tuples(st.integers(1, 512), st.floats(1e-9, 10.0)), unique_by=lambda one: one[0]),
    st.integers(1, 512),
)
def test_times_are_those_measured_or_between_what_others_were_off(found, asked):
    known = machine(*(measured(matmul(n), WHOLE, s) for n, s in found), launch_s=1e-6)

    time_s = op_time_s(matmul(asked), WHOLE, MESH, known)

    by_size = dict(found)
    if asked in by_size:
        assert time_s == by_size[asked]
        return
    plain = machine(launch_s=1e-6)
    ratios = [s / op_time_s(matmul(n), WHOLE, MESH, plain) for n, s in found] or [1.0]
    ratio = time_s / op_time_s(matmul(asked), WHOLE, MESH, plain)
    assert min(ratios) * 0.999 <= ratio <= max(ratios) * 1.001


def test_a_cluster_file_keeps_operators_and_a_backend_brings_its_own(tmp_path):
    own, other = measured(matmul(64), WHOLE, 1.0), measured(matmul(64), WHOLE, 2.0)
    sample = Measurement(
        backend="mpi", kind="all-reduce", group_size=2, shared_bytes=1000, times_s=(1e-4,)
    )
    calibration = replace(Calibration.of([sample]), operators=(other,))
    replace(machine(own), calibrations={"mpi": calibration}).save(tmp_path / "cluster.json")

    found = Cluster.load(tmp_path / "cluster.json")

    assert found.device.operators == (own,)
    assert op_time_s(matmul(64), WHOLE, MESH, found) == 1.0
    assert op_time_s(matmul(64), WHOLE, MESH, found.priced_by("mpi")) == 2.0


@pytest.mark.parametrize("wrong", [{"time_s": -1.0}, {"time_s": float("nan")}, {"flop": -1.0}])
def test_what_no_operator_takes_is_refused(wrong):
    with pytest.raises(SbpValueError, match="from 0 on"):
        replace(measured(matmul(64), WHOLE, 1.0), **wrong)
