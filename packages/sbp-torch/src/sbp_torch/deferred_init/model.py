"""A model built without memory, and its states made one by one; see the package."""

from __future__ import annotations

from collections.abc import Callable, Collection, ItemsView, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from sbp_torch.capture.initial_values import first_values
from sbp_torch.capture.step import model_tensors
from sbp_torch.deferred_init.families import families, remembered
from sbp_torch.deferred_init.record import ConstructorRecorder
from sbp_torch.deferred_init.replay import Replay
from sbp_torch.deferred_init.tape import Tape, Window
from sbp_torch.update_options import UpdateOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class DeferredModel:
    """A model without data and the way to make its states.

    Args:
        model: Its tensors lie on the `meta` device; `capture` takes it as it is. To call it, take
            `whole_model()` instead, and load what was trained into that.
        seed: Of PyTorch's default generator before the constructor ran.
        build: The constructor.
        recording: What it did.
    """

    model: nn.Module
    seed: int
    build: Callable[[], nn.Module]
    recording: ConstructorRecorder

    def states(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        update: UpdateOptions = UpdateOptions(),  # noqa: B008 - frozen
    ) -> DeferredStates:
        """Return every state of the captured graph by its input name, made on demand.

        States of the optimizer that hold one number, such as zero, are not made as whole tensors:
        they are that number, expanded, of which shards are cut at their own size.

        Args:
            optimizer: Over `model.parameters()`.
            update: As given to `capture`.

        Raises:
            CaptureError: the states of the optimizer before its first step are unknown.
        """
        tape = self.recording.tape
        found = model_tensors(self.model)
        real = {name: tensor.detach() for name, tensor in found.items() if not tensor.is_meta}
        windows = {name: tape.window(tensor) for name, tensor in found.items() if tensor.is_meta}
        if optimizer is not None:
            for name, first in first_values(self.model, optimizer, update).items():
                if first.value is not None:
                    real[name] = first.value
                    continue
                with self.recording.running():
                    copied = found[first.of].detach().to(first.dtype)
                windows[name] = tape.window(copied)
        return DeferredStates(tape, windows, real)

    def whole_model(self) -> nn.Module:
        """Return the model as one device has it: built anew under the seed, in one piece."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(self.seed)
            return self.build()


class DeferredStates(Mapping[str, Tensor]):
    """States by name, made when they are asked for; nothing is kept.

    Go through `items()` or `each()`, and let go of a tensor before you take the next: that draws
    every random number once, and holds one state at a time. `states[name]` makes one state; out of
    the order of iteration it may have to draw all numbers again. Tensors are not to be changed.

    Args:
        tape: What makes them.
        windows: The states to be made, by name.
        real: The states that are there already, by name.
    """

    def __init__(
        self, tape: Tape, windows: Mapping[str, Window], real: Mapping[str, Tensor]
    ) -> None:
        self._tape, self._windows, self._real = tape, windows, real
        self._order = [name for family in families(tape, windows) for name in family.states]
        self._replay = Replay(tape)

    def __getitem__(self, name: str) -> Tensor:
        if name in self._real:
            return self._real[name]
        return self._replay.values([self._windows[name]])[0]

    def __iter__(self) -> Iterator[str]:
        yield from self._real
        yield from self._order

    def __len__(self) -> int:
        return len(self._real) + len(self._windows)

    def __contains__(self, name: object) -> bool:
        return name in self._real or name in self._windows

    def items(self) -> ItemsView[str, Tensor]:
        """Return names and tensors, in the order in which they are best made."""
        return _Items(self)

    def each(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield some of the states by name; of the others only the random numbers are drawn.

        Args:
            names: Which; those that are no states are left aside.
        """
        for name, value in self._real.items():
            if name in names:
                yield name, value
        wanted = {name: window for name, window in self._windows.items() if name in names}
        made = families(self._tape, wanted)
        replay = Replay(self._tape, remembered(self._tape, made))
        for family in made:
            yield from replay.family(family)


class _Items(ItemsView[str, Tensor]):
    """Goes through the states in the order in which they are made."""

    _mapping: DeferredStates

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._mapping.each(self._mapping.keys())


def deferred(build: Callable[[], nn.Module], seed: int, *, whole: bool = False) -> DeferredModel:
    """Build a model without memory.

    Args:
        build: Returns the model. Everything that is done to its tensors before training belongs
            into it: `.to(dtype)`, loading a file of weights.
        seed: The states will be those after `torch.manual_seed(seed)`. The default generator is
            left as it was.
        whole: Build it for real, in one piece: for constructors that cannot be deferred.

    Raises:
        CaptureError: the constructor does what cannot be deferred; says at which line.
    """
    recording = ConstructorRecorder(seed)
    if whole:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            model = build()
    else:
        with recording.running():
            model = build()
        _make_unregistered(model, recording)
    return DeferredModel(model=model, seed=seed, build=build, recording=recording)


def _make_unregistered(model: nn.Module, recording: ConstructorRecorder) -> None:
    """Give values to tensors that modules hold in lists and mappings: those are no states."""
    tape = recording.tape
    states = {tape.window(t).storage for t in model_tensors(model).values() if t.is_meta}

    def real(value: Any) -> Any:
        deferred = isinstance(value, Tensor) and value.is_meta
        if not deferred or tape.window(value).storage in states:
            return value
        return recording.values(value)

    for module in model.modules():
        for key, value in vars(module).items():
            if isinstance(value, list | tuple | dict) and key not in _REGISTERS:
                setattr(module, key, tree_map(real, value))


#: Where modules keep what is registered.
_REGISTERS = ("_parameters", "_buffers", "_modules")
