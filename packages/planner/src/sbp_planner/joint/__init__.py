"""A step on all mesh axes at once, as a choice problem: what `ilp` and its kin solve.

`layers` finds what repeats, `near` leaves signatures out where they are too many, `lifetime` says
how long values are held. `group_bound` bounds steps of very many signatures. `lower` makes the
choice problem of a `StepProblem`, `priced` puts a price on memory, and `search` solves the step
under the exact memory of compiled plans. Elimination, bounds and proofs are those of
`sbp_planner.choice`.
"""
