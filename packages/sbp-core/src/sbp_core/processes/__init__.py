"""The processes of a run: how they start, what they know of each other, and how they end.

What starts them: `launchers` says how, in `LaunchSpec`s, `supervisor` does so and waits for them,
`exit_report` says how they ended and which failed first, and `reaper` ends what is left, also if
the supervisor itself is killed.

What a boxing backend with one rank in each process is made of, but for the transport and the
tensors: `process_backend` is one, `connections` how it breaks, `outbox` what it has sent, `calls`
what it is in the middle of, `waiting` how it waits, `backend_settings` what configs check. How
ranks learn that one of them failed: `control_store` (the entries by which they know of each other;
in a `key_value_store`), `membership` (their processes) and `failure_detector` (the thread that
looks). `survivors` are the ranks that are left then, and what they say to each other.
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
