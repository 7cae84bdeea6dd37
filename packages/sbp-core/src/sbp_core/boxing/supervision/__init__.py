"""Starting the ranks of a run, and seeing to it that all of them end.

`start` says what is to be started, `meet` does so for processes that meet at an address,
`supervise` starts it, `ended` is how it went, `culprit` who of a launcher's ranks fell first, and
`keeper` ends what is left if the supervisor itself is killed.

Stability: provisional.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy

if TYPE_CHECKING:
    from sbp_core.boxing.supervision.launch_spec import LaunchSpec, thread_share
    from sbp_core.boxing.supervision.rendezvous import processes_that_meet
    from sbp_core.boxing.supervision.supervisor import Line, supervise

__all__ = ["LaunchSpec", "Line", "processes_that_meet", "supervise", "thread_share"]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "LaunchSpec": "launch_spec",
        "Line": "supervisor",
        "processes_that_meet": "rendezvous",
        "supervise": "supervisor",
        "thread_share": "launch_spec",
    },
)
