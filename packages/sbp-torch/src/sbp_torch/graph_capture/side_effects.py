"""What a forward leaves behind: side effects, which are undone, and states bound to other tensors.

A graph remembers nothing but its states. So a number that a module counts up, a tensor that it
keeps in a list, or a draw from Python's own generator would be lost, and the graph would do the
first step for ever. Compared are the attributes of all modules, lists, mappings, sets and
NumPy arrays in them, and the generators of Python, NumPy and PyTorch; other objects are not looked
into.

A buffer may be assigned a detached tensor of its form, which then is its new value. Parameters stay
the tensors that they are.
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

#: Where modules keep what is registered, and what that is called.
REGISTERS: Mapping[str, str] = {
    "_parameters": "parameter",
    "_buffers": "buffer",
    "_modules": "module",
}

PLAIN = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """An attribute of a module that is not what it was.

    Args:
        module: Path of the module.
        owner: Name of its class.
        key: The attribute, and the way into it: `cache['k'][0]`.
        before: What it was; None if there was none.
        after: What it is; None if there is none.
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
        """Whether the mode of a module is another one."""
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
            f"{shorten(self.before)} to {shorten(self.after)}, so that its next step may be "
            "another",
            where=where,
            accepted="attributes that the forward leaves as they are, or sets once and for all",
            todo=f"keep it as a tensor: register_buffer({name!r}, torch.tensor(...)) in __init__, "
            f"changed in place, as in self.{name}.add_(1)",
        )


class AttributeSnapshot:
    """The attributes of all modules and what is in them, at one moment."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.named_modules())
        #: Attributes of modules, and containers in them, by id: itself, what it held, number of the
        #: module, the way to it; of attributes, the way is empty.
        self._held: dict[int, tuple[Any, Any, int, str]] = {}
        self._stand_ins: Mapping[int, Tensor] = {}
        for number, (_, module) in enumerate(self._modules):
            self._hold(vars(module), number, "")

    def _hold(self, value: Any, number: int, way: str) -> None:
        # Once each: containers may hold each other, and themselves. `_held` keeps the container
        # alive, so that its id stays its own.
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
        """Return what is not as it was, attributes first.

        Args:
            stand_ins: By the id of a tensor that stood for a state meanwhile, that state: a list of
                a module's own weights that it makes anew is the same list.
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
        """Whether a value is what it was: itself, or an equal number, string, or list of such.

        What a container held is asked for each container once; so here, one that is itself is the
        same. Of objects of unknown kinds nobody knows what makes them equal: they are the same.
        """
        after = self._stand_ins.get(id(after), after)
        if before is after:
            return True
        if type(before) is not type(after):
            return False
        if isinstance(before, PLAIN):
            # By text: nan is nan, and 0.0 is not -0.0.
            return repr(before) == repr(after)
        # A tensor that was not there before, even of equal numbers: the graph would not keep it.
        if isinstance(before, Tensor):
            return False
        # What it held at the snapshot: a container that was replaced may have been changed as well.
        old = self._held[id(before)][1] if id(before) in self._held else content_of(before)
        new = content_of(after)
        if isinstance(old, dict) and new is not None:
            return list(old) == list(new) and all(self._is_same(old[k], new[k]) for k in old)
        if isinstance(old, list) and new is not None:
            return len(old) == len(new) and all(map(self._is_same, old, new))
        return bool(old == new)

    def with_real_tensors(self, traced: Iterable[Tensor]) -> list[Tensor]:
        """Put real tensors, of zeros, in the places of some, and return them in order."""
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
        """Set everything back to what it was."""
        for value, content, _, _ in self._held.values():
            refill(value, content)


class MissingAttribute:
    """Stands for what is not there."""

    def __init__(self, told: str) -> None:
        self._told = told

    def __repr__(self) -> str:
        return self._told


_MISSING: Any = MissingAttribute("nothing")


def items_of(value: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return what a mapping holds; of a kind of dict, without its own `__getitem__`.

    That of `transformers.activations.ACT2FN` makes a module of what it holds.
    """
    return dict(dict.items(value)) if isinstance(value, dict) else dict(value)


def content_of(value: Any) -> Any:
    """Return a copy of what a container holds: a list, dict, set or bytes; None if it is none."""
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
    """Let a container hold again what it held."""
    if isinstance(value, tuple | frozenset):
        return
    if isinstance(content, bytes):
        numpy: Any = sys.modules["numpy"]
        if isinstance(value, numpy.ndarray) and value.tobytes() != content:
            value[...] = numpy.frombuffer(content, value.dtype).reshape(value.shape)
        return
    now = content_of(value)
    if isinstance(value, MutableMapping):
        # Left alone if nothing changed: a class of the user's may do more than hold what it gets.
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
    """Return a value as text, of 60 characters at most."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Generators:
    """The states of the generators of Python, NumPy and PyTorch, at one moment."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = _numpy_state()
        self._torch = torch.default_generator.get_state()

    def check(self) -> None:
        """Refuse a program that has drawn from Python's or NumPy's generator since.

        Raises:
            CaptureError: it has.
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
        """Set them back."""
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
        before: What stood for them in the forward.
        after: What the modules held in their places at the end.
        storages: The storage of each of `before`, before the forward.

    Raises:
        CaptureError: a parameter, or a tensor of another form or that is another state, too, was
            assigned; or the forward assigned to `.data`, or called backward.
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
    """Return the pairs of states that are two tensors with elements in common."""
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.layout is torch.strided and tensor.numel():
            groups.setdefault(storage_key(tensor), []).append(name)
    pairs = (pair for names in groups.values() for pair in combinations(names, 2))
    return [(first, second) for first, second in pairs if _overlap(tensors[first], tensors[second])]


def _overlap(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors on one storage have an element in common."""
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
