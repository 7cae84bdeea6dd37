"""The solver of choice problems: a strategy for each node, least cost, within a memory limit.

In the order of their use: `problem` (the choices and their cost), `reduced_graph` and `reduce`
(exact reductions), `compact` (the reduced problem), `program` (the integer program), `incumbent`
(the best result so far), `solver` (all of these together, elimination of narrow graphs, and the
search of `large`). `chain` solves chains and knapsacks exactly. For tables over any number of
nodes, without memory, `prove` proves an assignment by `moved_costs` and elimination. `iopddl` has
the files of a contest, and random problems.
"""

from sbp_planner.choice.chain import ChainSolution, solve_chain
from sbp_planner.choice.incumbent import ChoiceSolution, Progress
from sbp_planner.choice.iopddl.instance import FORBIDDEN, read_problem, write_problem
from sbp_planner.choice.iopddl.planted import FAMILIES, Shape, planted_problem
from sbp_planner.choice.iopddl.synthetic import transformer_problem
from sbp_planner.choice.problem import AssignmentCost, ChoiceProblem, evaluate, memory_rows
from sbp_planner.choice.solver import solve

__all__ = [
    "FAMILIES",
    "FORBIDDEN",
    "AssignmentCost",
    "ChainSolution",
    "ChoiceProblem",
    "ChoiceSolution",
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
