"""Runtimes on PyTorch: the reference runtime, one device, and what runtimes share.

`reference` runs all ranks in lock-step in one thread, `single` a graph on one device; `store` holds
what a rank keeps between steps, `accumulation` what it sums over micro-batches, `partial_update`
says what is left when a step failed while states were overwritten. Importing this imports no torch.
"""
