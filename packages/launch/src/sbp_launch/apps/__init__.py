"""The commands of a run, `sbp-train` and `sbp-plan`, and `sbp-watch`.

`hydra_app` is what the first two share; `answers` is what `sbp-plan` says next to a plan,
`feasible` looks for settings with which one fits, and `pipeline_command` shows a schedule. `sweep`
makes the table of the runs of `--multirun`.
"""
