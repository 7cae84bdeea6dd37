"""Detect and undo side effects of the user's forward at capture, and find buffers that it assigned.

A graph keeps only its states. If a module counts up a number, keeps a tensor in a list, or draws
from Python's generator, the graph would lose this, and repeat the first step forever. Compared are
the attributes of all modules, the lists, mappings, sets and NumPy arrays in them, and the random
generators of Python, NumPy and PyTorch. Other objects are not searched.

A forward may assign a detached tensor of the same shape and dtype to a buffer, which becomes its
new value. It must not assign to parameters.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterable, Mapping, MutableMapping, MutableSequence, MutableSet
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sbp_core.errors import CaptureError
from sbp_torch._torch_compat import storage_key

#: The attributes in which modules keep registered objects, and the kinds of these.
REGISTERS: Mapping[str, str] = {
    "_parameters": "parameter",
    "_buffers": "buffer",
    "_modules": "module",
}

PLAIN = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A changed attribute of a module.

    Args:
        module: Path of the module.
        owner: Name of its class.
        key: The attribute, and the path inside it: `cache['k'][0]`.
        before: The old value; None if there was none.
        after: The new value; None if there is none.
        registered: `parameter`, `buffer` or `module` if it is registered; else empty.
    """

    module: str
    owner: str
    key: str
    before: Any
    after: Any
    registered: str = ""

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that it holds now and did not hold before."""
        known = {id(leaf) for leaf in tree_leaves(self.before)}
        found = [leaf for leaf in tree_leaves(self.after) if isinstance(leaf, Tensor)]
        return [tensor for tensor in found if id(tensor) not in known]

    @property
    def is_mode(self) -> bool:
        """Whether this is the training mode of a module."""
        return self.key == "training"

    def refusal(self) -> CaptureError:
        """Return the error for a program that makes this change."""
        where = f"{self.owner}.forward (module {self.module or '(root)'!r})"
        name = self.key.partition("[")[0]
        if self.registered:
            return CaptureError(
                f"the forward registers or removes the {self.registered} {self.key!r}",
                where=where,
                accepted="modules whose parameters, buffers and parts stay the same ones",
                todo=f"register {self.key!r} in __init__; keep what changes in a buffer",
            )
        if self.is_mode:
            mode, call = ("train", "train()") if self.after else ("eval", "eval()")
            return CaptureError(
                f"the loss puts module {self.module or '(root)'!r} into {mode} mode and leaves it "
                "there, where other programs and evaluations would find it",
                accepted="modes that are as they were when the loss returns",
                todo=f"call .{call} in the loop, before the step; or set the mode back in the loss",
            )
        if self.tensors:
            return CaptureError(
                f"the forward of module {self.module or '(root)'!r} sets {self.key!r}, which "
                "outlives the step",
                where=where,
                accepted="tensors that outlive a step are registered buffers; tensors that are "
                "kept and depend on no input, state or random number",
                todo=f"return {name!r} as a metric, or register_buffer({name!r}, ...) in __init__ "
                "and set it by copy_ or by assignment, detached; if only the same step reads it, "
                "such as an auxiliary loss, let the loss put back what was there: del, or = None",
            )
        return CaptureError(
            f"the forward of module {self.module or '(root)'!r} changes {self.key!r} from "
            f"{shorten(self.before)} to {shorten(self.after)}, so its next step may be "
            "different",
            where=where,
            accepted="attributes that the forward leaves as they are, or sets once and for all",
            todo=f"keep it as a tensor: register_buffer({name!r}, torch.tensor(...)) in __init__, "
            f"changed in place, as in self.{name}.add_(1)",
        )


class AttributeSnapshot:
    """The attributes of all modules and their contents, at one moment."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.named_modules())
        #: Dicts of attributes, and containers in them, by id: the object, its content, the number
        #: of the module, the path to it; the path of a dict of attributes is empty.
        self._held: dict[int, tuple[Any, Any, int, str]] = {}
        self._stand_ins: Mapping[int, Tensor] = {}
        for number, (_, module) in enumerate(self._modules):
            self._hold(vars(module), number, "")

    def _hold(self, value: Any, number: int, way: str) -> None:
        # Visit each once, because containers may contain each other and themselves. `_held` keeps
        # the container alive, so that its id is not reused.
        if id(value) in self._held or type(value) in PLAIN or isinstance(value, Tensor):
            return
        content = content_of(value)
        if content is None:
            return
        self._held[id(value)] = (value, content, number, way)
        parts = dict(enumerate(content)) if isinstance(content, list) else content
        for key, part in parts.items() if isinstance(parts, dict) else ():
            self._hold(part, number, f"{way}[{key!r}]" if way else key)

    def changes(self, stand_ins: Mapping[int, Tensor]) -> list[Change]:
        """Return all changes, those of attributes first.

        Args:
            stand_ins: The state for the id of each tensor that replaced a state in the trace. With
                it, a list of its own weights that a module makes again counts as unchanged.
        """
        self._stand_ins = stand_ins
        found: list[Change] = []
        for value, content, number, way in sorted(
            self._held.values(), key=lambda held: bool(held[3])
        ):
            path, module = self._modules[number]
            now, registered = content_of(value), REGISTERS.get(way, "")
            parts = [(way, content, now)]
            if isinstance(content, dict):
                parts = [
                    (
                        f"{way}[{key!r}]" if way and not registered else key,
                        content.get(key, _MISSING),
                        now.get(key, _MISSING),
                    )
                    for key in dict.fromkeys((*content, *now))
                ]
            found += [
                Change(
                    module=path,
                    owner=type(module).__name__,
                    key=key,
                    before=before,
                    after=after,
                    registered=registered,
                )
                for key, before, after in parts
                if not self._is_same(before, after)
            ]
        return found

    def _is_same(self, before: Any, after: Any) -> bool:
        """Whether a value is unchanged: the same object, or an equal number, string, or list.

        The content of each container is compared elsewhere, so here the same container object is
        unchanged. Objects of unknown types count as unchanged, because they cannot be compared.
        """
        after = self._stand_ins.get(id(after), after)
        if before is after:
            return True
        if type(before) is not type(after):
            return False
        if isinstance(before, PLAIN):
            # By text: nan equals nan, and 0.0 differs from -0.0.
            return repr(before) == repr(after)
        # A new tensor, even with equal numbers, is a change: the graph would not keep it.
        if isinstance(before, Tensor):
            return False
        # Its content at the snapshot, because a replaced container may have been changed as well.
        old = self._held[id(before)][1] if id(before) in self._held else content_of(before)
        new = content_of(after)
        if isinstance(old, dict) and new is not None:
            return list(old) == list(new) and all(self._is_same(old[k], new[k]) for k in old)
        if isinstance(old, list) and new is not None:
            return len(old) == len(new) and all(map(self._is_same, old, new))
        return bool(old == new)

    def with_real_tensors(self, traced: Iterable[Tensor]) -> list[Tensor]:
        """Replace tensors of a trace by real tensors of zeros, and return these in order."""
        made = {
            id(old): torch.zeros(old.shape, dtype=old.dtype, device=old.device) for old in traced
        }

        def real(value: Any) -> Any:
            return made.get(id(value), value)

        for key, (value, content, number, way) in self._held.items():
            if isinstance(content, dict):
                content = {k: real(part) for k, part in content.items()}
            elif isinstance(content, list):
                content = [real(part) for part in content]
            self._held[key] = (value, content, number, way)
        return list(made.values())

    def restore(self) -> None:
        """Restore all attributes and contents."""
        for value, content, _, _ in self._held.values():
            refill(value, content)


