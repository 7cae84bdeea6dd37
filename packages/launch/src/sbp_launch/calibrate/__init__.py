"""The app `sbp-calibrate`: measure this machine through a boxing backend; write a cluster file.

In the order in which they are used: `config` (the settings, checked), `kept` (what stays of the
file), `app` (the command), `calls` (what is measured), `job` (files and lines between the
processes), `__main__` and `rank` (one process), `measuring` and `steps` (what each rank measures),
`run` (starts them, makes the cluster of what they found, and prints it), `operators` (adds what
operators take). What the times are fitted to is `sbp_core.calibration`.
"""
