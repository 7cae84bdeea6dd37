"""How the ranks of several processes begin together: one program, and the states of rank 0.

Every process has made the program by itself. If they differ, all ranks are told where. If only the
values of the states differ, because nobody seeded the processes alike, those of rank 0 are taken,
as `DistributedDataParallel` does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch import Tensor

from sbp_core.runtime import Session
from sbp_launch.planning.flow import Planned
from sbp_launch.step.agreement import compare, digest_of, manifest
from sbp_launch.step.engine import Engine
from sbp_launch.step.program import OneDeviceProgram
from sbp_launch.team import Team

logger = logging.getLogger(__name__)


def join(
    session: Session,
    team: Team,
    planned: Planned,
    engine: Engine,
    program: OneDeviceProgram,
    states: Mapping[str, Tensor],
) -> None:
    """See that all processes mean the same, and let them begin with the same states.

    Args:
        session: Started, and without a step so far.
        team: All processes.
        planned: Its plan.
        engine: What started it.
        program: What was planned.
        states: Those with which it was started.

    Raises:
        ConfigError: the processes have different programs.
    """
    if team.is_alone:
        return
    chosen = {
        "the mesh": engine.settings.mesh,
        "batch_is": engine.batch_is,
        "seed": engine.seed,
        "the seed of the model": program.deferred.seed if program.deferred else "",
    }
    compare(manifest(planned, engine.registry, chosen), team.gather)
    if not isinstance(states, dict):
        return  # each is made when it is asked for, from a seed, which has been compared
    if len(set(team.gather(digest_of(states), "the first states"))) > 1:
        if 0 in session.local_ranks:
            logger.warning(
                "the processes made the model with different values: all take the values of rank "
                "0. To save this transfer, call torch.manual_seed(...) before the model is made"
            )
        session.load_state_dict({name: team.from_first(name, states[name]) for name in states})
