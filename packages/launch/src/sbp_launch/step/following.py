"""`Following`: find what the user's training loop has changed since its step was captured.

The program's Python code runs only at capture. So before each step, `forms` asks this class whether
the loop has frozen a layer, changed a number or written to a weight, and acts:

    a value that the code read at capture    capture again: an equal graph goes on, another one is
                                             a new form, a failure is an error with the user's line
    modules or parameters are replaced       an error that names them
    new values of weights, buffers, states   copied to the ranks (`training`)
    values that differ between ranks         an error on all ranks (`training`)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from sbp_core.errors import RunError
from sbp_core.graph import LogicalGraph
from sbp_launch.planning.unchanged import check_unchanged
from sbp_launch.step.program import OneDeviceProgram
from sbp_launch.step.training import Training
from sbp_torch.graph_capture import NumberPlace
from sbp_torch.guards import ANEW, ChangedValue, Guard, modules_in_eval_mode


class Following:
    """Finds the changes of a captured program, and gives new values of its states to the ranks.

    Args:
        program: A program that is not captured yet.
    """

    def __init__(self, program: OneDeviceProgram) -> None:
        self._program = program
        self._guard = self._make_guard()
        self._evaluated: Guard | None = None
        #: Whether tensors of the model may have been replaced by others.
        self.looks_again = False
        asleep = () if program.model.training else modules_in_eval_mode(program.model)
        if asleep:
            warnings.warn(
                f"the model is in eval mode, and is trained in this mode: {asleep[0]!r} behaves as "
                "in evaluation; if you do not want this, call model.train() before parallelize",
                stacklevel=4,
            )

    # From capture to the first step.

    def note_capture(self, graph: LogicalGraph, again: Callable[[], LogicalGraph]) -> None:
        """Register that the step was captured; see `check_unchanged`."""
        check_unchanged(self._guard, graph, again, self._make_guard)

    def _make_guard(self) -> Guard:
        program = self._program
        return Guard(program.model, program.loss, program.optimizer, program.update)

    # Steps.

    def look(self) -> None:
        """Check whether tensors of the model may have been replaced by others."""
        self.looks_again |= not self._guard.holds()

    def changes(self) -> list[ChangedValue]:
        """Return the values read by the program that have changed since its last form was found."""
        found = self._guard.changes()
        self.looks_again |= bool(found)
        return found

    def take_over(self, training: Training) -> dict[str, Tensor]:
        """Copy to the ranks the values that were written to states; return them by state name."""
        looks_again, self.looks_again = self.looks_again, False
        return training.take_over(looks_again=looks_again)

    def accept(self, numbers: Collection[NumberPlace]) -> None:
        """Register that there is a form for the program in its present condition.

        Args:
            numbers: Floats that may change, because the form has inputs for them.
        """
        self._guard.renew(numbers)

    def has_other_forward(self) -> bool:
        """Whether the program may evaluate differently than at the last call of this function.

        Raises:
            RunError: its modules or parameters were replaced.
        """
        if self._evaluated is None:
            program = self._program
            self._evaluated = Guard(program.model, program.loss, program.optimizer)
            # Changes since the capture count, too.
            changes = self._guard.changes(training=False)
        else:
            changes = self._evaluated.changes(training=False)
        if any(one.is_structure for one in changes):
            raise self.refusal([one for one in changes if one.is_structure])
        if changes:
            self._evaluated.renew()
        return bool(changes)

    def refusal(self, changes: Sequence[ChangedValue], problem: str = "") -> RunError:
        """Return the error for a program that has changed and cannot be followed.

        Args:
            changes: The values that have changed.
            problem: Why there is no form for the changed program.
        """
        first, more = changes[0], len(changes) - 1
        also = f" (and {more} more: {'; '.join(one.what for one in changes[1:4])})" if more else ""
        return RunError(
            f"{first.what}: the captured step no longer fits{also}",
            where=(first.where, problem) if problem else first.where,
            accepted="changes of weights, buffers, optimizer states and learning rates; other "
            "changes, not of modules and parameters, after which the step can be captured again",
            todo=first.todo.replace(ANEW, self._program.anew),
        )
