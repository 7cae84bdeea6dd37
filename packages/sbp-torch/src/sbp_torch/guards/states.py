"""The tensors of a model and the states of its optimizer, while ranks train them elsewhere.

The states of a step live on its ranks. The model that it was captured from is connected to them: a
tensor of it that is read has the value of its state behind the last step, and what is written to
one is taken over before the next step. So `AveragedModel.update_parameters(model)`,
`model.load_state_dict(best)`, `torch.save(model.state_dict(), path)` and `optimizer.state_dict()`
mean what they mean in a loop on one device.

    step(batch)                      the states change on the ranks; the model is behind
    model.head.weight.norm()         __torch_function__ -> all tensors of the model are read
    model.head.weight.zero_()        its version is counted up
    step(batch)                      what was written is taken over, then the step is taken
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sbp_core.errors import RunError
from sbp_torch._torch_compat import as_plain_tensors, storage_key
from sbp_torch.capture import initial_states
from sbp_torch.capture.step import model_tensors
from sbp_torch.capture.update import AVERAGE
from sbp_torch.guards.optimizer_states import OptimizerStates
from sbp_torch.interchange.torch_states import to_optimizer_state
from sbp_torch.optim.combined import members
from sbp_torch.update_options import UpdateOptions

logger = logging.getLogger(__name__)

#: Reads states by name, whole, each as it is behind the last step.
ReadStates = Callable[[tuple[str, ...]], Mapping[str, Tensor]]

#: Attribute of a connected tensor: whose it is, its name, and whether its writes leave no trace.
_OWNER = "_sbp_states"


def _getters(*names: str) -> set[Any]:
    found = {getattr(Tensor, name) for name in names if hasattr(Tensor, name)}
    return {getattr(one, "__get__", one) for one in found}


def _setters(*names: str) -> set[Any]:
    return {getattr(Tensor, name).__set__ for name in names}


#: What tells of a tensor, but not of its values.
_ABOUT = {
    *_getters(
        *("_backward_hooks", "_base", "_grad_fn", "_post_accumulate_grad_hooks", "_version"),
        *("device", "dtype", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_mkldnn"),
        *("is_mps", "is_nested", "is_quantized", "is_sparse", "is_sparse_csr", "is_xpu"),
        *("itemsize", "layout", "name", "names", "nbytes", "ndim", "output_nr"),
        *("requires_grad", "retains_grad", "shape"),
    ),
    *_setters("_backward_hooks", "requires_grad"),
    *(
        getattr(Tensor, name)
        for name in (
            *("__hash__", "__len__", "_is_view", "data_ptr", "dim", "element_size", "get_device"),
            *("is_complex", "is_contiguous", "is_floating_point", "is_inference"),
            *("is_pinned", "is_same_size", "is_shared", "is_signed", "ndimension", "nelement"),
            *("numel", "register_hook", "requires_grad_", "size", "storage_offset", "stride"),
        )
    ),
}

(_GRAD,) = _getters("grad")

#: What writes, or hands out memory to be written, without a trace.
_UNTRACED = {
    *_getters("data"),
    *_setters("data"),
    Tensor.__array__,
    Tensor.__dlpack__,
    Tensor.numpy,
    Tensor.untyped_storage,
}

#: Where PyTorch itself looks for gradients in a loop that has none to give: what it does there to
#: parameters without a gradient is nothing.
_MAY_FIND_NO_GRADIENT = ("torch/optim/", "torch/nn/modules/module.py")


class _Connected:
    """A tensor of a model whose state lives on ranks; mixed into the tensor's own class."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in _ABOUT:
            with as_plain_tensors():
                return func(*args, **given)
        connected = [one for one in tree_leaves((args, given)) if isinstance(one, _Connected)]
        if func == _GRAD:
            return _gradient(args[0], sys._getframe(1).f_code.co_filename)
        if func == Tensor.__repr__:
            return connected[0]._read_as_plain(repr)
        for one in connected:
            _owner(one).asked_for(one, untraced=func in _UNTRACED or _is_untraced(one))
        with as_plain_tensors():
            found = func(*args, **given)
            for one in tree_leaves(found):
                if isinstance(one, Tensor) and not isinstance(one, _Connected):
                    _connect_alias(one, connected, untraced=func in _UNTRACED)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._read_as_plain(lambda plain: copy.deepcopy(plain, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._read_as_plain(lambda plain: plain.__reduce_ex__(protocol))

    def _read_as_plain(self: Any, call: Callable[[Any], Any]) -> Any:
        _owner(self).asked_for(self, untraced=False)
        with _as_before([self]):
            return call(self)


def _owner(tensor: Any) -> ConnectedStates:
    found: ConnectedStates = vars(tensor)[_OWNER][0]
    return found


def _is_ordinary(tensor: Tensor) -> bool:
    """Whether a tensor's class has no `__torch_function__` of its own."""
    classes = (one for one in type(tensor).__mro__ if "__torch_function__" in vars(one))
    return next(classes) in (Tensor, torch._C.TensorBase, nn.Parameter)


def _is_untraced(tensor: Any) -> bool:
    return bool(vars(tensor)[_OWNER][2])


def _connect(tensor: Tensor, owner: ConnectedStates, name: str, *, untraced: bool) -> None:
    vars(tensor)[_OWNER] = (owner, name, untraced)
    tensor.__class__ = _connected_class(type(tensor))


def _disconnect(tensor: Any) -> None:
    if isinstance(tensor, _Connected):
        del vars(tensor)[_OWNER]
        tensor.__class__ = type(tensor).__bases__[1]


#: By the class of a tensor, that of one that is connected.
_CLASSES: dict[type, Any] = {}


def _connected_class(cls: type) -> Any:
    if cls not in _CLASSES:
        _CLASSES[cls] = type(cls.__name__, (_Connected, cls), {"__module__": cls.__module__})
    return _CLASSES[cls]


@contextmanager
def _as_before(tensors: Iterable[Any]) -> Iterator[None]:
    """Let connected tensors be ordinary ones meanwhile."""
    changed: list[Any] = [one for one in tensors if isinstance(one, _Connected)]
    held = [vars(one).pop(_OWNER) for one in changed]
    for one in changed:
        one.__class__ = type(one).__bases__[1]
    try:
        yield
    finally:
        for one, entry in zip(changed, held, strict=True):
            vars(one)[_OWNER] = entry
            one.__class__ = _connected_class(type(one))


def _connect_alias(tensor: Tensor, connected: Iterable[Any], *, untraced: bool) -> None:
    """Connect a view of a connected tensor, so that it is read and written as that is."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return
    for one in connected:
        if storage_key(tensor) == storage_key(one):
            owner, name, before = vars(one)[_OWNER]
            _connect(tensor, owner, name, untraced=untraced or before)
            return


def _gradient(tensor: Any, caller: str) -> Tensor | None:
    """Return the gradient of a tensor.

    Raises:
        RunError: it has none, and somebody asks but PyTorch's own loops, which then do nothing.
    """
    with as_plain_tensors():
        found: Tensor | None = tensor.grad
    if found is not None or any(part in caller for part in _MAY_FIND_NO_GRADIENT):
        return found
    name = vars(tensor)[_OWNER][1]
    raise RunError(
        f"the gradient of {name!r} is asked for, and gradients live inside a step only",
        where=caller,
        accepted="what the step does with them: clip_norm=, update=UpdateOptions(...)",
        todo="clip by clip_norm= of parallelize; its norm is the metric 'grad_norm'; return "
        "others as metrics of the loss: torch.autograd.grad(loss, parameter, create_graph=True)",
    )


class ConnectedStates:
    """Connects the tensors of a model, and the states of its optimizer, to those of a step.

    Args:
        model: The one-device program. Tensors of classes that have a `__torch_function__` of their
            own, and those without values, are left alone.
        optimizer: Over the model's parameters.
        update: As given to `capture`.
        read: Reads states of the step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        update: UpdateOptions,
        read: ReadStates,
    ) -> None:
        self._model, self._optimizer, self._update, self._read = model, optimizer, update, read
        self._tensors = {
            name: tensor
            for name, tensor in model_tensors(model).items()
            if not tensor.is_meta and _is_ordinary(tensor)
        }
        self._versions = {name: one._version for name, one in self._tensors.items()}
        own = (
            name
            for name, one in model_tensors(model).items()
            if not (one.is_meta or _is_ordinary(one))
        )
        if (name := next(own, None)) is not None:
            logger.warning(
                "%r is of a class with a __torch_function__ of its own, so that it does not read "
                "as what is trained: step.state_dict() has it, and step.copy_to(model) writes it",
                name,
            )
        #: Of tensors whose memory was handed out: what it held then.
        self._handed_out: dict[str, Tensor] = {}
        self._is_behind = False
        begins = initial_states(model, optimizer, update, copy=False)
        #: The states of the step that are those of the optimizer.
        self._of_optimizers = tuple(name for name in begins if self._is_optimizers(name))
        self._states = [OptimizerStates(one, self.read_optimizer) for one in members(optimizer)]

    def connect(self, let_go: Callable[[bool], None]) -> None:
        """Begin: tensors and states are as those of the step.

        Args:
            let_go: Called if somebody else wants the model; disconnects it, or raises. Is told
                whether they have states of their own.
        """
        self.let_go = let_go
        for name, tensor in self._tensors.items():
            _connect(tensor, self, name, untraced=False)
        for one in self._states:
            one.connect()

    def behind_step(self) -> None:
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
        name = vars(tensor)[_OWNER][1]
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
        self._handed_out.clear()
        with as_plain_tensors():
            self._versions = {name: one._version for name, one in self._tensors.items()}

    def look_again(self) -> None:
        """Connect tensors that were put in the places of others: they count as written."""
        for name, tensor in model_tensors(self._model).items():
            if name in self._tensors and tensor is not self._tensors[name]:
                if isinstance(self._tensors[name], _Connected):
                    self.read_model()
                    _disconnect(self._tensors[name])
                self._tensors[name], self._versions[name] = tensor, -1
                if not isinstance(tensor, _Connected):
                    _connect(tensor, self, name, untraced=False)

    def written(self) -> dict[str, Tensor]:
        """Return what was written since the last step, by the names of the states."""
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
        if any(one.is_written() for one in self._states):
            self.read_optimizer()
            with self.apart():
                own = initial_states(self._model, self._optimizer, self._update, copy=False)
            found |= {name: own[name] for name in self._of_optimizers if name in own}
        return found

    def take_optimizer(self, states: Mapping[str, Tensor]) -> None:
        """Give the optimizer states that are those of the step."""
        with self.apart():
            for one in self._states:
                one.take(to_optimizer_state(states, self._model, one.optimizer)["state"])

    def _is_optimizers(self, name: str) -> bool:
        parameter, _, key = name.rpartition(".")
        return parameter in self._tensors and name not in self._tensors and key != AVERAGE

    def taken_over(self) -> None:
        """Note that what was written is in the states, or was overwritten there."""
        self._handed_out.clear()
        with as_plain_tensors():
            self._versions = {name: one._version for name, one in self._tensors.items()}
        for one in self._states:
            if one.is_written():
                one.taken_over()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Let the model's tensors be ordinary ones meanwhile, with the values that they have."""
        with ExitStack() as stack:
            stack.enter_context(_as_before(self._tensors.values()))
            for one in self._states:
                stack.enter_context(one.apart())
            yield

    def disconnect(self) -> None:
        """End: the model's tensors are ordinary ones again, with the values that they have."""
        for tensor in self._tensors.values():
            _disconnect(tensor)
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
        with self.apart():
            states = self._read(self._of_optimizers)
            for one in behind:
                one.take(to_optimizer_state(states, self._model, one.optimizer)["state"])


def connected_elsewhere(model: nn.Module) -> ConnectedStates | None:
    """Return what the tensors of a model are connected to; None if they are ordinary ones."""
    for tensor in model_tensors(model).values():
        if isinstance(tensor, _Connected):
            return _owner(tensor)
    return None
