"""PyTorch's distributed tensors: placements in both directions, and states as `DTensor`s.

| ours     | DTensor             |                                                            |
|----------|---------------------|------------------------------------------------------------|
| `S(i)`   | `Shard(i)`          | also on several mesh axes; both apply axes from the left   |
| `B`      | `Replicate()`       |                                                            |
| `P`      | `Partial("sum")`    | `P("max")`, `P("min")` likewise                            |

DTensor cuts an uneven extent otherwise: all parts but the last ones have ceil(n/p) elements, where
ours differ by at most one (10 over 4 ranks: 3, 3, 3, 1 and 3, 3, 2, 2). So states are handed over
whole, and cut anew. What has no counterpart is refused: `Partial("avg")`, `Partial("product")`,
strided shards, and the masked and normed partials of single operators.

Nothing here communicates but `whole_states`.

>>> from sbp_core.sbp import B, NdSbp, P, S
>>> to_placements(NdSbp(S(1), B, P("max")))
(Shard(dim=1), Replicate(), Partial(max))
>>> from_placements(to_placements(NdSbp(S(1), B, P("max"))))
NdSbp(S(1), B, P("max"))
>>> [torch_part(torch.arange(10), NdSbp(S(0)), (4,), (at,)).tolist() for at in range(4)]
[[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from sbp_core.errors import SbpTypeError, SbpValueError, unknown_name
from sbp_core.placement import Placement
from sbp_core.sbp import REDUCTIONS, B, NdSbp, Sbp, Split, check_sbp
from sbp_core.sbp import Partial as OurPartial

_ACCEPTED = "Shard(dim) with dim >= 0, Replicate(), " + ", ".join(
    f'Partial("{name}")' for name in REDUCTIONS
)


def to_placements(sbp: NdSbp) -> tuple[TorchPlacement, ...]:
    """Return DTensor's placements, one for each mesh axis."""
    return tuple(
        Shard(entry.dim)
        if isinstance(entry, Split)
        else Partial(entry.reduction)
        if isinstance(entry, OurPartial)
        else Replicate()
        for entry in sbp
    )


def from_placements(placements: Sequence[TorchPlacement]) -> NdSbp:
    """Return the nd-SBP of DTensor's placements.

    Raises:
        SbpValueError: one has no counterpart.
    """
    found: list[Sbp] = []
    for axis, entry in enumerate(placements):
        # Exact types: what is derived from them, such as strided shards, means something else.
        if type(entry) is Replicate:
            found.append(B)
        elif type(entry) is Shard and entry.dim >= 0:
            found.append(Split(entry.dim))
        elif type(entry) is Partial and entry.reduce_op in REDUCTIONS:
            found.append(OurPartial(entry.reduce_op))
        else:
            raise SbpValueError(
                f"{entry!r} on mesh axis {axis} has no counterpart here",
                accepted=_ACCEPTED,
                todo="redistribute the DTensor to one of these first",
            )
    return NdSbp(*found)


def torch_part(
    whole: Tensor, sbp: NdSbp, mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> Tensor:
    """Return the part of a whole tensor that DTensor holds at a mesh coordinate: a view.

    Of a partial value, the first rank of the axis holds it, and the others what adds nothing.

    Args:
        whole: Of any shape and dtype.
        sbp: How it is cut; one entry for each mesh axis.
        mesh_shape: Ranks along each axis.
        coordinate: Which rank.

    Raises:
        SbpValueError: `sbp` does not fit the tensor or the mesh.
    """
    check_sbp(whole.shape, sbp, mesh_shape)
    part = whole
    for entry, count, at in zip(sbp, mesh_shape, coordinate, strict=True):
        if isinstance(entry, Split):
            size = -(-part.shape[entry.dim] // count)
            start = min(at * size, part.shape[entry.dim])
            part = part.narrow(entry.dim, start, min(size, part.shape[entry.dim] - start))
        elif isinstance(entry, OurPartial) and entry.reduction == "sum" and at:
            part = torch.zeros_like(part)
    return part


def to_dtensor(whole: Tensor, sbp: NdSbp, mesh: DeviceMesh) -> DTensor:
    """Return a whole tensor as this rank's `DTensor`, which is a copy of its part.

    Args:
        whole: The same on every rank, or at least this rank's part of it.
        sbp: How it is to be cut.
        mesh: That this rank is in.

    Raises:
        SbpValueError: `sbp` does not fit the tensor or the mesh, or this rank is not in the mesh.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise SbpValueError(
            f"rank {torch.distributed.get_rank()} is not in the mesh {mesh}",
            accepted=f"one of the ranks {mesh.mesh.flatten().tolist()}",
        )
    part = torch_part(whole.detach(), sbp, tuple(mesh.shape), coordinate)
    return DTensor.from_local(
        part.clone(memory_format=torch.contiguous_format).to(mesh.device_type),
        mesh,
        to_placements(sbp),
        run_check=False,
        shape=whole.shape,
        stride=torch.empty(whole.shape, device="meta").stride(),
    )


def to_dtensors(
    states: Mapping[str, Tensor], sbps: Mapping[str, NdSbp], mesh: DeviceMesh
) -> dict[str, DTensor]:
    """Return whole states as this rank's `DTensor`s.

    Args:
        states: Whole tensors, such as `Session.state_dict()`.
        sbps: How each is to be cut, such as `entry.sbp` of a strategy's storage; states that it
            does not name are replicated.
        mesh: That this rank is in.

    Raises:
        SbpLookupError: `sbps` names a state that is not there.
        SbpValueError: see `to_dtensor`.
    """
    for name in sbps:
        if name not in states:
            raise unknown_name("state", name, states)
    everywhere = NdSbp(*[B] * len(mesh.shape))
    return {
        name: to_dtensor(whole, sbps.get(name, everywhere), mesh) for name, whole in states.items()
    }


def whole_states(states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return states as whole tensors, for `Session.load_state_dict`; ranks gather in one order.

    Args:
        states: `DTensor`s, or tensors that are whole; the same names on every rank.

    Raises:
        SbpTypeError: one is no tensor.
    """
    found = {}
    for name, value in states.items():
        if not isinstance(value, Tensor):
            raise SbpTypeError(
                f"{name!r} is a {type(value).__name__}", accepted="a tensor or a DTensor"
            )
        found[name] = value.full_tensor() if isinstance(value, DTensor) else value
    return found


def placement_of(mesh: DeviceMesh) -> Placement:
    """Return our placement of a device mesh: its ranks, axes and kind of device."""
    names = mesh.mesh_dim_names
    return Placement(mesh.mesh.tolist(), names, mesh.device_type)


def check_mesh(mesh: DeviceMesh, placement: Placement) -> None:
    """Check that a device mesh has the ranks of a placement, in the same order.

    Raises:
        SbpValueError: it has not.
    """
    if mesh.mesh.tolist() != placement.ranks:
        raise SbpValueError(
            f"the device mesh {mesh.mesh.tolist()} is not the placement {placement.ranks}",
            accepted=f"init_device_mesh({placement.device!r}, {placement.mesh_shape})",
        )
