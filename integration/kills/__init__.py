"""Kill ranks at random moments, on every backend and launcher, and check the other processes.

`python -m kills --help`, run in the folder `integration`. `program` is the program of the ranks,
`trial` is one kill with its checks. `training` does the same with `sbp-train`, at a chosen moment,
and `saves` with a process that saves one checkpoint after the other.
"""
