"""Compute the mean loss of a run over held-out data, with the states of its training step.

If parameters have moving averages (`trainer.update.ema_decay`), the averages are evaluated.
"""

from __future__ import annotations

from collections import Counter

from sbp_core.errors import SbpError
from sbp_launch.data import BatchLoader, LocalBatch, LocalPart, is_for_gpus
from sbp_launch.run.run import Run
from sbp_launch.step.training_step import TrainingStep
from sbp_launch.team import fail_together
from sbp_launch.trainer.run_program import RunProgram


class Evaluator:
    """Evaluates the states that a step trains.

    The evaluation is planned and started at its first call. It uses the same batches each time.

    Args:
        run: The run.
        program: Provides the batches.
        step: The step that trains, whose states are evaluated in place.
    """

    def __init__(self, run: Run, program: RunProgram, step: TrainingStep) -> None:
        self.run, self.program, self.step = run, program, step

    def metrics(self) -> dict[str, float]:
        """Return `held_out_loss`, and `held_out_NAME` for each metric of the model: their means.

        All processes of the run call this. All ranks together evaluate one micro-batch at a time.

        Raises:
            RunError: a rank failed.
            SbpError: a sample cannot be loaded; names it.
        """
        settings = self.run.config.trainer
        example = self.program.example(settings.micro_batch_size)
        averaged = settings.update.ema_decay is not None
        evaluating, plan = self.step.evaluator(example, averaged=averaged)
        totals: Counter[str] = Counter()
        count = settings.evaluate.batches * settings.num_micro_batches
        loader = BatchLoader(
            self.program.source,
            "validation",
            self.program.cursor("validation"),
            settings.micro_batch_size,
            LocalPart(plan, evaluating.local_ranks),
            ahead=settings.prefetch,
            num_batches=count,
            pinned=is_for_gpus(plan),
        )
        with loader:
            for index in range(count):
                batch = self._next(loader)
                scalars = {"seed": settings.seed, "step": index}
                outputs = evaluating.step(batch.values, scalars, batch_is="local").outputs
                for name, value in outputs.items():
                    if not value.dim():
                        totals[name] += value.item()
        return {f"held_out_{name}": total / count for name, total in totals.items()}

    def _next(self, loader: BatchLoader) -> LocalBatch:
        """Return the next batch, after all processes of the run have loaded theirs."""
        problem: SbpError | None = None
        try:
            batch = loader.next()
        except SbpError as error:
            problem = error
        fail_together(self.step.team, problem)
        return batch
