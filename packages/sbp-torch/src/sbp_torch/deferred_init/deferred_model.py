"""`deferred`: build a model without memory. `DeferredStates`: create its states one by one.

See the package for an example. `record` records the constructor, `tape` creates the states.
"""

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
    """A model without data, and the record from which its states are created.

    Args:
        model: The model, with tensors on the `meta` device, as `capture` accepts it. For a model
            to call, use `whole_model()`, and load the trained states into it.
        seed: Seed of PyTorch's default generator for the constructor.
        build: The constructor.
        recorder: The record of the constructor's operators.
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
        """Return every state of the captured graph by its input name, created on demand.

        A state of the optimizer that starts with one number, such as zero, takes no memory for the
        whole tensor: it is this number, expanded, and only its shards take memory.

        Args:
            optimizer: The optimizer of `model.parameters()`.
            update: The options that `capture` gets.

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
        """Build the model again in one piece, with data, from the same seed."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(self.seed)
            return self.build()


class DeferredStates(Mapping[str, Tensor]):
    """A mapping from names to states, which are created at each request and not stored.

    Iterate over `items()` or `each()`, and drop a tensor before you take the next: this draws most
    random numbers once, and needs the memory of one state at a time. `states[name]` creates one
    state; the first time, it also draws all random numbers before it. Do not change the tensors.

    Args:
        tape: The record from which states are created.
        windows: Name -> window of a state to create.
        real: Name -> state that exists already.
    """

    def __init__(
        self, tape: Tape, windows: Mapping[str, Window], real: Mapping[str, Tensor]
    ) -> None:
        self._windows, self._real = windows, real
        self._replay = TapeReplay(tape)
        # States of one storage are created together; storages in the order of their last draws,
        # because the generator only moves forward. Draws of other states in between are dropped.
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
        """Return names and tensors, in the order of least cost."""
        return _Items(self)

    def each(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield some of the states by name; for all other states, only random numbers are drawn.

        Args:
            names: Names of states; unknown names are ignored.
        """
        for name, value in self._real.items():
            if name in names:
                yield name, value
        for group in self._groups:
            wanted = [name for name in group if name in names]
            if not wanted:
                continue
            made = self._replay.values([self._windows[name] for name in wanted])
            for name in wanted:  # keep no reference, so that the storage can be freed
                yield name, made.pop(0)


class _Items(ItemsView[str, Tensor]):
    """Iterates over the states in the order in which they are created."""

    _mapping: DeferredStates

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._mapping.each(self._mapping.keys())


def deferred(build: Callable[[], nn.Module], seed: int, *, whole: bool = False) -> DeferredModel:
    """Build a model without memory.

    Args:
        build: Returns the model. Everything that is done to its tensors before training belongs
            into it: `.to(dtype)`, loading a file of weights.
        seed: Seed for the states, as in `torch.manual_seed(seed)`. The default generator is
            unchanged.
        whole: Whether to build the model with data, in one piece: for constructors that cannot be
            deferred.

    Raises:
        CaptureError: the constructor cannot be deferred; the error names the line.
    """
    recorder = ConstructorRecorder(seed)
    if whole:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            model = build()
    else:
        with recorder.running():
            model = build()
        # Tensors in lists and mappings of modules are no states: they get values.
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
