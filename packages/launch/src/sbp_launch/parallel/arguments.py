"""Convert plain arguments of `parallelize` to the settings that planning takes."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch
import yaml  # type: ignore[import-untyped] # its stubs are a package of their own

from sbp_core.errors import ConfigError, PlanError, suggestion
from sbp_core.plugins import merge_settings
from sbp_core.runtime import BatchIs
from sbp_launch.compile_config import CompileConfig
from sbp_launch.parallel.micro_batches import MicroBatches
from sbp_torch.graph_capture import SampleDims, UpdateOptions, flatten_batch

_P = ParamSpec("_P")
_T = TypeVar("_T")

#: Settings of `sbp-train`, and the corresponding arguments of `parallelize`.
_ARGUMENTS = {
    "cluster.mesh": "mesh",
    "trainer.micro_batches_per_update": "micro_batches=MicroBatches(..., per_update={})",
    "trainer.micro_batches": "micro_batches",
    "trainer.loss": "micro_batches=MicroBatches(..., loss={})",
    "trainer.batch_size": "batch",
    "trainer.update": "update",
}

#: Former arguments of `parallelize`, and their replacements.
_FORMER = {
    "axes": "mesh={'data': 2, 'tensor': 2}",
    "loss_is": "micro_batches=MicroBatches(4, loss=...)",
    "micro_batches_per_update": "micro_batches=MicroBatches(4, loss=..., per_update=...)",
    "clip_norm": "update={'clip_norm': ...}",
    "autocast": "compile={'autocast': ...}",
    "prove": "compile={'prove': ...}",
}

#: A setting of `sbp-train` in a text, and its value if one is given.
_SETTING = re.compile(
    r"(?<![\w./'])((?:trainer|cluster|planner|compile|runtime|boxing)(?:\.[a-z_]+)+)"
    r"(=(?:\[[^\]]*\]|[\w.@/-]*[\w/]))?"
)

_BATCH_DIM = "the argument batch_dim"

#: The axes of a mesh in a text, preceded by the mesh if that is given.
_AXES = re.compile(r"(?:cluster\.mesh=\[([^\]]*)\],? )?cluster\.axes=\[([^\]]*)\]")


@contextmanager
def in_arguments() -> Iterator[None]:
    """Make errors in the `with` block name arguments of `parallelize` instead of settings.

    before: set cluster.mesh=[4] cluster.axes=[data]; planner.memory_bytes >= 5000
    after:  set mesh={'data': 4}; planner={'memory_bytes': ...} >= 5000
    """
    try:
        yield
    except (ConfigError, PlanError) as error:
        parts = (error.what, "\n".join(error.where), error.accepted, error.todo)
        what, where, accepted, todo = map(_with_arguments, parts)
        if (what, where, accepted, todo) == parts:
            raise
        said = error.replaced(
            type(error), what=what, where=where.splitlines(), accepted=accepted, todo=todo
        )
        raise said from error.__cause__


def _with_arguments(text: str) -> str:
    return _SETTING.sub(_as_argument, _AXES.sub(_as_mesh, text))


def _as_mesh(axes: re.Match[str]) -> str:
    """Return a mesh, or only its axes, as the argument: `mesh={'data': 4}`."""
    names = [name.strip() for name in axes[2].split(",")]
    sizes = axes[1].split(",") if axes[1] else ["..."] * len(names)
    sized = zip(names, sizes, strict=False)
    return f"mesh={{{', '.join(f'{name!r}: {size.strip()}' for name, size in sized)}}}"


def _as_argument(setting: re.Match[str]) -> str:
    """Return a setting as an argument: `planner={'offload': ['optimizer_states']}`."""
    key, text = setting[1], (setting[2] or "").removeprefix("=")
    value = repr(yaml.safe_load(text)) if text else ""
    known = next((one for one in _ARGUMENTS if key == one or key.startswith(f"{one}.")), None)
    argument, *inner = key.split(".")
    if known is not None and "{}" in _ARGUMENTS[known]:
        return _ARGUMENTS[known].format(value or "...")
    if known is not None:
        argument, inner = _ARGUMENTS[known], key.removeprefix(known).split(".")[1:]
    elif argument == "trainer":
        return setting[0]
    if not inner:
        return f"{argument}={value}" if value else argument
    opened = "".join(f"{{'{name}': " for name in inner)
    return f"{argument}={opened}{value or '...'}{'}' * len(inner)}"


def takes_former(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let a function take former arguments of `parallelize`, with a warning that names new ones.

    Former arguments are accepted for one release.
    """

    @wraps(function)
    def call(*args: _P.args, **given: _P.kwargs) -> _T:
        former = {name: given.pop(name) for name in _FORMER if name in given}
        for name in former:
            said = f"{name}= is {_FORMER[name]} now"
            warnings.warn(said, FutureWarning, stacklevel=2)
        return function(*args, **{**given, **_now(given, former)})

    return call


