"""The cost model of planners: predicted time of one operator, and of one boxing (resharding).

    operator = max(local flop / rate, local bytes / bandwidth) + launch                  [s]
    boxing   = sum over steps of: link + launches + target bytes / bandwidth             [s]

Times are those of the rank with the largest shards.

* local flop: `work_flop` of the call times the fraction of it that one rank does. A mesh axis on
  which any tensor of the call is split divides the work by ceil(n / p) / n, where n is the extent
  of the split dim that the previous axes leave, and p the ranks of the axis; on an axis on which
  all tensors are B or P every rank does all of the work.
* rate: `Device.flop_per_s` of the dtype of the first floating tensor, in flop/s. A dtype that the
  device does not list has the slowest listed rate.
* local bytes: every distinct tensor argument and every output once, as the rank holds them; of a
  table, only the rows that the call names (`touch` of its notation).
* launch: `Device.launch_s`, once for a call; launches of a boxing step: the same, and
  `Device.boxing_launch_s`, unless it is a local step, which is an operator like others.

A view moves and computes nothing: 0. If calls of operators were measured on the device, their times
replace the roofline, and `sbp_core.operators` corrects the roofline of other calls. `boxing.price`
gives the time that a step spends on links; the rest of a boxing is handling its steps and writing
their results, so that a slice is not free either. If a calibration measured whole calls of the
transport, it includes that rest, except for the work of the runtime around a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from sbp_core.boxing.price import step_time
from sbp_core.boxing.router import route
from sbp_core.boxing.routes import Route
from sbp_core.boxing.step import BoxingStep, StepKind
from sbp_core.cluster import Cluster, Device
from sbp_core.graph.ir import ITEMSIZE, Argument, TensorType
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp, Split, local_shape, split_bounds
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.derivations import derivation, work_flop
from sbp_core.strategy import Signature

__all__ = [
    "boxing_step_time_s",
    "boxing_time_s",
    "fastest_route",
    "host_copy_time_s",
    "local_bytes",
    "op_time_s",
]

_FLOATING = ("float64", "float32", "float16", "bfloat16", "complex64", "complex128")


def local_bytes(tensor: TensorType, sbp: NdSbp, mesh_shape: Sequence[int]) -> int:
    """Return the bytes of the largest shard of a tensor, which the first rank holds."""
    return prod(_shard(tensor, sbp, mesh_shape)) * ITEMSIZE[tensor.dtype]


def _shard(tensor: TensorType, sbp: NdSbp, mesh_shape: Sequence[int]) -> tuple[int, ...]:
    return local_shape(tensor.shape, sbp, mesh_shape, (0,) * len(mesh_shape))


def work_fraction(call: OpCall, signature: Signature, mesh_shape: Sequence[int]) -> float:
    """Return the fraction of a call's work that the rank with the largest shard does, in (0, 1]."""
    tensors = [
        *zip(call.inputs, signature.inputs, strict=True),
        *zip(call.outputs, signature.outputs, strict=True),
    ]
    share = 1.0
    for axis, ranks in enumerate(mesh_shape):
        shares = []
        for tensor, sbp in tensors:
            if isinstance(entry := sbp[axis], Split):
                # The part of the split extent that the previous axes leave.
                before = NdSbp(*sbp[:axis]), mesh_shape[:axis], (0,) * axis
                extent = local_shape(tensor.shape, *before)[entry.dim]
                shares.append(split_bounds(extent, ranks, 0)[1] / extent if extent else 1.0)
        share *= max(shares, default=1.0)
    return share


def rate_dtype(call: OpCall) -> str:
    """Return the dtype whose rate applies to a call; "" if it has no floating tensor."""
    dtypes = [tensor.dtype for tensor in (*call.outputs, *call.inputs)]
    return next((dtype for dtype in dtypes if dtype in _FLOATING), "")


