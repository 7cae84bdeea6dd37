"""Settings of boxing backends with several processes: checks, and defaults from the environment.

Separate from the backends, because configs are read without importing backends. This is the only
module here that reads the environment for a rank.
"""

from __future__ import annotations

import os

from sbp_core.errors import ConfigError

_SCHEMES = ("env://", "tcp://", "file://")


def check_rendezvous(init_method: str, rank: int | None, world_size: int | None) -> None:
    """Check the address at which processes find each other, this process' rank and their number.

    Raises:
        ConfigError: a setting is invalid.
    """
    if not init_method.startswith(_SCHEMES):
        raise ConfigError(
            f"init_method={init_method!r} names no rendezvous",
            accepted="env://, tcp://HOST:PORT, file:///PATH",
        )
    if world_size is not None and world_size < 1:
        raise ConfigError(f"world_size={world_size} is too small", accepted="1 or more")
    if rank is not None and not 0 <= rank < (rank + 1 if world_size is None else world_size):
        raise ConfigError(
            f"rank={rank} is no rank of world_size={world_size}", accepted="0 .. world_size - 1"
        )


def check_timeouts(**settings_s: float) -> None:
    """Check timeouts in seconds, given by the names of their settings.

    Raises:
        ConfigError: one is not positive.
    """
    for name, seconds in settings_s.items():
        if not seconds > 0:
            raise ConfigError(f"{name}={seconds} leaves no time", accepted="seconds above 0")


def rank_and_size(rank: int | None, world_size: int | None, *, todo: str) -> tuple[int, int]:
    """Return the rank of this process and the number of ranks, as set or from the environment.

    Args:
        rank: Setting; None for RANK in the environment.
        world_size: Setting; None for WORLD_SIZE in the environment.
        todo: The advice if both are missing; `{key}` stands for the setting.

    Raises:
        ConfigError: neither the setting nor the environment has it, or there is no such rank.
    """
    found: list[int] = []
    for key, given, variable in (("rank", rank, "RANK"), ("world_size", world_size, "WORLD_SIZE")):
        text = os.environ.get(variable, "") if given is None else str(given)
        if not text.isdecimal():
            raise ConfigError(
                f"{key} is not set, and the environment has {variable}={text!r}",
                accepted="an integer >= 0",
                todo=todo.format(key=key),
            )
        found.append(int(text))
    if found[0] >= found[1]:
        raise ConfigError(
            f"rank={found[0]} is no rank of world_size={found[1]}", accepted="0 .. world_size - 1"
        )
    return found[0], found[1]


def local_rank(otherwise: int) -> int:
    """Return the local rank of this process, from LOCAL_RANK or a default."""
    text = os.environ.get("LOCAL_RANK", "")
    return int(text) if text.isdecimal() else otherwise
