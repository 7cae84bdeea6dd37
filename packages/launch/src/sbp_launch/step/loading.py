"""Load states when the set of frozen parameters differs from the one at the time of saving.

saved while `backbone` was frozen     its moments start afresh, as in the first step
saved while it was trained            its moments are kept until it is trained here
saved step counters differ            from now on, each parameter has its own step counter
saved as `backbone._orig_mod.weight`  loaded into `backbone.weight`
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from sbp_core.errors import SbpLookupError, unknown_name
from sbp_core.runtime import state_slots
from sbp_launch.checkpoint.names import match_names
from sbp_launch.checkpoint.saving import ReadTogether
from sbp_launch.checkpoint.tensors import Chosen, LazyTensors
from sbp_launch.step.training import Training
from sbp_torch.runtime import check_tensor


def load_states(training: Training, states: Mapping[str, Tensor]) -> None:
    """Replace all states.

    Args:
        training: The training whose states are replaced.
        states: New states by name: a `dict`, or the tensors of a checkpoint.

    Raises:
        SbpError: see `Session.load_state_dict`.
    """
    states = _match_names(training, states)
    ahead = states.ahead if isinstance(states, ReadTogether) else states.__getitem__
    known = set(training.states.names)
    kept = training.states.frozen_states(name for name in states if name not in known)
    _check(training, states, kept)
    missing = [name for name in training.states.names if name not in states]
    fresh: dict[str, Tensor] = {}
    if missing:
        with training.disconnected():
            fresh = training.states.fresh(missing, states.keys(), ahead)
    for tied in training.states.plan.ties.values():
        values = {float(fresh[name]) for name in tied if name in fresh}
        values |= {float(ahead(name)) for name in tied if name in states}
        if len(values) > 1:
            training.count_apart()
            break
    training.keep({name: ahead(name).clone() for name in kept})
    taken: Mapping[str, Tensor] = states
    if fresh and isinstance(states, ReadTogether):
        taken = _Together(states, fresh)
    elif fresh:
        taken = {**states, **fresh}
    training.started.load_state_dict(taken)


def _match_names(training: Training, states: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return states by the names that they have in the step."""
    own = training.states.names
    if isinstance(states, ReadTogether):
        states.call(own)
        return states
    names = match_names(states, own)
    if all(name == there for name, there in names.items()):
        return states
    if isinstance(states, LazyTensors):
        return Chosen(states, names)
    return {name: states[there] for name, there in names.items()}


def _check(training: Training, states: Mapping[str, Tensor], kept: Collection[str]) -> None:
    """Check the given states before any present state is replaced.

    Raises:
        SbpError: a state is unknown, or has another shape or dtype.
    """
    plan = training.states.plan
    slots = state_slots(plan)
    numbers = {name for tied in plan.ties.values() for name in tied}
    like = states.like if isinstance(states, ReadTogether) else states.__getitem__
    for name in states:
        if name in slots:
            slot = slots[name]
            check_tensor(name, like(name), slot.shape, slot.dtype)
        elif name not in numbers and name not in kept:
            error = unknown_name("state", name, slots)
            raise error.replaced(
                SbpLookupError,
                todo=f"{error.todo}; if it belongs to another program, add that program first: "
                "step.add_step(loss, batch, optimizer)",
            )


class _Together(LazyTensors):
    """Tensors that are read from a checkpoint, and tensors in memory, in one mapping."""

    def __init__(self, read: LazyTensors, held: Mapping[str, Tensor]) -> None:
        self._read, self._held, self._names = read, held, [*read.names, *held]

    @property
    def names(self) -> Collection[str]:
        """See `LazyTensors.names`."""
        return self._names

    def like(self, name: str) -> Tensor:
        """See `LazyTensors.like`."""
        return self._held[name].to("meta") if name in self._held else self._read.like(name)

    def part(self, name: str, bounds: Sequence[tuple[int, int]]) -> Tensor:
        """See `LazyTensors.part`."""
        if name in self._held:
            return self._held[name][tuple(slice(*one) for one in bounds)].clone()
        return self._read.part(name, bounds)
