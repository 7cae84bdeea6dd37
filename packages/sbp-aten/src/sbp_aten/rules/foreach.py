"""Operators on lists of tensors: `_foreach_*` and the fused optimizers.

Each entry of the lists is an operator call of its own, independent of the other entries: its labels
are those of the single operator behind a prefix `p0_`, `p1_`, ... A signature splits the tensors of
one entry, or passes partial values in one entry or in all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import inf

from sbp_aten.rules.pointwise import notation_of
from sbp_core.graph import Argument, Ref, TensorType, refs
from sbp_core.signatures import (
    Dependence,
    Dims,
    Effect,
    Notation,
    OpCall,
    Rule,
    argument,
    fresh_dims,
    linear,
    tensors_as_refs,
)

#: What the call of one entry means.
Meaning = Callable[[OpCall], Notation]


def _entries(call: OpCall) -> Iterator[tuple[OpCall, tuple[int, ...]]]:
    """Yield the call of each entry, and the positions of its tensors among all.

    `_foreach_add.List([a, b], [c, d])` is `add.List(a, c)` and `add.List(b, d)`.
    """
    args, kwargs = tensors_as_refs(call)
    name, overload = call.op.removeprefix("aten._foreach_").split(".")
    lists = [arg for arg in args if isinstance(arg, tuple)]
    if name == "pow" and overload != "ScalarAndTensor":
        overload = "of_tensor"
    for entry_index in range(len(lists[0])):
        entry_args: list[Argument] = [
            arg[entry_index] if isinstance(arg, tuple) else arg
            for arg in args
            if not (isinstance(arg, Ref) and _is_scalars(name, arg))
        ]
        positions = tuple(int(ref.name) for ref in refs(tuple(entry_args)) if ref.name != "host")
        yield (
            OpCall(
                op=f"aten.{name}.{overload.removesuffix('AndTensor')}",
                args=tuple(entry_args),
                kwargs=kwargs,
                inputs=tuple(call.inputs[at] for at in positions),
                tensor_names=tuple(map(str, positions)),
                outputs=(call.outputs[entry_index],),
            ),
            positions,
        )


def _is_scalars(name: str, ref: Ref) -> bool:
    """Return whether an argument holds one number for each entry, and is no factor or addend."""
    return name.startswith("addc") and ref.name != "host"


def _foreach(meaning: Meaning) -> Rule:
    """Return the rule of an operator that applies `meaning` to each entry."""

    def jointly(call: OpCall) -> Notation:
        inputs: list[Dims] = [
            fresh_dims(len(entry.shape), f"x{at}_") for at, entry in enumerate(call.inputs)
        ]
        whole = {name for dims in inputs for (name,) in dims}
        outputs: list[Dims] = []
        reductions: list[tuple[str, str]] = []
        nonempty: set[str] = set()
        why = ""
        entries: list[tuple[Notation, tuple[int, ...]]] = []
        for at, (entry_call, positions) in enumerate(_entries(call)):
            notation = meaning(entry_call)
            entries.append((notation, positions))
            for position, dims in zip(positions, notation.inputs, strict=True):
                inputs[position] = _renamed(dims, at)
            outputs.append(_renamed(notation.outputs[0], at))
            reductions += [(f"p{at}_{label}", "none") for label in notation.labels]
            reductions += [(f"p{at}_{label}@{at}", how) for label, how in notation.reductions]
            whole |= {f"p{at}_{label}" for label in notation.whole}
            nonempty |= {f"p{at}_{label}" for label in notation.nonempty}
            why = why or notation.why
        used = {name for dims in (*inputs, *outputs) for dim in dims for name in dim}
        return Notation(
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            dependences=tuple(_dependences(entries)),
            whole=frozenset(whole & used),
            nonempty=frozenset(nonempty),
            reductions=tuple(reductions),
            why=why,
        )

    return Rule(jointly)


def _renamed(dims: Dims, entry_index: int) -> Dims:
    return tuple(tuple(f"p{entry_index}_{name}" for name in dim) for dim in dims)


def _dependences(entries: Sequence[tuple[Notation, tuple[int, ...]]]) -> Iterator[Dependence]:
    """Yield the dependences of each entry, then those of all entries jointly.

    An argument that all entries share is partial for all of them, or for none.
    """
    uses = Counter(position for _, positions in entries for position in positions)
    jointly: dict[tuple[Effect, tuple[int, ...]], list[int]] = {}
    counts: Counter[tuple[Effect, tuple[int, ...]]] = Counter()
    for entry_index, (notation, positions) in enumerate(entries):
        for dependence in notation.dependences:
            entry_inputs = tuple(positions[at] for at in dependence.inputs)
            key = (dependence.effect, dependence.inputs)
            jointly.setdefault(key, []).extend(entry_inputs)
            counts[key] += 1
            if all(uses[position] == 1 for position in entry_inputs):
                reads = dependence.effect not in (Effect.UNREAD, Effect.IGNORED)
                outputs = (entry_index,) if reads else None
                yield Dependence(effect=dependence.effect, inputs=entry_inputs, outputs=outputs)
    for (effect, _), inputs in jointly.items():
        if counts[effect, _] == len(entries):
            yield Dependence(effect=effect, inputs=tuple(dict.fromkeys(inputs)))


def _reduced(how: Callable[[OpCall], str], why: str = "") -> Meaning:
    """Return the meaning of a reduction over all dims: with sum, max or min, or not of parts."""

    def meaning(call: OpCall) -> Notation:
        dims = fresh_dims(len(call.inputs[0].shape))
        names = frozenset(name for (name,) in dims)
        reduction = how(call)
        return Notation(
            inputs=(dims,),
            outputs=((),),
            whole=frozenset() if reduction else names,
            # Nothing has no maximum.
            nonempty=names if reduction in ("max", "min") else frozenset(),
            reductions=tuple((name, reduction or "sum") for name in sorted(names)),
            why="" if reduction else why,
        )

    return meaning


def _of_norm(call: OpCall) -> str:
    """Return how norms of parts give the norm: as a sum, maximum or minimum, or not at all."""
    order = argument(call, 1, "ord", 2)
    known = {0: "sum", 1: "sum", inf: "max", -inf: "min"}
    return known.get(order, "") if isinstance(order, int | float) else ""


def _product(_: OpCall) -> Notation:
    """`_foreach_mm`: `i k, k j => i j`, linear in either factor."""
    i, k, j = (("i",), ("k",), ("j",))
    return Notation(
        inputs=((i, k), (k, j)),
        outputs=((i, j),),
        dependences=(linear(0), linear(1)),
        reductions=(("k", "sum"),),
    )


def _fused(call: OpCall, *, steps: int | None, sums: bool) -> Notation:
    """Return the notation of a fused optimizer: elementwise at each place.

    Args:
        call: The call; its lists are all of one length, or empty.
        steps: Which list holds the numbers of steps, which stay whole. Some operators return new
            values of all lists, some of all but this one.
        sums: Whether new values are jointly linear in the old ones and the gradients.
    """
    args, _ = tensors_as_refs(call)
    lists = [[int(ref.name) for ref in arg] for arg in args if isinstance(arg, tuple)]
    inputs: list[Dims] = [
        fresh_dims(len(entry.shape), f"x{at}_") for at, entry in enumerate(call.inputs)
    ]
    by_entry: list[list[int]] = [[] for _ in lists[0]]
    for at, positions in enumerate(lists):
        if at != steps:
            for entry_index, position in enumerate(positions):
                inputs[position] = _labelled(call.inputs[position], entry_index)
                by_entry[entry_index].append(position)
    all_returned = len(call.outputs) == sum(map(len, lists))
    order = [found for at, found in enumerate(lists) if all_returned or at != steps]
    outputs = [inputs[position] for positions in order for position in positions]
    made = [entry_index for positions in order for entry_index in range(len(positions))]
    labels = {name for dims in inputs for (name,) in dims}
    dependences = [
        linear(*positions, outputs=tuple(at for at, of in enumerate(made) if of == entry_index))
        for entry_index, positions in enumerate(by_entry)
    ]
    jointly = linear(*(position for positions in by_entry for position in positions))
    return Notation(
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        dependences=(*dependences, jointly) if sums else (),
        whole=frozenset(name for name in labels if name.startswith("x")),
        reductions=tuple((name, "none") for name in sorted(labels)),
        why="it is one number for the whole tensor",
    )


def _labelled(entry: TensorType, entry_index: int) -> Dims:
    return _renamed(fresh_dims(len(entry.shape)), entry_index)


_ADAM = Rule(lambda call: _fused(call, steps=5, sums=False))
_ADAGRAD = Rule(lambda call: _fused(call, steps=3, sums=False))
_SGD = Rule(lambda call: _fused(call, steps=None, sums=True))

_UNARY = (
    "abs acos asin atan ceil clone cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p "
    "log2 neg reciprocal round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc zero"
)
_BINARY = {
    "List Scalar ScalarList Tensor": "add div mul",
    "List Scalar ScalarList": "clamp_max clamp_min lerp maximum minimum pow sub",
    "Scalar ScalarList Tensor": "addcdiv addcmul",
    "default": f"{_UNARY} copy",
    "ScalarAndTensor": "pow",
}

RULES = {
    **{
        f"aten._foreach_{name}.{overload}": _foreach(notation_of)
        for overloads, names in _BINARY.items()
        for overload in overloads.split()
        for name in names.split()
    },
    "aten._foreach_max.default": _foreach(_reduced(lambda _: "max")),
    "aten._foreach_mm.default": _foreach(_product),
    "aten._foreach_norm.Scalar": _foreach(
        _reduced(_of_norm, "norms of parts do not add up; sums of their powers do (powsum)")
    ),
    "aten._foreach_powsum.Scalar": _foreach(_reduced(lambda _: "sum")),
    "aten._fused_adagrad.default": _ADAGRAD,
    "aten._fused_adagrad.tensor_lr": _ADAGRAD,
    "aten._fused_adam.default": _ADAM,
    "aten._fused_adam.tensor_lr": _ADAM,
    "aten._fused_adamw.default": _ADAM,
    "aten._fused_adamw.tensor_lr": _ADAM,
    "aten._fused_sgd.default": _SGD,
    "aten._fused_sgd.tensor_lr": _SGD,
}
