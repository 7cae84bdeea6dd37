"""Sharding rules of operators on lists of tensors: `_foreach_*` and fused optimizers, also ours.

Each entry of the lists is an independent operator call: its labels are the labels of the single
operator after a prefix `p0_`, `p1_`, ... A signature splits the tensors of one entry, or passes
partial values in one entry or in all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf

from sbp_aten.rules.formula import by_operator, notation
from sbp_aten.rules.pointwise import notation_of
from sbp_core.graph import Argument, Ref, refs
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

#: Returns the notation for the call of one entry.
Meaning = Callable[[OpCall], Notation]


def _entries(call: OpCall) -> Iterator[tuple[OpCall, tuple[int, ...]]]:
    """Yield the call of each entry, and the positions of its tensors in the whole call.

    `_foreach_add.List([a, b], [c, d])` is `add.List(a, c)` and `add.List(b, d)`.
    """
    args, kwargs = tensors_as_refs(call)
    name, overload = call.op.removeprefix("aten._foreach_").split(".")
    lists = [arg for arg in args if isinstance(arg, tuple)]
    if name == "pow" and overload != "ScalarAndTensor":
        overload = "of_tensor"
    # A tensor with one number for each entry is not a factor or addend.
    numbers = name.startswith("addc")
    for entry_index in range(len(lists[0])):
        entry_args: list[Argument] = [
            arg[entry_index] if isinstance(arg, tuple) else arg
            for arg in args
            if not (numbers and isinstance(arg, Ref) and arg.name != "host")
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
            meant = meaning(entry_call)
            entries.append((meant, positions))
            for position, dims in zip(positions, meant.inputs, strict=True):
                inputs[position] = _renamed(dims, at)
            outputs.append(_renamed(meant.outputs[0], at))
            reductions += [(f"p{at}_{label}", "none") for label in meant.labels]
            reductions += [(f"p{at}_{label}@{at}", how) for label, how in meant.reductions]
            whole |= {f"p{at}_{label}" for label in meant.whole}
            nonempty |= {f"p{at}_{label}" for label in meant.nonempty}
            why = why or meant.why
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
    """Yield the dependences of each entry, then the dependences of all entries jointly.

    An argument that all entries share is partial for all of them, or for none.
    """
    uses = Counter(position for _, positions in entries for position in positions)
    jointly: dict[tuple[Effect, tuple[int, ...]], list[int]] = {}
    counts: Counter[tuple[Effect, tuple[int, ...]]] = Counter()
    for entry_index, (meant, positions) in enumerate(entries):
        for dependence in meant.dependences:
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
    """Return the meaning of a reduction over all dims: sum, max, min, or none for parts."""

    def meaning(call: OpCall) -> Notation:
        kind = how(call)
        # An empty tensor has no maximum.
        mark = "!" if not kind else "+" * (kind != "sum")
        reason = "" if kind else f"; why {why}"
        return notation(call, f"d*{mark} => (); reduce d* {kind or 'sum'}{reason}")

    return meaning


def _of_norm(call: OpCall) -> str:
    """Return how norms of parts combine: by sum, maximum or minimum, or not at all (`""`)."""
    order = argument(call, 1, "ord", 2)
    known = {0: "sum", 1: "sum", inf: "max", -inf: "min"}
    return known.get(order, "") if isinstance(order, int | float) else ""


def _fused(call: OpCall, *, steps: int | None, sums: bool) -> Notation:
    """Return the notation of a fused optimizer: elementwise at each place.

    Args:
        call: The call; its lists have one common length, or are empty.
        steps: Position of the list of step numbers, which stay whole. Some operators return new
            values of all lists, some of all lists except this one.
        sums: Whether new values are jointly linear in the old ones and the gradients.
    """
    args, _ = tensors_as_refs(call)
    lists = [[int(ref.name) for ref in arg] for arg in args if isinstance(arg, tuple)]
    inputs = [fresh_dims(len(entry.shape), f"x{at}_") for at, entry in enumerate(call.inputs)]
    by_entry: list[list[int]] = [[] for _ in lists[0]]
    for at, positions in enumerate(lists):
        if at != steps:
            for index, position in enumerate(positions):
                inputs[position] = _renamed(fresh_dims(len(call.inputs[position].shape)), index)
                by_entry[index].append(position)
    all_returned = len(call.outputs) == sum(map(len, lists))
    order = [found for at, found in enumerate(lists) if all_returned or at != steps]
    made = [index for positions in order for index in range(len(positions))]
    names = {name for dims in inputs for (name,) in dims}
    dependences = [
        linear(*positions, outputs=tuple(at for at, of in enumerate(made) if of == index))
        for index, positions in enumerate(by_entry)
    ]
    jointly = linear(*(position for positions in by_entry for position in positions))
    return Notation(
        inputs=tuple(inputs),
        outputs=tuple(inputs[position] for positions in order for position in positions),
        dependences=(*dependences, jointly) if sums else (),
        whole=frozenset(name for name in names if name.startswith("x")),
        reductions=tuple((name, "none") for name in sorted(names)),
        why="it is one number for the whole tensor",
    )


def _own_fused(call: OpCall, *, sums: bool) -> Notation:
    """Return the notation: all tensors of the parameter's shape split alike; a 0-d step is whole.

    Args:
        call: `sbp.fused_*(p, g, states..., [0-d step])`.
        sums: Whether new values are jointly linear in the old ones and the gradient.
    """
    count = len(call.outputs) + 1  # the gradient is not returned
    inputs = ", ".join("d*" if at < count else "()" for at in range(len(call.inputs)))
    clause = f"; linear {' '.join(map(str, range(count)))}" * sums
    return notation(call, f"{inputs} => {', '.join('d*' for _ in call.outputs)}{clause}")


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


_MATRICES = "i k, k j => i j; linear 0; linear 1; reduce k sum"
_NORM = "norms of parts do not add up; sums of their powers do (powsum)"

RULES = {
    **by_operator(
        {
            f"_foreach_{name}.{overload}": _foreach(notation_of)
            for overloads, names in _BINARY.items()
            for overload in overloads.split()
            for name in names.split()
        }
        | {
            "_foreach_max": _foreach(_reduced(lambda _: "max")),
            "_foreach_mm": _foreach(lambda call: notation(call, _MATRICES)),
            "_foreach_norm.Scalar": _foreach(_reduced(_of_norm, _NORM)),
            "_foreach_powsum.Scalar": _foreach(_reduced(lambda _: "sum")),
            "_fused_adagrad _fused_adagrad.tensor_lr": Rule(partial(_fused, steps=3, sums=False)),
            "_fused_adam _fused_adam.tensor_lr _fused_adamw _fused_adamw.tensor_lr": Rule(
                partial(_fused, steps=5, sums=False)
            ),
            "_fused_sgd _fused_sgd.tensor_lr": Rule(partial(_fused, steps=None, sums=True)),
        }
    ),
    **by_operator(
        {
            "fused_adagrad fused_adagrad.tensor_step fused_adam fused_adam.tensor_step": Rule(
                partial(_own_fused, sums=False)
            ),
            "fused_sgd": Rule(partial(_own_fused, sums=True)),
        },
        "sbp",
    ),
}
