"""The training step that both entry points use: `parallelize` in a user's loop, and `sbp-train`.

A `TrainingStep` owns a program, its plan, the session on the ranks, evaluation, the agreement of
processes, saving, and the work of the surviving ranks after one has failed. `sbp_launch.parallel`
makes it from a user's arguments; `sbp_launch.trainer` makes it from a config, and adds budgets,
callbacks, metrics and votes.
"""
