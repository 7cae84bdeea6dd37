"""The command `sbp-plan`: check the config, plan a training step, and print the plan.

No step is run. Further settings:

    out=FILE        write the strategy, to edit and to use with `planner=file`
    timeline=NAME   draw the simulated step; trace=FILE: write it for the viewer Perfetto
    page=FILE       write the whole plan as an HTML page; figures=FILE: its costs as JSON
    calls=FILE      list the operator calls of ranks, for `sbp-calibrate ops=FILE` to measure
    explain=...     print the costs with other SBPs of some tensors, in place of the plan
    compare=...     print a comparison with another plan, in place of the plan
    pipeline=NAME   print a pipeline schedule, without planning
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

from hydra.core.hydra_config import HydraConfig

from sbp_core import strategy_yaml
from sbp_core.errors import ConfigError, MemoryLimitError
from sbp_core.output import standard_output
from sbp_core.plugins import PluginRegistry, merge_settings
from sbp_core.strategy import Strategy
from sbp_launch.apps.hydra_app import run
from sbp_launch.apps.pipeline_command import is_asked, run_pipeline
from sbp_launch.checks import check_distinct, check_writable
from sbp_launch.explaining.question import Question, strategy_of
from sbp_launch.explaining.timelines import ENDINGS
from sbp_launch.settings.check import check
from sbp_launch.settings.config import Application, ComposedConfig, RunConfig, key_of
from sbp_launch.settings.resumed import quote

#: Endings of files that `planner=file` reads.
_ENDINGS = (".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """The settings of `sbp-plan` itself.

    Args:
        out: File to write the strategy to; None for none.
        timeline: Path for drawings of the simulated step, without ending; None for none.
        trace: File to write the simulated step to as a trace, `.json`; None for none.
        page: File to write the plan to as a page, `.html`; None for none.
        calls: File for a list of the operator calls of ranks, `.json`, which `sbp-calibrate
            ops=FILE` measures; None for none.
        figures: File to write the costs of the plan to, `.json`; None for none.
        explain: Tensors, and an SBP to compare with: what would it cost? None to ask nothing.
        compare: A strategy file or a run folder to compare this plan with; None for none.
        overwrite: Whether `out` may exist.
    """

    out: str | None = None
    timeline: str | None = None
    trace: str | None = None
    page: str | None = None
    calls: str | None = None
    figures: str | None = None
    explain: str | None = None
    compare: str | None = None
    overwrite: bool = False

    @property
    def asks(self) -> bool:
        """Whether an answer is printed in place of the plan."""
        return self.explain is not None or self.compare is not None

    def __post_init__(self) -> None:
        if self.explain is not None:
            Question.parse(self.explain)
        if self.compare is not None:
            strategy_of(self.compare)
        outputs = []
        for key, path, example in (
            ("page", self.page, "plan.html"),
            ("trace", self.trace, "step.json"),
            ("calls", self.calls, "calls.json"),
            ("figures", self.figures, "plan.json"),
        ):
            if path is None:
                continue
            ending = Path(example).suffix
            if Path(path).suffix != ending:
                raise ConfigError(f"{key}={path!r} does not end in {ending}", accepted=example)
            check_writable(key, path, example=f"{key}={example}")
            outputs.append((f"{key}={path}", path))
        if self.timeline is not None:
            for ending in ENDINGS:
                path = self.timeline + ending
                check_writable("timeline", path, example="timeline=step")
                outputs.append((f"timeline={self.timeline}", path))
        check_distinct([*outputs, *([(f"out={self.out}", self.out)] if self.out else [])])
        if self.out is None:
            return
        if Path(self.out).suffix not in _ENDINGS:
            raise ConfigError(
                f"out={self.out!r} ends in none of {', '.join(_ENDINGS)}",
                accepted="a path such as strategy.yaml",
            )
        check_writable("out", self.out, example="strategy.yaml")
        if Path(self.out).exists() and not self.overwrite:
            raise ConfigError(
                f"out={self.out!r} exists",
                accepted="a file that does not exist yet",
                todo="choose another name, or add overwrite=true",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRun:
    """A checked command line of `sbp-plan`: the run to plan, own settings, and the overrides."""

    run: RunConfig
    settings: PlanConfig
    overrides: tuple[str, ...] = ()


#: Names of the settings of `sbp-plan` itself.
_OWN = tuple(field.name for field in fields(PlanConfig))


def check_plan(composed: ComposedConfig, registry: PluginRegistry) -> PlanRun:
    """Return the plan that a composed config asks for.

    Raises:
        ConfigError: see `check`; or `out` cannot be written, or exists.
    """
    checked = check(composed, registry, _OWN)
    overrides = [text for name in _OWN for text in composed.overrides_of(name)]
    settings = merge_settings(
        PlanConfig,
        {name: composed.values[name] for name in _OWN if name in composed.values},
        where=["sbp_launch/conf/plan.yaml", *overrides],
    )
    return PlanRun(run=checked, settings=settings, overrides=composed.overrides)


def next_command(path: str, overrides: Sequence[str]) -> str:
    """Return the `sbp-train` command that uses the strategy file, with the other overrides."""
    own = ("planner", *_OWN)
    kept = [text for text in overrides if key_of(text).partition(".")[0] not in own]
    return shlex.join(["sbp-train", "planner=file", f"planner.path={path}", *kept])


def save_strategy(strategy: Strategy, path: str) -> None:
    """Write a strategy in the format of the file's ending.

    Raises:
        ConfigError: the file cannot be written.
    """
    file = Path(path)
    try:
        strategy.save(file) if file.suffix == ".json" else strategy_yaml.save(strategy, file)
    except OSError as error:
        raise ConfigError(f"out={path!r} cannot be written: {error.strerror}") from error


def _plan(config: PlanRun, registry: PluginRegistry, run_folder: Path) -> None:
    # Imported here: a wrong setting is reported without waiting for torch.
    from sbp_launch.apps.answers import (
        answer_compare,
        answer_explain,
        draw_page,
        list_calls,
        write_figures,
        write_trace,
    )
    from sbp_launch.apps.feasible import recomposing, told_what_fits
    from sbp_launch.explaining.draw import draw_plan
    from sbp_launch.trainer.planning_only import PlanningOnly

    settings, desk = config.settings, PlanningOnly(config.run, registry)
    try:
        planned = desk.plan()
    except MemoryLimitError as error:
        if not HydraConfig.initialized():
            raise
        # Do not check the output files again.
        check_run = partial(check, own=_OWN)
        recompose = recomposing(application(), check_run, registry, config.overrides)
        raise told_what_fits(error, desk, recompose) from error
    planner = desk.planner
    assert planner is not None, "what was planned has a planner"
    if not settings.asks:
        desk.show()
    if settings.explain is not None:
        answer_explain(settings.explain, planned, planner, desk.planning_s, desk.run.console)
    other = None
    if settings.compare is not None:
        other = (
            settings.compare,
            answer_compare(settings.compare, planned, planner, desk.run, desk.program),
        )
    if settings.timeline is not None:
        draw_plan(planned, settings.timeline)
    if settings.trace is not None:
        write_trace(planned, settings.trace)
    if settings.page is not None:
        draw_page(planned, config.run.model.name, settings.page, other)
    if settings.figures is not None:
        write_figures(planned, settings.figures)
    if settings.calls is not None:
        list_calls(planned, planner, settings.calls)
    if (path := settings.out) is not None:
        save_strategy(planned.strategy, path)
        sys.stdout.write(f"wrote {path}: how every tensor and op is split; edit it, then\n")
        sys.stdout.write(f"  {next_command(path, config.overrides)}\n")


def with_quoted_question(arguments: Sequence[str]) -> list[str]:
    """Quote the text of `explain=`, so that Hydra does not parse it; accept the old name `why=`."""
    asked, found = re.compile(r"explain=(?!['\"]|null$)."), []
    for text in arguments:
        if text.startswith("why="):
            sys.stderr.write("sbp-plan: warning: why= has a new name: explain=\n")
            text = f"explain={text[4:]}"
        found.append(f"explain={quote(text[8:])}" if asked.match(text) else text)
    return found


def application() -> Application[PlanRun]:
    """Return the command."""
    return Application(
        name="sbp-plan",
        about="plan a training step on many ranks, and print the plan without training",
        config_name="plan",
        check=check_plan,
        task=_plan,
        sweep_goes_on=True,
    )


@standard_output("sbp-plan")
def main() -> None:
    """Run `sbp-plan` and exit with its code."""
    sys.argv[1:] = with_quoted_question(sys.argv[1:])
    if is_asked(sys.argv[1:]):
        sys.exit(run_pipeline(sys.argv[1:]))
    sys.exit(run(application()))


if __name__ == "__main__":
    main()
