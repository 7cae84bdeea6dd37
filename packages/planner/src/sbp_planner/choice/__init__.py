"""The solver of choice problems: a strategy for each node, least cost, within a memory limit.

In the order in which they are used: `problem` (what is to be chosen, and what a choice costs),
`iopddl` (problems in files), `rows` (the times at which memory can bind), `graph` and `reduce`
(exact reductions), `compact` (what they leave), `program` (the integer program), `solve`.

Stability: provisional.
"""

from sbp_planner.choice.problem import ChoiceProblem, Evaluation, evaluate
from sbp_planner.choice.solve import ChoiceSolution, Progress, solve

__all__ = ["ChoiceProblem", "ChoiceSolution", "Evaluation", "Progress", "evaluate", "solve"]
