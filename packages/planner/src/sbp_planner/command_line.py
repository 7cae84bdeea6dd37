"""What the commands of this package share: they answer bad options as errors are answered."""

from __future__ import annotations

import argparse
from typing import NoReturn

from sbp_core.errors import SbpValueError


class Parser(argparse.ArgumentParser):
    """Answers bad options as the rest of the package does."""

    def error(self, message: str) -> NoReturn:
        """Refuse the options.

        Raises:
            SbpValueError: always.
        """
        raise SbpValueError(message, todo="--help lists the options")
