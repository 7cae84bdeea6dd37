"""Starting the ranks of a run, and seeing to it that all of them end.

`launch_spec` says what is to be started, `rendezvous` does so for one process a rank that finds the
others at an address, and `mpiexec` for the launcher of that name. `supervisor` starts the processes
and waits for them, `exit_report` says how they ended, `root_cause` which of a launcher's ranks
failed first, and `reaper` ends what is left, also if the supervisor itself is killed.

Stability: provisional.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy

if TYPE_CHECKING:
    from sbp_core.boxing.supervision.exit_report import ExitReport
    from sbp_core.boxing.supervision.launch_spec import LaunchSpec, thread_share
    from sbp_core.boxing.supervision.mpiexec import mpiexec_specs
    from sbp_core.boxing.supervision.rendezvous import one_process_per_rank
    from sbp_core.boxing.supervision.supervisor import Line, supervise

__all__ = [
    "ExitReport",
    "LaunchSpec",
    "Line",
    "mpiexec_specs",
    "one_process_per_rank",
    "supervise",
    "thread_share",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "ExitReport": "exit_report",
        "LaunchSpec": "launch_spec",
        "Line": "supervisor",
        "mpiexec_specs": "mpiexec",
        "one_process_per_rank": "rendezvous",
        "supervise": "supervisor",
        "thread_share": "launch_spec",
    },
)
