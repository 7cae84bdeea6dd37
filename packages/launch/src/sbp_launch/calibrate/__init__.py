"""The app `sbp-calibrate`: measure this machine through a boxing backend; write a cluster file.

In the order in which they are used: `calibration_config` (the settings, checked),
`kept_measurements` (what stays of the file), `command` (the command), `calls` (what is measured),
`job` (files and lines between the processes), `__main__` and `measuring_rank` (one process),
`measuring` and `launch_overhead` (what each rank measures), `calibration` (starts them, makes the
cluster of what they found, and prints it), `operators` (adds what operators take). What the times
are fitted to is `sbp_core.calibration`.
"""
