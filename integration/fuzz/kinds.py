"""All kinds of files that users may get from others: of the core, of the apps, and plans to run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from fuzz.plan_edits import edited_plan
from fuzz.running import plans, run_plan
from sbp_core.testing import files
from sbp_core.testing.fuzz import FileKind

#: A plan that is run if it is accepted.
RUNNING_PLAN = FileKind(
    name="plan in a run",
    suffix=".json",
    originals=plans,
    use=run_plan,
    names_place=False,
    edit=edited_plan,
)


def _of_launch() -> Mapping[str, FileKind]:
    """Return the kinds of files that sbp-launch reads, from its tests."""
    folder = Path(__file__).parents[2] / "packages" / "launch" / "tests"
    sys.path.append(str(folder))
    try:
        kinds: Mapping[str, FileKind] = import_module("file_kinds").KINDS
    finally:
        sys.path.remove(str(folder))
    return kinds


#: By name.
KINDS = {**files.KINDS, RUNNING_PLAN.name: RUNNING_PLAN, **_of_launch()}
