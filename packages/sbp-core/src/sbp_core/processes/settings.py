"""Checks of settings that backends of several processes have in common.

Kept apart from those backends: configs are read without them.

Stability: internal.
"""

from __future__ import annotations

from sbp_core.errors import ConfigError

__all__ = ["check_rendezvous", "check_timeouts"]

_SCHEMES = ("env://", "tcp://", "file://")


def check_rendezvous(init_method: str, rank: int | None, world_size: int | None) -> None:
    """Check where processes find each other, and which of how many this one is, if that is set.

    Raises:
        ConfigError: a setting cannot be meant.
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
    """Check settings, by their names, that are seconds to wait.

    Raises:
        ConfigError: one leaves no time.
    """
    for name, seconds in settings_s.items():
        if not seconds > 0:
            raise ConfigError(f"{name}={seconds} leaves no time", accepted="seconds above 0")
