"""The settings of `sbp-calibrate` (measure this machine), and their checks."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sbp_core.errors import ConfigError
from sbp_core.plugins import PluginRegistry, merge_settings
from sbp_launch.calibrate.kept_measurements import KeptMeasurements, kept_measurements
from sbp_launch.checks import check_least, check_writable
from sbp_launch.settings.check import choose, refuse_unknown
from sbp_launch.settings.config import ComposedConfig, PluginChoice

if TYPE_CHECKING:
    from sbp_core.cluster import Cluster

#: Kinds of boxing steps to measure, as in `sbp_core.calibration.CALL_KINDS`.
CALL_KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "transfer")

#: The config groups of `sbp-calibrate`.
GROUPS = ("boxing", "runtime")

#: Largest number of ranks per core of the machine; more would take very long to start.
_RANKS_PER_CORE = 16

_AT_LEAST_ONE = ("ranks", "repetitions", "min_bytes", "max_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateConfig:
    """What to measure, and where to write it.

    Args:
        ranks: Ranks to start on this machine, >= 1; one measures no communication.
        out: Cluster file to write.
        name: Name of the machine in reports.
        overwrite: Whether to discard all that `out` already holds. Otherwise calibrations of other
            backends stay in it, and a file in which they cannot stay is refused.
        kinds: Kinds of steps to measure, of `CALL_KINDS`.
        min_bytes: Smallest message in bytes, >= 1; each size is twice the one before.
        max_bytes: Largest message in bytes.
        sizes: Sizes of messages in bytes, in place of `min_bytes` and `max_bytes`.
        group_sizes: Sizes of groups to measure, >= 2; empty: those in meshes of `ranks`.
        repetitions: Most repetitions of all calls, in another order each time, >= 1.
        time_s: Seconds that measuring may take once the ranks are connected; it limits repetitions
            and sizes. Below 20 the small model has fewer layers.
        deadline_s: Seconds that one call may wait for other ranks.
        ops: Run folder or folders whose times of operators are added to `out`; nothing is measured
            then, and no other setting counts. Or one file of `sbp-plan calls=FILE`: its calls are
            measured within `time_s`, on as many ranks as `out` is for, and added.
    """

    ranks: int = 2
    out: str = "cluster.json"
    name: str = "measured"
    overwrite: bool = False
    kinds: tuple[str, ...] = CALL_KINDS
    min_bytes: int = 1024
    max_bytes: int = 256 * 2**20
    sizes: tuple[int, ...] = ()
    group_sizes: tuple[int, ...] = ()
    repetitions: int = 9
    time_s: float = 120.0
    deadline_s: float = 60.0
    ops: str | tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.ops, str):
            object.__setattr__(self, "ops", (self.ops,) if self.ops else ())
        check_least(self, 1, *_AT_LEAST_ONE, why="")
        for name in ("time_s", "deadline_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)}", accepted="seconds above 0")
        most = _RANKS_PER_CORE * (os.cpu_count() or 1)
        if self.ranks > most:
            raise ConfigError(
                f"ranks={self.ranks} is more than this machine can run",
                accepted=f"1 .. {most}: {_RANKS_PER_CORE} for each core",
            )
        if not self.kinds:
            raise ConfigError("kinds=[] leaves nothing to measure", accepted=", ".join(CALL_KINDS))
        unknown = [kind for kind in self.kinds if kind not in CALL_KINDS]
        if unknown:
            raise ConfigError(f"kinds names {unknown[0]!r}", accepted=", ".join(CALL_KINDS))
        if any(size < 1 for size in self.sizes):
            raise ConfigError(f"sizes={list(self.sizes)}", accepted="bytes >= 1")
        if not self.sizes and self.max_bytes < self.min_bytes:
            raise ConfigError(
                f"max_bytes={self.max_bytes} is below min_bytes={self.min_bytes}",
                accepted="max_bytes >= min_bytes",
            )
        wrong = [size for size in self.group_sizes if not 2 <= size <= self.ranks]
        if wrong:
            raise ConfigError(
                f"group_sizes={list(self.group_sizes)} has no groups of {wrong[0]} among "
                f"ranks={self.ranks}",
                accepted=f"2 .. {self.ranks}",
            )
        # Checked here, before minutes of measuring whose result could not be written.
        check_writable("out", self.out, example="a.json")

    @property
    def chosen_sizes(self) -> tuple[int, ...]:
        """The sizes of messages in bytes, ascending."""
        if self.sizes:
            return tuple(sorted(set(self.sizes)))
        sizes = [self.min_bytes]
        while 2 * sizes[-1] <= self.max_bytes:
            sizes.append(2 * sizes[-1])
        return tuple(sizes)

    @property
    def chosen_group_sizes(self) -> tuple[int, ...]:
        """The sizes of groups; by default those along the axes of meshes of all ranks."""
        if self.group_sizes:
            return tuple(sorted(set(self.group_sizes)))
        return tuple(size for size in range(2, self.ranks + 1) if self.ranks % size == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateRun:
    """A checked command line of `sbp-calibrate`.

    Args:
        boxing: The backend to measure.
        runtime: The runtime that runs the steps from which launch overheads are derived.
        device: Device of the tensors, such as `cpu` or `cuda`: each process finds out which GPU.
        settings: The settings.
        kept: Parts of the existing file that stay.
        with_operators: The new contents of the file, if operators of runs are added.
        calls: The file with calls of operators, if these are measured.
    """

    boxing: PluginChoice
    runtime: PluginChoice
    device: str
    settings: CalibrateConfig
    kept: KeptMeasurements = field(default_factory=KeptMeasurements)
    with_operators: Cluster | None = None
    calls: str = ""


def check_calibrate(composed: ComposedConfig, registry: PluginRegistry) -> CalibrateRun:
    """Return the calibration that a composed config describes.

    Raises:
        ConfigError: the backend or a setting is unknown, missing or invalid, or data of the file
            would be lost.
    """
    known = [entry.name for entry in fields(CalibrateConfig)]
    refuse_unknown(composed, [*GROUPS, *known], registry)
    settings = {name: value for name, value in composed.values.items() if name not in GROUPS}
    choice, backend = choose(composed, registry, "boxing")
    runtime, _ = choose(composed, registry, "runtime")
    # The setting `auto` of a backend means: choose a GPU for each process.
    device = str(getattr(backend, "device", "cpu"))
    overrides = [text for name in known for text in composed.overrides_of(name)]
    calibrate = merge_settings(
        CalibrateConfig, settings, where=["sbp_launch/conf/calibrate.yaml", *overrides]
    )
    with_operators, kept, calls = None, KeptMeasurements(), ""
    if calibrate.ops:
        # Imported here: config errors are reported without importing numpy.
        from sbp_launch.calibrate.operators import add_operators, ranks_of_list

        if any(map(os.path.isfile, calibrate.ops)):
            if len(calibrate.ops) > 1:
                raise ConfigError(
                    f"ops={list(calibrate.ops)} mixes a file of calls with other files",
                    accepted="run folders, or one file of sbp-plan calls=FILE",
                    todo="measure the calls by themselves, and add the runs before or after",
                )
            calls = calibrate.ops[0]
            ranks = ranks_of_list(calibrate.out, calls, choice.name)
            calibrate = replace(calibrate, ranks=ranks)
        else:
            with_operators = add_operators(calibrate.out, tuple(calibrate.ops))
    elif not calibrate.overwrite:
        kept = kept_measurements(calibrate.out, calibrate.ranks, choice.name)
    return CalibrateRun(
        boxing=choice,
        runtime=runtime,
        device="cuda" if device == "auto" else device,
        settings=calibrate,
        kept=kept,
        with_operators=with_operators,
        calls=str(Path(calls).resolve()) if calls else "",
    )