class MissingAttribute:
    """A placeholder for a missing attribute."""

    def __init__(self, told: str) -> None:
        self._told = told

    def __repr__(self) -> str:
        return self._told


_MISSING: Any = MissingAttribute("nothing")


def items_of(value: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the items of a mapping, without calling the `__getitem__` of a subclass of dict.

    The `__getitem__` of `transformers.activations.ACT2FN` makes a module from an item.
    """
    return dict(dict.items(value)) if isinstance(value, dict) else dict(value)


def content_of(value: Any) -> Any:
    """Return a copy of the content of a container: list, dict, set or bytes; None for others."""
    if isinstance(value, MutableMapping):
        return items_of(value)
    if isinstance(value, tuple | MutableSequence) and not isinstance(value, bytearray | nn.Module):
        return list(value)
    if isinstance(value, set | frozenset):
        return set(value)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        return value.tobytes()
    return None


def refill(value: Any, content: Any) -> None:
    """Restore the content of a container."""
    if isinstance(value, tuple | frozenset):
        return
    if isinstance(content, bytes):
        numpy: Any = sys.modules["numpy"]
        if isinstance(value, numpy.ndarray) and value.tobytes() != content:
            value[...] = numpy.frombuffer(content, value.dtype).reshape(value.shape)
        return
    now = content_of(value)
    if isinstance(value, MutableMapping):
        # Do nothing without a change, because a class of the user may have side effects itself.
        alike = list(now) == list(content) and all(now[key] is content[key] for key in content)
        if not alike:
            value.clear()
            value.update(content)
    elif isinstance(value, MutableSet):
        if now != content:
            value.clear()
            for part in content:
                value.add(part)
    elif len(now) != len(content) or any(a is not b for a, b in zip(now, content, strict=True)):
        if isinstance(value, deque):
            value.clear()
            value.extend(content)
        else:
            value[:] = content


def shorten(value: object) -> str:
    """Return a value as text of at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Generators:
    """The states of the generators of Python, NumPy and PyTorch, at one moment."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = _numpy_state()
        self._torch = torch.default_generator.get_state()

    def check(self) -> None:
        """Refuse a program that has drawn from Python's or NumPy's generator since this moment.

        Raises:
            CaptureError: a generator has changed.
        """
        for name, is_same in (
            ("random", random.getstate() == self._python),
            ("numpy.random", _numpy_state() == self._numpy),
        ):
            if not is_same:
                raise CaptureError(
                    f"the forward or the loss draws from {name}: the graph would repeat that "
                    "number each step",
                    accepted="random numbers that are tensors: torch.rand, torch.randint, dropout",
                    todo="draw by torch.rand(...), and choose with torch.where; or draw in the "
                    "data loader, and put the number into the batch as a tensor",
                )

    def restore(self) -> None:
        """Restore the generators."""
        random.setstate(self._python)
        if self._numpy is not None:
            name, keys, *rest = self._numpy
            numpy: Any = sys.modules["numpy"]
            numpy.random.set_state((name, numpy.frombuffer(keys, "uint32"), *rest))
        torch.default_generator.set_state(self._torch)


def _numpy_state() -> tuple[Any, ...] | None:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    name, keys, *rest = numpy.random.get_state()
    return (name, keys.tobytes(), *rest)


def replaced_states(
    own: Mapping[str, Tensor],
    before: Mapping[str, Tensor],
    after: Mapping[str, Any],
    storages: Mapping[str, int],
) -> dict[str, Tensor]:
    """Return the tensors that a forward assigned to the names of states.

    Args:
        own: The model's states by name.
        before: The tensors in their places at the beginning of the forward.
        after: The objects in their places at its end.
        storages: The storage of each tensor of `before`, before the forward.

    Raises:
        CaptureError: the forward assigned to a parameter, assigned a tensor of another form or
            another state, assigned to `.data`, or called backward.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in before.items():
        new = after[name]
        if tensor.is_leaf and tensor.grad is not None:
            raise CaptureError(
                f"the loss function calls backward(): {name!r} has a gradient before the backward "
                "phase",
                accepted="loss functions that return the loss",
                todo="leave .backward() out; for gradients within the loss take "
                "torch.autograd.grad(..., create_graph=True)",
            )
        if new is not tensor:
            old = own[name]
            if isinstance(old, nn.Parameter):
                raise CaptureError(
                    f"the forward replaces the parameter {name!r} by another tensor",
                    accepted="parameters that stay the same tensors; assigned buffers",
                    todo=f"compute with a local tensor, or write {name}.copy_(...) under "
                    "torch.no_grad()",
                )
            form = (new.shape, new.dtype) if isinstance(new, Tensor) else type(new).__name__
            if form != (old.shape, old.dtype):
                got = form if isinstance(form, str) else f"{form[1]} of shape {tuple(form[0])}"
                raise CaptureError(
                    f"the forward assigns {got} to the buffer {name!r}, which is "
                    f"{old.dtype} of shape {tuple(old.shape)}",
                    accepted="a tensor of the same shape and dtype",
                    todo="register the buffer with its final shape and dtype",
                )
            found[name] = new
        elif storage_key(tensor) != storages[name]:
            raise CaptureError(
                f"the forward assigns to {name}.data",
                accepted="states that are changed in place",
                todo=f"write {name}.copy_(...) under torch.no_grad()",
            )
    final = {name: storage_key(found.get(name, tensor)) for name, tensor in before.items()}
    for name in found:
        for other, key in final.items():
            if other != name and key == final[name]:
                raise CaptureError(
                    f"the forward makes {name!r} the same tensor as {other!r}",
                    accepted="buffers with memory of their own",
                    todo=f"assign a copy: .clone(), or {name}.copy_(...)",
                )
    return found


def shared_memory(tensors: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """Return the pairs of states that are different tensors with common elements."""
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.layout is torch.strided and tensor.numel():
            groups.setdefault(storage_key(tensor), []).append(name)
    pairs = (pair for names in groups.values() for pair in combinations(names, 2))
    return [(first, second) for first, second in pairs if _overlap(tensors[first], tensors[second])]


def _overlap(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors on one storage have a common element."""
    # The first byte of each in the storage, and the byte after its last.
    spans = []
    for one in (left, right):
        last = sum((n - 1) * stride for n, stride in zip(one.shape, one.stride(), strict=True))
        start, size = int(one.storage_offset()), one.dtype.itemsize
        spans.append((start * size, (start + last + 1) * size))
    (start, end), (first, last) = spans
    if end <= first or last <= start:
        return False
    if left.dtype != right.dtype:
        return True
    seen = torch.zeros(max(end, last) // left.dtype.itemsize, dtype=torch.bool)
    seen.as_strided(left.shape, left.stride(), left.storage_offset()).fill_(True)
    return bool(seen.as_strided(right.shape, right.stride(), right.storage_offset()).any())
