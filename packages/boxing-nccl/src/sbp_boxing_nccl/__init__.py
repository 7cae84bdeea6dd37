"""sbp boxing over MPI.

Read the modules in this order: `configs` (settings), `library` (finding mpi4py), `board` (notes of
the ranks to each other), `group` (collectives and messages of one set of ranks), `connections` (all
groups, and how they break), `parcel` and `wire` (shards to flat messages and back), `communicator`
(one step), `backend`. Importing this package imports neither torch nor mpi4py.
"""
