"""Deferred initialisation: build a model without memory, and create its states one by one.

    made = deferred(build, seed=0)
    optimizer = torch.optim.AdamW(made.model.parameters())
    graph = capture(made.model, loss, batch, optimizer)
    ...
    session = runtime.start(plan, made.states(optimizer), backend)

`build` runs once, on tensors without data, and its operators are recorded on a tape. The states are
then created from the tape. Each is cut into shards and freed before the next, so a rank holds its
shards, one parameter, and the temporary values of its creation, such as the float32 numbers of a
parameter that is kept in bfloat16. The states are equal, bit for bit, to the result of
`torch.manual_seed(seed); build()` in one piece on the same kind of CPU.

A constructor may do everything that writes to CPU tensors through PyTorch. If it reads values, they
are computed at once; if these depend on random numbers, all earlier random numbers are drawn then,
too. Errors that name the line are raised for other devices, for tensors that are not plain and
strided, and for random numbers drawn into tensors that PyTorch did not make. Reads of storages
(`untyped_storage()`, `torch.save`) are not noticed, so a constructor must not do this. For such a
model, or if memory is no concern, use `deferred(build, seed, whole=True)`: it builds the model in
one piece, with all its memory on every process. Random numbers of `random` and NumPy are drawn
once, while `build` runs: seed them yourself, equally on all processes. PyTorch's default generator
is changed and restored while states are created: draw nothing in other threads at that time.
"""

from __future__ import annotations

from sbp_torch.deferred_init.deferred_model import DeferredModel, DeferredStates, deferred

__all__ = ["DeferredModel", "DeferredStates", "deferred"]
