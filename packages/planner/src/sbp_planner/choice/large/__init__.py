"""The search for problems of any size that the integer program does not solve at once.

In the order of their use: `dual` (messages and memory prices: bounds, and reduced costs),
`consistent` (an assignment without forbidden pairs), `forest` and `moves` (changes of many small
trees at once, also where memory does not fit yet), `neighbourhood` (large neighbourhoods), `worker`
(a second process), `large_search` (all of these together). Only `solver` uses this package.
"""
