"""Convert layouts (nd-SBP) and states to PyTorch's `DTensor` placements and `DTensor`s, and back.

| ours     | DTensor             |                                                            |
|----------|---------------------|------------------------------------------------------------|
| `S(i)`   | `Shard(i)`          | also on several mesh axes; both apply axes from the left   |
| `B`      | `Replicate()`       |                                                            |
| `P`      | `Partial("sum")`    | `P("max")`, `P("min")` likewise                            |

DTensor cuts an uneven extent differently: its parts have ceil(n/p) elements, except the last ones;
our parts differ by at most one element (10 over 4 ranks: 3, 3, 3, 1 and 3, 3, 2, 2). So states are
converted as whole tensors, and cut again. Placements without a counterpart raise an error:
`Partial("avg")`, `Partial("product")`, strided shards, and masked and normed partials of single
operators.

Only `whole_states` communicates.

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
        SbpValueError: a placement has no counterpart.
    """
    found: list[Sbp] = []
    for axis, entry in enumerate(placements):
        # Exact types: subclasses, such as strided shards, mean something else.
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

    For a partial sum, the first rank of the axis holds the values and the other ranks hold zeros.
    For a partial maximum or minimum, every rank holds the values.

    Args:
        whole: A tensor of any shape and dtype.
        sbp: The layout of the tensor; one entry for each mesh axis.
        mesh_shape: Number of ranks along each axis.
        coordinate: Position of the rank in the mesh.

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
    """Return a `DTensor` of a whole tensor; it has a copy of this rank's part.

    Args:
        whole: The whole tensor; only this rank's part of it has to be correct.
        sbp: The layout of the `DTensor`.
        mesh: The device mesh, which contains this rank.

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
        sbps: Layout of each state, such as `entry.sbp` of a strategy's storage; states without an
            entry are replicated.
        mesh: The device mesh, which contains this rank.

    Raises:
        SbpLookupError: `sbps` names a state that `states` lacks.
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
        states: `DTensor`s or whole tensors; the same names in the same order on every rank.

    Raises:
        SbpTypeError: a state is no tensor.
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
        SbpValueError: the ranks or their order differ.
    """
    if mesh.mesh.tolist() != placement.ranks:
        raise SbpValueError(
            f"the device mesh {mesh.mesh.tolist()} is not the placement {placement.ranks}",
            accepted=f"init_device_mesh({placement.device!r}, {placement.mesh_shape})",
        )
