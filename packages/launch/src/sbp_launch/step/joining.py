"""How the ranks of several processes begin together: one program, and the states of rank 0.

Every process has made the program by itself. If they differ, all ranks are told where. If only the
values of the states differ, because nobody seeded the processes alike, those of rank 0 are taken,
as `DistributedDataParallel` does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch import Tensor

from sbp_core import boxing
from sbp_core.boxing import BoxingBackend, Communicator
from sbp_core.placement import Placement
from sbp_core.runtime import Session
from sbp_core.sbp import B, NdSbp
from sbp_launch.planning.flow import Planned
from sbp_launch.step.agreement import Gather, compare, digest_of, gathering, manifest
from sbp_launch.step.engine import Engine
from sbp_launch.step.program import OneDeviceProgram

logger = logging.getLogger(__name__)

#: Seconds that ranks wait for each other: one may have planned on a slower machine.
DEADLINE_S = 300.0


def join(
    session: Session,
    backend: BoxingBackend,
    planned: Planned,
    engine: Engine,
    program: OneDeviceProgram,
    states: Mapping[str, Tensor],
) -> Gather | None:
    """See that all processes mean the same, and let them begin with the same states.

    Args:
        session: Started, and without a step so far.
        backend: Its own.
        planned: Its plan.
        engine: What started it.
        program: What was planned.
        states: Those with which it was started.

    Returns:
        What gathers texts of all ranks, while no step runs; None if one process has all ranks.

    Raises:
        ConfigError: the processes have different programs.
    """
    if not backend.spans_processes or len(planned.plan.ranks) == 1:
        return None
    (rank,) = backend.local_ranks()
    ranks = [part.rank for part in planned.plan.ranks]
    communicator = backend.communicator(rank)
    gather = gathering(communicator, ranks, DEADLINE_S)
    chosen = {
        "the mesh": engine.settings.mesh,
        "batch_is": engine.batch_is,
        "seed": engine.seed,
        "the seed of the model": program.deferred.seed if program.deferred else "",
    }
    compare(manifest(planned, engine.registry, chosen), gather)
    if not isinstance(states, dict):
        return gather  # each is made when it is asked for, from a seed, which has been compared
    found = gather("the first states", digest_of(states))
    if len(set(found.values())) > 1:
        if rank == ranks[0]:
            logger.warning(
                "the processes made the model with different values: all take the values of rank "
                "%d. To save this transfer, call torch.manual_seed(...) before the model is made",
                ranks[0],
            )
        session.load_state_dict(
            {name: _from_first(communicator, ranks, name, value) for name, value in states.items()}
        )
    return gather


def _from_first(communicator: Communicator, ranks: list[int], name: str, value: Tensor) -> Tensor:
    """Return the value of the first rank, on all ranks."""
    everyone = NdSbp(B)
    here = value.detach().contiguous().to(communicator.device)
    shape, dtype = tuple(here.shape), str(here.dtype).removeprefix("torch.")
    first, others = Placement(ranks[:1], ("rank",)), Placement(ranks[1:], ("rank",))
    route = boxing.route(shape, dtype, (first, everyone), (others, everyone))
    for index, step in enumerate(route.steps):
        tag = f"first value of {name!r}, step {index}"
        if communicator.rank in step.source[0]:
            communicator.send(step, here, tag=tag, deadline_s=DEADLINE_S)
        if communicator.rank in step.target[0]:
            here = communicator.receive(step, None, tag=tag, deadline_s=DEADLINE_S)
    return here.to(value.device)
