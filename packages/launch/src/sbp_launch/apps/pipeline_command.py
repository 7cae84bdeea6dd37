"""`sbp-plan pipeline=NAME`: print and draw a pipeline schedule, without a model or a config.

The settings are passed to `sbp_core.pipeline`. The output is a line of figures, a timeline in the
terminal, and the same timeline as SVG and as an HTML page.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from sbp_core.errors import ConfigError, SbpError, nearest
from sbp_core.pipeline import SCHEDULES, SimulatedSchedule, pipeline_schedule, simulate_schedule
from sbp_launch.checks import check_writable
from sbp_launch.console import make_console
from sbp_launch.exit_codes import BAD_CONFIG
from sbp_launch.explaining.timelines import ENDINGS, show, write_drawings

_ABOUT = {
    "pipeline": f"the schedule: {', '.join(SCHEDULES)}",
    "stages": "ranks of the pipeline",
    "micro_batches": "micro-batches of a step",
    "chunks": "stages that each rank holds; by default the usual number for the schedule",
    "times": "[F,I,W] of one rank's part of the model, all of its chunks together: forward, input "
    "gradient, weight gradient; or such a list for each rank; by default [1,1,1]",
    "transfer": "time from a stage to the next one on another rank; by default 0",
    "memory": "most activations that a rank may keep alive; 1: of a micro-batch on its part",
    "out": "path of the drawings, without an extension; by default pipeline-NAME",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSettings:
    """The settings of `sbp-plan pipeline=NAME`, see `_ABOUT`; None if not given."""

    pipeline: str
    stages: int
    micro_batches: int
    chunks: int | None
    times: Sequence[object]
    transfer: Fraction
    memory: Fraction | None
    out: str


def is_asked(arguments: Sequence[str]) -> bool:
    """Return whether a command line asks for a schedule instead of a plan."""
    return any(argument.startswith("pipeline=") for argument in arguments)


def run_pipeline(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    if {"-h", "--help"} & {*arguments}:
        sys.stdout.write("sbp-plan pipeline=NAME stages=N micro_batches=N [KEY=VALUE ...]\n\n")
        sys.stdout.writelines(f"  {key}=  {about}\n" for key, about in _ABOUT.items())
        return 0
    try:
        settings = read_settings(arguments)
        for ending in ENDINGS:
            check_writable("out", settings.out + ending, example="out=pipeline")
        schedule = pipeline_schedule(
            settings.pipeline,
            settings.stages,
            settings.micro_batches,
            num_chunks=settings.chunks,
            times=settings.times,
            transfer=settings.transfer,
            memory=settings.memory,
        )
        simulated = simulate_schedule(schedule, settings.times, transfer=settings.transfer)
        facts = facts_of(simulated)
        sys.stdout.write(", ".join(f"{name} {value}" for name, value in facts.items()) + "\n")
        show(simulated.timeline(), make_console())
        write_drawings(simulated.timeline(), facts, settings.out)
    except SbpError as error:
        sys.stderr.write(f"sbp-plan: {error}\n")
        return BAD_CONFIG
    return 0


def read_settings(arguments: Sequence[str]) -> PipelineSettings:
    """Parse a command line.

    Raises:
        ConfigError: A key is unknown, missing or given twice, or a value has the wrong type.
    """
    given: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or key not in _ABOUT:
            near = nearest(key, _ABOUT)
            raise ConfigError(
                f"{argument!r} is not a setting of a schedule",
                accepted=", ".join(f"{known}=" for known in _ABOUT),
                todo=f"did you mean {near}=?" if near else "leave it out",
            )
        if key in given:
            raise ConfigError(f"{key}= is given twice: {given[key]} and {value}")
        given[key] = value
    return PipelineSettings(
        pipeline=given["pipeline"],
        stages=_count(given, "stages"),
        micro_batches=_count(given, "micro_batches"),
        chunks=_count(given, "chunks") if "chunks" in given else None,
        times=_times(given.get("times", "[1,1,1]")),
        transfer=_number(given.get("transfer", "0"), "transfer"),
        memory=_number(given["memory"], "memory") if "memory" in given else None,
        out=given.get("out", f"pipeline-{given['pipeline']}"),
    )


def _count(given: Mapping[str, str], key: str) -> int:
    text = given.get(key)
    if text is None:
        raise ConfigError(
            f"{key}= is missing", accepted=f"{key}=N: {_ABOUT[key]}", todo=f"add {key}=N"
        )
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{key}={text} is not a positive integer", accepted="1, 2, 3, ...")
    return int(text)


def _number(text: str, key: str) -> Fraction:
    try:
        number = Fraction(text)
    except (ValueError, ZeroDivisionError):
        number = Fraction(-1)
    if number < 0:
        raise ConfigError(
            f"{key}={text} is not a number >= 0", accepted="a number >= 0, such as 1 or 0.75"
        )
    return number


def _times(text: str) -> Sequence[object]:
    # Decimals are parsed exactly: a bubble of 0.3 is not 0.30000000000000004.
    whole = re.sub(r"(?<![\d.])\.(?=\d)", "0.", text)
    try:
        times = json.loads(whole, parse_float=Fraction)
    except (ValueError, RecursionError):
        times = None
    if not isinstance(times, list):
        raise ConfigError(
            f"times={text} is not a list",
            accepted="times=[F,I,W], or a list of such lists, one for each rank",
            todo='write it without spaces, or in quotes: "times=[1, 1.25, 0.75]"',
        )
    return times


def facts_of(simulated: SimulatedSchedule) -> dict[str, str]:
    """Return the figures of a schedule by name, as texts."""
    schedule = simulated.schedule
    share = 100 * float(simulated.bubble / simulated.makespan)
    facts = {
        "makespan": _short(simulated.makespan),
        "period": _short(simulated.period),
        "bubble": f"{_short(simulated.bubble)} ({share:.2f} % of the makespan)",
        "peak live activations by rank": " ".join(map(_short, simulated.live)),
    }
    if not schedule.flushes:
        updates = schedule.micro_batches_per_update
        every = "micro-batch" if updates == 1 else f"{updates} micro-batches"
        facts["period"] += f" (an update every {every}, without a drain)"
    if len({*simulated.idle}) > 1:
        facts["idle by rank"] = " ".join(map(_short, simulated.idle))
    return facts


def _short(number: Fraction) -> str:
    return f"{float(number):.10g}"
