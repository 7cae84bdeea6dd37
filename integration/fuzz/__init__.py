"""Files with random edits: what any of our parsers makes of them, in processes that are watched.

`python -m fuzz --help`, run in the folder `integration`. `kinds` are the kinds of files, those of
the core (`sbp_core.testing.files`) among them; `running` runs plans that the checker accepts;
`watch` tries edits in processes that may take so much memory and so long.
"""
