"""Convert nested batches to named tensors and back, and move the dim of their samples.

before: {"text": (ids, mask), "labels": y}           nested, as the loss takes it
after:  {"text.0": ids, "text.1": mask, "labels": y}  flat, as graphs and sessions name them

Other values are refused: a number or string would be the same in every step. None stays None.

before: x (time, samples, features)    in the user's loop and loss
after:  x (samples, time, features)    in capture, plan and inputs of a step
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from sbp_core.errors import CaptureError, SbpValueError
from sbp_torch.graph_capture.diagnostics import check_dense

T = TypeVar("T")

#: Plain values, which a batch cannot hold: they would become constants of the captured step.
_CONSTANTS = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)


def flatten_batch(batch: Any) -> dict[str, Tensor]:
    """Return the tensors of a batch by name.

    A name joins the keys and positions of the path to a tensor by dots; a batch that is one tensor
    has the name `batch`.

    Args:
        batch: A tensor; or tensors and None in mappings, sequences, named tuples, dataclasses, and
            types that are registered with `torch.utils._pytree`.

    Raises:
        CaptureError: two tensors would have the same name; a tensor is sparse, or has additional
            attributes; or the batch holds another value, such as a number or a NumPy array.
    """
    found: dict[str, Tensor] = {}
    for path, tensor in _leaves(batch, ""):
        name = path if batch is not tensor else "batch"
        if name in found:
            raise CaptureError(
                f"two tensors of the batch are called {name!r}", accepted="keys without dots"
            )
        todo = "make it dense: .to_dense(); or pass its parts separately, such as its indices and "
        check_dense(name, tensor, of="batch", todo=f"{todo}values")
        own = next((key for key in vars(tensor) if not key.startswith("_")), None)
        if own is not None and type(tensor) is Tensor:
            raise CaptureError(
                f"the tensor {name!r} of the batch has an attribute {own!r}, which a step does not "
                "see",
                accepted="attributes that are set on parameters and buffers",
                todo=f"pass it as an entry of the batch of its own: {{..., {own!r}: ...}}",
            )
        found[name] = tensor
    return found


def rebuild_batch(batch: T, tensors: Mapping[str, Tensor]) -> T:
    """Return a batch of the same form with other tensors, by the names of `flatten_batch`."""
    if isinstance(batch, Tensor):
        return tensors["batch"]  # type: ignore[return-value] # T is Tensor
    made: T = _rebuilt(batch, "", tensors)
    return made


def _children(value: Any) -> list[tuple[str, Any]] | None:
    """Return the named parts of a container; None for any other value."""
    if isinstance(value, Mapping):
        return [(str(key), part) for key, part in value.items()]
    if isinstance(value, tuple | list | deque):
        return [(str(index), part) for index, part in enumerate(value)]
    if is_dataclass(value) and not isinstance(value, type):
        return [(entry.name, getattr(value, entry.name, None)) for entry in fields(value)]
    if value is None or isinstance(value, (Tensor, *_CONSTANTS)):
        return None
    parts, form = tree_flatten(value, is_leaf=lambda part: part is not value)
    if form.is_leaf():
        return None
    return [(str(index), part) for index, part in enumerate(parts)]


def _leaves(value: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors by name."""
    if isinstance(value, Tensor):
        yield prefix, value
        return
    if value is None:
        return
    children = _children(value)
    if children is None:
        raise _refusal(value, prefix)
    for name, part in children:
        yield from _leaves(part, f"{prefix}.{name}" if prefix else name)


def _refusal(value: object, name: str) -> CaptureError:
    """Return the error for a value that is neither a tensor nor a container of tensors."""
    what, kind = f"{name!r} of the batch" if name else "the batch", type(value)
    accepted = (
        "tensors and None, in mappings, sequences, dataclasses and nodes that are registered with "
        "torch.utils._pytree"
    )
    if not isinstance(value, _CONSTANTS):
        return CaptureError(
            f"{what} is of type {kind.__module__}.{kind.__qualname__}: what it holds would be the "
            "same in every step",
            accepted=accepted,
            todo="convert arrays by torch.from_numpy and their numbers by torch.tensor; register "
            "a class by torch.utils._pytree.register_pytree_node, or make it a dataclass",
        )
    as_tensor = ""
    if isinstance(value, bool | int | float | complex):
        as_tensor = f"make it a tensor, as in torch.tensor({value!r}), or "
    return CaptureError(
        f"{what} is {value!r} of type {kind.__qualname__}: it would be the same in every step",
        accepted=accepted,
        todo=f"{as_tensor}put it into the loss function",
    )