def local_call(call: OpCall, signature: Signature, mesh_shape: Sequence[int]) -> str:
    """Return the call of the rank with the largest shards, as text: `aten.mm.default(...)->...`.

    Equal texts take about equal times. Among non-tensor arguments the text contains only booleans,
    such as which gradients are needed. Sizes follow from the results.

    Args:
        call: Op, arguments and logical types.
        signature: How it is split.
        mesh_shape: The shape of its mesh.
    """

    def text(tensors: Sequence[TensorType], sbps: Sequence[NdSbp]) -> str:
        return ", ".join(
            f"{tensor.dtype}{list(_shard(tensor, sbp, mesh_shape))}".replace(" ", "")
            for tensor, sbp in zip(tensors, sbps, strict=True)
        )

    flags = "".join(_flags((*call.args, *call.kwargs.values())))
    taken, made = text(call.inputs, signature.inputs), text(call.outputs, signature.outputs)
    return f"{call.op}({taken}{flags and '; ' + flags})->{made}"


def _flags(value: Argument) -> Iterator[str]:
    """Yield the booleans in an argument, as `t` and `f`."""
    if isinstance(value, bool):
        yield "ft"[value]
    elif isinstance(value, tuple):
        for part in value:
            yield from _flags(part)


def fastest_route(
    shape: Sequence[int],
    dtype: str,
    source: tuple[Placement, NdSbp],
    target: tuple[Placement, NdSbp],
    cluster: Cluster | None,
) -> Route:
    """Return the faster of two routes of the fewest bytes: in few steps, or with few far bytes.

    Args:
        shape: The shape of the logical tensor.
        dtype: Its dtype name.
        source: (placement, nd-SBP) before.
        target: (placement, nd-SBP) after.
        cluster: The machine; without one, the route with the fewest steps.

    Raises:
        SbpValueError: see `boxing.route`.
    """
    direct = route(shape, dtype, source, target)
    if cluster is None or source[0] == target[0]:
        return direct
    apart = route(shape, dtype, source, target, fewest_between=True)
    return min(direct, apart, key=lambda found: boxing_time_s(found, cluster))


def boxing_time_s(route: Route, cluster: Cluster) -> float:
    """Return the time of one boxing, in seconds; 0 if there is nothing to do.

    Args:
        route: The boxing steps.
        cluster: Links and rates.
    """
    return sum(boxing_step_time_s(step, cluster) for step in route.steps)


def boxing_step_time_s(step: BoxingStep, cluster: Cluster) -> float:
    """Return the time of one boxing step, in seconds: to move, to start, and to write its result.

    Args:
        step: The boxing step.
        cluster: Links, rates and calibrations. A calibration measured whole calls, so only the work
            of the runtime around a call is added to its prediction.
    """
    device, moved = cluster.device, step_time(step, cluster)
    time_s = moved.time_s + (device.boxing_launch_s if step.kind is not StepKind.LOCAL else 0.0)
    if moved.is_whole_call:
        return time_s
    placement, sbp = step.target
    written = local_bytes(TensorType(step.shape, step.dtype), sbp, placement.mesh_shape)
    return time_s + device.launch_s + written / device.memory_bytes_per_s


def copy_time_s(num_bytes: int, num_calls: int, device: Device) -> float:
    """Return the time of copies, in seconds.

    Args:
        num_bytes: Bytes read and written, in total.
        num_calls: Operators that copy.
        device: The device that runs them.
    """
    return num_calls * device.launch_s + num_bytes / device.memory_bytes_per_s


def host_copy_time_s(num_bytes: int, device: Device) -> float:
    """Return the time of a copy between a device and its host's memory, in seconds.

    Args:
        num_bytes: The size of the tensor.
        device: The device; if it has no link to its host, it copies in its own memory.
    """
    link = device.host_link
    if link is None:
        return copy_time_s(2 * num_bytes, 1, device)
    return device.launch_s + link.latency_s + num_bytes / link.bytes_per_s


