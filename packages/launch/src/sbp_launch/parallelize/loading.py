"""States that are loaded where there may be fewer, or more: of what was frozen then, or is now.

saved while `backbone` was frozen     its moments begin anew, as they did then
saved while it was trained            its moments are kept until it is trained here
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
    for tied in training.states.plan.ties.values():
        if len({float(ahead(name)) for name in tied if name in states}) > 1:
            training.count_apart()
            break
    known = set(training.states.names)
    frozen = training.states.frozen(states.keys() - known)
    training.keep({name: ahead(name).clone() for name in frozen})
    missing = known - states.keys()
    fresh = training.fresh(missing, states.keys()) if missing else {}
    taken: Mapping[str, Tensor] = states
    if fresh and isinstance(states, ReadTogether):
        taken = _Together(states, fresh)
    elif fresh:
        taken = {**states, **fresh}
    training.started.load_state_dict(taken)


class _Together(Tensors):
    """Tensors that are read, and others that are in memory."""

    def __init__(self, read: Tensors, held: Mapping[str, Tensor]) -> None:
        self._read, self._held, self._names = read, held, [*read.names, *held]

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
