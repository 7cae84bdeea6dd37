"""Boxing on tensors: steps executed, and the backend whose ranks are threads of one process.

`execute` runs one step for all ranks at once, or one rank's share of it. `local` is the backend of
one process; its threads divide large steps by `share` and use memory again by `buffer_pool`.
`processes` is the tensor side of backends of several processes.
"""
