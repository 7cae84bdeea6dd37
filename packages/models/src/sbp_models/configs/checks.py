"""Refuse bad values of settings (sizes, seeds, fractions) when a config of any package is built.

Messages begin with the name of the setting.
"""

from __future__ import annotations

from collections.abc import Iterable

from sbp_core.errors import ConfigError


def check_positive(config: object, *names: str) -> None:
    """Refuse integers below 1.

    Raises:
        ConfigError: one of the named settings is below 1.
    """
    for name in names:
        value = getattr(config, name)
        if value < 1:
            raise ConfigError(f"{name}={value} is too small", accepted="an integer >= 1")


def check_sizes(name: str, sizes: Iterable[int], *, at_least: int = 1) -> None:
    """Refuse a list that is too short or has an entry below 1.

    Raises:
        ConfigError: the list is too short, or an entry is below 1.
    """
    listed = list(sizes)
    if len(listed) < at_least or any(size < 1 for size in listed):
        raise ConfigError(
            f"{name}={listed} names no sizes", accepted=f"{at_least} or more integers, each >= 1"
        )


def check_seed(seed: int) -> None:
    """Refuse a negative seed.

    Raises:
        ConfigError: the seed is negative.
    """
    if seed < 0:
        raise ConfigError(f"seed={seed} is negative", accepted="an integer >= 0")


def check_fractions(config: object, *names: str) -> None:
    """Refuse numbers outside [0, 1).

    Raises:
        ConfigError: one of the named settings is outside.
    """
    for name in names:
        value = getattr(config, name)
        if not 0 <= value < 1:
            raise ConfigError(f"{name}={value} is no fraction", accepted="a number in [0, 1)")


def check_not_negative(config: object, *names: str) -> None:
    """Refuse negative numbers.

    Raises:
        ConfigError: one of the named settings is negative.
    """
    for name in names:
        value = getattr(config, name)
        if not value >= 0:
            raise ConfigError(f"{name}={value} is negative or no number", accepted="a number >= 0")


def check_divides(config: object, divisor: str, dividend: str) -> None:
    """Refuse a setting that does not divide another.

    Args:
        config: The config with both settings.
        divisor: Name of the divisor, such as `num_heads`.
        dividend: Name of the dividend, such as `hidden`.

    Raises:
        ConfigError: it does not; the message lists the divisors.
    """
    part, whole = getattr(config, divisor), getattr(config, dividend)
    if whole % part:
        divisors = [number for number in range(1, whole + 1) if whole % number == 0]
        raise ConfigError(
            f"{divisor}={part} does not divide {dividend}={whole}",
            accepted=f"{divisor} among {', '.join(map(str, divisors))}",
            todo="change one of the two so that it does",
        )
