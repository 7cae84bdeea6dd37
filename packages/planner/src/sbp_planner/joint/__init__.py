"""A step on all mesh axes at once, as a choice problem: the search of `ilp` and related planners.

`layers` finds equal layers. `near` leaves out signatures if there are too many. `lifetime`
estimates how long values are held. `group_bound` bounds steps of very many signatures. `lower`
makes the choice problem of a `StepProblem`, `priced` puts a price on memory, and `search` solves
the step under the exact memory of compiled plans. Elimination, bounds and proofs are in
`sbp_planner.choice`.
"""
