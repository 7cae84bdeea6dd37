"""Training a run: `trainer` is its flow, `loop` one step after the other until its budget is spent.

Before the loop: `run_program` (model, data, optimizer), `planned` and `micro_batches` (the plan),
`session` (the ranks), `resume` (where the run goes on). In it: `step`, `checkpoints` with the
`saved_settings`, `evaluation`, `callbacks` and the callback `early_stop`, and `team`, what
processes say to each other between steps. Of each step: `figures`, `phases`;
`finite_loss` and `first_bad_value` are for those that fail. Behind it: `summary`, and `sampling`,
which continues a text with what was trained.
"""
