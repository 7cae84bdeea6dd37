"""The conformance suite of boxing backends: subclass `BoxingConformance` and supply one method.

    class TestMyBackend(BoxingConformance):
        name = "mine"
        rank_counts = (2, 4)

        def run_ranks(self, num_ranks, program):
            # Make ranks 0 .. num_ranks - 1 (threads, or processes), open one backend over all of
            # them, and on each rank call, all at the same time,
            #     result = program(rank, backend.communicator(rank))
            # Wait for all ranks, close the backend, return the results in rank order.

What a case is. One tensor is converted along its route, or by one step made by hand, on every rank.
*Every rank's* shard is compared with its slice of the logical tensor; partial values are put
together and compared with it; for each step, the bytes that the communicators counted are compared
with those predicted; and inputs must be left as they were, unless they were donated. Shards are
donated in every other case, have gaps in memory in every third and ask for gradients, of which
boxing must know nothing, in every fifth. The values are integers, so that
sums are exact in any order. `families` lists the cases.

What to supply besides:

* `run_backends(num_ranks, job)`: the same for `job(rank, backend)`. Then failing and closing are
  tried as well, and what a closed backend still holds, else those tests are skipped.
  `use_communicator` makes `run_ranks` of it.
* `rank_counts`: on how many ranks the exhaustive tests run; a test that wants more ranks than the
  largest of them is skipped. 4, 6 and 8 ranks have the meshes of two and three axes.
* `dtypes` (leave out what the transport has not), `device` of the shards, `deadline_s` (time one
  step may take on a slow machine), `missing_deadline_s` (how long ranks wait for one that never
  comes).

How to run. Most tests are quick: every pair of SBPs on one mesh axis, a sample of all else on up to
four ranks, and failures. Those with the mark `exhaustive` run every case; that takes minutes. Put

    markers = ["exhaustive: takes long"]

into the settings of pytest; then `-m "not exhaustive"` and `-m exhaustive` select, and
`-p sbp_torch.testing.boxing.report` prints how many cases ran, by backend and number of ranks.

What `run_ranks` can rely on, and must do:

* `program` is picklable (a `functools.partial` of a module-level function), so it can be sent to a
  spawned process, or written to a file for `mpiexec`; what it returns is picklable, and holds no
  tensor.
* `program` catches the `BoxingError`s that a test expects. If it raises, `run_ranks` raises too.
* A program may leave a rank out of a step (that is one of the tests): the rank still returns, later
  than the others. Do not put a barrier of your own transport between the ranks after `program`.
* Calls are independent; processes may stay alive between calls, backends may not.

The package: `conversion_cases` (what is converted), `families` (which cases there are), `values`
(their tensors, by the definition alone), `convert` (what ranks run, and how it is judged),
`in_flight` (what they run to have several steps under way), `failures` (what they run when
something goes wrong), `suite` (the tests), `report` (a plugin of pytest).
"""

from sbp_torch.testing.boxing.conversion_cases import BoxingCase, State
from sbp_torch.testing.boxing.convert import (
    BoxingTrial,
    TrialResult,
    find_problems,
    make_trials,
    run_route,
    run_trials,
)
from sbp_torch.testing.boxing.families import FAMILIES, quick_cases, sample
from sbp_torch.testing.boxing.suite import (
    BoxingConformance,
    CaseCount,
    Job,
    Program,
    use_communicator,
)
from sbp_torch.testing.boxing.values import (
    gather,
    logical_tensor,
    scatter,
    source_shards,
    target_shard,
)

__all__ = [
    "FAMILIES",
    "BoxingCase",
    "BoxingConformance",
    "BoxingTrial",
    "CaseCount",
    "Job",
    "Program",
    "State",
    "TrialResult",
    "find_problems",
    "gather",
    "logical_tensor",
    "make_trials",
    "quick_cases",
    "run_route",
    "run_trials",
    "sample",
    "scatter",
    "source_shards",
    "target_shard",
    "use_communicator",
]
