"""Deferred initialisation: a model built without memory, and its states made one by one.

    made = deferred(build, seed=0)
    optimizer = torch.optim.AdamW(made.model.parameters())
    graph = capture(made.model, loss, batch, optimizer)
    ...
    session = runtime.start(plan, made.states(optimizer), backend)

`build` runs once, on tensors without data, and is written down as a tape. The states are then made
from the tape: each is cut into shards and freed before the next, so that a rank holds its shards
and one parameter, and what the constructor itself needs to make that one, such as the float32
numbers of a parameter that is kept in bfloat16. They are equal, bit for bit, to what
`torch.manual_seed(seed); build()` gives in one piece on the same kind of CPU.

What a constructor may do: everything that writes to CPU tensors through PyTorch. Values that it
looks at are made when it asks; if they depend on random numbers, all that were drawn before them
are drawn then, too. Refused with the line: other devices, tensors that are not plain and strided,
and random numbers drawn into tensors that PyTorch did not make. Not noticed, so not to be done
while the model is built: looking at storages (`untyped_storage()`, `torch.save`). Such a model, and
one whose memory is no concern, is built by `deferred(build, seed, whole=True)`: for real, in one
piece, with the memory that this takes on every process. Random numbers of `random` and NumPy are
drawn once, while `build` runs: seed them yourself, alike on all processes. PyTorch's default
generator is borrowed while states are made: draw nothing in other threads meanwhile.
"""

from __future__ import annotations

from sbp_torch.deferred_init.deferred_model import DeferredModel, DeferredStates, deferred

__all__ = ["DeferredModel", "DeferredStates", "deferred"]
