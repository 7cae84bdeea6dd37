"""A model built without memory, and its states made one by one; see the package."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, ItemsView, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from sbp_core.errors import CaptureError
from sbp_torch.deferred_init.record import ConstructorRecorder
from sbp_torch.deferred_init.tape import Tape, TapeReplay, Window
from sbp_torch.graph_capture.side_effects import REGISTERS
from sbp_torch.graph_capture.step import model_tensors
from sbp_torch.graph_capture.update import Update, UpdateOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class DeferredModel:
    """A model without data and the way to make its states.

    Args:
        model: Its tensors are on the `meta` device; `capture` takes it as it is. To call it, take
            `whole_model()` instead, and load what was trained into that.
        seed: Of PyTorch's default generator before the constructor ran.
        build: The constructor.
        recorder: What it did.
    """

    model: nn.Module
    seed: int
    build: Callable[[], nn.Module]
    recorder: ConstructorRecorder

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
        tape, found = self.recorder.tape, model_tensors(self.model)
        values = {name: tensor.detach() for name, tensor in found.items()}
        if optimizer is not None:
            updating = Update(self.model, optimizer, update)
            states, copies = updating.values(), updating.copies()
            for entry in updating.inputs():
                value = states[entry.name].detach()
                if value.is_meta and entry.name not in copies:
                    raise CaptureError(
                        f"the state {entry.name!r} of {type(optimizer).__name__} starts with "
                        "values of its own",
                        accepted="one number for all elements, or a copy of the parameter",
                        todo="build the model with deferred(..., whole=True)",
                    )
                if value.is_meta:
                    with self.recorder.running():
                        value = found[entry.of or ""].detach().to(value.dtype)
                values[entry.name] = value
        windows = {name: tape.window(value) for name, value in values.items() if value.is_meta}
        real = {name: value for name, value in values.items() if not value.is_meta}
        return DeferredStates(tape, windows, real)

    def whole_model(self) -> nn.Module:
        """Return the model as one device has it: built anew under the seed, in one piece."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(self.seed)
            return self.build()


class DeferredStates(Mapping[str, Tensor]):
    """States by name, made when they are asked for; none is stored.

    Go through `items()` or `each()`, and let go of a tensor before you take the next: that draws
    most random numbers once, and needs the memory of one state at a time. `states[name]` makes one
    state; the first time it also draws the numbers of all that were drawn before. Tensors are not
    to be changed.

    Args:
        tape: What makes them.
        windows: The states to be made, by name.
        real: The states that are there already, by name.
    """

    def __init__(
        self, tape: Tape, windows: Mapping[str, Window], real: Mapping[str, Tensor]
    ) -> None:
        self._windows, self._real = windows, real
        self._replay = TapeReplay(tape)
        # States of one storage are made together; storages in the order of their last draws, since
        # the generator goes one way: what others draw in between is then known, or thrown away.
        together: dict[int, list[str]] = defaultdict(list)
        for name, window in windows.items():
            together[window.storage].append(name)
        self._groups = sorted(
            together.values(),
            key=lambda names: max(self._replay.draws(windows[names[0]]), default=-1),
        )

    def __getitem__(self, name: str) -> Tensor:
        if name in self._real:
            return self._real[name]
        return self._replay.values([self._windows[name]])[0]

    def __iter__(self) -> Iterator[str]:
        yield from self._real
        for names in self._groups:
            yield from names

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
        for group in self._groups:
            wanted = [name for name in group if name in names]
            if not wanted:
                continue
            made = self._replay.values([self._windows[name] for name in wanted])
            for name in wanted:  # each is handed over, so that the last frees their storage
                yield name, made.pop(0)


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
    recorder = ConstructorRecorder(seed)
    if whole:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            model = build()
    else:
        with recorder.running():
            model = build()
        # Tensors that modules hold in lists and mappings are no states: they get values.
        tape = recorder.tape
        states = {tape.window(t).storage for t in model_tensors(model).values() if t.is_meta}

        def real(value: Tensor) -> Tensor:
            is_state = value.is_meta and tape.window(value).storage in states
            return value if is_state else recorder.values(value)

        for module in model.modules():
            for key, value in vars(module).items():
                if isinstance(value, list | tuple | dict) and key not in REGISTERS:
                    setattr(module, key, tree_map_only(Tensor, real, value))
    return DeferredModel(model=model, seed=seed, build=build, recorder=recorder)
