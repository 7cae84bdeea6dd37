"""The setting `planner.offload`, which all planners have: which states are in host memory.

Hook modules read it, so it imports nothing slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from sbp_core.errors import ConfigError

#: Patterns of states; or `auto`, which offloads where memory is short; empty for no states.
Offload: TypeAlias = tuple[str, ...] | Literal["auto"]

_ACCEPTED = "auto, [], or patterns of states, such as [optimizer_states]"


def check_offload(offload: Offload) -> None:
    """Refuse a setting that names no states.

    Raises:
        ConfigError: it names none.
    """
    # Values from files and command lines need not have the declared type.
    said: object = offload
    is_list = not isinstance(said, str) and all(offload)
    if said != "auto" and not is_list:
        raise ConfigError(f"offload={offload!r}", accepted=_ACCEPTED)


class Offloads:
    """A config with the setting `offload`; it refuses offloading on a device without a host."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check_offload(getattr(self, "offload", ()))

    def check_combination(self, others: Mapping[str, object]) -> None:
        """Refuse states in host memory on a machine without any; see `ChecksCombination`.

        Raises:
            ConfigError: the settings ask for that.
        """
        check_host(getattr(self, "offload", ()), others)


def check_host(offload: Offload, others: Mapping[str, object]) -> None:
    """Refuse states in host memory if the config of the cluster has none.

    Raises:
        ConfigError: states are offloaded, and the cluster has no host memory.
    """
    cluster = others.get("cluster")
    is_named = offload != "auto" and bool(offload)
    if is_named and getattr(cluster, "host_memory_bytes", 0) is None:
        raise no_host(offload)


def no_host(offload: Offload, of: str = "") -> ConfigError:
    """Return the error for offloading without host memory.

    Args:
        offload: The setting.
        of: The name of the cluster, if it is known.
    """
    named = f" {of!r}" if of else ""
    return ConfigError(
        f"planner.offload={list(offload)}, and the devices of cluster{named} have no host memory",
        accepted="a cluster whose devices have host_memory_bytes and host_link, such as "
        "cluster=a100 and other profiles of GPUs",
        todo="set planner.offload=[], or cluster.host_memory_bytes with cluster=local, or give "
        "these two in the cluster file",
    )
