"""The mean loss of a run over held-out data, on the session that trains.

Where parameters are averaged (`trainer.update.ema_decay`), the averages are evaluated.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from types import TracebackType

from sbp_core.compile import PhysicalPlan
from sbp_core.errors import SbpError
from sbp_core.runtime import Runtime, Session
from sbp_launch.data import BatchLoader, LocalBatch, LocalPart, is_for_gpus
from sbp_launch.planning.flow import Planned
from sbp_launch.run.run import Run
from sbp_launch.team import Team, fail_together
from sbp_launch.trainer.planned import plan_evaluation
from sbp_launch.trainer.program import Program


class Evaluator:
    """Evaluates what a session trains, as often as it is asked. Use it as a context manager.

    It is planned and started when it is first asked. Its batches are the same each time.

    Args:
        run: The run.
        program: Gives the batches.
        planned: What the session runs.
        session: Whose states are evaluated, where they are; it takes no step meanwhile.
        team: The processes of the run; this one alone if None.
    """

    def __init__(
        self,
        run: Run,
        program: Program,
        planned: Planned,
        session: Session,
        team: Team | None = None,
    ) -> None:
        self.run, self.program, self.planned, self.session = run, program, planned, session
        self.team = team or Team()
        self._started = ExitStack()
        self._evaluating: tuple[Session, PhysicalPlan] | None = None

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._started.close()

    def metrics(self) -> dict[str, float]:
        """Return `held_out_loss`, and `held_out_NAME` for each metric of the model: their means.

        All processes of the run call this. A micro-batch is evaluated at a time, by all ranks.

        Raises:
            RunError: a rank failed.
            SbpError: a sample cannot be loaded; names it.
        """
        settings = self.run.config.trainer
        evaluating, plan = self._session()
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
        """Return the next batch, if all processes of the run have theirs."""
        problem: SbpError | None = None
        try:
            batch = loader.next()
        except SbpError as error:
            problem = error
        fail_together(self.team, problem)
        return batch

    def _session(self) -> tuple[Session, PhysicalPlan]:
        if self._evaluating is None:
            runtime: Runtime = self.run.make("runtime")
            plan = plan_evaluation(self.run, self.program, self.planned).plan
            session = runtime.start(plan, self.session)
            self._evaluating = self._started.enter_context(session), plan
        return self._evaluating
