"""Starting the ranks of a run, and seeing to it that all of them end.

`launch_spec` says what is to be started, and `rendezvous` does so for one process a rank that finds
the others at an address. `supervisor` starts the processes and waits for them, `exit_report` says
how they ended, `root_cause` which of a launcher's ranks failed first, and `reaper` ends what is
left, also if the supervisor itself is killed.

Stability: provisional.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy

if TYPE_CHECKING:
    from sbp_core.boxing.supervision.launch_spec import LaunchSpec, thread_share
    from sbp_core.boxing.supervision.rendezvous import one_process_per_rank
    from sbp_core.boxing.supervision.supervisor import Line, supervise

__all__ = ["LaunchSpec", "Line", "one_process_per_rank", "supervise", "thread_share"]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "LaunchSpec": "launch_spec",
        "Line": "supervisor",
        "one_process_per_rank": "rendezvous",
        "supervise": "supervisor",
        "thread_share": "launch_spec",
    },
)
