"""All kinds of files that come from elsewhere: of the core, of the apps, and plans in a run."""

from __future__ import annotations

from fuzz.running import edited_plan, run_plan
from sbp_core.testing import files
from sbp_core.testing.fuzz import FileKind

#: A plan that is run if it is accepted.
RUNNING_PLAN = FileKind(
    name="plan in a run",
    suffix=".json",
    originals=files.KINDS["plan"].originals,
    use=run_plan,
    names_place=False,
    edit=edited_plan,
)

#: By name.
KINDS = {**files.KINDS, RUNNING_PLAN.name: RUNNING_PLAN}
