"""Matrix products: sums of products, so that the notation says everything."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from sbp_core.signatures import (
    Dependence,
    Dims,
    Notation,
    OpCall,
    Rule,
    argument,
    broadcast_dims,
    decreasing,
    fresh_dims,
    increasing,
    linear,
    maxima,
    parse_notation,
    unread,
)

#: Why there may be no empty shards beside some biases.
_UNBROADCAST = "beside an empty matrix the kernel does not broadcast the bias"
_REAL_BETA = "beside an empty matrix the kernel refuses to multiply integers by a real beta"


def _bias_dims(call: OpCall, product: Notation) -> Dims:
    """Return the dims of argument 0, which is broadcast to the output of `product`."""
    names = {f"d{dim}": label for dim, label in enumerate(product.outputs[0])}
    shape = broadcast_dims(call.inputs[0].shape, call.outputs[0].shape)
    return tuple(names[dim[0]] if dim else () for dim in shape)


def _product_flop(call: OpCall, product: Notation) -> float:
    """Return the work of the factors behind argument 0."""
    dims = zip(call.inputs[1:], product.inputs, strict=True)
    sizes = {
        name: extent
        for entry, tensor in dims
        for (name,), extent in zip(tensor, entry.shape, strict=True)
    }
    return 2.0 * prod(sizes.values())


def _monotone(call: OpCall) -> tuple[Dependence, ...]:
    """Return how the output grows with a bias that is scaled by `beta`.

    Bool products are made of "and" and "or", which grow with everything.
    """
    if call.inputs[0].dtype == "bool":
        return (*map(increasing, range(3)), maxima(0, 1), maxima(0, 2))
    beta = _beta(call)
    if not isinstance(beta, int | float):
        return ()
    # No case for 0: the bias is not read then, see `_with_bias`.
    return (increasing(0) if beta > 0 else decreasing(0),)


def _beta(call: OpCall) -> object:
    """Return what the bias is multiplied by; integers are multiplied by an integer."""
    beta = call.kwargs.get("beta", 1)
    return int(beta) if isinstance(beta, float) and "int" in call.inputs[0].dtype else beta


def _with_bias(text: str, *, empty: bool = True) -> Rule:
    """Return the rule of a product to which a first argument, broadcast, is added.

    `j + i k, k j -> i j`; with `beta=0` the bias is not read: `j, i k, k j => i j; unread 0`.
    A product whose kernel returns an unbroadcast bias for an empty matrix has no `empty` shards.
    """

    def meaning(call: OpCall) -> Notation:
        product = parse_notation(text)
        inputs = (_bias_dims(call, product), *product.inputs)
        # A rank with an empty shard calls the kernel on it, which must then do what it always does.
        why = "" if empty or inputs[0] == product.outputs[0] else _UNBROADCAST
        if "int" in call.inputs[0].dtype and isinstance(call.kwargs.get("beta"), float):
            why = _REAL_BETA
        if why:
            product = replace(product, nonempty=frozenset(product.labels), why=why)
        # An unread bias may be anything, also nan: it is no addend. So the sum of products has to
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
    product = parse_notation("i k, k j -> i j")
    return Notation(
        inputs=(_bias_dims(call, product), *product.inputs),
        outputs=product.outputs,
        whole=frozenset("k"),
        work_flop=_product_flop(call, product),
        why="an activation follows the sum",
    )


def _int_mm(call: OpCall) -> Notation:
    """Int8 in, int32 out: partial int8 values would wrap, so only the output may be partial."""
    rows, inner = call.inputs[0].shape
    work = 2.0 * rows * inner * call.inputs[1].shape[1]
    return replace(parse_notation("i k, k j => i j"), work_flop=work)


def _scaled_mm(call: OpCall) -> Notation:
    """`i k, k j, i 1, 1 j => i j` with a scale for each row and column, or one for all.

    Scales of blocks have to stay with their blocks; a bias is added once, to a whole sum.
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
        # One scale a row (or column), which is cut with it. Anything else, but one number for all,
        # is of blocks.
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
        batches,
        (("i", "k")[-min(len(left), 2) :], ("k", "j")[: min(len(right), 2)]),
        strict=True,
    ):
        first = longest - len(batch)
        outer = ((f"b{first + at}",) if size != 1 else () for at, size in enumerate(batch))
        dims.append((*outer, *((name,) for name in inner)))
    # A dim of one element that is broadcast in both has no label; it stays so in the output.
    known = {name for tensor in dims for dim in tensor for name in dim}
    made = [f"b{at}" for at in range(longest)]
    made += [name for name, shape in (("i", left), ("j", right)) if len(shape) > 1]
    outputs = tuple((name,) if name in known else () for name in made)
    return Notation(inputs=tuple(dims), outputs=(outputs,), addends=(0, 0))


def _linear(call: OpCall) -> Notation:
    """`d0 d1 k, j k + j -> d0 d1 j`."""
    outer = fresh_dims(len(call.inputs[0].shape) - 1)
    bias: tuple[Dims, ...] = ((("j",),),) if len(call.inputs) > 2 else ()
    return Notation(
        inputs=((*outer, ("k",)), (("j",), ("k",)), *bias),
        outputs=((*outer, ("j",)),),
        addends=(0, 0, *(1 for _ in bias)),
    )


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
    """`b o i, b o i, b o i -> b o` and alike: each argument lacks the dims it is expanded over."""
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


RULES = {
    "aten._addmm_activation.default": Rule(_addmm_activation),
    "aten._int_mm.default": Rule(_int_mm),
    "aten._scaled_mm.default": Rule(_scaled_mm),
    "aten._trilinear.default": Rule(_trilinear),
    "aten.addbmm.default": _with_bias("n i k, n k j -> i j"),
    "aten.addmm.default": _with_bias("i k, k j -> i j"),
    "aten.addmv.default": _with_bias("i k, k -> i", empty=False),
    "aten.addr.default": _with_bias("i, j -> i j"),
    "aten.baddbmm.default": _with_bias("n i k, n k j -> n i j"),
    "aten.bmm.default": Rule("n i k, n k j -> n i j"),
    "aten.dot.default": Rule("k, k -> ()"),
    "aten.linear.default": Rule(_linear),
    "aten.matmul.default": Rule(_matmul),
    "aten.mm.default": Rule("i k, k j -> i j"),
    "aten.mv.default": Rule("i k, k -> i"),
    "aten.tensordot.default": Rule(_tensordot),
    "aten.vdot.default": Rule("k, k -> ()"),
}
