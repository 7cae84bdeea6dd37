"""`Layouts`: find the memory layout of operator results: storages, strides, bytes.

An instruction is called once on fake tensors (without data) for each layout of its arguments.
Repeated layers, the ranks of a mesh and similar plans make equal calls and share the result. So the
exact layout of a step of 10,000 nodes on four ranks costs as much as the layout of one layer. The
core predicts memory with it, through `tensor_library`.

    mm(%x, %w)    x: float32[8, 4] in storage 0, w: float32[4, 6] in storage 1
                  -> float32[8, 6], strides (6, 1), in a new storage of 192 bytes
    t(%w)         -> float32[6, 4], strides (1, 6), in the storage of its first argument
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from sbp_core.boxing import BoxingStep
from sbp_core.compile import LOCAL_BOX, Instruction
from sbp_core.errors import PlanError, SbpError
from sbp_core.graph import ITEMSIZE, map_refs, refs
from sbp_core.memory import Number, ResultLayout, StorageView, StridedLayout
from sbp_core.signatures import check_shapes
from sbp_torch._torch_compat import fake_mode, storage_key
from sbp_torch._torch_patches import unlogged_failures
from sbp_torch.boxing.execute import local_step, torch_dtype
from sbp_torch.ops.operators import asked_for, bind, freeze, operator_of, results_of
from sbp_torch.signatures.torch_call import describe

#: Stands for the result of a host operator that cannot take the stand-ins of its arguments.
_ANY_NUMBER = 0.5

#: Operators whose fake kernels divide by the number of elements.
_MEAN_LOSSES = {
    "aten.huber_loss_backward.default",
    "aten.mse_loss_backward.default",
    "aten.smooth_l1_loss_backward.default",
}


class Layouts:
    """Memory layouts of the results of calls, cached by the layouts of their arguments."""

    def __init__(self) -> None:
        self._mode = fake_mode()
        self._known: dict[tuple[Any, ...], tuple[ResultLayout | Number, ...]] = {}

    @property
    def num_calls(self) -> int:
        """Number of executed calls: distinct operators and layouts of arguments."""
        return len(self._known)

    def call(
        self,
        entry: Instruction,
        rank: int,
        read: Callable[[str], StorageView | Number],
        steps: Sequence[BoxingStep] = (),
    ) -> tuple[ResultLayout | Number, ...]:
        """Return the layout of each output of an instruction, in order.

        Args:
            entry: The instruction.
            rank: The rank that executes it.
            read: Returns the layout of the value of a key; for a host number, the number.
            steps: The boxing steps of the plan, to which `sbp.local_box` refers by index.

        Raises:
            PlanError: the operator cannot be called on fake tensors.
        """
        names = tuple(ref.name for ref in refs((entry.args, tuple(entry.kwargs.values()))))
        given = {name: read(name) for name in names}
        if entry.op.startswith("host."):
            return (_host_number(entry, given),)
        origins: dict[int, _Origin] = {}
        if "as_strided" not in entry.op:  # its offset counts from the start of the storage
            given, origins = _moved_to_start(given)
        sizes = {
            value.storage: value.storage_bytes
            for value in given.values()
            if isinstance(value, StorageView)
        }
        storages = {storage: index for index, storage in enumerate(sizes)}

        def lies(name: str) -> Hashable:  # the layout of a value, without its name
            value = given[name]
            if isinstance(value, StorageView):
                return value.layout, storages[value.storage]
            return "host", type(value)

        if entry.op == LOCAL_BOX:
            source, index = entry.args
            what: object = (rank, steps[index], freeze(source, lies))
        else:
            what = freeze((entry.args, tuple(entry.kwargs.items())), lies)
        # The key has everything that the layout depends on, but no names: the layouts of arguments,
        # and which of them share a storage.
        key = (entry.op, what, tuple(sizes.values()))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._learn(entry, rank, given, steps)
        return _moved_back(known, given, origins) if origins else known

    def _learn(
        self,
        entry: Instruction,
        rank: int,
        given: dict[str, StorageView | Number],
        steps: Sequence[BoxingStep],
    ) -> tuple[ResultLayout | Number, ...]:
        """Call the operator on fake tensors with the layouts of the arguments."""
        with torch.no_grad(), unlogged_failures():
            try:
                # The fake kernel would divide by the number of elements, which may be 0. The real
                # kernel takes a shard without elements, and all arguments have at most one.
                views = [value for value in given.values() if isinstance(value, StorageView)]
                sizes = [prod(view.layout.shape) for view in views]
                is_empty = entry.op in _MEAN_LOSSES and 0 in sizes and max(sizes) <= 1
                with nullcontext() if is_empty else self._mode:
                    arguments = _tensors(given)
                    return _result_layouts(_run(entry, rank, arguments, steps), given, arguments)
            except SbpError as error:
                raise error.replaced(
                    PlanError, where=(f"node {entry.node!r}", *error.where)
                ) from error
            except Exception as error:
                raise PlanError(
                    f"the memory of {entry.op} is not known: {error}",
                    where=f"node {entry.node!r}",
                    accepted="operators that run on fake tensors",
                    todo="register a fake implementation: torch.library.register_fake",
                ) from error


#: Offset in a storage at which the arguments of a call begin, and size of the storage; in bytes.
_Origin = tuple[int, int]

_Given = dict[str, StorageView | Number]


def _moved_to_start(given: _Given) -> tuple[_Given, dict[int, _Origin]]:
    """Return arguments in storages that contain nothing else, and their original offsets.

    So calls are equal wherever in a packed buffer their arguments are:

        storage     ..........[--- x ---]......      offset 10, 27 elements
        moved                 [--- x ---]            offset 0, 11 elements
    """
    views: dict[int, list[StorageView]] = {}
    for value in given.values():
        if isinstance(value, StorageView):
            views.setdefault(value.storage, []).append(value)
    origins: dict[int, _Origin] = {}
    spans: dict[int, tuple[int, int]] = {}
    for storage, found in views.items():
        if len({view.layout.dtype for view in found}) > 1:
            continue  # offsets count elements
        first, size = found[0], ITEMSIZE[found[0].layout.dtype]
        begin = min(view.layout.offset for view in found)
        ends = []  # the offset after the last element of each
        for lies in (view.layout for view in found):
            steps = zip(lies.shape, lies.strides, strict=True)
            last = sum((extent - 1) * stride for extent, stride in steps)
            ends.append(lies.offset if 0 in lies.shape else lies.offset + last + 1)
        span_bytes = (max(ends) - begin) * size
        # Otherwise the arguments fill their storage already, as usual, and nothing moves.
        if begin or span_bytes != first.storage_bytes:
            spans[storage] = begin, span_bytes
            origins[storage] = begin * size, first.storage_bytes
    if not spans:
        return given, origins
    moved: _Given = {}
    for name, value in given.items():
        if isinstance(value, StorageView) and value.storage in spans:
            begin, span_bytes = spans[value.storage]
            lies = replace(value.layout, offset=value.layout.offset - begin)
            value = StorageView(lies, value.storage, span_bytes)
        moved[name] = value
    return moved, origins


def _moved_back(
    known: tuple[ResultLayout | Number, ...], given: _Given, origins: Mapping[int, _Origin]
) -> tuple[ResultLayout | Number, ...]:
    """Return results in which views of moved arguments have their original offsets."""
    values = tuple(given.values())
    found: list[ResultLayout | Number] = []
    for made in known:
        if isinstance(made, ResultLayout) and made.source >= 0:
            source = values[made.source]
            assert isinstance(source, StorageView), "a view looks at a tensor"
            if source.storage in origins:
                offset_bytes, storage_bytes = origins[source.storage]
                offset = made.layout.offset + offset_bytes // ITEMSIZE[made.layout.dtype]
                lies = replace(made.layout, offset=offset)
                made = replace(made, layout=lies, storage_bytes=storage_bytes)
        found.append(made)
    return tuple(found)


def _run(
    entry: Instruction,
    rank: int,
    arguments: dict[str, Tensor | Number],
    steps: Sequence[BoxingStep],
) -> tuple[Any, ...]:
    if entry.op == LOCAL_BOX:
        source, index = entry.args
        value = arguments[source.name]
        assert isinstance(value, Tensor), "boxing moves tensors"
        return (local_step(steps[index], rank, value),)
    args = bind(entry.args, arguments.__getitem__)
    kwargs = {key: bind(part, arguments.__getitem__) for key, part in entry.kwargs.items()}
    operator = operator_of(entry.op)
    made = operator(*args, **kwargs)
    if isinstance(made, tuple | list):
        made = asked_for(operator, args, kwargs, made)
    results = results_of(made)
    if "backward" in entry.op or "attention" in entry.op:
        # Their real kernels do not check shapes, and may access memory out of bounds; fake kernels
        # do not check them either.
        check_shapes(describe(entry.op, args, kwargs, results)[0])
    return results


def _tensors(given: dict[str, StorageView | Number]) -> dict[str, Tensor | Number]:
    """Create tensors; those of one storage share memory."""
    # The storage of a result shows whether it is a view of an argument. So arguments in one storage
    # are views of one tensor, in any dtype, such as a complex tensor and its real view.
    bases: dict[int, Tensor] = {}
    made: dict[str, Tensor | Number] = {}
    for name, value in given.items():
        if not isinstance(value, StorageView):
            made[name] = value
            continue
        dtype = torch_dtype(value.layout.dtype)
        base = bases.get(value.storage)
        if base is None:
            count = value.storage_bytes // torch.empty((), dtype=dtype).element_size()
            base = bases[value.storage] = torch.empty(count, dtype=dtype)
        elif base.dtype != dtype:
            base = base.view(dtype)
        made[name] = base.as_strided(value.layout.shape, value.layout.strides, value.layout.offset)
    return made


def _result_layouts(
    made: Sequence[Any],
    given: dict[str, StorageView | Number],
    arguments: dict[str, Tensor | Number],
) -> tuple[ResultLayout | Number, ...]:
    """Return the layout and storage of each result; the number itself for a number."""
    storages: dict[int, str] = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            # The first argument in a storage stands for the storage.
            storages.setdefault(storage_key(value), name)
    # By position, not by name, because other calls use the cached result.
    positions = {name: index for index, name in enumerate(given)}
    fresh: dict[int, int] = {}
    found: list[ResultLayout | Number] = []
    for value in made:
        if not isinstance(value, Tensor):
            found.append(value if isinstance(value, int | float) else 0)
            continue
        storage = storage_key(value)
        source = positions[storages[storage]] if storage in storages else -1
        index = fresh.setdefault(storage, len(fresh)) if source < 0 else -1
        found.append(
            ResultLayout(
                layout=StridedLayout(
                    shape=tuple(value.shape),
                    strides=value.stride(),
                    offset=int(value.storage_offset()),
                    dtype=str(value.dtype).removeprefix("torch."),
                ),
                source=source,
                fresh=index,
                storage_bytes=int(value.untyped_storage().nbytes()),
            )
        )
    return tuple(found)


def _host_number(entry: Instruction, given: dict[str, StorageView | Number]) -> Number:
    """Compute a host number, or a stand-in, because no layout depends on its value.

    Raises:
        PlanError: the operator takes no such arguments.
        GraphError: there is no such operator.
    """
    operator = operator_of(entry.op)
    args = map_refs(entry.args, lambda ref: given[ref.name])
    reads = entry.op == "host.item" and len(args) == 1 and isinstance(args[0], StorageView)
    try:
        if reads:  # the number in a tensor of one element
            lies = args[0].layout
            if prod(lies.shape) != 1:
                raise TypeError(f"a tensor of shape {lies.shape} is no number")
            return 1 if lies.dtype.startswith(("int", "uint", "bool")) else _ANY_NUMBER
        if entry.kwargs or not all(isinstance(one, int | float) for one in args):
            raise TypeError("it takes host numbers, by position")
        value = operator(*args)
    except (ArithmeticError, ValueError):
        return _ANY_NUMBER
    except (TypeError, AttributeError) as error:
        raise PlanError(
            f"{entry.op} cannot be called so: {error}",
            where=f"node {entry.node!r}",
            accepted="as many host numbers as it takes",
        ) from error
    return value if isinstance(value, int | float) else _ANY_NUMBER
