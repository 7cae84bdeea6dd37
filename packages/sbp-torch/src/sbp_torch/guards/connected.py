"""Bring tensors of a model and states of an optimizer up to date before the user's code reads them.

`ConnectedStates` connects the user's model and optimizer in this way, because ranks train copies of
their tensors. `__torch_function__` of a connected tensor sees every operator, and methods of
`OptimizerStates` see every access to the `state` of an optimizer.
"""

from __future__ import annotations

import copy
import functools
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sbp_core.errors import ConfigError, RunError
from sbp_torch._torch_compat import as_plain_tensors, is_tracing, storage_key
from sbp_torch._torch_patches import replaced


class Owner(Protocol):
    """Brings connected tensors up to date: `ConnectedStates` or `OptimizerStates`."""

    def asked_for(self, tensor: Any, *, untraced: bool) -> None:
        """Prepare for a read or write of a tensor.

        Args:
            tensor: The tensor.
            untraced: Whether writes to the tensor leave its version counter unchanged.
        """

    def let_go(self, has_states: bool) -> None:
        """Make all tensors ordinary again, with their present values.

        Args:
            has_states: Whether the caller has other values for them.

        Raises:
            ConfigError: they are still trained.
        """


#: Attribute of a connected tensor: owner, name, and whether writes leave its version unchanged.
OWNER = "_sbp_states"


def _getters(*names: str) -> set[Any]:
    found = {getattr(Tensor, name) for name in names if hasattr(Tensor, name)}
    return {getattr(one, "__get__", one) for one in found}


def _setters(*names: str) -> set[Any]:
    return {getattr(Tensor, name).__set__ for name in names}


#: Functions that ask for properties of a tensor, but not for its values.
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
            *("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "numel"),
            *("register_hook", "requires_grad_", "size", "storage_offset", "stride"),
        )
    ),
    *(torch.empty_like, torch.full_like, torch.ones_like, torch.zeros_like),
    *(torch.rand_like, torch.randn_like),
}

(_GRAD,) = _getters("grad")
_SETS_DATA = _setters("data")

#: Names of operators that write to tensors without an increase of the version counter.
_WITHOUT_VERSIONS = re.compile(r"batch_norm|instance_norm|moving_avg_obs|^_fused_\w+_$")

#: Functions that write to a tensor, or return its memory, and leave its version counter unchanged.
_UNTRACED = {
    *_getters("data"),
    *_setters("data"),
    Tensor.__array__,
    Tensor.__dlpack__,
    Tensor.numpy,
    Tensor.storage,
    Tensor.untyped_storage,
    *(nn.functional.batch_norm, nn.functional.instance_norm),
    # They update running statistics and weights, but no version counters.
    *(getattr(torch, name) for name in dir(torch) if _WITHOUT_VERSIONS.search(name)),
}

#: Files of PyTorch that read gradients. Their loops skip parameters without a gradient. Only for
#: clipping is this an error, because the user would believe that gradients were clipped.
_OF_TORCH, _CLIPPING = "/torch/", "/torch/nn/utils/clip_grad"

#: The code that requires a detached tensor to have the class of the original tensor.
_MAKES_PARAMETER = nn.Parameter.__new__.__code__


