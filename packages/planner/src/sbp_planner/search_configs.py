"""Configs of the planners that search for a plan, one class each: `IlpConfig`, `AlpaConfig`, ...

They check the settings that a user gives. As in `configs`, messages begin with the setting's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar

from sbp_core.errors import ConfigError, nearest
from sbp_core.pipeline import SCHEDULES
from sbp_core.planning import Offload, Offloads
from sbp_planner.configs import check_stage_axes

#: Pattern -> SBP, as in `ManualConfig`.
PinMap = Mapping[str, str | Mapping[str, str]]


#: Settings that must be above 0, in addition to those named `max_...`.
_POSITIVE = ("memory_bytes", "time_limit_s", "proposals", "temperature")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limited(Offloads):
    """A config with limits of a search, which are checked by their names.

    Raises:
        ConfigError: a limit is not above 0, or `gap` is not in [0, 1).
    """

    def __post_init__(self) -> None:
        Offloads.__post_init__(self)
        for setting in fields(self):
            name, value = setting.name, getattr(self, setting.name)
            is_positive = name in _POSITIVE or name.startswith("max_")
            if is_positive and value is not None and not value > 0:
                unset = ", or null for the device's" if name == "memory_bytes" else ""
                raise ConfigError(f"{name}={value}", accepted=f"a number above 0{unset}")
            # With 1, any plan would be good enough.
            if name == "gap" and not 0 <= value < 1:
                raise ConfigError(
                    f"gap={value}",
                    accepted="a number from 0, and less than 1",
                    todo=f"gap={value / 100:g} is {value:g} %" if 1 <= value < 100 else "",
                )


class _CutsStages(_Limited):
    """The common settings of planners that cut the model into stages."""

    __slots__ = ()

    def check_combination(self, others: Mapping[str, object]) -> None:
        """Refuse a mesh with several axes without an axis of stages.

        Raises:
            ConfigError: the mesh is such; see `check_stage_axes`. Or see `Offloads`.
        """
        super().check_combination(others)
        cluster = others.get("cluster")
        check_stage_axes(getattr(cluster, "mesh", ()), getattr(cluster, "axes", ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class IlpConfig(_Limited):
    """Settings of `sbp_planner.ilp`.

    Args:
        pins: Pins to keep, as in `ManualConfig`.
        memory_bytes: Memory of a rank that the plan may use; None for all of the device.
        time_limit_s: Seconds for each search for an assignment, and for all variants of the step
            together.
        gap: Relative distance to the bound at which a program counts as solved, in [0, 1); variants
            that can gain no more than that are skipped.
        tied: Whether equal layers are decided alike, which makes the program much smaller.
        offload: States in host memory, as in `sbp_planner.configs.ManualConfig`.
    """

    pins: PinMap = field(default_factory=dict)
    memory_bytes: float | None = None
    time_limit_s: float = 60.0
    gap: float = 0.0
    tied: bool = True
    offload: Offload = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExhaustiveConfig(_Limited):
    """Settings of `sbp_planner.exhaustive`.

    Args:
        pins: Pins to keep, as in `ManualConfig`.
        memory_bytes: Memory of a rank that the plan may use; None for all of the device.
        max_assignments: How many branches of the search may be considered.
        offload: States in host memory, as in `sbp_planner.configs.ManualConfig`.
    """

    pins: PinMap = field(default_factory=dict)
    memory_bytes: float | None = None
    max_assignments: int = 2_000_000
    offload: Offload = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyConfig(Offloads):
    """Settings of `sbp_planner.greedy`.

    Args:
        pins: Pins to keep, as in `ManualConfig`.
        offload: States in host memory, as in `sbp_planner.configs.ManualConfig`.
    """

    pins: PinMap = field(default_factory=lambda: {"batch": "S(0)"})
    offload: Offload = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class TofuConfig(Offloads):
    """Settings of `sbp_planner.tofu`.

    Args:
        pins: Pins to keep, as in `ManualConfig`; a pin on a mesh axis holds for all factors of
            the axis.
        offload: States in host memory, as in `sbp_planner.configs.ManualConfig`.
    """

    pins: PinMap = field(default_factory=dict)
    offload: Offload = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptcnnConfig(_Limited):
    """Settings of `sbp_planner.optcnn`.

    Args:
        pins: Pins to keep, as in `ManualConfig`.
        max_entries: Most entries of a table that elimination may make.
        offload: States in host memory, as in `sbp_planner.configs.ManualConfig`.
    """

    pins: PinMap = field(default_factory=dict)
    max_entries: int = 1 << 18
    offload: Offload = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class McmcConfig(_Limited):
    """Settings of `sbp_planner.mcmc`.

    Args:
        pins: Pins to keep, as in `ManualConfig`.
        memory_bytes: Memory of a rank that the plan may use; None for all of the device.
        proposals: Number of steps of the walk; each compiles a plan.
        time_limit_s: Seconds after which the walk ends.
        temperature: A step that is slower by this share of the best time is accepted with
            probability 1 / e.
        seed: Seed of the walk.
        offload: States in host memory, as in `sbp_planner.configs.ManualConfig`.
    """

    pins: PinMap = field(default_factory=dict)
    memory_bytes: float | None = None
    proposals: int = 200
    time_limit_s: float = 60.0
    temperature: float = 0.02
    seed: int = 0
    offload: Offload = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoConfig(_Limited):
    """Settings of `sbp_planner.auto`.

    Args:
        memory_bytes: Memory of a rank that the plan may use; None for all of the device.
        time_limit_s: Seconds after which no new candidate is tried.
        pipeline: Schedule of candidates with several stages, see `ManualConfig`.
        num_shown: How many candidates are listed.
        offload: States in host memory, as in `sbp_planner.configs.ManualConfig`.
    """

    memory_bytes: float | None = None
    time_limit_s: float = 60.0
    pipeline: str = "1f1b"
    num_shown: int = 8
    offload: Offload = "auto"

    def __post_init__(self) -> None:
        _Limited.__post_init__(self)
        if self.pipeline not in SCHEDULES:
            raise ConfigError(
                f"pipeline={self.pipeline!r}", accepted=nearest(self.pipeline, SCHEDULES)
            )
        if self.num_shown < 1:
            raise ConfigError(f"num_shown={self.num_shown}", accepted="1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpipeConfig(_CutsStages):
    """Settings of `sbp_planner.pipelines.GpipePlanner`.

    Args:
        offload: States in host memory, as in `sbp_planner.configs.ManualConfig`.
    """

    offload: Offload = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipedreamConfig(_CutsStages):
    """Settings of `sbp_planner.pipelines.PipedreamPlanner`.

    Args:
        offload: States in host memory, as in `sbp_planner.configs.ManualConfig`.
    """

    offload: Offload = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlpaConfig(_CutsStages):
    """Settings of `sbp_planner.alpa`.

    Args:
        memory_bytes: Memory of a rank that the plan may use; None for all of the device.
        max_blocks: Most blocks, of about equal work, between which the model may be cut.
        time_limit_s: Seconds after which no new stage is priced.
        gap: Relative distance to the bound over stages at which no new stage is priced, in [0, 1).
        offload: States in host memory, as in `sbp_planner.configs.ManualConfig`.
    """

    memory_bytes: float | None = None
    max_blocks: int = 16
    time_limit_s: float = 120.0
    gap: float = 0.01
    offload: Offload = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class DlplacerConfig(_Limited):
    """Settings of `sbp_planner.placers.DlplacerPlanner`.

    Args:
        memory_bytes: Memory of a rank that the plan may use; None for all of the device.
        time_limit_s: Seconds for the integer program.
        gap: Relative distance to the bound at which it counts as solved, in [0, 1).
        max_groups: Most groups of operators; neighbours in a chain are merged to reach it.
        offload: States in host memory, as in `sbp_planner.configs.ManualConfig`.
    """

    memory_bytes: float | None = None
    time_limit_s: float = 30.0
    gap: float = 0.01
    max_groups: int = 32
    offload: Offload = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class StanzaConfig(DlplacerConfig):
    """Settings of `sbp_planner.placers.StanzaPlanner`.

    Args:
        num_fc_workers: Positions of the smaller part; None for the fastest number.
    """

    FORMER_NAMES: ClassVar[Mapping[str, str]] = {"few": "num_fc_workers"}
    num_fc_workers: int | None = None

    def __post_init__(self) -> None:
        DlplacerConfig.__post_init__(self)
        if self.num_fc_workers is not None and self.num_fc_workers < 1:
            what = f"num_fc_workers={self.num_fc_workers}"
            raise ConfigError(what, accepted="1 or more, or null")


@dataclass(frozen=True, slots=True, kw_only=True)
class GalvatronConfig(_CutsStages):
    """Settings of `sbp_planner.galvatron`.

    Args:
        memory_bytes: Memory of a rank that the plan may use; None for all of the device.
        max_layers: Most layers, of about equal work, that the model is divided into.
        time_limit_s: Seconds after which no new number of stages or micro-batches is tried.
        offload: States in host memory, as in `sbp_planner.configs.ManualConfig`.
    """

    memory_bytes: float | None = None
    max_layers: int = 64
    time_limit_s: float = 60.0
    offload: Offload = "auto"
