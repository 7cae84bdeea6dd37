"""The app `sbp-calibrate`: measure this machine through a boxing backend; write a cluster file.

In the order in which they are used: `config` (the settings, checked), `app` (the command), `calls`
(what is measured), `job` (files and lines between the processes), `__main__` and `rank`
(one process), `collectives` and `device` (what each rank measures),
`run` (starts them and makes the cluster of what they found), `machine` (what kind of machine it
is), `table` (what is printed). What the times are fitted to is `sbp_core.calibration`.
"""
