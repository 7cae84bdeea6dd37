"""Traces of the steps of a run (`trainer.trace`).

`tracer` records a trace and merges it over processes, `events` converts it for the viewer Perfetto,
`times` sums it up by rank, and `operator_times` by operator.
"""
