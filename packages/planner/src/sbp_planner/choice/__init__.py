"""The solver of choice problems: a strategy for each node, least cost, within a memory limit.

In the order in which they are used: `problem` (what is to be chosen, and what a choice costs),
`iopddl` (problems in files), `rows` (the times at which memory can bind), `graph` and `reduce`
(exact reductions), `compact` (what they leave), `elimination` (narrow graphs), `program` (the
integer program), `dual` (messages and memory prices; `schedule` and `tables` say in which order and
on what), `consistent` (an assignment without forbidden pairs), `forest` and `moves` (changes of
many small trees at once), `penalties` (what makes an assignment fit), `neighbourhood` (large
neighbourhoods), `worker` (a second process), `record` (the best so far), `search` (all of these
together), `solver`. Beside them `chain` (chains, exactly), `synthetic` and `planted` (random
problems).

Stability: provisional.
"""

from sbp_planner.choice.chain import ChainSolution, solve_chain
from sbp_planner.choice.iopddl import FORBIDDEN, read_problem, write_problem
from sbp_planner.choice.planted import FAMILIES, Shape, planted_problem
from sbp_planner.choice.problem import ChoiceProblem, Evaluation, evaluate
from sbp_planner.choice.record import ChoiceSolution, Progress
from sbp_planner.choice.rows import memory_rows
from sbp_planner.choice.solver import solve
from sbp_planner.choice.synthetic import transformer_problem

__all__ = [
    "FAMILIES",
    "FORBIDDEN",
    "ChainSolution",
    "ChoiceProblem",
    "ChoiceSolution",
    "Evaluation",
    "Progress",
    "Shape",
    "evaluate",
    "memory_rows",
    "planted_problem",
    "read_problem",
    "solve",
    "solve_chain",
    "transformer_problem",
    "write_problem",
]
