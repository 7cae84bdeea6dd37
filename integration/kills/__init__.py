"""Kills ranks at random moments, on every backend and launcher, and looks what becomes of the rest.

`python -m kills --help`, run in the folder `integration`. `program` is what the ranks run, `trial`
is one kill and what must hold of it; `training` is the same of `sbp-train`, at a chosen moment, and
`saves` of a process that saves one checkpoint after the other.
"""
