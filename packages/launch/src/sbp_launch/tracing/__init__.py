"""The trace of some steps of a run.

`tracer` takes it and puts it together over processes, `events` draws it for Perfetto, and `times`
sums it up, by rank and by operator.
"""
