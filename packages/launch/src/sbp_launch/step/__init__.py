"""The training step that both doors take: `parallelize` in a loop of one's own, and `sbp-train`.

A `TrainingStep` owns a program, its plan, the session on the ranks, evaluation, the agreement of
processes, saving, and what the ranks do that are left when one has failed. `sbp_launch.parallel`
makes it of a user's arguments, `sbp_launch.trainer` of a config, and adds budgets, callbacks,
metrics and votes.
"""
