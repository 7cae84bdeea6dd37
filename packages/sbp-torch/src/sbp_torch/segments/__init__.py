"""How compute segments are executed: as generated Python, by Inductor, or as CUDA graphs.

`execution` chooses; `codegen`, `inductor` and `cudagraph` make the functions, the last two of what
`split` leaves of a segment.
"""
