"""Where a user keeps what can be made again: the one place that reads `XDG_CACHE_HOME`.

Stability: internal.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder(kind: str) -> Path:
    """Return the folder of this user for one kind of thing, as the XDG standard says.

    Args:
        kind: Name of the folder below `sbp`, such as `signatures`.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    return root / "sbp" / kind
