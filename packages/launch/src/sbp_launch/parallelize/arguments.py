"""The plain arguments of `parallelize`, as the settings that planning takes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, cast, get_args

import torch
import yaml  # type: ignore[import-untyped] # its stubs are a package of their own

from sbp_aten.pass_options import LossMeaning
from sbp_core.cluster import Cluster
from sbp_core.errors import ConfigError, PlanError, suggestion
from sbp_core.placement import Placement
from sbp_core.plugins import GraphPass, PluginRegistry, merge_settings
from sbp_core.runtime import BatchIs
from sbp_launch.compile_config import CompileConfig
from sbp_launch.planning.flow import PlanSettings
from sbp_torch.capture import SampleDims, UpdateOptions, flatten_batch

#: What the loss of several micro-batches is.
LossIs = Literal["whole_batch", "mean_of_micro_batches", "each_micro_batch"]

#: Settings of `sbp-train`, and the arguments of `parallelize` that they are.
_ARGUMENTS = {
    "cluster.mesh": "mesh",
    "cluster.axes": "axes",
    "trainer.micro_batches_per_update": "micro_batches_per_update",
    "trainer.micro_batches": "micro_batches",
    "trainer.loss": "loss_is",
    "trainer.batch_size": "batch",
    "trainer.update": "update",
}

#: A setting of `sbp-train` in a text, and its value if one is given.
_SETTING = re.compile(
    r"(?<![\w./'])((?:trainer|cluster|planner|compile|runtime|boxing)(?:\.[a-z_]+)+)"
    r"(=(?:\[[^\]]*\]|[\w.@/-]*[\w/]))?"
)

_BATCH_DIM = "the argument batch_dim"

#: What `torch.autocast` converts to.
_PRECISIONS = ("bfloat16", "float16")


@contextmanager
def in_arguments() -> Iterator[None]:
    """Let errors of the `with` block speak of the arguments of `parallelize`.

    before: set cluster.mesh=[4] cluster.axes=[data]; planner.memory_bytes >= 5000
    after:  set mesh=[4] axes=['data']; planner={'memory_bytes': ...} >= 5000
    """
    try:
        yield
    except (ConfigError, PlanError) as error:
        parts = (error.what, "\n".join(error.where), error.accepted, error.todo)
        what, where, accepted, todo = (_SETTING.sub(_as_argument, part) for part in parts)
        if (what, where, accepted, todo) == parts:
            raise
        said = error.replaced(
            type(error), what=what, where=where.splitlines(), accepted=accepted, todo=todo
        )
        raise said from error.__cause__


def _as_argument(setting: re.Match[str]) -> str:
    """Return a setting as an argument: `planner={'offload': ['optimizer_states']}`."""
    key, text = setting[1], (setting[2] or "").removeprefix("=")
    value = repr(yaml.safe_load(text)) if text else ""
    known = next((one for one in _ARGUMENTS if key == one or key.startswith(f"{one}.")), None)
    argument, *inner = key.split(".")
    if known is not None:
        argument, inner = _ARGUMENTS[known], key.removeprefix(known).split(".")[1:]
    elif argument == "trainer":
        return setting[0]
    if not inner:
        return f"{argument}={value}" if value else argument
    opened = "".join(f"{{'{name}': " for name in inner)
    return f"{argument}={opened}{value or '...'}{'}' * len(inner)}"


def make_settings(
    registry: PluginRegistry,
    mesh: Placement,
    cluster: Cluster,
    config: CompileConfig,
    micro_batches: int | Literal["auto"],
    loss_is: LossIs,
    micro_batches_per_update: int,
    update: UpdateOptions,
) -> PlanSettings:
    """Return how steps are planned.

    Raises:
        ConfigError: there are no micro-batches, or they do not divide into updates; or their loss
            has no such meaning, or another one than what has several updates.
    """
    count = micro_batches_of(micro_batches)
    if loss_is not in get_args(LossIs):
        raise ConfigError(
            f"loss_is={loss_is!r}",
            where="the argument loss_is",
            accepted=" or ".join(map(repr, get_args(LossIs))),
        )
    several = loss_is == "each_micro_batch"
    fits = type(micro_batches_per_update) is int and micro_batches_per_update >= 1
    is_divided = micro_batches != "auto"
    if not fits or (is_divided and count % (micro_batches_per_update if several else 1)):
        raise ConfigError(
            f"micro_batches_per_update={micro_batches_per_update!r} of "
            f"micro_batches={micro_batches}",
            where="the argument micro_batches_per_update",
            accepted="a divisor of micro_batches",
        )
    if micro_batches_per_update > 1 and not several:
        raise ConfigError(
            f"micro_batches_per_update={micro_batches_per_update} with loss_is={loss_is!r}, which "
            "has one update a step",
            where="the argument micro_batches_per_update",
            accepted="1, or loss_is='each_micro_batch'",
        )
    return PlanSettings(
        mesh=Placement.grid(mesh.mesh_shape, mesh.axes, cluster.device.kind),
        cluster=cluster,
        compile=config,
        passes=tuple(cast(GraphPass, registry.make("pass", name)) for name in config.plugins),
        micro_batches=count,
        loss=LossMeaning(loss_is),
        micro_batches_per_update=micro_batches_per_update,
        update=update,
    )


def micro_batches_of(micro_batches: int | Literal["auto"]) -> int:
    """Return how many micro-batches a step has; 1 where the planner chooses.

    Raises:
        ConfigError: it is no number of them.
    """
    if micro_batches == "auto":
        return 1
    if type(micro_batches) is not int or micro_batches < 1:
        raise ConfigError(
            f"micro_batches={micro_batches!r}",
            where="the argument micro_batches",
            accepted="an integer >= 1, or 'auto': as few as fit the memory, or as many as the "
            "planner chooses",
        )
    return micro_batches


def compile_config(
    given: CompileConfig | Mapping[str, Any] | None, autocast: str | torch.dtype | None
) -> CompileConfig:
    """Return how a step is compiled, with the precision that was chosen with it.

    Raises:
        ConfigError: a setting is unknown or refused, or the precision is given twice.
    """
    name, where = str(autocast or "").removeprefix("torch."), "the argument compile"
    if isinstance(given, CompileConfig):
        config = given
    else:
        config = merge_settings(CompileConfig, given or {}, key="compile", where=where)
    if not name:
        return config
    if config.autocast:
        raise ConfigError(
            f"autocast={name!r} and compile={{'autocast': {config.autocast!r}}} are both given",
            where="the arguments autocast and compile",
            accepted="one of them",
        )
    if name not in _PRECISIONS:
        raise ConfigError(
            f"autocast={autocast!r}",
            where="the argument autocast",
            accepted=f"{', '.join(_PRECISIONS)}; None for none",
        )
    return replace(config, autocast=cast(Literal["bfloat16", "float16"], name))


def update_options(update: UpdateOptions | None, clip_norm: float | None) -> UpdateOptions:
    """Return what happens once a step, besides the optimizer.

    Raises:
        ConfigError: the norm is given twice.
    """
    found = UpdateOptions(fused=True) if update is None else update
    if clip_norm is None:
        return found
    if found.clip_norm is not None:
        raise ConfigError(
            f"clip_norm={clip_norm} and update=UpdateOptions(clip_norm={found.clip_norm}) are both "
            "given",
            where="the arguments clip_norm and update",
            accepted="one of them",
        )
    return replace(found, clip_norm=clip_norm)


def sample_dims(batch_dim: int | Mapping[str, int], example: Any) -> SampleDims:
    """Return where the samples of a batch lie.

    Args:
        batch_dim: See `parallelize`.
        example: A batch of this process.

    Raises:
        ConfigError: something is no dim, or no tensor of the example has it or that name.
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
    """Return what a process gives in a step.

    Raises:
        ConfigError: the text says neither.
    """
    if batch_is not in ("global", "local"):
        raise ConfigError(
            f"batch_is={batch_is!r}",
            where="the argument batch_is",
            accepted="'global', the whole batch; 'local', the part of this process",
        )
    return cast(BatchIs, batch_is)
