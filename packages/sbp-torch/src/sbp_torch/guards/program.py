"""`Guard`: before each step, find changes of the values that the program read when it was captured.

Capture runs a program's Python code once; after most changes, `sbp_launch.step` captures it again.
The guard compares by identity and value what this code read: attributes of modules, modes, hooks,
which tensors are trained, values in cells, globals, defaults and objects, and the parameter groups
of the optimizer. The model's own tensors are states of the step and are not compared; see `states`.
"""

from __future__ import annotations

import operator
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Sized
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from sbp_torch._torch_compat import as_plain_tensors
from sbp_torch.graph_capture.numbers import NumberPlace
from sbp_torch.graph_capture.side_effects import REGISTERS, refill
from sbp_torch.graph_capture.step import model_tensors
from sbp_torch.guards.connected import is_let_go, trained_elsewhere
from sbp_torch.guards.functions import has_attributes, is_called, is_fixed
from sbp_torch.guards.optimizer_guard import OF_OPTIMIZERS, OptimizerGuard
from sbp_torch.guards.reads import Reads
from sbp_torch.guards.recorded_values import (
    ANEW,
    MOST_ENTRIES,
    NOTHING,
    PLAIN,
    SURROUNDINGS,
    ChangedValue,
    HeldContainer,
    HeldMapping,
    HeldTensor,
    Numbers,
    changed_floats,
    held_in,
    hooks_of,
    is_float,
    is_identical,
    is_same,
    mode_change,
    num_attributes,
    place_of,
    registered_change,
    short,
    surroundings,
)
from sbp_torch.optim import members
from sbp_torch.update_options import UpdateOptions

#: Attributes of modules that `nn.Module.__call__` reads.
_OF_CALLS = {"training", *REGISTERS, "forward"}

#: Attribute of optimizers with the settings that a loss may read.
_GROUPS = "param_groups"

#: Hooks that change what a step computes.
_HOOKS = {
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"),
    *("_forward_hooks_always_called", "_is_full_backward_hook"),
    *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
}

#: Hooks of all modules, and of all optimizers.
_HOOKS_OF_ALL = [
    (f"{module.__name__}.{key}", value)
    for module in (nn.modules.module, sys.modules[torch.optim.Optimizer.__module__])
    for key, value in vars(module).items()
    if key.startswith("_global") and key.endswith("_hooks") and isinstance(value, dict)
]
_HOOKS |= {label.rpartition(".")[2] for label, _ in _HOOKS_OF_ALL}


