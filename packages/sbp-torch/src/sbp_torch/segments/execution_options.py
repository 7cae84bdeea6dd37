"""Check the settings `compile` and `compile_fallback`, which all runtimes have."""

from __future__ import annotations

from typing import Literal, get_args

from sbp_core.errors import ConfigError, unknown_name

__all__ = ["Execution", "check_execution"]

#: How compute segments are executed (`segments.execution`).
Execution = Literal["eager", "inductor", "cudagraph"]


def check_execution(compile: str, *, compile_fallback: bool) -> None:  # noqa: A002 (a setting)
    """Check the settings of segments that all runtimes share.

    Raises:
        ConfigError: a setting is invalid.
    """
    accepted = get_args(Execution)
    if compile not in accepted:
        error = unknown_name("execution of segments", compile, accepted)
        raise error.replaced(ConfigError, what=f"compile={compile!r}")
    if compile_fallback and compile != "inductor":
        raise ConfigError(
            f"compile_fallback=true with compile={compile}",
            accepted="compile_fallback=true with compile=inductor",
        )
