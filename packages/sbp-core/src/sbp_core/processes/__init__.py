"""The processes of a run: starting them, detecting failures, and ending all of them.

Starting and ending: `launchers` returns `LaunchSpec`s, commands that start ranks; `supervisor` runs
them and waits for all; `exit_report` explains how they ended and which failed first; `reaper` ends
the remaining processes, even if the supervisor itself is killed.

Parts of a boxing backend with one rank in each process, without the transport and the tensors:
`process_backend` is its base class, `connections` handles broken connections, `outbox` keeps sent
messages, `calls` records pending calls, `waiting` polls, `backend_settings` checks configs. Failure
detection between ranks: `control_store` (short entries by which ranks inform each other, kept in a
`key_value_store`), `membership` (the process of each rank) and `failure_detector` (a thread that
looks for failures). `survivors` lets the remaining ranks agree on what to do after a failure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy_room

if TYPE_CHECKING:
    from sbp_core.processes.backend_settings import (
        check_rendezvous,
        check_timeouts,
        local_rank,
        rank_and_size,
    )
    from sbp_core.processes.calls import group_name, tag_number
    from sbp_core.processes.connections import CLOSE_TIMEOUT_S, PATIENCE_S, Connections
    from sbp_core.processes.control_store import (
        FIRST_STAYS,
        ControlStore,
        StoreLostError,
        StoreSilentError,
    )
    from sbp_core.processes.exit_report import ExitReport
    from sbp_core.processes.key_value_store import (
        CountingStore,
        KeyValueControlStore,
        connect_current_store,
        count_opening,
    )
    from sbp_core.processes.launchers import (
        Launcher,
        LaunchRequest,
        mpiexec_specs,
        one_process_per_rank,
    )
    from sbp_core.processes.membership import Siblings
    from sbp_core.processes.outbox import Outbox
    from sbp_core.processes.process_backend import ProcessBackend, check_ranks
    from sbp_core.processes.supervisor import Line, supervise
    from sbp_core.processes.survivors import Survivors
    from sbp_core.processes.waiting import run_abandonable, wait_until

__all__ = [
    "CLOSE_TIMEOUT_S",
    "FIRST_STAYS",
    "PATIENCE_S",
    "Connections",
    "ControlStore",
    "CountingStore",
    "ExitReport",
    "KeyValueControlStore",
    "LaunchRequest",
    "Launcher",
    "Line",
    "Outbox",
    "ProcessBackend",
    "Siblings",
    "StoreLostError",
    "StoreSilentError",
    "Survivors",
    "check_ranks",
    "check_rendezvous",
    "check_timeouts",
    "connect_current_store",
    "count_opening",
    "group_name",
    "local_rank",
    "mpiexec_specs",
    "one_process_per_rank",
    "rank_and_size",
    "run_abandonable",
    "supervise",
    "tag_number",
    "wait_until",
]

__getattr__, __dir__ = lazy_room(
    __name__,
    calls="group_name tag_number",
    connections="CLOSE_TIMEOUT_S PATIENCE_S Connections",
    control_store="FIRST_STAYS ControlStore StoreLostError StoreSilentError",
    exit_report="ExitReport",
    key_value_store="CountingStore KeyValueControlStore connect_current_store count_opening",
    launchers="LaunchRequest Launcher mpiexec_specs one_process_per_rank",
    membership="Siblings",
    outbox="Outbox",
    process_backend="ProcessBackend check_ranks",
    backend_settings="check_rendezvous check_timeouts local_rank rank_and_size",
    supervisor="Line supervise",
    survivors="Survivors",
    waiting="run_abandonable wait_until",
)
