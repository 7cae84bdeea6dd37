"""Keep the user's model and optimizer in sync with the states that the ranks train.

The states of a step live on its ranks. The model from which the step was captured is connected to
them: a read of its tensors returns the values after the last step, and a write to a tensor changes
the state before the next step. So `AveragedModel.update_parameters(model)`,
`model.load_state_dict(best)`, `torch.save(model.state_dict(), path)` and `optimizer.state_dict()`
work as in a loop on one device.

    step(batch)                      the states change on the ranks; the model is out of date
    model.head.weight.norm()         __torch_function__ -> all tensors of the model are read
    model.head.weight.zero_()        its version counter increases
    step(batch)                      the written values become states, then the step is taken
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sbp_core.errors import RunError
from sbp_torch._torch_compat import as_plain_tensors, storage_key
from sbp_torch.graph_capture import initial_states, trainable
from sbp_torch.graph_capture.step import model_tensors
from sbp_torch.graph_capture.update import AVERAGE
from sbp_torch.guards.connected import (
    Connected,
    OptimizerStates,
    as_before,
    connect,
    disconnect,
    is_ordinary,
    name_of,
    owner_of,
)
from sbp_torch.interchange.torch_states import to_optimizer_state
from sbp_torch.optim.combined import members
from sbp_torch.update_options import UpdateOptions

logger = logging.getLogger(__name__)

#: Names of states -> whole tensors, with their values after the last step.
ReadStates = Callable[[tuple[str, ...]], Mapping[str, Tensor]]


class ConnectedStates:
    """Connects the tensors of a model and the states of its optimizer to the states of a step.

    Args:
        model: The one-device program. Meta tensors, and tensors of classes with a
            `__torch_function__` of their own, are not connected.
        read: Function that reads states of the step.
    """

    def __init__(self, model: nn.Module, read: ReadStates) -> None:
        self._model, self._read = model, read
        #: The optimizers that train the model, with the options of their updates.
        self._programs: list[tuple[torch.optim.Optimizer, UpdateOptions]] = []
        every = {name: one for name, one in model_tensors(model).items() if not one.is_meta}
        self._tensors = {name: one for name, one in every.items() if is_ordinary(one)}
        self._versions = {name: one._version for name, one in self._tensors.items()}
        if (name := next((name for name in every if name not in self._tensors), None)) is not None:
            logger.warning(
                "%r is of a class with its own __torch_function__, so it does not show the "
                "trained values: step.state_dict() has them, step.copy_to(model) writes them",
                name,
            )
        #: Tensors whose memory the user may write unseen -> copies of the values at that time.
        self._handed_out: dict[str, Tensor] = {}
        self._is_behind = False
        #: Names of the step's optimizer states -> their dtypes.
        self._dtypes: dict[str, torch.dtype] = {}
        self._states: list[OptimizerStates] = []
        self._is_connected = False

    def add(
        self, optimizer: torch.optim.Optimizer, update: UpdateOptions, names: Collection[str]
    ) -> None:
        """Add an optimizer whose states the step has, or new states of a known optimizer.

        Call it only after earlier writes to the optimizer have reached the step.
        """
        if not any(optimizer is known and update is same for known, same in self._programs):
            self._programs.append((optimizer, update))
        begins = self._initial_states(optimizer, update)
        for name, one in begins.items():
            parameter, _, key = name.rpartition(".")
            is_optimizers = parameter in self._tensors and name not in self._tensors
            if name in names and is_optimizers and key != AVERAGE:
                self._dtypes[name] = one.dtype
        known = {id(one.optimizer) for one in self._states}
        for part in members(optimizer):
            if id(part) not in known:
                self._states.append(OptimizerStates(part, self.read_optimizer))
                if self._is_connected:
                    self._states[-1].connect()
        for states in self._states:
            states.is_behind |= states.optimizer in members(optimizer)

    def connect(self, let_go: Callable[[bool], None]) -> None:
        """Begin to connect. Tensors and states have the values of the step now.

        Args:
            let_go: Called if another user needs the model. It disconnects the model, or raises.
                Its argument is whether that user has states of their own.
        """
        self.let_go, self._is_connected = let_go, True
        # An unregistered tensor that shares memory with a registered one gets its own memory. The
        # `weight` of the older `spectral_norm` begins as `weight_orig.data`: both have separate
        # values, and would overwrite each other.
        model = self._model
        registered = {id(one) for one in (*model.parameters(), *model.buffers())}
        taken = {storage_key(one) for one in self._tensors.values() if id(one) in registered}
        for tensor in self._tensors.values():
            if id(tensor) not in registered and storage_key(tensor) in taken:
                tensor.data = tensor.data.clone()
        for name, tensor in self._tensors.items():
            connect(tensor, self, name)
        for one in self._states:
            one.connect()

    def note_step(self) -> None:
        """Note that the states of the step have changed."""
        self._is_behind = True
        for one in self._states:
            one.is_behind = True

    def asked_for(self, tensor: Any, *, untraced: bool) -> None:
        """Bring the model up to date before one of its tensors is used.

        Raises:
            RunError: the states are spread over ranks of other processes, or lost.
        """
        self.read_model()
        name = name_of(tensor)
        if untraced and name not in self._handed_out:
            with as_plain_tensors():
                self._handed_out[name] = self._tensors[name].detach().clone()

    def read_model(self) -> None:
        """Give the model's tensors the values of their states, unless they are up to date."""
        if not self._is_behind:
            return
        self.take_values(self._read(tuple(self._tensors)))

    def take_values(self, states: Mapping[str, Tensor]) -> None:
        """Copy the values of the states into the model's tensors."""
        with torch.no_grad(), as_plain_tensors():
            for name, tensor in self._tensors.items():
                tensor.data.copy_(states[name])
        self.in_step()

    def in_step(self) -> None:
        """Note that the model's tensors have the values of their states."""
        self._is_behind = False
        self._note_versions()

    def _note_versions(self) -> None:
        self._handed_out.clear()
        with as_plain_tensors():
            self._versions = {name: one._version for name, one in self._tensors.items()}

    def reconnect(self) -> None:
        """Connect tensors that have replaced connected tensors; they count as written."""
        for name, tensor in model_tensors(self._model).items():
            if name in self._tensors and tensor is not self._tensors[name]:
                if isinstance(self._tensors[name], Connected):
                    self.read_model()
                    disconnect(self._tensors[name])
                self._tensors[name], self._versions[name] = tensor, -1
                self.read_model()  # the other tensors: the next lines need an up-to-date model
                if not isinstance(tensor, Connected):
                    connect(tensor, self, name)

    def written_states(self) -> dict[str, Tensor]:
        """Return what was written since the last step, by the names of the states.

        Raises:
            RunError: a tensor was written through an alias from before the step, which may have
                had outdated values; or a state of the optimizer is missing.
        """
        with as_plain_tensors():
            found = {
                name: tensor.detach()
                for name, tensor in self._tensors.items()
                if tensor._version != self._versions[name]
                or (
                    name in self._handed_out
                    and not torch.equal(tensor.detach(), self._handed_out[name])
                )
            }
        if found and self._is_behind:
            raise RunError(
                f"{next(iter(found))!r} was written through an alias that was made before the "
                "parallel step began, such as parameter.data or a view",
                accepted="writes to the model's own tensors, and to aliases that were made since",
                todo="make the alias inside of the `with` block, or again after each step",
            )
        if any(one.is_written() for one in self._states):
            self.read_optimizer()
            own = {
                name: value
                for optimizer, update in self._programs
                for name, value in self._initial_states(optimizer, update).items()
            }
            for name, dtype in self._dtypes.items():
                if name in own:
                    found[name] = own[name].to(dtype)
                elif self._tensors[name.rpartition(".")[0]].requires_grad:
                    raise RunError(
                        f"the state {name!r} was removed from the optimizer",
                        accepted="states of other values, and optimizer.state.clear()",
                        todo="set it to zero: tensor.zero_()",
                    )
        return found

    def _initial_states(
        self, optimizer: torch.optim.Optimizer, update: UpdateOptions
    ) -> dict[str, Tensor]:
        """Return the present or initial states of an optimizer, also for frozen parameters."""
        with self.disconnected(), as_plain_tensors(), trainable([*self._model.parameters()]):
            return initial_states(self._model, optimizer, update, copy=False)

    def take_optimizer(
        self, states: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
    ) -> None:
        """Give an optimizer the states of the step."""
        with self.disconnected():
            for one in self._states:
                if one.optimizer in members(optimizer):
                    one.take(to_optimizer_state(states, self._model, one.optimizer)["state"])

    def taken_over(self) -> None:
        """Note that the writes have reached the states, or were overwritten there."""
        self._note_versions()
        for one in self._states:
            if one.is_written():
                one.taken_over()

    @contextmanager
    def disconnected(self) -> Iterator[None]:
        """Make the model's tensors ordinary inside the `with` block, with their present values."""
        with ExitStack() as stack:
            stack.enter_context(as_before(self._tensors.values()))
            for one in self._states:
                stack.enter_context(one.disconnected())
            yield

    def disconnect(self) -> None:
        """Make the model's tensors ordinary again, with their present values."""
        for tensor in self._tensors.values():
            disconnect(tensor)
        for one in self._states:
            one.disconnect()

    def read_all(self) -> None:
        """Give model and optimizer the values that they have in the step."""
        self.read_model()
        if self._tensors:
            self.read_optimizer()

    def read_optimizer(self) -> None:
        """Give optimizers their states in the step, unless the user has replaced the states.

        Raises:
            RunError: the states are spread over ranks of other processes, or lost.
        """
        behind = [one for one in self._states if one.is_behind and one.is_in_place]
        if not behind:
            return
        if not self._tensors:
            raise RunError(
                "the states of the optimizer are asked for, and live on the ranks only",
                todo="ask the step: step.optimizer_state_dict(), step.state_dict()",
            )
        with self.disconnected():
            states = self._read(tuple(self._dtypes))
            for one in behind:
                one.take(to_optimizer_state(states, self._model, one.optimizer)["state"])


def connected_elsewhere(model: nn.Module) -> ConnectedStates | None:
    """Return the `ConnectedStates` of a model; None if its tensors are ordinary."""
    for tensor in model_tensors(model).values():
        if isinstance(tensor, Connected):
            found: ConnectedStates = owner_of(tensor)
            return found
    return None
