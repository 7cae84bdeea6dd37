"""Fuzz our parsers with randomly edited files, in processes with limits.

`python -m fuzz --help`, run in the folder `integration`. `kinds` has the kinds of files, including
those of the core (`sbp_core.testing.files`); `running` runs plans that the checker accepts; `watch`
tries edits in processes with limits of memory and time.
"""
