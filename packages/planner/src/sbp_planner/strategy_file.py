"""Read and check the strategy file of `planner=file`: its form, its mesh, its variant.

`FileConfig` calls `check_form` with the settings, before there is a graph; `sbp_planner.file`, the
planner, calls the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from sbp_core import strategy_yaml
from sbp_core.errors import ConfigError, SbpError
from sbp_core.graph import LogicalGraph
from sbp_core.graph_variant import GraphFamily, GraphVariant
from sbp_core.infer import stage_placements
from sbp_core.placement import Placement
from sbp_core.serialize import Lines
from sbp_core.strategy import Strategy


def check_form(path: Path, mesh: Placement) -> None:
    """Check what needs no graph: the form of a file, and its mesh.

    Raises:
        ConfigError: it cannot be read, or is for another mesh; names the file and the line.
    """
    with naming(path):
        strategy, lines = (
            Strategy.load_with_lines(path)
            if path.suffix == ".json"
            else strategy_yaml.load_form(path)
        )
        check_mesh(strategy, mesh, lines)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn an error of the `with` block into a `ConfigError` that names `planner.path` and file."""
    try:
        yield
    except SbpError as error:
        # The first place is the file, with the line; the key is put before it.
        line, *others = error.where if _is_in(path, error) else (str(path), *error.where)
        raise error.replaced(
            ConfigError,
            what=f"the strategy cannot be used: {error.what}",
            where=(f"planner.path={line}", *others),
        ) from error


def _is_in(path: Path, error: SbpError) -> bool:
    return bool(error.where) and error.where[0].startswith(str(path))


def read(path: Path, graph: LogicalGraph) -> tuple[Strategy, Lines]:
    """Read a file; return also the lines of its decisions.

    Raises:
        SbpError: it cannot be read.
    """
    if path.suffix == ".json":
        return Strategy.load_with_lines(path)
    return strategy_yaml.load_with_lines(path, graph)


def read_variant(path: Path, family: GraphFamily | None) -> GraphVariant | None:
    """Return the variant of the step that a file is for; None for the requested variant.

    Also None for a file that cannot be read, for which `read` raises the error.

    Args:
        path: The file.
        family: The variants of the step.
    """
    try:
        form = Strategy.load(path) if path.suffix == ".json" else strategy_yaml.load_form(path)[0]
    except SbpError:
        return None
    if form.variant is not None or family is None:
        return form.variant
    if form.num_micro_batches == family.variant.num_micro_batches:
        return None
    return replace(family.variant, num_micro_batches=form.num_micro_batches)


def check_mesh(read: Strategy, mesh: Placement, lines: Lines) -> None:
    """Check that a strategy is for a mesh.

    Raises:
        ConfigError: it is for another one.
    """
    stages = tuple(stage_placements(mesh))
    if read.stages != stages:
        raise ConfigError(
            f"the strategy is for {_meshes(read.stages)}, and the run has {_meshes(stages)}",
            where=lines.where(["stages"]),
            todo=_mesh_of(read.stages),
        )


def _meshes(stages: Sequence[Placement]) -> str:
    """Return the mesh of each stage: `a mesh of data 2 x tensor 2`."""
    texts = [
        " x ".join(f"{axis} {size}" for axis, size in zip(one.axes, one.mesh_shape, strict=True))
        for one in stages
    ]
    if len(stages) == 1:
        return f"a mesh of {texts[0]}"
    return f"{len(stages)} stages, each with a mesh of {', '.join(dict.fromkeys(texts))}"


def _mesh_of(stages: Sequence[Placement]) -> str:
    """Return how to set the mesh for which a strategy was made."""
    if len(stages) > 1:
        return "set cluster.mesh and cluster.axes as in the run that made the strategy"
    shape, axes = ",".join(map(str, stages[0].mesh_shape)), ",".join(stages[0].axes)
    return f"set cluster.mesh=[{shape}] cluster.axes=[{axes}]"
