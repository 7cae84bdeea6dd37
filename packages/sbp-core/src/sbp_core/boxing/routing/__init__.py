"""Inside the router: what a conversion depends on, the table of all single steps, and the search.

`canonical_problem` takes away what a route does not depend on, `layout` has the states as numbers,
and how their elements are counted. `collectives` and `transfers` have what every step between two
states moves and holds, `step_tables` puts them together. `shortest_path` finds the best path.
`boxing.router` is the way in.
"""
