"""Training a run: `trainer` has the whole flow, `loop` takes steps until the budget is spent.

Before the loop: `run_program` (model, data, optimizer), `planned` and `other_plan` (the plan),
`session` (checks, and saving at the end), `resume` (the checkpoint to continue from). In the loop:
`step`, `checkpoints` with `saved_settings`, `evaluation`, `callbacks` and the callback
`early_stop`. `figures` and `phases` measure steps; `finite_loss` handles a loss that is not finite.
After the loop: `summary`, and `sampling`, which continues a text with the trained model.
"""
