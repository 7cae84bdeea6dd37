"""A step on all mesh axes at once, as a choice problem: what `ilp` and its kin solve.

`layers` finds what repeats, `lifetime` how long values are held, `lower` makes the choice problem
of a `StepProblem`, `search` solves it under the exact memory of compiled plans.
"""
