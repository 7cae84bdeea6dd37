"""The settings of the planners, validated on construction.

Messages begin with the name of the setting, which `sbp_core.plugins.merge_settings` completes to
its key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from sbp_core.errors import ConfigError, nearest, suggestion
from sbp_core.pipeline import SCHEDULES
from sbp_core.planning import Offload, Offloads, check_host, check_offload
from sbp_core.serialize import open_file

if TYPE_CHECKING:
    from sbp_core.placement import Placement

#: Mesh axes that presets use, in the order in which a mesh has them.
AXES = ("pipe", "data", "tensor")

#: The default axes of stages and of samples.
PIPE, DATA = AXES[0], AXES[1]

#: The patterns that `sbp_planner.patterns` finds in graphs.
PATTERNS = ("tensor", "classes", "tables", "experts", "sequence")

#: The dims of a layout that need no definition: samples, and those that patterns find.
BATCH_DIM, NAMED_DIMS = "batch", PATTERNS[1:]

#: A tensor and one of its dims: `blocks.*.up.weight[0]`.
_NAMED_DIM = re.compile(r"(?P<pattern>.+)\[(?P<dim>-?\d+)\]")

#: The value of `pipeline` for the fastest schedule that fits.
AUTO = "auto"

#: The default folder of runs.
RUNS = "runs"

#: Presets for any model and any mesh.
FIT_ANY = ("propagate", "manual/data_parallel", "manual/zero")


def check_axes(needed: Sequence[str], mesh: Sequence[int], axes: Sequence[str]) -> None:
    """Refuse a mesh that lacks an axis.

    Args:
        needed: Names of the needed axes.
        mesh: Ranks along each axis.
        axes: Name of each axis.

    Raises:
        ConfigError: an axis is missing; suggests a mesh and axes.
    """
    missing = [name for name in needed if name not in axes]
    if not missing:
        return
    wanted = [*needed, *(name for name in (*axes, *AXES) if name not in needed)][: len(mesh)]
    wanted = sorted(wanted if len(wanted) >= len(needed) else needed, key=_order)
    sizes = list(mesh)
    while len(sizes) < len(wanted):
        # The last axis is split into two, as evenly as possible.
        last = sizes.pop()
        part = max(one for one in range(1, last + 1) if last % one == 0 and one * one <= last)
        sizes += [last // part, part]
    say = "" if sizes == list(mesh) else f"cluster.mesh=[{','.join(map(str, sizes))}] "
    names = " and ".join(map(repr, missing))
    raise ConfigError(
        f"the mesh has no axis {names}, which the planner needs: "
        f"cluster.mesh={list(mesh)}, cluster.axes=[{','.join(axes)}]",
        accepted=f"a mesh with the axes {', '.join(needed)}",
        todo=f"set {say}cluster.axes=[{','.join(wanted)}]; for any mesh: {fit_any()}",
    )


def dim_of(text: str) -> tuple[str, int]:
    """Return the pattern and the dim of `blocks.*.up.weight[0]`.

    Raises:
        ConfigError: the text has another form.
    """
    found = _NAMED_DIM.fullmatch(text.strip())
    if found is None:
        raise ConfigError(
            f"{text!r} names no dim of a tensor",
            accepted="a pattern of tensors and a dim in brackets: 'blocks.*.up.weight[0]'",
        )
    return found["pattern"], int(found["dim"])


def layout_of(layout: str | Mapping[str, str]) -> dict[str, str]:
    """Return a layout, `batch:data; hidden:tensor` or a mapping, as name of a dim -> mesh axis.

    Raises:
        ConfigError: it cannot be read, or maps one name twice.
    """
    if not isinstance(layout, str):
        return dict(layout)
    found: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in layout.split(";"))):
        name, colon, axis = (word.strip() for word in part.partition(":"))
        if not (name and colon and axis) or ":" in axis:
            raise ConfigError(
                f"layout={layout!r}: {part!r} maps no dim to a mesh axis",
                accepted="'batch:data; hidden:tensor', or {batch: data, hidden: tensor}",
            )
        if found.setdefault(name, axis) != axis:
            raise ConfigError(
                f"layout={layout!r} maps {name!r} to two mesh axes",
                accepted="one mesh axis for each name",
            )
    return found


def check_stage_axes(mesh: Sequence[int], axes: Sequence[str]) -> None:
    """Refuse several axes without an axis of stages, for planners that cut a model.

    Args:
        mesh: Ranks along each axis.
        axes: Name of each axis.

    Raises:
        ConfigError: none of several axes is the axis of stages; suggests a mesh and axes.
    """
    if len(axes) < 2 or PIPE in axes:
        return
    raise ConfigError(
        f"a mesh of the axes {', '.join(axes)} does not show which ranks are stages",
        accepted=f"one axis, which the planner divides into stages, or an axis {PIPE!r}",
        todo=f"set cluster.mesh=[{prod(mesh)}] cluster.axes=[{DATA}]; for any mesh: {fit_any()}",
    )


def check_split_axis(name: str | None, mesh: Sequence[int], axes: Sequence[str]) -> str:
    """Return the mesh axis over which data are split, and parameters may be.

    Args:
        name: Name of the axis; None for `data`, or else the only axis of several ranks.
        mesh: Ranks along each axis.
        axes: Name of each axis.

    Raises:
        ConfigError: there is no such axis, it is the axis of stages, or it is ambiguous; suggests
            another choice.
    """
    possible = {axis: size for axis, size in zip(axes, mesh, strict=True) if axis != PIPE}
    several = [axis for axis, size in possible.items() if size > 1] or list(possible)
    if name in possible or (name is None and DATA in possible):
        return name or DATA
    if name is None and len(several) == 1:
        return several[0]
    which = f"the mesh axis {name!r}, which is " + ("of stages" if name == PIPE else "missing")
    also = f"planner.axis={several[0]}, or " if several else ""
    raise ConfigError(
        f"osdp shards over {which if name else 'one mesh axis, and none is named'}: "
        f"cluster.mesh={list(mesh)}, cluster.axes=[{','.join(axes)}]",
        where="planner osdp",
        accepted=f"one of {', '.join(possible)}" if possible else "an axis that is not of stages",
        todo=f"set {also}cluster.mesh=[{prod(mesh)}] cluster.axes=[{DATA}]; for any mesh: "
        f"{fit_any()}",
    )


def fit_any() -> str:
    """Return the presets for any model and any mesh, as typed on the command line."""
    return ", ".join(f"planner={preset}" for preset in FIT_ANY)


def _order(name: str) -> int:
    return AXES.index(name) if name in AXES else len(AXES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManualConfig:
    """Settings of `sbp_planner.manual`.

    Args:
        patterns: Mesh axis -> names of patterns to find in the graph of the step, see
            `sbp_planner.patterns`; `*` is every axis that is not named. `tables?` is applied only
            to a model that has it, where `tables` would be refused. Their pins come after pins of
            words (`batch`, `parameters`, ...) and before pins of names.
        pins: Pattern -> SBP, in the order in which they apply; see `sbp_core.infer.pins`.
        layout: Mesh axes of named dims, `batch:data; hidden:tensor`; see `sbp_planner.layout_pins`.
        names: For a layout: name of a dim -> a tensor that has it, `blocks.*.up.weight[0]`.
        stage_patterns: For each pipeline stage, patterns of module paths; empty splits evenly.
        pipeline: The schedule of several stages, by its name in `sbp_core.pipeline`, or `auto` for
            the fastest that fits.
        chunks: How many stages each position of the axis `pipe` holds; None for as many as the
            schedule needs.
        stage_ranks: Instead of an axis `pipe`, the number of positions of the first mesh axis that
            each stage has, `(15, 1)`; the positions of a stage share each micro-batch.
        vertical_sync: With the pipeline `pipedream`: all stages compute a micro-batch with the
            parameters of one update.
        offload: Patterns of states in host memory, `optimizer_states` for all that can be there;
            `auto` for as few as needed to fit. See `sbp_core.planning.search`.
        needs_axes: Mesh axes without which the preset does not do what its name says.
        fits: Models whose names the pins use, for messages; empty: any.
    """

    patterns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    pins: Mapping[str, str | Mapping[str, str]] = field(default_factory=dict)
    layout: str | Mapping[str, str] = ""
    names: Mapping[str, str] = field(default_factory=dict)
    stage_patterns: tuple[tuple[str, ...], ...] = ()
    pipeline: str = "1f1b"
    chunks: int | None = None
    stage_ranks: tuple[int, ...] = ()
    vertical_sync: bool = False
    offload: Offload = ()
    needs_axes: tuple[str, ...] = ()
    fits: str = ""

    def __post_init__(self) -> None:
        check_offload(self.offload)
        _check_stages(self.pipeline, self.chunks, self.stage_patterns)
        for axis, names in self.patterns.items():
            for name in names:
                if name.removesuffix("?") not in PATTERNS:
                    raise ConfigError(
                        f"patterns.{axis}={list(names)}: {name!r} is no pattern",
                        accepted=", ".join(PATTERNS),
                        todo=suggestion(name, PATTERNS),
                    )
        if self.pins:
            _check_pins(self.pins, "pins")
        layout_of(self.layout)
        for text in self.names.values():
            dim_of(text)

    @property
    def needed_axes(self) -> tuple[str, ...]:
        """The needed mesh axes; stages of unequal ranks need no axis `pipe`."""
        return () if self.stage_ranks else self.needs_axes

    def check_combination(self, others: Mapping[str, object]) -> None:
        """Refuse a mesh without the axes that the pins need; see `ChecksCombination`.

        Raises:
            ConfigError: an axis is missing; suggests a mesh and axes.
        """
        cluster = others.get("cluster")
        mesh, axes = getattr(cluster, "mesh", ()), getattr(cluster, "axes", ())
        check_axes(self.needed_axes, mesh, axes)
        check_host(self.offload, others)
        if mesh and self.pins:
            # Imported here because hook modules are imported for every command, and these modules
            # take a while.
            from sbp_core.infer import stage_placements
            from sbp_core.placement import Placement

            _check_pins(self.pins, "planner.pins", stage_placements(Placement.grid(mesh, axes))[0])


def _check_pins(
    pins: Mapping[str, str | Mapping[str, str]], key: str, mesh: Placement | None = None
) -> None:
    """Check that pins can be read.

    Args:
        pins: Pattern -> value.
        key: The setting that holds them, for messages.
        mesh: The mesh of a stage, if it is known: pins may name no other axes.

    Raises:
        ConfigError: a pin cannot be read.
    """
    from sbp_core.infer import check_pin  # see above

    for pattern, value in pins.items():
        try:
            check_pin(pattern, value, mesh.axes if mesh else None)
        except ConfigError as error:
            raise error.replaced(ConfigError, what=f"{key}: {error.what}", where="") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class PropagateConfig(Offloads):
    """Settings of `sbp_planner.propagate`.

    Args:
        pin_sets: Name -> pins, as in `ManualConfig`; all other tensors are inferred. Unreadable
            pins are refused when they are tried.
        stage_patterns: For each pipeline stage, patterns of module paths; empty splits evenly.
        pipeline, chunks, stage_ranks, vertical_sync, offload: As in `ManualConfig`.
    """

    FORMER_NAMES: ClassVar[Mapping[str, str]] = {"tries": "pin_sets"}
    pin_sets: Mapping[str, Mapping[str, str | Mapping[str, str]]] = field(
        default_factory=lambda: {
            "data parallel": {"batch": "S(0)", "use:batch": "S(0)", "activations": "S(0)"},
            "free but for the batch": {"batch": "S(0)"},
            "data parallel with sharded states": {
                "batch": "S(0)",
                "use:batch": "S(0)",
                "activations": "S(0)",
                "parameters": "B",
                "optimizer_states": "S(0)",
                "gradients": "S(0)",
                "updates": "S(0)",
            },
        }
    )
    stage_patterns: tuple[tuple[str, ...], ...] = ()
    pipeline: str = "1f1b"
    chunks: int | None = None
    stage_ranks: tuple[int, ...] = ()
    vertical_sync: bool = False
    offload: Offload = ()

    def __post_init__(self) -> None:
        check_offload(self.offload)
        _check_stages(self.pipeline, self.chunks, self.stage_patterns)
        if not self.pin_sets:
            raise ConfigError("pin_sets={} is empty", accepted="pins by name, one set or more")


def _check_stages(
    pipeline: str, chunks: int | None, stage_patterns: Sequence[Sequence[str]]
) -> None:
    """Refuse settings that do not determine the stages.

    Raises:
        ConfigError: the settings do not.
    """
    if pipeline not in (*SCHEDULES, AUTO):
        raise ConfigError(f"pipeline={pipeline!r}", accepted=nearest(pipeline, (*SCHEDULES, AUTO)))
    if chunks is not None and chunks < 1:
        raise ConfigError(f"chunks={chunks}", accepted="1 or more, or null")
    for stage, patterns in enumerate(stage_patterns):
        if not patterns or not all(patterns):
            raise ConfigError(
                f"stage_patterns[{stage}]={patterns!r} names no module",
                accepted="a list of patterns for each stage, such as [embed, blocks.0]",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OsdpConfig:
    """Settings of `sbp_planner.osdp`.

    Args:
        axis: The mesh axis over which data are split, and parameters may be; None for `data`, or
            else the only axis of several ranks.
        pins: Pins to keep, as in `ManualConfig`, such as the splits on other axes.
        memory_bytes: Memory of a rank that the plan may use; None for all of the device.
        batch_sizes: Samples of a step to compare with `trainer.batch_size`, by samples per second;
            `auto` doubles the batch while it fits. Empty: none.
        time_limit_s: Seconds after which no new variant of the step is tried.
        stage_patterns, pipeline, chunks, stage_ranks: The stages, as in `ManualConfig`.
        offload: As in `ManualConfig`.
    """

    axis: str | None = None
    pins: Mapping[str, str | Mapping[str, str]] = field(default_factory=dict)
    memory_bytes: float | None = None
    batch_sizes: tuple[int, ...] | Literal["auto"] = ()
    time_limit_s: float = 60.0
    stage_patterns: tuple[tuple[str, ...], ...] = ()
    pipeline: str = "1f1b"
    chunks: int | None = None
    stage_ranks: tuple[int, ...] = ()
    offload: Offload = "auto"

    def __post_init__(self) -> None:
        check_offload(self.offload)
        if self.axis == "":
            raise ConfigError("axis='' names no mesh axis", accepted="a name, such as data")
        if self.memory_bytes is not None and not self.memory_bytes > 0:
            raise ConfigError(
                f"memory_bytes={self.memory_bytes!r}",
                accepted="a number of bytes above 0, or null for the device's memory",
            )
        if not self.time_limit_s > 0:
            raise ConfigError(f"time_limit_s={self.time_limit_s}", accepted="seconds above 0")
        sizes = self.batch_sizes
        if sizes != AUTO and (isinstance(sizes, str) or min(sizes, default=1) < 1):
            raise ConfigError(
                f"batch_sizes={sizes!r}", accepted=f"numbers from 1, such as [16,32,64], or {AUTO}"
            )
        if self.pipeline not in SCHEDULES:
            raise ConfigError(
                f"pipeline={self.pipeline!r}", accepted=nearest(self.pipeline, SCHEDULES)
            )
        _check_stages(self.pipeline, self.chunks, self.stage_patterns)
        if self.pins:
            _check_pins(self.pins, "pins")

    def check_combination(self, others: Mapping[str, object]) -> None:
        """Refuse a mesh without the axis; see `sbp_core.plugins.ChecksCombination`.

        Raises:
            ConfigError: there is no such axis; see `check_split_axis`.
        """
        cluster = others.get("cluster")
        mesh, axes = getattr(cluster, "mesh", ()), getattr(cluster, "axes", ())
        if mesh:
            check_split_axis(self.axis, mesh, axes)
        check_host(self.offload, others)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileConfig:
    """Settings of `sbp_planner.file`.

    Args:
        path: The strategy, as YAML or, where the name ends in `.json`, as JSON.
        allow_other_graph: Whether to accept a strategy of a graph that differs in more than names.
        offload: States to put in host memory in addition to those of the file, as in
            `ManualConfig`.
    """

    FORMER_NAMES: ClassVar[Mapping[str, str]] = {"other_graph": "allow_other_graph"}
    path: str = "strategy.yaml"
    allow_other_graph: bool = False
    offload: Offload = ()

    def __post_init__(self) -> None:
        check_offload(self.offload)
        if not self.path:
            raise ConfigError("path='' names no file", accepted="a .yaml or .json file")
        try:
            open_file(Path(self.path)).close()
        except OSError as error:
            raise ConfigError(
                f"path={self.path!r} cannot be read: {error.strerror or error}",
                accepted="a strategy that sbp-plan out=FILE wrote, or a run into its folder",
                todo=_strategy_near(self.path),
            ) from error

    def check_combination(self, others: Mapping[str, object]) -> None:
        """Refuse a file that is no strategy, or one for another mesh, before there is a graph.

        Raises:
            ConfigError: the file is refused; see `sbp_planner.strategy_file.check_form`.
        """
        # Imported here because hook modules are imported for every command, and this takes a while.
        from sbp_core.placement import Placement
        from sbp_planner.strategy_file import check_form

        check_host(self.offload, others)
        cluster = others.get("cluster")
        mesh, axes = getattr(cluster, "mesh", ()), getattr(cluster, "axes", ())
        if mesh:
            check_form(Path(self.path), Placement.grid(mesh, axes))


def _strategy_near(path: str) -> str:
    """Return advice on a path that is no file: the strategy of a similar or the newest run."""
    inside = [Path(path, name) for name in ("strategy.yaml", "strategy.json")]
    if found := [file for file in inside if file.is_file()]:
        return f"set planner.path={found[0]}"
    runs = {str(file): file for file in Path(RUNS).glob("*/strategy.yaml")}
    if not runs:
        return "sbp-plan out=FILE writes one"
    near = nearest(path, runs)
    if near:
        return f"did you mean {near!r}?"
    return f"the newest run has {max(runs, key=lambda run: runs[run].stat().st_mtime)!r}"
