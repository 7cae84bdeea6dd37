"""The survey of the algebra over PyTorch's own operator samples: `python -m signatures`.

`variants` lists the samples (PyTorch's operator database, and our own `additions`). `calls` traces
them and records every ATen call with its real tensors, `store` keeps the calls in a file. `judge`
compares the claims of rules for one call with its execution, `cache` keeps verdicts, `survey`
spreads the work over processes, and `summary` prints the results.
"""
