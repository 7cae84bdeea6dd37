"""The command `sbp-calibrate`: measure this machine, and write the results into a cluster file.

Communication is measured through a boxing backend, a plugin that runs collectives. The modules, in
the order of use: `calibration_config` (the checked settings), `kept_measurements` (parts of an
existing file that stay), `command` (the command), `calls` (the calls that are measured), `job`
(files and messages between the processes), `__main__` and `measuring_rank` (one process),
`measuring` and `launch_overhead` (measurements of each rank), `calibration` (starts the ranks,
makes a cluster from the results, and prints it), `operators` (adds times of operators). The curves
that are fitted to the times are in `sbp_core.calibration`.
"""
