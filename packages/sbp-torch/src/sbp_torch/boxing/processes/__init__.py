"""The tensor side of backends of several processes.

`packed_buffer` makes flat messages of what a `Manifest` says, `exchange` is the communicator.
`agreement` compares a text over all ranks, `fingerprint` every step; both serve any backend.
"""
