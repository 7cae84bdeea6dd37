"""Python's garbage collector, while a step is planned."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the search for cycles: it reads over and over what is made and kept, and finds little.

    Capturing and planning a small GPT takes 0.2 to 0.4 s less so. Reference counts free memory as
    ever. Whoever has switched it off finds it off.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
