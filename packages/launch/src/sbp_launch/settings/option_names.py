"""Suggest an option for an unknown name, and the package that may provide it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sbp_core.errors import ConfigError, nearest
from sbp_core.plugins import PluginRegistry

#: Distributions of sbp that provide options of a group, without sbp-torch and sbp-launch.
HOMES: Mapping[str, tuple[str, ...]] = {
    "model": ("sbp-models",),
    "data": ("sbp-models",),
    "runtime": ("sbp-actor-runtime",),
    "planner": ("sbp-planner",),
    "boxing": ("sbp-boxing-torch", "sbp-boxing-nccl"),
}

#: The names of our options in other programs.
OTHER_OPTIONS: Mapping[str, str] = {
    "boxing=gloo": "torch",
    "cluster=cpu": "local",
    "data=file": "text",
    "optimizer=adam_w": "adamw",
    "planner=ddp": "data_parallel",
    "planner=deepspeed": "zero",
    "planner=dp": "data_parallel",
    "planner=fsdp": "zero",
    "planner=fsdp2": "zero",
    "planner=fully_shard": "zero",
    "planner=hybrid_shard": "hsdp",
    "planner=megatron": "tensor_parallel",
    "planner=mesh_tensorflow": "layout",
    "planner=mics": "hsdp",
    "planner=pp": "pipeline",
    "planner=shardedddp": "sdp",
    "planner=tp": "tensor_parallel",
    "planner=zero3": "zero",
    "planner=zeroredundancyoptimizer": "zero1",
}


def nearest_option(group: str, option: str, options: Sequence[str]) -> str:
    """Return the option that was probably meant, or `""`.

    >>> nearest_option("planner", "zero3", ["manual/zero", "osdp"])
    'manual/zero'
    >>> nearest_option("planner", "tensor_paralel", ["manual/tensor_parallel", "osdp"])
    'manual/tensor_parallel'
    """
    name = option.rpartition("/")[2]
    by_name = {one.rpartition("/")[2]: one for one in reversed(options)}
    ours = OTHER_OPTIONS.get(f"{group}={name.lower()}", name)
    near = nearest(option, options) or by_name.get(nearest(name, by_name), "")
    return by_name.get(ours) or near or by_name.get(name.lower(), "")


def no_option(
    group: str,
    option: str,
    options: Sequence[str],
    registry: PluginRegistry,
    *,
    asked: str,
    where: str,
    misplaced: str = "",
    spelled: Callable[[str], str] = str,
) -> ConfigError:
    """Return the error for an unknown option of a group, with the package that may provide it.

    Args:
        group: The group.
        option: The unknown option.
        options: The options of the group.
        registry: The plugins; a broken plugin may provide the option.
        asked: The text that chose it: `planner=manual/zeroo`.
        where: The place of this text.
        misplaced: The remedy if the option's file is in the wrong folder.
        spelled: Returns how an option is written in that place.
    """
    accepted = ", ".join(options) or f"none: no installed package provides a {group}"
    near = nearest_option(group, option, options)
    suspect, certain = registry.suspect(f"{group}/{option}")
    # With a near match it is a typing error; without one, a broken plugin may provide it.
    if suspect is not None and (certain or not near):
        todo = f"{suspect.remedy}, or choose one of these"
        what = suspect.denies(asked, certain=certain)
        return ConfigError(what, where=where, accepted=accepted, todo=todo)
    brought = {entry.distribution for entry in registry.entries}
    homes = [home for home in HOMES.get(group, ()) if home not in brought]
    inside = [one for one in options if one.startswith(f"{option}/")]
    if misplaced:
        todo = misplaced
    elif inside:
        todo = f"choose one of them: {group}={spelled(inside[0])}, or another of {option}/..."
    elif near:
        todo = f"did you mean {group}={spelled(near)}?"
    elif homes:
        brings = "provide" if len(homes) > 1 else "provides"
        todo = f"pip install {' '.join(homes)}, which {brings} options of the group {group!r}"
        todo += '; or all that sbp-train uses: pip install "sbp-launch[all]"'
    else:
        todo = f"choose one of these, or install a package that provides {group}={option}"
    what = f"{asked}: no such option of the group {group!r}"
    return ConfigError(what, where=where, accepted=accepted, todo=todo)
