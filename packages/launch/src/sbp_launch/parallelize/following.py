"""What a loop changes between steps: followed, or refused by name.

what the program read, changed, and it is the same step       followed: it is captured again
... and it is another step                                    another form, see `forms`
... and it cannot be captured                                 refused, with the user's line
weights, buffers, states of the optimizer that are written    taken over, see `training`
learning rates, written weights, batches that ranks differ in refused on all ranks, see there
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from torch import Tensor

from sbp_core.errors import ConfigError, RunError
from sbp_core.graph import LogicalGraph, graph_hash
from sbp_launch.parallelize.program import OneDeviceProgram
from sbp_launch.parallelize.training import Training
from sbp_torch.guards import Changed, Guard, modules_in_eval_mode


class Following:
    """Follows what becomes of the program of a step behind its capture.

    Args:
        program: Not yet captured.
    """

    def __init__(self, program: OneDeviceProgram) -> None:
        self._program = program
        self._guard = Guard(program.model, program.loss, program.optimizer, program.update)
        self._evaluated: Guard | None = None
        #: Whether other tensors may be in the places of the model's.
        self.looks_again = False
        asleep = () if program.model.training else modules_in_eval_mode(program.model)
        if asleep:
            warnings.warn(
                f"the model is in eval mode, and is trained in that, as in a loop of your own: "
                f"{asleep[0]!r} does what it does in evaluation; call model.train() before "
                "parallelize if that is not meant",
                stacklevel=4,
            )

    # From capture to the first step.

    def captured(self, graph: LogicalGraph, again: Callable[[], LogicalGraph]) -> None:
        """Note that the step was captured.

        What its capture has changed is set back. That it changes something once, such as a cache
        that is filled, is harmless: the next capture changes nothing more, and makes the same step.

        Args:
            graph: The captured step.
            again: Captures it.

        Raises:
            ConfigError: each capture changes what the program reads.
        """
        changes = self._guard.changes()
        if not changes:
            return
        program = self._program
        behind = Guard(program.model, program.loss, program.optimizer, program.update)
        try:
            is_once = graph_hash(again()) == graph_hash(graph) and not behind.changes()
        except Exception:  # also PyTorch's own, such as of tensors of the first capture
            is_once = False
        self._guard.restore()
        if not is_once:
            raise ConfigError(
                f"the loss changes what it reads: {changes[0].what}",
                where=changes[0].where,
                accepted="a loss that reads its batch, and changes nothing but buffers of the "
                "model",
                todo="return what is to be kept as a metric; or let it be a buffer of the model, "
                "which self.register_buffer(...) makes and copy_ changes",
            )

    # Steps.

    def look(self) -> None:
        """See whether other tensors may be in the places of the model's."""
        self.looks_again |= not self._guard.holds()

    def changes(self) -> list[Changed]:
        """Return what the program read and is not as it was when a form was last found for it."""
        found = self._guard.changes()
        self.looks_again |= bool(found)
        return found

    def take_over(self, training: Training) -> dict[str, Tensor]:
        """Take over what was written to the states; return it by their names."""
        looks_again, self.looks_again = self.looks_again, False
        return training.take_over(looks_again=looks_again)

    def accept(self) -> None:
        """Note that there is a form for the program as it is."""
        self._guard.renew()

    def has_other_forward(self) -> bool:
        """Whether the program may evaluate otherwise than when this was asked last.

        Raises:
            RunError: its modules or parameters are others.
        """
        if self._evaluated is None:
            program = self._program
            self._evaluated = Guard(program.model, program.loss, program.optimizer)
            # What has changed since capture counts, too.
            changes = self._guard.changes(training=False)
        else:
            changes = self._evaluated.changes(training=False)
        if any(one.is_structure for one in changes):
            raise refusal([one for one in changes if one.is_structure])
        if changes:
            self._evaluated.renew()
        return bool(changes)


def refusal(changes: Sequence[Changed], problem: str = "") -> RunError:
    """Return the error for a program that has changed and cannot be followed.

    Args:
        changes: What has.
        problem: Why there is no form for it.
    """
    first, more = changes[0], len(changes) - 1
    also = f" (and {more} more: {'; '.join(one.what for one in changes[1:4])})" if more else ""
    return RunError(
        f"{first.what}: it is another step now{also}",
        where=(first.where, problem) if problem else first.where,
        accepted="changes that need no other states, of what the step reads; weights, buffers, "
        "states of the optimizer, learning rates",
        todo=first.todo,
    )