class Connected:
    """Mixin for a tensor of a model whose state lives on ranks, added to the tensor's own class."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in _ABOUT:
            with as_plain_tensors():
                return func(*args, **given)
        connected = [one for one in tree_leaves((args, given)) if isinstance(one, Connected)]
        if func == _GRAD:
            return _gradient(args[0], sys._getframe(1).f_code.co_filename)
        if func in (Tensor.__repr__, Tensor.__format__):
            return args[0]._read_as_plain(lambda plain: func(plain, *args[1:], **given))
        if connected and is_tracing():  # of another model: in capture, a model's own are replaced
            raise trained_elsewhere(name_of(connected[0]))
        for one in connected:
            owner_of(one).asked_for(one, untraced=func in _UNTRACED or vars(one)[OWNER][2])
        with as_plain_tensors():
            found = func(*args, **given)
            for one in tree_leaves(found):
                if isinstance(one, Tensor) and not isinstance(one, Connected):
                    _connect_alias(one, connected, untraced=func in _UNTRACED)
            if func in _SETS_DATA:  # the assigned tensor is an alias from now on
                _connect_alias(args[1], connected[:1], untraced=True)
        if func == Tensor.detach and sys._getframe(1).f_code is _MAKES_PARAMETER:
            found.__class__ = type(args[0])  # nn.Parameter(tensor) requires it
        return found

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return an ordinary tensor: tensors created through this class are not connected."""
        return cls.__bases__[1](*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._read_as_plain(lambda plain: copy.deepcopy(plain, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._read_as_plain(lambda plain: plain.__reduce_ex__(protocol))

    def _read_as_plain(self: Any, call: Callable[[Any], Any]) -> Any:
        owner_of(self).asked_for(self, untraced=False)
        with as_before([self]):
            return call(self)


def owner_of(tensor: Any) -> Any:
    """Return the owner of a connected tensor."""
    return vars(tensor)[OWNER][0]


def name_of(tensor: Any) -> str:
    """Return the name that a tensor was connected under."""
    return str(vars(tensor)[OWNER][1])


def is_ordinary(tensor: Tensor) -> bool:
    """Whether a tensor's class has no `__torch_function__` of its own."""
    classes = (one for one in type(tensor).__mro__ if "__torch_function__" in vars(one))
    return next(classes) in (Tensor, torch._C.TensorBase, nn.Parameter)


def connect(tensor: Tensor, owner: Owner, name: str, *, untraced: bool = False) -> None:
    """Make a tensor call its owner before each read or write."""
    vars(tensor)[OWNER] = (owner, name, untraced)
    tensor.__class__ = _connected_class(type(tensor))


def disconnect(tensor: Any) -> None:
    """Make a tensor ordinary again."""
    if isinstance(tensor, Connected):
        del vars(tensor)[OWNER]
        tensor.__class__ = type(tensor).__bases__[1]


#: Class of a tensor -> class of such a tensor when it is connected.
_CLASSES: dict[type, Any] = {}


def _connected_class(cls: type) -> Any:
    if cls not in _CLASSES:
        _CLASSES[cls] = type(cls.__name__, (Connected, cls), {"__module__": cls.__module__})
    return _CLASSES[cls]


def is_let_go(tensor: Tensor) -> bool:
    """Whether a tensor is ordinary; a connected tensor is made ordinary if its training is over."""
    if isinstance(tensor, Connected):
        try:
            owner_of(tensor).let_go(False)
        except ConfigError:
            return False
        disconnect(tensor)  # it may be an alias, of which the owner does not know
    return True


def trained_elsewhere(name: str, where: str = "") -> RunError:
    """Return the error for a program that reads a tensor which another step trains."""
    return RunError(
        f"the program reads {name!r}, which another step trains",
        where=where,
        accepted="tensors of the model that is given, of the batch, and constants",
        todo="let both models be modules of one, such as nn.ModuleDict, which two losses train in "
        "turn: step.add_step(loss, batch, optimizer)",
    )


@contextmanager
def as_before(tensors: Iterable[Any]) -> Iterator[None]:
    """Make connected tensors ordinary inside the `with` block."""
    changed: list[Any] = [one for one in tensors if isinstance(one, Connected)]
    held = [vars(one).pop(OWNER) for one in changed]
    for one in changed:
        one.__class__ = type(one).__bases__[1]
    try:
        yield
    finally:
        for one, entry in zip(changed, held, strict=True):
            if not isinstance(one, Connected):  # else it was connected inside the block
                vars(one)[OWNER] = entry
                one.__class__ = _connected_class(type(one))


def _connect_alias(tensor: Tensor, connected: Iterable[Any], *, untraced: bool) -> None:
    """Connect a tensor that shares memory with a connected tensor, to the same owner."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return
    for one in connected:
        try:
            is_alias = storage_key(tensor) == storage_key(one)
        except NotImplementedError:  # of transforms, such as vmap
            return
        if is_alias:
            owner, name, before = vars(one)[OWNER]
            connect(tensor, owner, name, untraced=untraced or before)
            return


def _gradient(tensor: Any, caller: str) -> Tensor | None:
    """Return the gradient of a tensor.

    Raises:
        RunError: it has none, and the caller is none of PyTorch's loops that skip such tensors.
    """
    with as_plain_tensors():
        found: Tensor | None = tensor.grad
    is_of_torch = _OF_TORCH in caller and _CLIPPING not in caller
    if found is not None or is_of_torch:
        return found
    name = vars(tensor)[OWNER][1]
    raise RunError(
        f"the gradient of {name!r} is asked for, and gradients live inside a step only",
        where=caller,
        accepted="what the step does with them: update={'clip_norm': ...}",
        todo="clip with update={'clip_norm': ...}, whose metric 'grad_norm' is the norm; return "
        "other figures as metrics of the loss: torch.autograd.grad(loss, parameter, "
        "create_graph=True)",
    )


class OptimizerStates(defaultdict[Any, Any]):
    """The `state` of an optimizer, which reads its values from a step at each access."""

    def __init__(self, optimizer: torch.optim.Optimizer, read: Callable[[], None]) -> None:
        super().__init__(dict)
        self.optimizer, self._read = optimizer, read
        self.is_behind = self._is_apart = self._is_touched = False
        self._before: Any = optimizer.state
        self._known: dict[tuple[int, Any], tuple[Any, int]] = {}

    def connect(self) -> None:
        """Begin to connect. The optimizer has the states of the step now."""
        self._before = self.optimizer.state
        dict.update(self, self._before)
        self.optimizer.state = self
        self._note()

    def disconnect(self) -> None:
        """Give the optimizer an ordinary mapping with its present states."""
        for tensor in self._tensors():
            disconnect(tensor)
        if self.is_in_place:
            self._before.clear()
            self._before.update(dict.items(self))
            self.optimizer.state = self._before

    @contextmanager
    def disconnected(self) -> Iterator[None]:
        """Act as an ordinary mapping of ordinary tensors inside the `with` block."""
        with replaced(self, _is_apart=True), as_before([*self._tensors()]):
            yield

    def _tensors(self) -> Iterator[Tensor]:
        for held in dict.values(self.optimizer.state):
            yield from (one for one in held.values() if isinstance(one, Tensor))

    def asked_for(self, tensor: Any, *, untraced: bool) -> None:
        """See `Owner.asked_for`."""
        self.ask()
        self._is_touched |= untraced

    def let_go(self, has_states: bool) -> None:
        """Refuse: states stay connected as long as their optimizer. See `Owner.let_go`.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("a state of an optimizer that a parallel step has is no constant")

    def ask(self) -> None:
        """Read the states if they are out of date, except inside `disconnected`."""
        if self.is_behind and not self._is_apart:
            self._read()

    def take(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Take states by the number of their parameter, as in `state_dict()`.

        States that the step lacks, because their parameters are frozen, stay.
        """
        members = [one for group in self.optimizer.param_groups for one in group["params"]]
        for number, held in states.items():
            own = dict.setdefault(self, members[number], {})
            for key, value in held.items():
                before = own.get(key)
                with torch.no_grad(), as_plain_tensors():
                    if isinstance(before, Tensor) and is_alike(before, value):
                        before.data.copy_(value)  # in place: the user may hold this tensor
                    else:
                        own[key] = value
        self.is_behind = False
        self._note()

    def _entries(self) -> dict[tuple[int, Any], tuple[Any, int]]:
        return {
            (id(parameter), key): (value, version_of(value))
            for parameter, held in dict.items(self.optimizer.state)
            for key, value in held.items()
        }

    def _note(self) -> None:
        self._is_touched = False
        with as_plain_tensors():
            for tensor in self._tensors():
                if type(tensor) is Tensor:
                    connect(tensor, self, "a state of the optimizer")
            self._known = self._entries()

    @property
    def is_in_place(self) -> bool:
        """Whether this mapping is still the `state` of the optimizer."""
        return self.optimizer.state is self

    def is_written(self) -> bool:
        """Whether the user has changed the states that were read, or has replaced them."""
        if not self.is_in_place:
            return True
        if self.is_behind:  # nobody has read or written them since the last step
            return False
        with as_plain_tensors():
            now, known = self._entries(), self._known
        if self._is_touched:
            return True
        return now.keys() != known.keys() or any(
            value is not known[key][0] or version != known[key][1]
            for key, (value, version) in now.items()
        )

    def taken_over(self) -> None:
        """Take the optimizer's present states as those of the step."""
        if not self.is_in_place:
            dict.clear(self)
            self.connect()
        self.is_behind = False
        self._note()

    def __reduce__(self) -> Any:
        self.ask()
        return defaultdict, (dict,), None, None, iter([*dict.items(self)])


def is_alike(before: Tensor, value: Any) -> bool:
    """Whether a value is a tensor with the shape, dtype and device of another tensor."""
    if not isinstance(value, Tensor):
        return False
    return (before.shape, before.dtype, before.device) == (value.shape, value.dtype, value.device)


def version_of(value: Any) -> int:
    """Return the version counter of a tensor; -1 for other values and for inference tensors."""
    if not isinstance(value, Tensor) or value.is_inference():
        return -1
    return value._version


def _asking_method(name: str) -> Any:
    original = getattr(defaultdict, name)

    @functools.wraps(original)
    def method(self: OptimizerStates, *args: Any, **kwargs: Any) -> Any:
        self.ask()
        return original(self, *args, **kwargs)

    return method


for _name in (
    *("__contains__", "__delitem__", "__eq__", "__getitem__", "__iter__", "__len__", "__repr__"),
    *("__setitem__", "clear", "copy", "get", "items", "keys", "pop", "popitem", "setdefault"),
    *("update", "values"),
):
    setattr(OptimizerStates, _name, _asking_method(_name))
