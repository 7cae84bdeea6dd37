"""Exit codes of the commands, and what is said of the error that ends one."""

from __future__ import annotations

import sys

from sbp_core.errors import ConfigError, SbpError

#: A setting is wrong; a run failed; the user pressed Ctrl-C.
BAD_CONFIG, FAILED, INTERRUPTED = 2, 1, 130

#: Exit codes above this one are those of signals.
SIGNALS = 128


def ended_by(error: SbpError, command: str) -> int:
    """Say to stderr why a command ends; return its exit code."""
    sys.stderr.write(f"{command}: {error}\n")
    return BAD_CONFIG if isinstance(error, ConfigError) else FAILED
