"""The conformance suite of boxing backends: subclass `BoxingConformance` and supply one method.

    class TestMyBackend(BoxingConformance):
        name = "mine"
        rank_counts = (2, 4)

        def run_ranks(self, num_ranks, program):
            # Make ranks 0 .. num_ranks - 1 (threads, or processes), open one backend over all of
            # them, and on each rank call, all at the same time,
            #     result = program(rank, backend.communicator(rank))
            # Wait for all ranks, close the backend, return the results in rank order.

Boxing is communication that changes how a tensor is distributed over ranks. In a case, all ranks
convert one tensor along its route (list of steps), or by one step. The suite compares *every
rank's* shard with its slice of the logical tensor; partial values are added up first. For each step
it compares the bytes that the communicators counted with the predicted bytes. Inputs must be
unchanged, unless they were donated. Shards are donated in every second case, have gaps in memory in
every third, and require gradients, which boxing must ignore, in every fifth. The values are
integers, so sums are exact in any order. `families` lists the cases.

Optional members of the subclass:

* `run_backends(num_ranks, job)`: the same for `job(rank, backend)`. It enables the tests of
  failures, of closing, and of resources that a closed backend still holds. With
  `use_communicator`, `run_ranks` can be implemented by it.
* `rank_counts`: numbers of ranks of the exhaustive tests; tests that need more ranks than the
  largest number are skipped. 4, 6 and 8 ranks have meshes of two and three axes.
* `dtypes` (only those that the transport supports), `device` of the shards, `deadline_s` (time
  limit of one step on a slow machine), `missing_deadline_s` (how long ranks wait for a rank that
  never takes part).

Most tests are quick: every pair of SBPs on one mesh axis, a sample of all other cases on up to four
ranks, and failures. Tests with the mark `exhaustive` run every case; this takes minutes. Put

    markers = ["exhaustive: takes long"]

into the settings of pytest; then `-m "not exhaustive"` and `-m exhaustive` select tests, and
`-p sbp_torch.testing.boxing.report` prints the number of cases by backend and number of ranks.

Rules for `run_ranks`:

* `program` is picklable (a `functools.partial` of a module-level function), so it can be sent to a
  spawned process, or written to a file for `mpiexec`; its result is picklable, without tensors.
* `program` catches the `BoxingError`s that a test expects. If it raises, `run_ranks` raises too.
* In some tests, a rank takes no part in a step: it still returns, but later than other ranks. Do
  not put a barrier of your own transport between the ranks after `program`.
* Calls are independent; processes may stay alive between calls, backends may not.

Modules: `conversion_cases` (one conversion), `families` (lists of cases), `values` (tensors of a
case, by the definition of SBP), `convert` (the program of the ranks, and the checks), `in_flight`
(programs with several steps at once), `failures` and `mismatches` (programs that fail on purpose),
`suite` (the tests), `report` (a pytest plugin).
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