def _rebuilt(value: Any, prefix: str, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return tensors[prefix]
    children = _children(value)
    if children is None:
        return value
    parts = [
        _rebuilt(part, f"{prefix}.{name}" if prefix else name, tensors) for name, part in children
    ]
    if isinstance(value, MutableMapping):
        rebuilt = copy.copy(value)
        for key, part in zip(value, parts, strict=True):
            rebuilt[key] = part
        return rebuilt
    if isinstance(value, Mapping):
        return dict(zip(value, parts, strict=True))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*parts)
    if isinstance(value, deque):
        return type(value)(parts, value.maxlen)
    if isinstance(value, tuple | list):
        return type(value)(parts)
    if is_dataclass(value) and not isinstance(value, type):
        # Copy it instead of calling its constructor, which would compute from the new tensors.
        made: Any = copy.copy(value)
        for (name, _), part in zip(children, parts, strict=True):
            object.__setattr__(made, name, part)
        return made
    _, form = tree_flatten(value, is_leaf=lambda part: part is not value)
    return tree_unflatten(parts, form)


@dataclass(frozen=True, slots=True)
class SampleDims:
    """Moves the samples of batches to dim 0, and back.

    Args:
        given: The dim of samples, >= 0. Either a mapping by the names of `flatten_batch`, with
            samples along dim 0 in all other tensors; or one number, with samples along dim 0 in
            tensors of fewer dims.
    """

    given: int | Mapping[str, int] = 0

    def of(self, name: str, tensor: Tensor) -> int:
        """Return the dim of the samples in a tensor.

        Raises:
            SbpValueError: the tensor has no such dim.
        """
        if isinstance(self.given, int):
            return self.given if tensor.dim() > self.given else 0
        dim = self.given.get(name, 0)
        if 0 < dim >= tensor.dim():
            raise SbpValueError(
                f"{name!r} of shape {tuple(tensor.shape)} has no dim {dim}, which batch_dim "
                "names as the dim of its samples",
                accepted=f"a tensor of more than {dim} dims",
            )
        return dim

    def in_front(self, batch: T) -> T:
        """Return a batch of a loop with its samples along dim 0, as views.

        Raises:
            SbpValueError: a tensor has no such dim.
        """
        if not self.given:
            return batch
        return self._move_dims(batch, lambda tensor, dim: tensor.movedim(dim, 0))

    def moved_back(self, batch: T) -> T:
        """Return a batch in the form of the user's loop; moved tensors become contiguous."""
        if not self.given:
            return batch
        # Contiguous, because a loss may call `view` on its batch.
        return self._move_dims(batch, lambda tensor, dim: tensor.movedim(0, dim).contiguous())

    def _move_dims(self, batch: T, move: Callable[[Tensor, int], Tensor]) -> T:
        moved = {
            name: move(tensor, dim) if (dim := self.of(name, tensor)) else tensor
            for name, tensor in flatten_batch(batch).items()
        }
        return rebuild_batch(batch, moved)

    def loss(self, loss: Callable[[nn.Module, Any], Any]) -> Callable[[nn.Module, Any], Any]:
        """Return a loss of batches with samples along dim 0, from a loss of the loop's batches."""
        return partial(_on_moved_back, self, loss) if self.given else loss


def _on_moved_back(
    dims: SampleDims, loss: Callable[[nn.Module, Any], Any], model: nn.Module, batch: Any
) -> Any:
    return loss(model, dims.moved_back(batch))


def as_written(loss: object) -> object:
    """Return the original of a loss that `SampleDims.loss` made; any other loss itself."""
    if isinstance(loss, partial) and loss.func is _on_moved_back:
        return loss.args[1]
    return loss
