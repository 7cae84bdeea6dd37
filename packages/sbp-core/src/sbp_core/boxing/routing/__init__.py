"""Inside the router: what a conversion depends on, the table of all single steps, and the search.

`canonical_problem` removes everything that a route does not depend on, `layout` has the states as
numbers and counts their elements. `collectives` and `transfers` compute the bytes and memory of
every step between two states, `step_tables` combines them. `shortest_path` finds the best path.
`boxing.router` is the entry point.
"""
