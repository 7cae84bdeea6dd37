"""Choose for `parallelize` the mesh of all ranks, and how they communicate (boxing backend)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from sbp_core.boxing import BoxingBackend
from sbp_core.errors import ConfigError
from sbp_core.placement import Placement
from sbp_launch.clusters.local import AXES
from sbp_launch.parallel.choices import Choice, Choices
from sbp_launch.world import MPIEXEC, THREADS, TORCHRUN, World

#: The boxing that fits a launcher.
_BOXING: Mapping[str, str] = {MPIEXEC: "mpi"}

#: How to start processes, for messages.
_START = "torchrun --nproc-per-node={size} PROGRAM, or mpiexec -n {size} python PROGRAM"


def mesh_of(world: World, mesh: int | Sequence[int] | Mapping[str, int] | None) -> Placement:
    """Return the mesh of all ranks.

    Args:
        world: The world of processes.
        mesh: See `parallelize`.

    Raises:
        ConfigError: the mesh is invalid, or its size is not the size of the world.
    """
    given = world.size if mesh is None else mesh
    _check_mesh_type(given)
    named = given if isinstance(given, Mapping) else None
    shape: tuple[int, ...]
    if isinstance(given, Mapping):
        shape = tuple(given.values())
    else:
        shape = (given,) if isinstance(given, int) else tuple(given)
    if shape.count(-1) == 1 and named:
        others = -prod(shape)
        shape = tuple(world.size // others if size == -1 else size for size in shape)
    if not shape or not all(type(size) is int and size > 0 for size in shape):
        raise ConfigError(
            f"mesh={mesh!r} has no ranks",
            where="the argument mesh",
            accepted="ranks along each axis, such as 4, (2, 2) or {'data': 2, 'tensor': 2}",
        )
    if named is None and len(shape) not in AXES:
        raise ConfigError(
            f"mesh={shape} has {len(shape)} axes without names",
            where="the argument mesh",
            accepted="a size for each name: mesh={'pipe': 2, 'node': 2, 'data': 2, 'tensor': 2}",
        )
    names = AXES[len(shape)] if named is None else tuple(named)
    if not all(isinstance(name, str) and name for name in names):
        raise ConfigError(
            f"mesh={mesh!r} has an axis without a name",
            where="the argument mesh",
            accepted="a size for each name: mesh={'data': 2, 'tensor': 2}",
        )
    if world.size > 1 and prod(shape) != world.size:
        ranks = prod(shape)
        raise ConfigError(
            f"mesh={shape} has {ranks} rank{'s' * (ranks > 1)}, and {world.launcher} started "
            f"{world.size} processes ({world.said_by})",
            where="the argument mesh",
            accepted=f"a mesh of {world.size} ranks: one for each process",
            todo=f"leave out mesh, or start as many processes: {_START.format(size=ranks)}",
        )
    return Placement.grid(shape, names)


def _check_mesh_type(mesh: object) -> None:
    """Check that a mesh is an integer, a sequence or a mapping.

    Raises:
        ConfigError: it is something else, such as text.
    """
    if isinstance(mesh, int | Sequence | Mapping) and not isinstance(mesh, str):
        return
    sizes = tuple(map(int, re.findall(r"\d+", mesh))) if isinstance(mesh, str) else ()
    raise ConfigError(
        f"mesh={mesh!r} is of type {type(mesh).__name__}",
        where="the argument mesh",
        accepted="ranks along each axis: an integer, such as 4, or a tuple, such as (2, 2)",
        todo=f"write mesh={sizes[0] if len(sizes) == 1 else sizes}" if sizes else "",
    )


def backend_of(
    world: World, boxing: Choice | BoxingBackend | None, choices: Choices, mesh: Placement
) -> BoxingBackend:
    """Return the boxing backend, not yet open.

    Args:
        world: The world of processes, with its launcher and rendezvous address.
        boxing: The user's choice; None for the backend that fits the launcher.
        choices: Makes the backend.
        mesh: All ranks, and their kind of device.

    Raises:
        ConfigError: the backend connects processes and there is one only, or the other way round.
    """
    fits = _BOXING.get(world.launcher, "torch") if world.size > 1 else "local"
    chosen = fits if boxing is None else boxing
    if isinstance(chosen, BoxingBackend):
        backend, shown = chosen, type(chosen).__name__
    else:
        option = choices.option("boxing", chosen)
        if option.name == "torch":
            option = choices.option("boxing", _with_settings(chosen, _boxing_settings(world, mesh)))
        backend, shown = choices.make(option), str(option)
    if backend.spans_processes and world.size == 1 < mesh.size:
        by = f"{world.launcher} has started one ({world.said_by})" if world.said_by else ""
        raise ConfigError(
            f"boxing={shown} connects one process a rank, and "
            f"{by or 'no launcher has started this one'}",
            where="the argument boxing",
            accepted="boxing='local': the ranks are threads of this process",
            todo=f"leave out boxing, or start it by {_START.format(size=mesh.size)}",
        )
    if not backend.spans_processes and world.size > 1:
        raise ConfigError(
            f"boxing={shown} connects the threads of one process, and {world.launcher} started "
            f"{world.size} processes",
            where="the argument boxing",
            accepted="boxing='torch', boxing='mpi'",
            todo="leave out boxing: what fits the launcher is chosen",
        )
    return backend


def _with_settings(choice: Choice, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return a choice with known settings added, unless it has them."""
    given = {"name": choice} if isinstance(choice, str) else dict(choice)
    return {**known, **given}


def _boxing_settings(world: World, mesh: Placement) -> dict[str, Any]:
    """Return the settings of `boxing=torch` that are known: device and rendezvous."""
    known: dict[str, Any] = {} if mesh.device == "cpu" else {"device": mesh.device}
    if world.launcher in (THREADS, TORCHRUN):
        return known
    known |= {"rank": world.rank, "world_size": world.size}
    told = world.variables
    if "MASTER_ADDR" in told and "MASTER_PORT" in told:
        known["init_method"] = f"tcp://{told['MASTER_ADDR']}:{told['MASTER_PORT']}"
    return known
