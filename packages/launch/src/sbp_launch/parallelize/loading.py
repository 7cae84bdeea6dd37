"""States that are loaded where there may be fewer, or more: of what was frozen then, or is now.

saved while `backbone` was frozen     its moments begin anew, as they did then
saved while it was trained            its moments wait until it is trained here
step counters that differ             each parameter has one of its own from now on
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from sbp_launch.checkpoint.saving import ReadTogether
from sbp_launch.checkpoint.tensors import Tensors
from sbp_launch.parallelize.training import Training


def load_states(training: Training, states: Mapping[str, Tensor]) -> None:
    """Replace all states by others.

    Args:
        training: Whose.
        states: By name; in a `dict`, or of a checkpoint.

    Raises:
        SbpError: see `Session.load_state_dict`.
    """
    ahead = states.ahead if isinstance(states, ReadTogether) else states.__getitem__
    for tied in training.plan.ties.values():
        if len({float(ahead(name)) for name in tied if name in states}) > 1:
            training.count_apart()
            break
    known = set(training.names)
    missing = known - states.keys()
    fresh = training.fresh_states(missing, states.keys()) if missing else {}
    later = training.frozen_states(states.keys() - known)
    waiting = {name: ahead(name).clone() for name in later}
    taken: Mapping[str, Tensor] = states
    if fresh or later:
        names = [name for name in states if name not in later]
        if isinstance(states, ReadTogether):
            taken = _Together(states, names, fresh)
        else:
            taken = {**{name: states[name] for name in names}, **fresh}
    training.started.load_state_dict(taken)
    training.not_yet_needed = waiting


class _Together(Tensors):
    """Tensors that are read, and others that are in memory."""

    def __init__(self, read: Tensors, names: Sequence[str], held: Mapping[str, Tensor]) -> None:
        self._read, self._held, self._names = read, held, [*names, *held]

    @property
    def names(self) -> Collection[str]:
        """See `Tensors.names`."""
        return self._names

    def like(self, name: str) -> Tensor:
        """See `Tensors.like`."""
        return self._held[name].to("meta") if name in self._held else self._read.like(name)

    def part(self, name: str, bounds: Sequence[tuple[int, int]]) -> Tensor:
        """See `Tensors.part`."""
        if name in self._held:
            return self._held[name][tuple(slice(*one) for one in bounds)].clone()
        return self._read.part(name, bounds)
