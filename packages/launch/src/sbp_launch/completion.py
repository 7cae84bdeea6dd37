"""Completion of options in folders: `planner=man` to `planner=manual/zero`.

Hydra completes groups, options and settings, but no option inside a folder of a group; only that is
here. Imports no torch.
"""

from __future__ import annotations

from sbp_launch.catalog import Catalog


def complete(line: str, catalog: Catalog) -> tuple[str, ...] | None:
    """Return the completions of the last word of a command line.

    Args:
        line: The command line up to the cursor.
        catalog: Groups and options.

    Returns:
        Whole words, such as `planner=manual/zero`; None if the word is no choice of an option, so
        that Hydra should answer.
    """
    if not line.split() or line.endswith(" "):
        return None
    group, equals, start = line.split()[-1].partition("=")
    if not equals or group not in catalog.groups():
        return None
    return tuple(f"{group}={one}" for one in catalog.options(group) if one.startswith(start))
