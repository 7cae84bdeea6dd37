"""Capture the step of a program, for the batch that a process gives or for another batch size."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

import torch

from sbp_core.errors import CaptureError, ConfigError
from sbp_core.graph import LogicalGraph
from sbp_launch.planning.flow import Captured, Planned, PlanSettings, capture_step
from sbp_launch.planning.proving import add_proof
from sbp_launch.step.numbers import Places
from sbp_launch.step.program import OneDeviceProgram
from sbp_torch.graph_capture import NO_NUMBERS, flatten_batch, rebuild_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCapture:
    """Captures the step of a program, and proves that its plan computes the same.

    Args:
        program: The program to capture.
        degree: Number of parts of processes that make a batch.
        settings: Settings of the capture.
        whole: An example of the batch of all processes, if known; it replaces the batch that a
            process gives.
        files: The config files of the model and its data, for messages.
    """

    program: OneDeviceProgram
    degree: int
    settings: PlanSettings
    whole: Any = None
    files: tuple[str, ...] = ()

    def __call__(self, batch: Any, numbers: Places = NO_NUMBERS, /) -> LogicalGraph:
        """Return the step of the program in its present condition, for a batch of one process.

        Args:
            batch: An example.
            numbers: Places of Python numbers that become inputs of the step.

        Raises:
            CaptureError: it cannot be captured.
            ConfigError: the model reads an entry of the batch that the data do not have.
        """
        return self._captured(batch, self._example(batch), numbers)

    def with_num_samples(self, batch: Any, size: int) -> LogicalGraph:
        """Return the step, captured for another number of samples.

        Args:
            batch: An example of what a process gives.
            size: Number of samples in the captured batch, of all processes together.

        Raises:
            SbpError: see `__call__`.
        """
        return self._captured(batch, _resize_batch(self._global_example(batch), size), NO_NUMBERS)

    def num_samples(self, batch: Any) -> int:
        """Return the number of samples in the batch of a step, of all processes together."""
        return _num_samples(self._global_example(batch))

    def _captured(self, batch: Any, example: Any, numbers: Places) -> LogicalGraph:
        program = self.program
        given = program.model, program.loss_of_step, example, program.optimizer
        try:
            return capture_step(*given, self.settings, numbers)
        except CaptureError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, ConfigError):
                cause = cause.__cause__
            if cause is not None and self.files:
                where = (*cause.where, *self.files)
                raise cause.replaced(ConfigError, where=where) from error
            told = self._told_samples(batch)
            if not told or numbers:
                raise
            todo = f"{error.todo}; {told}" if error.todo else told
            raise error.replaced(CaptureError, todo=todo) from error

    def _told_samples(self, batch: Any) -> str:
        """Return a sentence on the captured number of samples, if it differs from the given one."""
        given, taken = (
            next((len(one) for one in flatten_batch(made).values() if one.dim()), 0)
            for made in (batch, self._example(batch))
        )
        if given == taken or self.whole is not None:
            return ""
        whose = f"of {self.degree} processes" if self.degree > 1 else "of one micro-batch"
        return (
            f"the step is captured with the {taken} samples {whose}, where the batch has {given}: "
            f"a buffer with a row for each sample needs {taken} rows"
        )

    def prepare(self, graph: LogicalGraph, numbers: Places = NO_NUMBERS) -> Captured:
        """Return a captured graph, prepared for planning.

        Args:
            graph: The captured graph.
            numbers: Places of Python numbers that may be inputs of it.

        Raises:
            SbpError: it cannot be prepared.
        """
        return Captured.of(graph, self.settings, numbers)

    def _global_example(self, batch: Any) -> Any:
        """Return an example of the batch of all processes."""
        if self.whole is not None:
            return self.whole
        return captured_batch(batch, self.settings.micro_batches, self.degree, 1)

    def _example(self, batch: Any) -> Any:
        """Return an example of the batch for which the step is captured."""
        settings, given = self.settings, batch if self.whole is None else self.whole
        degree = self.degree if self.whole is None else 1
        return captured_batch(given, settings.micro_batches, degree, settings.captured_parts)

    def add_proof(
        self, made: Planned, captured: LogicalGraph, batch: Any, numbers: Places = NO_NUMBERS
    ) -> Planned:
        """Return a plan together with the result of its proof.

        Args:
            made: The plan of the captured step.
            captured: The step, captured for such a batch, cut into `settings.captured_parts`.
            batch: A batch of one process.
            numbers: Places of Python numbers that are inputs of the captured step.
        """
        program, known = self.program, self._example(batch)

        def capture(batch: Any) -> LogicalGraph:
            given = (program.model, program.loss_of_step, batch, program.optimizer)
            return capture_step(*given, made.settings, numbers)

        return add_proof(made, captured, known, program.own_states, capture)


def captured_batch(batch: Any, count: int, degree: int, parts: int) -> Any:
    """Return an example of the captured part of a step over all ranks, nested as the batch is.

    Args:
        batch: An example of the batch that one process gives in one step.
        count: Number of micro-batches of a step.
        degree: Number of such batches that a step takes over all ranks.
        parts: Number of parts of a step, of which one is captured: `count`, or 1 for the whole.

    Raises:
        ConfigError: a tensor of the batch has no samples, or does not divide into micro-batches.
    """
    found = flatten_batch(batch)
    for name, value in found.items():
        if value.dim() and not value.shape[0]:
            raise ConfigError(
                f"the batch has no samples: {name!r} is of shape {tuple(value.shape)}",
                where="batch",
                accepted="at least one sample in each tensor of the batch",
                todo="leave out the steps whose batches are empty",
            )
        if value.dim() and value.shape[0] % count:
            divisors = [n for n in range(1, value.shape[0] + 1) if value.shape[0] % n == 0]
            raise ConfigError(
                f"{name!r} of the batch has {value.shape[0]} samples, which do not divide into "
                f"micro_batches={count}",
                where="the argument micro_batches",
                accepted=f"micro_batches one of {', '.join(map(str, divisors))}",
                todo="take another size of batch, or other micro-batches; if these are time steps, "
                "give the dim of the samples, such as batch_dim=1",
            )
    taken = {
        name: torch.cat([value[: len(value) // parts]] * degree) if value.dim() else value
        for name, value in found.items()
    }
    return rebuild_batch(batch, taken)


def _num_samples(batch: Any) -> int:
    """Return the number of samples of a batch; if its tensors differ, the greatest divisor."""
    return gcd(*(len(value) for value in flatten_batch(batch).values() if value.dim()))


def _resize_batch(batch: Any, size: int) -> Any:
    """Return a batch of a given number of samples, some of which may repeat."""
    num = _num_samples(batch)
    if size == num:
        return batch
    rows = {
        name: value[torch.arange(len(value) // num * size) % len(value)] if value.dim() else value
        for name, value in flatten_batch(batch).items()
    }
    return rebuild_batch(batch, rows)