def _now(given: Mapping[str, Any], former: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that replace former ones.

    Raises:
        ConfigError: an argument is given both ways.
    """
    found: dict[str, Any] = {}

    def settings(argument: str, *names: str) -> None:
        new = {name: former[name] for name in names if former.get(name) is not None}
        told = given.get(argument) or {}
        has = told if isinstance(told, Mapping) else {name: getattr(told, name) for name in new}
        for name in new:
            if has.get(name) not in (None, "", True):
                raise ConfigError(
                    f"{name}={new[name]!r} and {argument}={{{name!r}: {has[name]!r}}} are both "
                    "given",
                    where=f"the arguments {name} and {argument}",
                    accepted="one of them",
                )
        if new:
            is_mapping = isinstance(told, Mapping)
            found[argument] = {**told, **new} if is_mapping else replace(cast(Any, told), **new)

    settings("update", "clip_norm")
    settings("compile", "autocast", "prove")
    if former.get("axes") is not None:
        axes, mesh = former["axes"], given.get("mesh")
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        sizes = (-1,) if mesh is None else (mesh,) if isinstance(mesh, int) else tuple(mesh)
        if len(names) != len(sizes) or len({*names}) != len(names):
            raise ConfigError(
                f"axes={names} does not name the axes of mesh={sizes}",
                where="the argument axes",
                accepted="one distinct name for each axis of the mesh",
            )
        found["mesh"] = dict(zip(names, sizes, strict=True))
    if "loss_is" in former or "micro_batches_per_update" in former:
        found["micro_batches"] = MicroBatches(
            given.get("micro_batches", 1),
            loss=former.get("loss_is", "whole_batch"),
            per_update=former.get("micro_batches_per_update", 1),
        )
    return found


def compile_config(given: CompileConfig | Mapping[str, Any] | None) -> CompileConfig:
    """Return the argument `compile` as a config.

    Raises:
        ConfigError: a setting is unknown or refused.
    """
    if isinstance(given, CompileConfig):
        return given
    named = {
        key: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        for key, value in (given or {}).items()
    }
    return merge_settings(CompileConfig, named, key="compile", where="the argument compile")


def update_options(given: UpdateOptions | Mapping[str, Any] | None) -> UpdateOptions:
    """Return the argument `update` as options.

    Raises:
        ConfigError: a setting is unknown or refused.
    """
    if isinstance(given, UpdateOptions):
        return given
    settings = {"fused": True, **(given or {})}
    return merge_settings(UpdateOptions, settings, key="update", where="the argument update")


def sample_dims(batch_dim: int | Mapping[str, int], example: Any) -> SampleDims:
    """Return the sample dims of a batch.

    Args:
        batch_dim: See `parallelize`.
        example: A batch of this process.

    Raises:
        ConfigError: a dim is invalid, or no tensor of the example has the dim or the name.
    """
    named = batch_dim if isinstance(batch_dim, Mapping) else {"": batch_dim}
    for dim in named.values():
        if type(dim) is not int or dim < 0:
            raise ConfigError(
                f"batch_dim={batch_dim!r}",
                where=_BATCH_DIM,
                accepted="the dim of the samples, an integer >= 0; or dims by the names of tensors "
                "of the batch: {'x': 1}",
            )
    if not any(named.values()):
        return SampleDims()
    flat = flatten_batch(example)
    shapes = ", ".join(f"{name!r} {list(value.shape)}" for name, value in flat.items())
    for name, dim in named.items():
        if name and name not in flat:
            raise ConfigError(
                f"batch_dim has a dim for {name!r}, and the batch has no tensor of that name",
                where=_BATCH_DIM,
                accepted=", ".join(map(repr, flat)),
                todo=suggestion(name, flat),
            )
        if dim >= max((flat[name].dim(),) if name else [one.dim() for one in flat.values()]):
            whose = repr(name) if name else "any tensor of the batch"
            raise ConfigError(
                f"batch_dim={batch_dim!r} is no dim of {whose}: {shapes}",
                where=_BATCH_DIM,
                accepted="a dim of the tensor, counted from 0",
            )
    return SampleDims(dict(batch_dim) if isinstance(batch_dim, Mapping) else batch_dim)


def checked_batch_is(batch_is: str) -> BatchIs:
    """Return the argument `batch_is`, checked.

    Raises:
        ConfigError: it is neither `global` nor `local`.
    """
    if batch_is not in ("global", "local"):
        raise ConfigError(
            f"batch_is={batch_is!r}",
            where="the argument batch_is",
            accepted="'global', the whole batch; 'local', the part of this process",
        )
    return cast(BatchIs, batch_is)
