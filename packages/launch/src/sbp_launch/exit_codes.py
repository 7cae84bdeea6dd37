"""Exit codes of the commands."""

from __future__ import annotations

#: A setting is wrong; a run failed; the user pressed Ctrl-C.
BAD_CONFIG, FAILED, INTERRUPTED = 2, 1, 130

#: Exit codes above this one are those of signals.
SIGNALS = 128
