"""The settings of the planners, validated on construction.

Messages begin with the name of the setting, which `sbp_core.plugins.merge_settings` completes to
its key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from sbp_core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ManualConfig:
    """Settings of `sbp_planner.manual`.

    Args:
        pins: Pattern -> SBP, in the order in which they apply; see `sbp_core.infer.pins`.
        stage_patterns: For each pipeline stage, patterns of module paths; empty splits evenly.
        schedule: How many micro-batches may be in flight on each of several stages: `1f1b` allows
            `num_stages - stage`, `gpipe` all.
        needs_axes: Mesh axes without which the preset does not do what its name says.
    """

    pins: Mapping[str, str | Mapping[str, str]] = field(default_factory=dict)
    stage_patterns: tuple[tuple[str, ...], ...] = ()
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    needs_axes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.schedule not in ("1f1b", "gpipe"):
            raise ConfigError(f"schedule={self.schedule!r}", accepted="1f1b, gpipe")
        if self.pins:
            _check_pins(self.pins)
        for stage, patterns in enumerate(self.stage_patterns):
            if not patterns or not all(patterns):
                raise ConfigError(
                    f"stage_patterns[{stage}]={patterns!r} names no module",
                    accepted="a list of patterns for each stage, such as [embed, blocks.0]",
                )


def _check_pins(pins: Mapping[str, str | Mapping[str, str]]) -> None:
    """Check that pins can be read.

    Raises:
        ConfigError: one cannot.
    """
    # Here and not above: hook modules are imported for every command, and this one takes a while.
    from sbp_core.infer import check_pin

    for pattern, value in pins.items():
        try:
            check_pin(pattern, value)
        except ConfigError as error:
            raise ConfigError(f"pins: {error.what}", accepted=error.accepted) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class OsdpConfig:
    """Settings of `sbp_planner.osdp`.

    Args:
        axis: The mesh axis over which data are split, and parameters may be.
        memory_bytes: Memory of a rank that the plan may use; None takes the device's.
    """

    axis: str = "data"
    memory_bytes: float | None = None

    def __post_init__(self) -> None:
        if not self.axis:
            raise ConfigError("axis='' names no mesh axis", accepted="a name, such as data")
        if self.memory_bytes is not None and not self.memory_bytes > 0:
            raise ConfigError(
                f"memory_bytes={self.memory_bytes!r}",
                accepted="a number of bytes above 0, or null for the device's memory",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FileConfig:
    """Settings of `sbp_planner.file`.

    Args:
        path: The strategy, as YAML or, where the name ends in `.json`, as JSON.
        other_graph: Whether it may have been made for a graph that differs in more than its names.
    """

    path: str = "strategy.yaml"
    other_graph: bool = False

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("path='' names no file", accepted="a .yaml or .json file")
