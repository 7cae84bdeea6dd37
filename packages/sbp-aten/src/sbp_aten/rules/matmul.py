"""Sharding rules of matrix products, and of distances between rows.

A product is a sum of products, so its notation says everything. A distance under a norm p is a sum
over the columns for p = 0 and 1 and a maximum for p = infinity; other norms take a root of the
whole sum, so columns stay whole.

Notation: see `sbp_core.signatures.notation` (`!` not split, `+` no empty shard, `x*` run of dims).
"""

from __future__ import annotations

from dataclasses import replace
from math import inf, prod

from sbp_aten.rules.formula import by_operator, notation
from sbp_core.signatures import (
    Dependence,
    Dims,
    Notation,
    OpCall,
    Rule,
    argument,
    broadcast_dims,
    decreasing,
    increasing,
    linear,
    maxima,
    parse_notation,
    unread,
    wrap_dim,
)

#: Reason why empty shards are not allowed with some biases.
_UNBROADCAST = "with an empty matrix the kernel does not broadcast the bias"


_REAL_BETA = "with an empty matrix the kernel refuses to multiply integers by a real beta"


def _bias_dims(call: OpCall, product: Notation) -> Dims:
    """Return the dims of argument 0, which is broadcast to the output of `product`."""
    names = {f"d{dim}": label for dim, label in enumerate(product.outputs[0])}
    shape = broadcast_dims(call.inputs[0].shape, call.outputs[0].shape)
    return tuple(names[dim[0]] if dim else () for dim in shape)


def _product_flop(call: OpCall, product: Notation) -> float:
    """Return the work of the factors after argument 0."""
    dims = zip(call.inputs[1:], product.inputs, strict=True)
    sizes = {
        name: extent
        for entry, tensor in dims
        for (name,), extent in zip(tensor, entry.shape, strict=True)
    }
    return 2.0 * prod(sizes.values())


def _monotone(call: OpCall) -> tuple[Dependence, ...]:
    """Return how the output depends on a bias that is scaled by `beta`: increasing or decreasing.

    Bool products consist of "and" and "or", which are increasing in all arguments.
    """
    if call.inputs[0].dtype == "bool":
        return (*map(increasing, range(3)), maxima(0, 1), maxima(0, 2))
    beta = _beta(call)
    if not isinstance(beta, int | float):
        return ()
    # No case for 0: the bias is not read then, see `_with_bias`.
    return (increasing(0) if beta > 0 else decreasing(0),)


def _beta(call: OpCall) -> object:
    """Return the factor of the bias; an integer for integers."""
    beta = call.kwargs.get("beta", 1)
    return int(beta) if isinstance(beta, float) and "int" in call.inputs[0].dtype else beta


def _with_bias(text: str, *, empty: bool = True) -> Rule:
    """Return the rule of a product to which a first argument, broadcast, is added.

    `j + i k, k j -> i j`; with `beta=0` the bias is not read: `j, i k, k j => i j; unread 0`.
    `empty=False`: no empty shards, because the kernel would return an unbroadcast bias.
    """

    def meaning(call: OpCall) -> Notation:
        product = parse_notation(text)
        inputs = (_bias_dims(call, product), *product.inputs)
        # A rank calls the kernel also on an empty shard, so it has to broadcast there, too.
        why = "" if empty or inputs[0] == product.outputs[0] else _UNBROADCAST
        if "int" in call.inputs[0].dtype and isinstance(call.kwargs.get("beta"), float):
            why = _REAL_BETA
        if why:
            product = replace(product, nonempty=frozenset(product.labels), why=why)
        # An unread bias may be anything, also NaN, so it is no addend. The sum of products has to
        # be stated by hand, without the bias.
        if _beta(call) == 0:
            return Notation(
                inputs=inputs,
                outputs=product.outputs,
                dependences=(unread(0), linear(1), linear(2), linear(0, 1), linear(0, 2)),
                nonempty=product.nonempty,
                work_flop=_product_flop(call, product),
                why=product.why,
            )
        return replace(product, inputs=inputs, addends=(0, 1, 1), dependences=(*_monotone(call),))

    return Rule(meaning)


def _addmm_activation(call: OpCall) -> Notation:
    """`j, i k!, k! j => i j`."""
    product = parse_notation("i k!, k! j => i j; why an activation follows the sum")
    return replace(
        product,
        inputs=(_bias_dims(call, product), *product.inputs),
        work_flop=_product_flop(call, product),
    )


