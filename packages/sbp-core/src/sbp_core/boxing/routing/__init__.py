"""Inside the router: what a conversion depends on, the table of all single steps, and the search.

`problem` takes away what a route does not depend on, `layout` has the states as numbers, `sizes`
counts their elements. `collectives` and `transfers` have what every step between two states moves
and holds, `tables` puts them together; `messages` has one transfer rank by rank, for its exact
memory and its price. `search` finds the best path. `boxing.router` is the way in.
"""
