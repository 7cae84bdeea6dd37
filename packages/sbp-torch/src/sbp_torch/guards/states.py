"""The tensors of a model and the states of its optimizer, while ranks train them elsewhere.

The states of a step live on its ranks. The model that it was captured from is connected to them: a
tensor of it that is read has the value of its state after the last step, and what is written to
one is taken over before the next step. So `AveragedModel.update_parameters(model)`,
`model.load_state_dict(best)`, `torch.save(model.state_dict(), path)` and `optimizer.state_dict()`
mean what they mean in a loop on one device.

    step(batch)                      the states change on the ranks; the model is behind
    model.head.weight.norm()         __torch_function__ -> all tensors of the model are read
    model.head.weight.zero_()        its version is counted up
    step(batch)                      what was written is taken over, then the step is taken
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

#: Reads states by name, whole, each as it is after the last step.
ReadStates = Callable[[tuple[str, ...]], Mapping[str, Tensor]]


class ConnectedStates:
    """Connects the tensors of a model and the states of its optimizer to the states of a step.

    Args:
        model: The one-device program. Tensors of classes that have a `__torch_function__` of their
            own, and those without values, are left alone.
        read: Reads states of the step.
    """

    def __init__(self, model: nn.Module, read: ReadStates) -> None:
        self._model, self._read = model, read
        #: What trains it: optimizers, with what else happens in a step of each.
        self._programs: list[tuple[torch.optim.Optimizer, UpdateOptions]] = []
        every = {name: one for name, one in model_tensors(model).items() if not one.is_meta}
        self._tensors = {name: one for name, one in every.items() if is_ordinary(one)}
        self._versions = {name: one._version for name, one in self._tensors.items()}
        if (name := next((name for name in every if name not in self._tensors), None)) is not None:
            logger.warning(
                "%r is of a class with a __torch_function__ of its own, so that it does not read "
                "as what is trained: step.state_dict() has it, and step.copy_to(model) writes it",
                name,
            )
        #: Of tensors whose memory was handed out: what it held then.
        self._handed_out: dict[str, Tensor] = {}
        self._is_behind = False
        #: dtypes of the states of the step that are those of optimizers.
        self._dtypes: dict[str, torch.dtype] = {}
        self._states: list[OptimizerStates] = []
        self._is_connected = False

    def add(
        self, optimizer: torch.optim.Optimizer, update: UpdateOptions, names: Collection[str]
    ) -> None:
        """Know the states of an optimizer, which the step has; if it is known, new ones of it.

        What was written to it before has been taken over.
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
        """Begin: tensors and states are as those of the step.

        Args:
            let_go: Called if somebody else wants the model; disconnects it, or raises. Is told
                whether they have states of their own.
        """
        self.let_go, self._is_connected = let_go, True
        # Tensors that modules hold unregistered are taken out of the memory of others. Such as the
        # `weight` of the older `spectral_norm`, which begins as `weight_orig.data`: each is to have
        # its own value, and would write over that of the other.
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
        """Bring the model up to date, as one of its tensors is asked for.

        Raises:
            RunError: the states are spread over ranks of other processes, or lost.
        """
        self.read_model()
        name = name_of(tensor)
        if untraced and name not in self._handed_out:
            with as_plain_tensors():
                self._handed_out[name] = self._tensors[name].detach().clone()

    def read_model(self) -> None:
        """Give the model's tensors the values of their states; nothing if they have them."""
        if not self._is_behind:
            return
        self.take_values(self._read(tuple(self._tensors)))

    def take_values(self, states: Mapping[str, Tensor]) -> None:
        """Give the model's tensors values that are those of its states."""
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
        """Connect tensors that were put in the places of others: they count as written."""
        for name, tensor in model_tensors(self._model).items():
            if name in self._tensors and tensor is not self._tensors[name]:
                if isinstance(self._tensors[name], Connected):
                    self.read_model()
                    disconnect(self._tensors[name])
                self._tensors[name], self._versions[name] = tensor, -1
                self.read_model()  # the others, as what follows takes the model to be up to date
                if not isinstance(tensor, Connected):
                    connect(tensor, self, name)

    def written(self) -> dict[str, Tensor]:
        """Return what was written since the last step, by the names of the states.

        Raises:
            RunError: something was written through an alias from before the step, which does not
                know that its values are behind; or a state of the optimizer is gone.
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
                        f"the state {name!r} of the optimizer was taken away",
                        accepted="states of other values, and optimizer.state.clear()",
                        todo="set it to zero: tensor.zero_()",
                    )
        return found

    def _initial_states(
        self, optimizer: torch.optim.Optimizer, update: UpdateOptions
    ) -> dict[str, Tensor]:
        """Return the states that an optimizer has now, or as they begin; also of what is frozen."""
        with self.disconnected(), as_plain_tensors(), trainable([*self._model.parameters()]):
            return initial_states(self._model, optimizer, update, copy=False)

    def take_optimizer(
        self, states: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
    ) -> None:
        """Give an optimizer states that are those of the step."""
        with self.disconnected():
            for one in self._states:
                if one.optimizer in members(optimizer):
                    one.take(to_optimizer_state(states, self._model, one.optimizer)["state"])

    def taken_over(self) -> None:
        """Note that what was written is in the states, or was overwritten there."""
        self._note_versions()
        for one in self._states:
            if one.is_written():
                one.taken_over()

    @contextmanager
    def disconnected(self) -> Iterator[None]:
        """Let the model's tensors be ordinary ones meanwhile, with the values that they have."""
        with ExitStack() as stack:
            stack.enter_context(as_before(self._tensors.values()))
            for one in self._states:
                stack.enter_context(one.disconnected())
            yield

    def disconnect(self) -> None:
        """End: the model's tensors are ordinary ones again, with the values that they have."""
        for tensor in self._tensors.values():
            disconnect(tensor)
        for one in self._states:
            one.disconnect()

    def read_all(self) -> None:
        """Give model and optimizer what they have in the step."""
        self.read_model()
        if self._tensors:
            self.read_optimizer()

    def read_optimizer(self) -> None:
        """Give optimizers the states that they have in the step, if nobody has since set them.

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
    """Return what the tensors of a model are connected to; None if they are ordinary ones."""
    for tensor in model_tensors(model).values():
        if isinstance(tensor, Connected):
            found: ConnectedStates = owner_of(tensor)
            return found
    return None
