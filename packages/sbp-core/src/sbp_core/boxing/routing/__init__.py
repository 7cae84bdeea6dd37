"""Inside the router: what a conversion depends on, the table of all single steps, and the search.

`problem` takes away what a route does not depend on, `layout` has the states as numbers, `table`
and `tables` what every step between two of them moves and holds, `search` finds the best path.
`boxing.router` puts them together. Imports no torch.
"""