def is_free(call: OpCall, flop: float) -> bool:
    """Return whether a call takes no time: its tag marks a view, or its rule declares no work."""
    return "view" in call.tags or flop == 0


def op_time_s(call: OpCall, signature: Signature, mesh: Placement, cluster: Cluster) -> float:
    """Return the time of one call on the rank with the largest shard, in seconds.

    Args:
        call: Op, arguments and logical types.
        signature: How it is split on `mesh`.
        mesh: The mesh on which it runs.
        cluster: Rates of the devices.

    Source: Williams, Waterman, Patterson, "Roofline", CACM 52 (2009).
    """
    return grid_time_s(call, signature, mesh.mesh_shape, cluster.device, work_flop(call))


def grid_time_s(
    call: OpCall, signature: Signature, mesh_shape: Sequence[int], device: Device, flop: float
) -> float:
    """Return the result of `op_time_s`, for callers that know the mesh's shape and the work.

    Args:
        call: See `op_time_s`.
        signature: How it is split.
        mesh_shape: The shape of the mesh; the signature has an entry for each of its axes.
        device: The device that runs it.
        flop: Work of the whole call, `work_flop(call)`.
    """
    table = device.operator_table if device.operators else None
    if table is not None:
        measured_s = table.measured_s(local_call(call, signature, mesh_shape))
        if measured_s is not None:
            return measured_s
    if is_free(call, flop):
        return 0.0
    work = operator_work(call, signature, mesh_shape, flop)
    roofline_s = device.roofline_s(work.flop, work.num_bytes, work.dtype)
    return table.estimated_s(call.op, work.dtype, roofline_s) if table else roofline_s


def _touched(call: OpCall) -> Sequence[Mapping[int, int]]:
    """Return for each tensor the dims of which few elements are touched, and how many of them."""
    none: Mapping[int, int] = {}
    tensors = (*call.inputs, *call.outputs)
    # Rows are named by integers.
    if not any(tensor.dtype in ("int64", "int32") for tensor in call.inputs):
        return [none] * len(tensors)
    notation = derivation(call).notation
    counts = dict(notation.touched)
    if not counts:
        return [none] * len(tensors)
    return [
        {at: counts[dim[0]] for at, dim in enumerate(dims) if len(dim) == 1 and dim[0] in counts}
        for dims in (*notation.inputs, *notation.outputs)
    ]


def _touched_bytes(
    tensor: TensorType, sbp: NdSbp, mesh_shape: Sequence[int], most: Mapping[int, int]
) -> int:
    """Return the bytes of the largest shard, with at most so many elements of some dims."""
    shape = _shard(tensor, sbp, mesh_shape)
    return prod(min(n, most.get(at, n)) for at, n in enumerate(shape)) * ITEMSIZE[tensor.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorWork:
    """The work of one rank for a call.

    Args:
        dtype: The dtype whose rate applies.
        flop: Its work; 0 if the call is free.
        num_bytes: The size of the tensors that it reads and writes.
    """

    dtype: str
    flop: float
    num_bytes: int


def operator_work(
    call: OpCall, signature: Signature, mesh_shape: Sequence[int], flop: float
) -> OperatorWork:
    """Return the work of the rank with the largest shards for a call; see `grid_time_s`."""
    few = _touched(call)
    given = zip(call.inputs, signature.inputs, few[: len(call.inputs)], strict=True)
    held: dict[object, int] = {}
    for name, (tensor, sbp, most) in zip(call.tensor_names, given, strict=True):
        held[name, sbp] = _touched_bytes(tensor, sbp, mesh_shape, most)
    made = sum(
        _touched_bytes(tensor, sbp, mesh_shape, most)
        for tensor, sbp, most in zip(
            call.outputs, signature.outputs, few[len(call.inputs) :], strict=True
        )
    )
    done = 0.0 if is_free(call, flop) else flop * work_fraction(call, signature, mesh_shape)
    return OperatorWork(dtype=rate_dtype(call), flop=done, num_bytes=sum(held.values()) + made)
