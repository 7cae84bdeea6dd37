"""Make sharding rules of common kinds: `along` a dim, `batched`, `opaque` (never split).

Rules of operators (`sbp_aten.rules`) are made from them. `along(1)` is an operator that needs some
dims whole, named by its second argument; `batched(2)` needs its last two dims whole, `opaque` needs
everything whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sbp_core.graph.ir import Argument
from sbp_core.signatures.arguments import argument, labels, wrap_dims
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.notation import Dependence, Dim, Dims, Notation
from sbp_core.signatures.rule import LocalCall, Localizer, Rule


def fresh_dims(count: int, prefix: str = "d") -> Dims:
    """Return `count` dims with one separate label each: `d0`, `d1`, ..."""
    return tuple((name,) for name in labels(prefix, count))


def broadcast_shape(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the shape that shapes are broadcast to; they are aligned from the right."""
    longest = max(map(len, shapes), default=0)
    return tuple(
        next((shape[-at] for shape in shapes if len(shape) >= at and shape[-at] != 1), 1)
        for at in range(longest, 0, -1)
    )


def opaque(why: str, *, work_flop: Callable[[OpCall], float] | None = None) -> Rule:
    """Return the rule of an operator that can only run whole on every rank, and why."""

    def meaning(call: OpCall) -> Notation:
        types = (*call.inputs, *call.outputs)
        dims = [fresh_dims(len(entry.shape), f"t{index}_") for index, entry in enumerate(types)]
        return Notation(
            inputs=tuple(dims[: len(call.inputs)]),
            outputs=tuple(dims[len(call.inputs) :]),
            whole=frozenset(name for tensor in dims for (name,) in tensor),
            work_flop=work_flop(call) if work_flop else None,
            why=why,
        )

    return Rule(meaning)


def along(
    index: int,
    name: str = "dim",
    *dependences: Dependence,
    default: object = None,
    why: str,
    nonempty: bool = False,
    localize: Localizer | None = None,
) -> Rule:
    """Return the rule of an operator that works along the dims of one argument, e.g. `cumsum`.

    Every tensor has the rank of the first one, or lacks the dims in question (`keepdim=False`).

    Args:
        index: Position of the argument that names the dims (one int, or a tuple of them).
        name: Its name.
        *dependences: Linearity and monotony of the operator.
        default: The value of the argument if it is not given.
        why: Why these dims have to be whole.
        nonempty: Whether the other dims may not have empty shards.
        localize: How arguments change on a shard.
    """

    def meaning(call: OpCall) -> Notation:
        num_dims = max(len(entry.shape) for entry in call.inputs)
        dims = wrap_dims(argument(call, index, name, default), num_dims)
        names = list(labels("d", num_dims))
        full: list[Dim] = [(label,) for label in names]
        left: list[Dim] = [full[dim] for dim in range(num_dims) if dim not in dims]

        def dims_of(shape: Sequence[int], tensor: int) -> Dims:
            if len(shape) != num_dims:
                return tuple(left[: len(shape)])
            return tuple(
                (f"t{tensor}_{dim}",) if dim in dims else full[dim] for dim in range(num_dims)
            )

        tensors = [
            dims_of(entry.shape, at) for at, entry in enumerate((*call.inputs, *call.outputs))
        ]
        own = {label for tensor in tensors for dim in tensor for label in dim} - set(names)
        return Notation(
            inputs=tuple(tensors[: len(call.inputs)]),
            outputs=tuple(tensors[len(call.inputs) :]),
            dependences=dependences,
            whole=frozenset(own),
            nonempty=frozenset(names) - {names[dim] for dim in dims} if nonempty else frozenset(),
            why=why,
        )

    return Rule(meaning, localize)


def batched(
    inner: int | Sequence[int], *dependences: Dependence, why: str, nonempty: bool = False
) -> Rule:
    """Return the rule of an operator that maps the matrices (say) of a batch one by one.

    The last `inner` dims of every tensor are whole; the dims before are batch dims, aligned from
    the right and broadcast.

    Args:
        inner: Number of whole trailing dims: for all tensors, or for each, outputs after inputs.
        *dependences: Linearity and monotony of the operator.
        why: Why the inner dims have to be whole.
        nonempty: Whether batch dims may not have empty shards.
    """

    def meaning(call: OpCall) -> Notation:
        types = (*call.inputs, *call.outputs)
        counts = [inner] * len(types) if isinstance(inner, int) else list(inner)
        batches = [
            entry.shape[: max(len(entry.shape) - count, 0)]
            for entry, count in zip(types, counts, strict=True)
        ]
        num_batch = max(map(len, batches))
        wide = [
            max((shape[len(shape) - at] for shape in batches if len(shape) >= at), default=1)
            for at in range(num_batch, 0, -1)
        ]
        names = list(labels("b", num_batch))
        tensors: list[Dims] = []
        own: set[str] = set()
        for index, (entry, batch) in enumerate(zip(types, batches, strict=True)):
            offset = num_batch - len(batch)
            outer: list[Dim] = [
                (names[offset + at],) if extent == wide[offset + at] else ()
                for at, extent in enumerate(batch)
            ]
            rest = fresh_dims(len(entry.shape) - len(batch), f"t{index}_")
            own |= {label for dim in rest for label in dim}
            tensors.append((*outer, *rest))
        return Notation(
            inputs=tuple(tensors[: len(call.inputs)]),
            outputs=tuple(tensors[len(call.inputs) :]),
            dependences=dependences,
            whole=frozenset(own),
            nonempty=frozenset(names) if nonempty else frozenset(),
            why=why,
        )

    return Rule(meaning)


def batch_notation(
    call: OpCall,
    dims: Sequence[int | None],
    *dependences: Dependence,
    why: str,
    free: bool = True,
    nonempty: bool = False,
) -> Notation:
    """Return the notation of an operator whose only dim that may be split is the batch dim `b`.

    Args:
        call: The call.
        dims: The batch dim of each tensor, inputs before outputs; None if it has none.
        *dependences: Linearity and monotony of the operator.
        why: Why the other dims may not be split.
        free: Whether the batch may be split.
        nonempty: Whether it may not have empty shards.
    """
    tensors: list[Dims] = []
    for index, (entry, batch) in enumerate(zip((*call.inputs, *call.outputs), dims, strict=True)):
        own = fresh_dims(len(entry.shape), f"t{index}_")
        tensors.append(tuple(("b",) if at == batch else dim for at, dim in enumerate(own)))
    every = frozenset(name for tensor in tensors for dim in tensor for name in dim)
    return Notation(
        inputs=tuple(tensors[: len(call.inputs)]),
        outputs=tuple(tensors[len(call.inputs) :]),
        dependences=dependences,
        whole=every - {"b"} if free else every,
        nonempty=frozenset("b") & every if nonempty and free else frozenset(),
        why=why,
    )


def run_as_is(call: OpCall) -> LocalCall:
    """Localise a call by running it unchanged: its arguments are equal on every shard."""
    return LocalCall(op=call.op, args=call.args, kwargs=call.kwargs)


def with_literals(call: OpCall, *changes: tuple[int, str, Argument]) -> LocalCall:
    """Localise a call by replacing some of its literal arguments.

    Args:
        call: The call.
        *changes: Position, name and new value of an argument, which may have been given either way.
    """
    args, kwargs = list(call.args), dict(call.kwargs)
    for index, name, value in changes:
        if index < len(args):
            args[index] = value
        else:
            kwargs[name] = value
    return LocalCall(op=call.op, args=tuple(args), kwargs=kwargs)