def _int_mm(call: OpCall) -> Notation:
    """Int8 to int32: partial int8 values would wrap, so only the output may be partial."""
    work = 2 * prod(call.inputs[0].shape) * call.inputs[1].shape[1]
    return notation(call, f"i k, k j => i j; flop {work}")


def _scaled_mm(call: OpCall) -> Notation:
    """`i k, k j, i 1, 1 j => i j` with a scale for each row and column, or one for all.

    With scales of blocks, nothing that would cut a block is split; a bias needs the whole sum.
    """
    (rows, inner), columns = call.inputs[0].shape, call.inputs[1].shape[1]
    scales: list[Dims] = []
    own: set[str] = set()
    for index, label, extent in ((2, "i", rows), (3, "j", columns)):
        shape = call.inputs[index].shape
        aligned = "ij".index(label)
        dims: Dims = tuple(
            () if size == 1 else (f"t{index}_{at}",) for at, size in enumerate(shape)
        )
        # One scale a row (or column), which is cut with it. Otherwise, except one number for all,
        # scales are for blocks.
        if prod(shape) != 1 and prod(shape) == extent and shape[aligned] == extent:
            dims = tuple((label,) if at == aligned else () for at in range(len(shape)))
        own |= {name for dim in dims for name in dim if name not in "ij"}
        scales.append(dims)
    bias = argument(call, 4, "bias")
    extra: list[Dims] = [] if bias is None else [(("j",),)]
    extra += [() for _ in call.inputs[4 + len(extra) :]]
    return Notation(
        inputs=((("i",), ("k",)), (("k",), ("j",)), *scales, *extra),
        outputs=((("i",), ("j",)),),
        whole=frozenset(own | set("ijk" if own else "k" if extra else "")),
        work_flop=2.0 * rows * inner * columns,
        why="scales belong to blocks" if own else "a bias is added to the whole sum",
    )


def _matmul(call: OpCall) -> Notation:
    """`b0 i k, k j -> b0 i j`: matrices of a batch, which is broadcast; vectors lack `i` or `j`."""
    left, right = (entry.shape for entry in call.inputs)
    batches = (left[:-2], right[:-2])
    longest = max(map(len, batches))
    dims: list[Dims] = []
    for batch, inner in zip(
        batches, (("i", "k")[-min(len(left), 2) :], ("k", "j")[: min(len(right), 2)]), strict=True
    ):
        first = longest - len(batch)
        outer = ((f"b{first + at}",) if size != 1 else () for at, size in enumerate(batch))
        dims.append((*outer, *((name,) for name in inner)))
    # A dim of one element in both factors has no label; neither has it in the output.
    known = {name for tensor in dims for dim in tensor for name in dim}
    made = [f"b{at}" for at in range(longest)]
    made += [name for name, shape in (("i", left), ("j", right)) if len(shape) > 1]
    outputs = tuple((name,) if name in known else () for name in made)
    return Notation(inputs=tuple(dims), outputs=(outputs,), addends=(0, 0))


def _linear(call: OpCall) -> Notation:
    return notation(call, f"d* k, j k{' + j' * (len(call.inputs) > 2)} -> d* j")


def _tensordot(call: OpCall) -> Notation:
    """`k0 k1 i0, k0 k1 j0 -> i0 j0`: sums over pairs of dims."""
    tensors: list[Dims] = []
    for at, prefix in enumerate("ij"):
        rank = len(call.inputs[at].shape)
        summed = [dim % rank for dim in argument(call, 2 + at, f"dims_{('self', 'other')[at]}")]
        names = [
            f"k{summed.index(dim)}" if dim in summed else f"{prefix}{dim}" for dim in range(rank)
        ]
        tensors.append(tuple((name,) for name in names))
    made = tuple(dim for tensor in tensors for dim in tensor if not dim[0].startswith("k"))
    return Notation(inputs=tuple(tensors), outputs=(made,), addends=(0, 0))


def _trilinear(call: OpCall) -> Notation:
    """`b o i, b o i, b o i -> b o` etc.: each argument lacks the dims it is expanded along."""
    num_dims = len(call.inputs[0].shape) + len(argument(call, 3, "expand1"))
    inputs: list[Dims] = []
    for index, entry in enumerate(call.inputs):
        over = {dim % num_dims for dim in argument(call, 3 + index, f"expand{index + 1}")}
        kept = [dim for dim in range(num_dims) if dim not in over]
        pairs = zip(kept, entry.shape, strict=True)
        inputs.append(tuple((f"d{dim}",) if extent != 1 else () for dim, extent in pairs))
    known = {name for dims in inputs for dim in dims for name in dim}
    summed = {dim % num_dims for dim in argument(call, 6, "sumdim")}
    made = [f"d{dim}" for dim in range(num_dims) if dim not in summed]
    return Notation(
        inputs=tuple(inputs),
        outputs=(tuple((name,) if name in known else () for name in made),),
        addends=(0, 0, 0),
    )


