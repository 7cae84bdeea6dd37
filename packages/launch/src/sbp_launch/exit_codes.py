"""Exit codes of the commands, and the message for an error that ends a command."""

from __future__ import annotations

import sys

from sbp_core.errors import ConfigError, SbpError

#: Wrong setting; failed run; interrupted by Ctrl-C.
BAD_CONFIG, FAILED, INTERRUPTED = 2, 1, 130

#: Exit codes above this one stand for signals: 128 plus the signal's number.
SIGNALS = 128


def ended_by(error: SbpError, command: str) -> int:
    """Print the error that ends a command to stderr; return the exit code."""
    sys.stderr.write(f"{command}: {error}\n")
    return BAD_CONFIG if isinstance(error, ConfigError) else FAILED
