"""The commands `sbp-train`, `sbp-plan` and `sbp-watch`.

`hydra_app` is shared by the first two; `answers` prints the answers of `sbp-plan` to further
settings, `feasible` searches for settings whose plan fits into memory, and `pipeline_command`
shows a schedule. `sweep` prints the table of the runs of `--multirun`.
"""
