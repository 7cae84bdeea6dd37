"""List all operator calls that a rank might execute in a step, under any plan, to measure them.

    graph, mesh --> each call, cut by each of its signatures --> distinct calls of a rank, by text

The list is a file, so a step can be listed on one machine and measured on another:
`sbp-calibrate ops=FILE`. A planner then uses measured times in place of rooflines, even for layouts
that nobody has run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from sbp_core.cluster import Device
from sbp_core.compile.actors import Compute, Instruction, keys_in
from sbp_core.compile.instructions import named
from sbp_core.cost import grid_time_s, is_free, local_call, operator_work
from sbp_core.errors import ConfigError
from sbp_core.graph import LogicalGraph, Phase, Rate, TensorType
from sbp_core.placement import Placement
from sbp_core.sbp import local_shape
from sbp_core.serialize import Document
from sbp_core.signatures import (
    OpCall,
    call_key,
    enumerate_signatures,
    localize,
    tensors_as_refs,
    work_flop,
)
from sbp_core.signatures.views import in_place_form

__all__ = ["RANK_CALLS", "RankCall", "RankCalls", "rank_calls"]

#: Stands for every number that a host computes.
_HOST = "host"

#: Most signatures of a call that are tried on a mesh of several axes, which may have very many.
_MOST_SIGNATURES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCall:
    """A call of an operator on one rank, and its local execution.

    Args:
        call: `sbp_core.cost.local_call`.
        dtype, flop, num_bytes: See `sbp_core.operators.MeasuredOperator`.
        predicted_s: Its time by the rates of the machine that it was listed for, in seconds.
        instructions: The rank's instructions, on tensors named "0", "1", ..., and "host": a number.
        inputs: Types of these tensors on the rank.
        outputs: Keys of the results.
    """

    call: str
    dtype: str
    flop: float
    num_bytes: int
    predicted_s: float
    instructions: tuple[Instruction, ...]
    inputs: tuple[TensorType, ...]
    outputs: tuple[str, ...]

    @property
    def segment(self) -> Compute:
        """A segment with only this call; its inputs are the tensors, then the number, if any."""
        taken = {key for entry in self.instructions for key in keys_in(entry)}
        tensors = map(str, range(len(self.inputs)))
        return Compute(
            name=self.call,
            stage=0,
            phase=Phase.FORWARD,
            rate=Rate.MICRO,
            thread="compute",
            inputs=(*tensors, *sorted(taken & {_HOST})),
            outputs=self.outputs,
            instructions=self.instructions,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCalls:
    """The calls of a step, the longest predicted times first.

    Args:
        num_ranks: Ranks of the meshes that the step was cut for.
        calls: Each call once.
    """

    num_ranks: int
    calls: tuple[RankCall, ...]


#: The file of a list.
RANK_CALLS: Document[RankCalls] = Document(
    kind=RankCalls,
    format="sbp-rank-calls",
    version=1,
    todo="list the calls of a step: sbp-plan calls=calls.json",
    error=ConfigError,
)


def rank_calls(
    graphs: Iterable[LogicalGraph], meshes: Sequence[Placement], device: Device
) -> RankCalls:
    """Return all calls that ranks of some meshes might execute, by all legal signatures.

    Views and other calls that take no time are left out, and so are calls that only hosts execute.

    Args:
        graphs: The step, in every form in which it may be planned.
        meshes: Meshes on which it may run, with equally many ranks.
        device: The device that runs it, for the order of the list.

    Raises:
        SignatureError: an operator has no rule.
    """
    calls = [OpCall.of(of, node) for of in graphs for node in of.nodes if not node.is_host]
    found: dict[str, RankCall] = {}
    for call in {call_key(call): call for call in calls}.values():
        for mesh in meshes:
            for one in _of_call(call, mesh, device):
                found.setdefault(one.call, one)
    listed = sorted(found.values(), key=lambda one: (-one.predicted_s, one.call))
    return RankCalls(num_ranks=max(mesh.size for mesh in meshes), calls=tuple(listed))


def _of_call(call: OpCall, mesh: Placement, device: Device) -> Iterator[RankCall]:
    flop = work_flop(call)
    if is_free(call, flop):
        return
    args, kwargs = tensors_as_refs(call)
    names = tuple(map(str, range(len(call.inputs))))
    # Named by number, so that one measurement stands for all calls with the same text.
    numbered = replace(call, args=args, kwargs=kwargs, tensor_names=names)
    outputs = tuple(f"made{index}" for index in range(len(call.outputs)))
    mesh_shape, origin = mesh.mesh_shape, (0,) * len(mesh.mesh_shape)
    seen: set[str] = set()
    for signature in islice(enumerate_signatures(call, mesh_shape), _MOST_SIGNATURES):
        text = local_call(call, signature, mesh_shape)
        if text in seen:
            continue
        seen.add(text)
        work = operator_work(call, signature, mesh_shape, flop)
        local = localize(numbered, signature, mesh, mesh.rank_list[0])
        executed = []
        for entry in named(local, outputs, call.op):
            # An update of states as in plans, which overwrites the old values.
            form = in_place_form(entry.op) if entry.op.startswith("sbp.") else None
            executed.append(entry if form is None else replace(entry, op=form.op))
        yield RankCall(
            call=text,
            dtype=work.dtype,
            flop=work.flop,
            num_bytes=work.num_bytes,
            predicted_s=grid_time_s(call, signature, mesh_shape, device, flop),
            instructions=tuple(executed),
            inputs=tuple(
                TensorType(local_shape(entry.shape, sbp, mesh_shape, origin), entry.dtype)
                for entry, sbp in zip(call.inputs, signature.inputs, strict=True)
            ),
            outputs=outputs,
        )
