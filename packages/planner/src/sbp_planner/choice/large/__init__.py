"""The search for problems that the integer program does not solve at once, of any size.

In the order in which they are used: `dual` (messages and memory prices: bounds, and what choices
add to them), `consistent` (an assignment without forbidden pairs), `forest` and `moves` (changes of
many small trees at once, also where memory does not fit yet), `neighbourhood` (large
neighbourhoods), `worker` (a second process), `large_search` (all of these together). `solver` alone
asks for it.
"""
