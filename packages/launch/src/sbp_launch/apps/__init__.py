"""The commands of a run, `sbp-train` and `sbp-plan`.

`app` is what they share; `sweep` makes the table of the runs of `--multirun`.
"""
