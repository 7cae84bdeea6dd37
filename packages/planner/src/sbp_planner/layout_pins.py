"""Turn a layout of named dims, as in Mesh-TensorFlow, into pins: `batch:data; hidden:tensor`.

A layout maps names of tensor dims to mesh axes. Every tensor that has a dim of that name is split
along it over that axis; all other tensors are whole along the axis. Dims of a captured step have no
names, so a name stands for a group of dims that are split together (`sbp_planner.dim_groups`):

    batch                        the samples: dim 0 of the batch inputs
    classes, tables, experts,    what `sbp_planner.patterns` finds
      sequence
    names of the user            the groups of the dims of some tensors: `blocks.*.up.weight[0]`

One tensor with two dims on one axis is an error, as in the paper. Extents need not be divisible.
`manual` joins these pins with its own; the pins of a group are made by `sbp_planner.pattern_pins`.

Source: Shazeer et al., "Mesh-TensorFlow: deep learning for supercomputers", NeurIPS 2018, sections
4 and 5.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from sbp_core.errors import ConfigError
from sbp_core.graph import InputKind, LogicalGraph
from sbp_core.infer import PIPE_AXIS
from sbp_core.placement import Placement
from sbp_planner.configs import BATCH_DIM, NAMED_DIMS, dim_of
from sbp_planner.dim_groups import DimGroup, TensorDim
from sbp_planner.pattern_pins import PatternPins, PinnedGroups
from sbp_planner.patterns import Patterns, parameter_names

#: The place that errors name.
_WHERE = "planner.layout"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPins(PatternPins):
    """The pins of a layout.

    Args:
        words: Pins of words (`batch`, `activations`, ...), which apply first: word -> axis -> SBP.
    """

    words: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def layout_pins(
    graph: LogicalGraph, mesh: Placement, layout: Mapping[str, str], names: Mapping[str, str]
) -> LayoutPins:
    """Return the pins of a layout.

    Args:
        graph: The step.
        mesh: The mesh; an axis `pipe` has stages, over which nothing is split.
        layout: Name of a dim -> mesh axis.
        names: Name of a dim -> a tensor that has it, `PATTERN[DIM]`.

    Raises:
        ConfigError: the mesh lacks an axis; no tensor has a dim of a name; or a tensor has two
            dims on one axis.
    """
    axes = [axis for axis in mesh.axes if axis != PIPE_AXIS]
    for name, axis in layout.items():
        if axis not in axes:
            raise ConfigError(
                f"layout '{name}:{axis}' names a mesh axis that this mesh does not have",
                where=_WHERE,
                accepted=", ".join(axes),
                todo="give the mesh that axis (cluster.axes), or map the dim to one that it has",
            )
    pins: dict[str, dict[str, str]] = {}
    words: dict[str, dict[str, str]] = {}
    lines: list[str] = []
    before = 1
    for axis, size in zip(mesh.axes, mesh.mesh_shape, strict=True):
        if axis == PIPE_AXIS:
            continue
        own = [name for name, on in layout.items() if on == axis]
        has_samples = BATCH_DIM in own and BATCH_DIM not in names
        samples = "S(0)" if has_samples else "B"
        for word in ("batch", "use:batch", "activations"):
            words.setdefault(word, {})[axis] = samples
        for word in (
            "parameters",
            "use:parameters",
            "optimizer_states",
            "gradients",
            "updates",
        ):
            # Gradients of split parameters are split, too.
            free = word in ("gradients", "updates") and own and not has_samples
            words.setdefault(word, {})[axis] = "free" if free else "B"
        if size > 1:  # with one rank there is nothing to split
            found = Patterns(graph=graph, axis=axis, size=size, before=before)
            dims = _NamedDims(found, names)
            groups = {name: dims.groups(name) for name in own}
            _check_one_dim(graph, axis, groups)
            maker = PinnedGroups(found)
            for name, of_name in groups.items():
                ends = dict.fromkeys(value for group in of_name for value in group.ends)
                whole = f"; gathered where it is needed whole: {next(iter(ends))}" if ends else ""
                more = f" and {len(ends) - 1} more" if len(ends) > 1 else ""
                lines.append(
                    f"layout: {name} over {axis}: {_described(graph, of_name)}{whole}{more}"
                )
            if has_samples:
                del groups[BATCH_DIM]  # the words split them
            maker.named([group for of_name in groups.values() for group in of_name])
            if not has_samples:
                maker.others([group for of_name in groups.values() for group in of_name])
            for pattern, entry in maker.pins.items():
                pins.setdefault(pattern, {})[axis] = entry
        before *= size if has_samples else 1
    return LayoutPins(pins=pins, explanation=tuple(lines), words=words)


@dataclass(frozen=True, slots=True)
class _NamedDims:
    """Finds the groups of a named dim on one mesh axis."""

    found: Patterns
    names: Mapping[str, str]

    def groups(self, name: str) -> list[DimGroup]:
        """Return the groups of dims that a name stands for.

        Raises:
            ConfigError: the name is unknown; or no operator can split these dims.
        """
        graph, shown = self.found.graph, self.found.shown
        if name in self.names:
            pattern, dim = dim_of(self.names[name])
            dims = self._dims(name, pattern, dim)
        elif name == BATCH_DIM:
            dims = {(entry.name, 0) for entry in graph.inputs if entry.kind is InputKind.BATCH}
        elif name in NAMED_DIMS:
            return self.found.find(name)
        else:
            here = [*self._there(), *(f"{own} ({where})" for own, where in self.names.items())]
            raise ConfigError(
                f"layout names the dim {name!r}, which no tensor is known to have",
                where=_WHERE,
                accepted=", ".join(here),
                todo=f"say which tensor has it: planner.names={{{name}: 'blocks.*.up.weight[0]'}}",
            )
        groups = [group for group in shown.groups if dims.intersection(group.dims)]
        if not groups:
            some = ", ".join(f"{value}[{dim}]" for value, dim in sorted(dims)[:3])
            raise ConfigError(
                f"layout names the dim {name!r} ({some}), which no operator can split over "
                f"{self.found.size} ranks of the mesh axis {self.found.axis!r}",
                where=_WHERE,
                accepted=", ".join(self._there()),
                todo="take an axis of fewer ranks, or another dim",
            )
        return groups

    def _dims(self, name: str, pattern: str, dim: int) -> set[TensorDim]:
        """Return a dim of all tensors that a pattern matches.

        Raises:
            ConfigError: it matches no tensor, or a tensor lacks the dim.
        """
        graph = self.found.graph
        inputs = [entry.name for entry in graph.inputs if graph.is_tensor(entry.name)]
        values = [value for node in graph.nodes for value in node.outputs if graph.is_tensor(value)]
        for known in (inputs, values):
            matched = [one for one in known if one == pattern or fnmatchcase(one, pattern)]
            if matched:
                break
        else:
            near = difflib.get_close_matches(pattern, [*inputs, *values], n=3, cutoff=0.3)
            raise ConfigError(
                f"names.{name}={self.names[name]!r} matches no tensor of {graph.name!r}",
                where="planner.names",
                accepted="a pattern of parameters, batch inputs or values, and a dim: 'up.w[0]'",
                todo=f"the nearest names are {', '.join(near)}" if near else "",
            )
        for one in matched:
            if not -len(graph.tensor(one).shape) <= dim < len(graph.tensor(one).shape):
                raise ConfigError(
                    f"names.{name}={self.names[name]!r}: {one!r} of shape "
                    f"{graph.tensor(one).shape} has no dim {dim}",
                    where="planner.names",
                    accepted=", ".join(f"{one}[{n}]" for n in range(len(graph.tensor(one).shape))),
                )
        return {(one, dim % len(graph.tensor(one).shape)) for one in matched}

    def _there(self) -> Iterator[str]:
        """Yield the names that need no definition, each with a tensor."""
        for name in (BATCH_DIM, *NAMED_DIMS):
            try:
                groups = self.groups(name)
            except ConfigError:
                continue
            yield f"{name} ({_described(self.found.graph, groups).partition(', ')[0]})"


def _check_one_dim(
    graph: LogicalGraph, axis: str, groups: Mapping[str, Sequence[DimGroup]]
) -> None:
    """Check that no tensor has two dims that are mapped to one mesh axis.

    Raises:
        ConfigError: one has; names it and both dims.
    """
    seen: dict[str, tuple[int, str]] = {}
    for name, of_name in groups.items():
        for value, dim in (one for group in of_name for one in group.dims):
            first, before = seen.setdefault(value, (dim, name))
            if (first, before) != (dim, name):
                raise ConfigError(
                    f"layout maps two dims of {value!r}, of shape {graph.tensor(value).shape}, to "
                    f"the mesh axis {axis!r}: {before} (dim {first}) and {name} (dim {dim})",
                    where=_WHERE,
                    accepted="for each axis, names of which a tensor has at most one dim",
                    todo=f"leave out one of the two, or map it to another axis than {axis!r}",
                )


def _described(graph: LogicalGraph, groups: Sequence[DimGroup]) -> str:
    """Return what a name stands for: parameters and batch inputs with the dim, layers once."""
    named = parameter_names(use for group in groups for use in group.uses)
    batch = [
        f"{value}[{dim}]"
        for group in groups
        for value, dim in group.dims
        if value in graph.input_kinds and graph.input_kinds[value].kind is InputKind.BATCH
    ]
    return ", ".join(dict.fromkeys([*batch, *named]))
