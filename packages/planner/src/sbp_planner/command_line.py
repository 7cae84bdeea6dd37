"""Parse the options of this package's commands; bad options raise errors like bad settings."""

from __future__ import annotations

import argparse
from typing import NoReturn

from sbp_core.errors import SbpValueError
from sbp_core.units import parse_bytes


class Parser(argparse.ArgumentParser):
    """Raises the errors of this package for bad options."""

    def error(self, message: str) -> NoReturn:
        """Refuse the options.

        Raises:
            SbpValueError: always.
        """
        raise SbpValueError(message, todo="--help lists the options")


def size_bytes(text: str) -> float:
    """Return the bytes that an option states: a number, or text with a unit.

    Raises:
        argparse.ArgumentTypeError: it states none.

    >>> size_bytes("1.6e10"), size_bytes("16GB"), size_bytes("16 GiB")
    (16000000000.0, 16000000000.0, 17179869184.0)
    """
    found = parse_bytes(text)
    if found is not None:
        return float(found)
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size: a number of bytes, or text with a unit, such as 16GB or 16GiB"
        ) from error
