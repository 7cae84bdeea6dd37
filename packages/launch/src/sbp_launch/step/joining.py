"""Start the ranks of several processes together, with one program and the states of rank 0.

Every process has made the program by itself. If the programs differ, all ranks raise an error that
names the difference. If only the values of the states differ, because the processes were seeded
differently, all take the values of rank 0, as with `DistributedDataParallel`.
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
    """Check that all processes have the same program, and give them the same states.

    Args:
        session: A started session that has taken no step.
        team: All processes.
        planned: The plan of the session.
        engine: The engine that started it.
        program: The program that was planned.
        states: The states with which it was started.

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
        return  # each state is made on demand from a seed, which was compared above
    if len(set(team.gather(digest_of(states), "the first states"))) > 1:
        if 0 in session.local_ranks:
            logger.warning(
                "the processes made the model with different values: all take the values of rank "
                "0. To save this transfer, call torch.manual_seed(...) before the model is made"
            )
        session.load_state_dict({name: team.from_first(name, states[name]) for name in states})