class Guard:
    """Compares a program with its values at the last `renew`.

    Args:
        model: The one-device program.
        loss: The function `loss(model, batch)`.
        optimizer: The optimizer of the model's parameters.
        update: The options that name the settings of groups which are inputs of the step.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Any,
        optimizer: torch.optim.Optimizer,
        update: UpdateOptions = UpdateOptions(),  # noqa: B008 - frozen
    ) -> None:
        self._model, self._loss, self._optimizer = model, loss, optimizer
        self._groups = OptimizerGuard(model, optimizer, update)
        self.renew()

    def renew(self, numbers: Collection[NumberPlace] = ()) -> None:
        """Take the present program as the reference.

        Args:
            numbers: Places of floats that may change, because they are inputs of the step.
        """
        self._numbers = Numbers(numbers)
        self._reads = Reads()
        self._mappings: list[HeldMapping] = []
        #: Attributes of objects that are not followed yet, because no code so far names them.
        self._unread: list[tuple[str, str, Any]] = []
        self._containers: list[HeldContainer] = []
        self._tensors: list[HeldTensor] = []
        self._states = model_tensors(self._model)
        self._seen: dict[int, object] = {id(one): one for one in self._states.values()}
        for path, module in self._model.named_modules():
            self._module(f"model.{path}" if path else "model", module)
        self._follow(self._reads.add(self._loss))
        for name, tensor in self._states.items():
            if vars(tensor):
                self._attributes(name, tensor)
            for hooks in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks):
                for hook in (hooks or {}).values():
                    self._visit(f"a hook on the gradient of {name!r}", hook)
        for label, hooks in _HOOKS_OF_ALL:
            self._containers.append(HeldContainer(label, hooks, dict(hooks)))
        for part in members(self._optimizer):  # hooks, and attributes of users' optimizer classes
            for key in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
                hooks = getattr(part, key, {})  # a wrapper may not call Optimizer.__init__
                self._containers.append(HeldContainer(f"the optimizer.{key}", hooks, dict(hooks)))
            if not is_fixed(type(part)):
                self._follow(self._reads.add_class(type(part)))
                self._attributes(type(part).__name__, part, is_read=False)
        self._look_into_objects()
        for cls in self._reads.classes:
            self._mappings.append(HeldMapping(cls.__name__, cls, vars(cls), dict(vars(cls)), type))
        self._trained = [one.requires_grad for one in self._states.values()]
        self._hooks, self._around = hooks_of(self._states.values()), surroundings()
        self._set_on_tensors = num_attributes(self._states.values())
        #: Mappings and lists, each with a live view of its values.
        self._all: list[tuple[Sized, Collection[Any]]] = [
            (one.live, one.live.values()) for one in self._mappings
        ]
        keys: list[tuple[int, Collection[Any]]] = [(one.id, one.live) for one in self._mappings]
        self._sets: list[tuple[Any, Any]] = []
        self._others: list[HeldContainer] = []
        for one in self._containers:
            if not isinstance(one.value, dict | list | set) or len(one.value) > MOST_ENTRIES:
                self._others.append(one)
            elif isinstance(one.value, dict):
                # Take the length of a plain dict itself: its view touches more memory in each step.
                lying = dict.values(one.value)
                is_bare = type(one.value) in (dict, OrderedDict)
                self._all.append((one.value if is_bare else lying, lying))
                keys.append((id(one.value), dict.keys(one.value)))
            elif isinstance(one.value, list):
                self._all.append((one.value, one.value))
                keys.append((id(one.value), range(len(one.value))))
            else:
                self._sets.append((one.value, one.content))
        self._keys = keys
        self._others_of = [one for one in self._mappings if not isinstance(one.owner, type)]
        self._missing = [(items, names) for items, names in self._reads.missing.values() if names]
        self._compared = [one for one in self._reads.places if one.number.at not in self._numbers]
        self._note()
        self._groups.renew()

    def _note(self) -> None:
        """Record the values in mappings and lists; most are empty, and are checked together."""
        self._numbers.find_among(self._keys)
        self._empty = [sized for sized, _ in self._all if not len(sized)]
        self._full = [lying for sized, lying in self._all if len(sized)]
        self._lengths = [*map(len, self._full)]
        self._lay = [*chain.from_iterable(self._full)]

    # Record the program.

    def _follow(self, found: Iterator[tuple[str, object]]) -> None:
        for label, value in found:
            self._visit(label, value)

    def _module(self, path: str, module: nn.Module) -> None:
        if id(module) in self._seen:
            return
        self._seen[id(module)] = module
        self._follow(self._reads.add_class(type(module)))
        self._attributes(path, module)

    def _attributes(self, label: str, owner: object, *, is_read: bool = True) -> None:
        if not hasattr(owner, "__dict__"):
            return
        live = vars(owner)
        self._mappings.append(HeldMapping(label, owner, live, dict(live), type(owner)))
        for key, value in live.items():
            if key in REGISTERS and isinstance(owner, nn.Module):
                self._containers.append(HeldContainer(f"{label}.{key}", value, dict(value), True))
                if key != "_modules":  # each module is visited by itself
                    for name, part in value.items():
                        self._visit(f"{label}.{name}", part)
            elif isinstance(owner, nn.Module) and (key in _OF_CALLS or key in _HOOKS):
                self._visit(f"{label}.{key}", value)
            elif not _is_of_optimizer(owner, key) or (is_read and key in (_GROUPS, "defaults")):
                self._unread.append((key, f"{label}.{key}", value))

    def _look_into_objects(self) -> None:
        """Follow the attributes of objects that any followed code reads."""
        while True:
            self._follow(self._reads.new_entries())
            read = [one for one in self._unread if self._reads.may_read(one[0])]
            self._unread = [one for one in self._unread if not self._reads.may_read(one[0])]
            for _, label, value in read:
                self._visit(label, value)
            if not read and not self._reads.has_more:
                return

    def _visit(self, label: str, value: Any) -> None:
        """Record a value and everything that it contains, each object once."""
        left: deque[tuple[str, Any]] = deque([(label, value)])
        while left:
            label, value = left.popleft()
            is_plain = isinstance(value, PLAIN) and not has_attributes(value)
            if is_plain or id(value) in self._seen:
                continue
            if isinstance(value, types.ModuleType):
                self._reads.add_module(value, label)
                continue
            if isinstance(value, nn.Module):
                for path, module in value.named_modules():
                    self._module(f"{label}.{path}" if path else label, module)
                continue
            self._seen[id(value)] = value
            if isinstance(value, Tensor):
                if not is_let_go(value):
                    raise trained_elsewhere(label, self._line(label))
                self._tensors.append(HeldTensor(label, value))
                if vars(value):
                    self._attributes(label, value)
                continue
            kind = label.rpartition(".")[2]
            if kind.startswith("_") and kind.endswith("_hooks") and kind not in _HOOKS:
                continue
            content = held_in(value)
            if content is not None:
                if not isinstance(value, tuple | frozenset):  # these cannot change
                    self._containers.append(HeldContainer(label, value, content))
                if isinstance(content, dict | list):
                    entries = content.items() if isinstance(content, dict) else enumerate(content)
                    left.extend((f"{label}[{key!r}]", part) for key, part in entries)
            if isinstance(value, types.BuiltinMethodType | types.MethodWrapperType):
                left.append((label, value.__self__))
            elif isinstance(value, weakref.ref):
                left.append((label, value()))
            elif callable(value) and not has_attributes(value):
                left.extend(self._reads.add(value, label))
            elif has_attributes(value):
                self._follow(self._reads.add_class(type(value)))
                self._follow(self._reads.add_slots(value, label))
                self._attributes(label, value)

    def restore(self) -> None:
        """Restore the recorded values of cells, globals, objects and containers, not of modules."""
        for place in self._reads.places:
            if not is_same(place.value, place.now()):
                place.number.write(place.value)
        for one in self._mappings:
            if not isinstance(one.owner, nn.Module | type):
                refill(one.live, one.kept)
        for kept in self._containers:
            if isinstance(kept.value, dict | list | set) and len(kept.value) <= MOST_ENTRIES:
                refill(kept.value, kept.content)

    # Compare the program.

    def holds(self) -> bool:
        """Whether a fast check finds no change since `renew`."""
        try:
            with as_plain_tensors():
                return (
                    self._numbers.follow_in(self._lay)
                    # The same objects are in mappings and lists, in the same order.
                    and not any(self._empty)
                    and [*map(len, self._full)] == self._lengths
                    and all(map(operator.is_, chain.from_iterable(self._full), self._lay))
                    and all(type(one.owner) is one.cls for one in self._others_of)
                    and all(items.keys().isdisjoint(names) for items, names in self._missing)
                    and all(place.number.read() is place.value for place in self._compared)
                    and all(one.is_same() for one in self._tensors)
                    and self._trained == [one.requires_grad for one in self._states.values()]
                    and self._hooks == hooks_of(self._states.values())
                    and self._set_on_tensors == num_attributes(self._states.values())
                    and self._around == surroundings()
                    and all(now == before for now, before in self._sets)
                    and all(is_same(one.content, held_in(one.value)) for one in self._others)
                    and self._groups.holds()
                )
        except Exception:  # a place is empty
            return False

    def changes(self, *, training: bool = True) -> list[ChangedValue]:
        """Return the changes since `renew` that may matter to the step.

        Args:
            training: Whether a training step follows; else modes and the optimizer do not count.
        """
        if self.holds():
            return []
        found = [*self._of_mappings(training), *self._of_containers()]
        for place in self._reads.places:
            number, after = place.number, place.now()
            if not is_same(place.value, after) and not self._numbers.may_be(number.at, after):
                told = (number.label, number.label, place.value, after, place.where, number)
                found.append(self._change(*told))
        for items, names in self._missing:  # globals that did not exist, and exist now
            for name in names.keys() & items.keys():
                found.append(self._change(name, name, NOTHING, items[name], names[name]))
        for other in self._others_of:
            if (now_type := type(other.owner)) is not other.cls:
                what = f"the class of {other.label}"
                found.append(self._change(what, other.label, other.cls, now_type))
        for one in self._tensors:
            if not is_let_go(one.tensor):
                raise trained_elsewhere(one.label, self._line(one.label))
            if not one.is_same():
                what = f"the tensor {one.label} was written"
                todo = f"let what holds it be a module or a buffer of the model; or {ANEW}"
                found.append(ChangedValue(what=what, where=self._line(one.label), todo=todo))
        if (now := surroundings()) != self._around:
            found.append(ChangedValue(what=f"{SURROUNDINGS} are {now}, and were {self._around}"))
        with as_plain_tensors():
            tensors = self._states.values()
            noted: tuple[tuple[str, list[Any], list[Any]], ...] = (
                ("a hook was registered on, or removed from,", self._hooks, hooks_of(tensors)),
                ("attributes were set on", self._set_on_tensors, num_attributes(tensors)),
            )
            for text, kept, found_now in noted:
                for name, old, new in zip(self._states, kept, found_now, strict=True):
                    if old != new:
                        end = "" if kept is self._hooks else ", or taken from it"
                        found.append(ChangedValue(what=f"{text} {name!r}{end}"))
            for (name, tensor), was in zip(self._states.items(), self._trained, strict=True):
                if tensor.requires_grad is not was:
                    now_told = "is frozen" if was else "is to be trained"
                    what = f"{name!r} {now_told} (requires_grad), and was "
                    what += f"{'trained' if was else 'frozen'} when the step was captured"
                    found.append(ChangedValue(what=what))
        if training:
            found += self._groups.changes()
        if not found and training:  # only harmless changes: record them for the fast check
            self._note()
        return found

    def _of_mappings(self, training: bool) -> Iterator[ChangedValue]:
        for one in self._mappings:
            if is_identical(one.live, one.kept):
                continue
            is_module = isinstance(one.owner, nn.Module)
            for key in dict.fromkeys((*one.kept, *one.live)):
                before, after = one.kept.get(key, NOTHING), one.live.get(key, NOTHING)
                if _is_of_optimizer(one.owner, key):
                    one.kept[key] = after
                    continue
                if is_same(before, after) or self._numbers.may_be((one.id, key), after):
                    continue
                if key == "training" and is_module:
                    if training and isinstance(after, bool):
                        yield mode_change(one.label, after)
                elif self._counts(one.owner, key):
                    label = f"{one.label}.{key}"
                    place = place_of(label, one.owner, one.live, key)
                    of_torch = is_module and is_fixed(type(one.owner))
                    yield self._change(label, key, before, after, place=place, of_torch=of_torch)
                elif after is NOTHING:
                    del one.kept[key]
                else:
                    one.kept[key] = after

    def _counts(self, owner: object, key: str) -> bool:
        if isinstance(owner, nn.Module) and (key in _OF_CALLS or key in _HOOKS):
            return True
        if isinstance(owner, type) and is_called(key, owner):
            return True
        if key.startswith("_") and key.endswith("_hooks"):
            return False
        return self._reads.may_read(key)

    def _of_containers(self) -> Iterator[ChangedValue]:
        for one in self._containers:
            if isinstance(one.value, dict) and is_identical(one.value, one.content):
                continue
            if isinstance(one.value, set) and one.value == one.content:
                continue
            owner, _, kind = one.label.rpartition(".")
            now = held_in(one.value)
            if isinstance(now, dict) and isinstance(one.content, dict):
                for key in dict.fromkeys((*one.content, *now)):
                    before, after = one.content.get(key, NOTHING), now.get(key, NOTHING)
                    if is_same(before, after) or self._numbers.may_be((id(one.value), key), after):
                        continue
                    if kind in REGISTERS and one.is_of_module:
                        yield registered_change(f"{owner}.{key}", REGISTERS[kind], before, after)
                    elif kind.endswith("_hooks") or "_hooks_" in kind:
                        verb = "removed from" if after is NOTHING else "registered on"
                        yield ChangedValue(what=f"a hook was {verb} {owner}")
                    else:
                        yield self._entry(one, key, before, after)
                if [*now] != [*one.content] and now.keys() == one.content.keys():
                    yield ChangedValue(what=f"the entries of {one.label} are in another order")
            elif isinstance(one.value, list) and (floats := changed_floats(one.content, now)):
                for index in floats:
                    if not self._numbers.may_be((id(one.value), index), now[index]):
                        yield self._entry(one, index, one.content[index], now[index])
            elif not is_same(one.content, now):
                yield self._change(one.label, one.label, one.content, now)

    def _entry(self, one: HeldContainer, key: Any, before: object, after: object) -> ChangedValue:
        label = f"{one.label}[{key!r}]"
        is_plain = isinstance(one.value, dict | list) and len(one.value) <= MOST_ENTRIES
        is_plain &= f".{_GROUPS}[" not in label  # they are inputs of the update already
        place = place_of(label, one.value, one.value, key) if is_plain else None
        return self._change(label, str(key), before, after, place=place)

    def _change(
        self,
        label: str,
        key: str,
        before: object,
        after: object,
        where: str = "",
        place: NumberPlace | None = None,
        *,
        of_torch: bool = False,  # PyTorch's layers accept numbers, but no tensors
    ) -> ChangedValue:
        name = key.rpartition(".")[2]
        todo = ANEW
        if isinstance(after, int | float) and not isinstance(after, bool) and not of_torch:
            todo = (
                f"pass it in the batch, as a tensor without dims: {{..., {name!r}: "
                f"torch.tensor({after!r})}}, and read it there; or {ANEW}"
            )
        elif isinstance(after, Tensor):
            todo = f"pass it in the batch; or {ANEW}"
        is_number = is_float(before) and is_float(after) and name not in self._reads.remembered
        return ChangedValue(
            what=f"{label} is {short(after)}, and was {short(before)} when the step was captured",
            where=self._reads.line_of(name) or where,
            todo=todo,
            number=place if is_number else None,
        )

    def _line(self, label: str) -> str:
        return self._reads.line_of(label.rpartition(".")[2].partition("[")[0])


def _is_of_optimizer(owner: object, key: str) -> bool:
    """Whether an attribute belongs to an optimizer and `Guard` does not have to compare it."""
    return isinstance(owner, torch.optim.Optimizer) and (
        key in OF_OPTIMIZERS or key.startswith("_")
    )