def _over_columns(norm: float) -> tuple[str, str]:
    """Return the mark of the columns `m`, and the clauses of a distance: how they are reduced."""
    if norm in (0, 1):
        return "", ""
    if norm == inf:
        return "", "; reduce m max"
    return "!", "; why a norm takes a root of the sum over the columns"


def _unread(norm: float, count: int) -> str:
    """Return the arguments (of `count`, the distances last) that a gradient does not read.

    For p = 1 it depends only on signs of differences, for p = 0 it is zero.
    """
    if norm not in (0, 1):
        return ""
    first = 0 if norm == 0 else count - 1
    return "".join(f"; unread {at}" for at in range(first, count - 1)) + f"; ignored {count - 1}"


def _cdist(call: OpCall) -> Notation:
    norm = 2.0 if call.op == "aten._euclidean_dist.default" else argument(call, 2, "p")
    mark, reduced = _over_columns(norm)
    work = 3.0 * prod(call.outputs[0].shape) * call.inputs[0].shape[-1]
    return notation(call, f"... p m{mark}, ... r m => ... p r; flop {work}{reduced}")


def _cdist_backward(call: OpCall) -> Notation:
    """Return the notation: a sum over the rows of argument 2."""
    work = 4.0 * prod(call.outputs[0].shape) * call.inputs[2].shape[-2]
    clauses = f"linear 0{_unread(argument(call, 3, 'p'), 4)}; flop {work}"
    return notation(call, f"... p r, ... p m, ... r m, ... p r => ... p m; {clauses}")


_PAIRS = "each row is paired with every other"


def _pdist(call: OpCall) -> Notation:
    mark, reduced = _over_columns(argument(call, 1, "p", 2.0))
    why = reduced.replace("why", f"why {_PAIRS}, and") if mark else f"{reduced}; why {_PAIRS}"
    work = 3.0 * call.outputs[0].shape[0] * call.inputs[0].shape[1]
    return notation(call, f"n! m{mark} => q!; flop {work}{why}")


def _pdist_backward(call: OpCall) -> Notation:
    unread, work = _unread(argument(call, 2, "p"), 3), 4.0 * prod(call.inputs[1].shape[1:])
    work *= call.inputs[0].shape[0]
    return notation(call, f"q!, n! m, q! => n! m; linear 0{unread}; flop {work}; why {_PAIRS}")


def _cross(call: OpCall) -> Notation:
    """`..., ... => ...`; the dim of the components is whole."""
    shape = call.outputs[0].shape
    dim = wrap_dim(argument(call, 2, "dim", -1), len(shape))
    found = notation(call, f"..., ... => ...; linear 0; linear 1; flop {3.0 * prod(shape)}")
    why = "the three components of a cross product mix"
    return replace(found, whole=frozenset({f"d{dim}"}), why=why)


RULES = by_operator(
    {
        "_addmm_activation": Rule(_addmm_activation),
        "_cdist_backward": Rule(_cdist_backward),
        "_cdist_forward _euclidean_dist": Rule(_cdist),
        "_int_mm": Rule(_int_mm),
        "_pdist_backward": Rule(_pdist_backward),
        "_pdist_forward": Rule(_pdist),
        "_scaled_mm": Rule(_scaled_mm),
        "_trilinear": Rule(_trilinear),
        "addbmm": _with_bias("n i k, n k j -> i j"),
        "addmm": _with_bias("i k, k j -> i j"),
        "addmv": _with_bias("i k, k -> i", empty=False),
        "addr": _with_bias("i, j -> i j"),
        "baddbmm": _with_bias("n i k, n k j -> n i j"),
        "bmm": Rule("n i k, n k j -> n i j"),
        "dot vdot": Rule("k, k -> ()"),
        "linalg_cross": Rule(_cross),
        "linear": Rule(_linear),
        "matmul": Rule(_matmul),
        "mm": Rule("i k, k j -> i j"),
        "mv": Rule("i k, k -> i"),
        "tensordot": Rule(_tensordot),
    }
)
