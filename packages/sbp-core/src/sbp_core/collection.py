"""Python's garbage collector, while modules are loaded and steps are planned."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collection_paused"]


#: Whether a step was planned before in this process.
_has_planned = False


@contextmanager
def collection_paused(*, plans: bool = False) -> Iterator[None]:
    """Pause the search for cycles: it reads over and over what is made and kept, and finds little.

    Loading these packages takes 0.2 to 0.3 s less so, and capturing and planning a small GPT as
    much again. Reference counts free memory as ever. Whoever has switched it off finds it off.

    Args:
        plans: Whether a step is planned. The one before holds models and states in cycles, and what
            is left of it is freed first: Python would not look until a million objects were left.
    """
    global _has_planned
    was_on = gc.isenabled()
    if plans and was_on:
        if _has_planned:
            gc.collect()
        _has_planned = True
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():
                # What is alive now becomes old without being read: else all of it, as the youngest
                # objects, would be read at once.
                gc.freeze()
                gc.unfreeze()
            gc.enable()
