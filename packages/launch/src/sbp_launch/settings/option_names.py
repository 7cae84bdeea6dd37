"""Which option somebody meant who wrote another name, and which package may bring one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sbp_core.errors import ConfigError, nearest
from sbp_core.plugins import PluginRegistry

#: Distributions of the house that bring options of a group, besides sbp-torch and sbp-launch.
HOMES: Mapping[str, tuple[str, ...]] = {
    "model": ("sbp-models",),
    "data": ("sbp-models",),
    "runtime": ("sbp-actor-runtime",),
    "planner": ("sbp-planner",),
    "boxing": ("sbp-boxing-torch", "sbp-boxing-nccl"),
}

#: What others call our options.
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
    "planner=megatron": "tensor_parallel",
    "planner=pp": "pipeline",
    "planner=tp": "tensor_parallel",
    "planner=zero3": "zero",
}


def nearest_option(group: str, option: str, options: Sequence[str]) -> str:
    """Return the option that was meant, or `""`.

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
    """Say that a group has no such option, and which package may bring it.

    Args:
        group: The group.
        option: What was asked for.
        options: Those that the group has.
        registry: The plugins; one that is broken may bring the option.
        asked: How it was asked for: `planner=manual/zeroo`.
        where: What asks for it.
        misplaced: What to do if the option is in another place than those of its group.
        spelled: How an option is written there.
    """
    accepted = ", ".join(options) or f"none: no installed package brings a {group}"
    near = nearest_option(group, option, options)
    suspect, certain = registry.suspect(f"{group}/{option}")
    # With a near match it is a slip of the pen; without one, a broken plugin may bring it.
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
        todo = f"say which of them: {group}={spelled(inside[0])}, or another of {option}/..."
    elif near:
        todo = f"did you mean {group}={spelled(near)}?"
    elif homes:
        brings = "bring" if len(homes) > 1 else "brings"
        todo = f"pip install {' '.join(homes)}, which {brings} options of the group {group!r}"
        todo += '; or all that sbp-train uses: pip install "sbp-launch[all]"'
    else:
        todo = f"choose one of these, or install a package that brings {group}={option}"
    what = f"{asked}: no such option of the group {group!r}"
    return ConfigError(what, where=where, accepted=accepted, todo=todo)
