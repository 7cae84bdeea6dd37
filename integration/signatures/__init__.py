"""The survey of the algebra over PyTorch's own operator samples: `python -m signatures`.

`variants` lists what is sampled (PyTorch's operator database, and `additions` of our own), `calls`
traces it and records every ATen call with its real tensors, `store` keeps the calls in a file,
`judge` compares what the rules claim of one call with what execution says, `cache` remembers
verdicts, `survey` spreads the work over processes, and `summary` prints what came of it.
"""
