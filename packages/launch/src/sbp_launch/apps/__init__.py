"""The commands of a run, `sbp-train` and `sbp-plan`.

`app` is what they share; `resuming` is `sbp-train resume=RUN`; `sweep` makes the table of the runs
of `--multirun`.
"""
