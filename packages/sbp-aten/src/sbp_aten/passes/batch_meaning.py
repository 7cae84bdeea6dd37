"""What the forward values of a micro-batch are to the whole batch.

Micro-batches are the ranks of one more mesh axis, in time: they split every tensor of the batch
along its samples, and parameters are the same for all. So the signatures that say what ranks may
compute apart also say what micro-batches may:

    value                          of a micro-batch                  of the whole batch
    parameters, and what is        `CONSTANT`                        the same
      made of them
    logits                         `SAMPLES`, along a dim            these, one behind the other
    a sum over the batch           `SUM`                             the sum of all
    a mean over the batch          `MEAN`                            the mean of all
    a ratio of two sums            `WHOLE`                           computed of the whole sums
    what samples compute of        `MIXED`                           cannot be told
      each other

Batch normalisation in training is excepted: its statistics are those of a micro-batch, and what it
makes are samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from math import prod

from sbp_aten.traits import TRAITS
from sbp_core.errors import SignatureError
from sbp_core.graph import InputKind, LogicalGraph, Node, OutputKind, Phase, Rate
from sbp_core.sbp import B, P, S, Sbp, Split
from sbp_core.signatures import OpCall, Signature1d, argument, derivation

#: PyTorch's number for `reduction="mean"`.
_MEAN = 1

#: Where losses take `reduction`. A mean of these is over all elements.
_REDUCTION_AT = {
    "binary_cross_entropy": 3,
    "binary_cross_entropy_with_logits": 4,
    "huber_loss": 2,
    "mse_loss": 2,
    "multi_margin_loss": 5,
    "multilabel_margin_loss_forward": 2,
    "smooth_l1_loss": 2,
    "soft_margin_loss": 2,
}

_BATCH_NORMS = ("_native_batch_norm_legit_functional", "native_batch_norm", "cudnn_batch_norm")

#: Losses whose output 1 is the total weight of the targets.
TOTAL_WEIGHTS = ("nll_loss_forward", "nll_loss2d_forward")

#: Operators that keep all elements, in their order.
RESHAPES = ("_unsafe_view", "reshape", "squeeze", "unsqueeze", "view")

#: How the names of dtypes begin that have gradients.
_DIFFERENTIABLE = ("float", "bfloat", "complex")

#: How far a number may be off a multiple of the size of a batch, for having been rounded.
_ROUNDING = 1e-9

_SUM = P("sum")


class Kind(Enum):
    """What a value of a micro-batch is to the whole batch; see the module's docstring."""

    CONSTANT = auto()
    SAMPLES = auto()
    SUM = auto()
    MEAN = auto()
    WHOLE = auto()
    MIXED = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What one forward value is to the whole batch.

    Args:
        kind: See `Kind`.
        dim: The dim of `SAMPLES` along which they lie.
        trained: Whether it depends on a parameter.
        cause: Of what is `MIXED`, the node where samples meet; of a `SUM`, one that multiplies it
            by a number that may be the size of a micro-batch; else None.
    """

    kind: Kind
    dim: int = 0
    trained: bool = False
    cause: Node | None = None

    @property
    def is_reduced(self) -> bool:
        """Whether it is of the batch, and not of single samples."""
        return self.kind in (Kind.SUM, Kind.MEAN, Kind.WHOLE)


CONSTANT = Meaning(kind=Kind.CONSTANT)


def linear_signatures(
    graph: LogicalGraph, node: Node, given: Iterable[int]
) -> list[frozenset[int]]:
    """Return the sets of tensor arguments that hold the given ones and in which a node is linear.

    The smallest come first. Arguments outside of a set are constants of the linear map.
    """
    wanted = frozenset(given)
    found = set()
    for signature in _signatures(graph, node):
        parts = frozenset(index for index, sbp in enumerate(signature.inputs) if sbp == _SUM)
        others = [sbp for index, sbp in enumerate(signature.inputs) if index not in parts]
        is_linear = all(sbp == _SUM for sbp in signature.outputs) and all(s == B for s in others)
        if is_linear and wanted <= parts:
            found.add(parts)
    return sorted(found, key=lambda parts: (len(parts), sorted(parts)))


def is_linear(graph: LogicalGraph, node: Node, given: Iterable[int]) -> bool:
    """Whether a node is linear in just these tensor arguments."""
    wanted = frozenset(given)
    return wanted in linear_signatures(graph, node, wanted)


def batch_meanings(graph: LogicalGraph) -> dict[str, Meaning]:
    """Return what each input and forward value of a captured step is to the whole batch."""
    meanings = {entry.name: _of_input(graph, entry.name) for entry in graph.inputs}
    for node in graph.nodes:
        if node.phase is Phase.FORWARD:
            meanings.update(zip(node.outputs, _of_node(graph, node, meanings), strict=True))
    return meanings


def _of_input(graph: LogicalGraph, name: str) -> Meaning:
    kind = graph.input_kinds[name].kind
    if kind is InputKind.BATCH and graph.is_tensor(name) and graph.tensor(name).shape:
        return Meaning(kind=Kind.SAMPLES)
    return Meaning(kind=Kind.CONSTANT, trained=kind is InputKind.PARAMETER)


def _of_node(graph: LogicalGraph, node: Node, meanings: Mapping[str, Meaning]) -> list[Meaning]:
    """Return the meanings of what a node makes."""
    given = [meanings[value] for value in node.inputs()]
    tensors = [meanings[value] for value in graph.tensor_inputs(node)]
    count = len(node.outputs)
    if node.is_host or node.kind in TRAITS.factories:
        return [CONSTANT] * count
    mixed = [one for one in given if one.kind is Kind.MIXED]
    if mixed:
        found = mixed[:1] * count
    elif all(meaning.kind is Kind.CONSTANT for meaning in given):
        found = [CONSTANT] * count
    elif node.kind in _BATCH_NORMS:
        found = [Meaning(kind=Kind.SAMPLES, dim=given[0].dim), *[CONSTANT] * (count - 1)]
    elif any(meaning.kind is Kind.SAMPLES for meaning in tensors):
        found = _of_samples(graph, node, tensors)
    else:
        found = _of_reduced(graph, node, tensors)
    trained = [_is_trained(graph, node, value, given) for value in node.outputs]
    return [
        replace(one, trained=is_trained) for one, is_trained in zip(found, trained, strict=True)
    ]


def _is_trained(graph: LogicalGraph, node: Node, value: str, given: Sequence[Meaning]) -> bool:
    """Whether a value may depend on a parameter in a way that gradients follow.

    A graph does not say what was detached: that counts as trained, too.
    """
    if not graph.tensor(value).dtype.startswith(_DIFFERENTIABLE):
        return False
    if node.kind in TOTAL_WEIGHTS and value == node.outputs[1]:
        given = given[1:]  # the targets and weights of classes, and not the scores
    return any(meaning.trained for meaning in given)


def _of_samples(graph: LogicalGraph, node: Node, given: Sequence[Meaning]) -> list[Meaning]:
    """Return the meanings of what is made of samples, and of constants beside them.

    A constant may be cut like samples: `zeros(batch_size)` is longer for the whole batch. What the
    batch sums up to, such as a number of tokens, is a constant there if no parameter is behind it;
    else every sample would depend on all others.
    """
    mixed = [Meaning(kind=Kind.MIXED, cause=node)] * len(node.outputs)
    if any(meaning.is_reduced and meaning.trained for meaning in given):
        return mixed
    samples = [S(one.dim) if one.kind is Kind.SAMPLES else None for one in given]
    if node.kind in RESHAPES and micro_batch_size(graph) == 1:
        return _of_one_sample(graph, node, samples) or mixed
    names = graph.tensor_inputs(node)
    # Of constants alone, as what samples are made of may reach far back.
    fixed = [
        sbp is None and (one.is_reduced or _numbers_samples(graph, name))
        for name, one, sbp in zip(names, given, samples, strict=True)
    ]
    for signature in _signatures(graph, node):
        fits = all(
            sbp == wanted if wanted is not None else sbp == B or (isinstance(sbp, Split) and not at)
            for sbp, wanted, at in zip(signature.inputs, samples, fixed, strict=True)
        )
        if fits:
            return [_made(graph, node, sbp) for sbp in signature.outputs]
    return _of_one_sample(graph, node, samples) or mixed


def _numbers_samples(graph: LogicalGraph, value: str) -> bool:
    """Whether a constant may number the samples of a micro-batch, which begins anew in the next."""
    node = graph.producers.get(value)
    if node is None or node.kind in ("arange", "eye"):
        return node is not None
    keeps = "pointwise" in node.tags or node.kind in RESHAPES or node.kind in TRAITS.copies
    return keeps and any(_numbers_samples(graph, name) for name in graph.tensor_inputs(node))


def _made(graph: LogicalGraph, node: Node, sbp: Sbp) -> Meaning:
    if isinstance(sbp, Split):
        return Meaning(kind=Kind.SAMPLES, dim=sbp.dim)
    if sbp == _SUM:
        at = _REDUCTION_AT.get(node.kind)
        call = OpCall.of(graph, node)
        mean = node.kind == "mean" or (
            at is not None and argument(call, at, "reduction", _MEAN) == _MEAN
        )
        return Meaning(kind=Kind.MEAN if mean else Kind.SUM)
    return CONSTANT if sbp == B else Meaning(kind=Kind.MIXED, cause=node)


def _of_one_sample(graph: LogicalGraph, node: Node, samples: Sequence[Sbp | None]) -> list[Meaning]:
    """Return the meanings where the batch is a dim of one, which rules take for one to broadcast.

    Elementwise operators keep its place from behind, and views the elements in front of it.
    """
    if len(node.outputs) != 1:
        return []
    shape, dims = graph.tensor(node.outputs[0]).shape, set()
    for value, sbp in zip(graph.tensor_inputs(node), samples, strict=True):
        if not isinstance(sbp, Split):
            continue
        before = graph.tensor(value).shape
        if "pointwise" in node.tags and before[sbp.dim] == 1:
            dims.add(sbp.dim - len(before) + len(shape))
        elif node.kind in RESHAPES:
            fits = (at for at in range(len(shape)) if prod(shape[:at]) == prod(before[: sbp.dim]))
            dims.add(next(fits, -1))
        else:
            dims.add(-1)
    return [Meaning(kind=Kind.SAMPLES, dim=max(dims))] if len(dims) == 1 and -1 not in dims else []


def _of_reduced(graph: LogicalGraph, node: Node, given: Sequence[Meaning]) -> list[Meaning]:
    """Return the meanings of what is made of sums, means, and constants beside them."""
    parts = [index for index, one in enumerate(given) if one.kind is not Kind.CONSTANT]
    kinds = {given[index].kind for index in parts}
    if kinds == {Kind.MEAN} and is_linear(graph, node, range(len(given))):
        # Also a constant is the mean of that of all micro-batches, such as a penalty.
        return [Meaning(kind=Kind.MEAN)] * len(node.outputs)
    if len(kinds) > 1 or Kind.WHOLE in kinds or not is_linear(graph, node, parts):
        return [Meaning(kind=Kind.WHOLE)] * len(node.outputs)
    (kind,) = kinds
    cause = next((given[index].cause for index in parts if given[index].cause), None)
    if kind is Kind.SUM and cause is None and _may_count_samples(graph, node):
        cause = node
    return [Meaning(kind=kind, cause=cause)] * len(node.outputs)


def _may_count_samples(graph: LogicalGraph, node: Node) -> bool:
    """Whether a node multiplies by a number that may be the size of a micro-batch, or its inverse.

    A graph has the number, and not how it was computed: 32 in `loss.sum() / len(x)`.
    """
    if node.kind not in ("div", "mul"):
        return False
    size = micro_batch_size(graph)
    numbers = [one for one in node.args if isinstance(one, int | float) and one]
    shares = (one / size for number in numbers for one in (abs(number), 1 / abs(number)))
    return any(abs(share - round(share)) < _ROUNDING and round(share) for share in shares)


def micro_batch_size(graph: LogicalGraph) -> int:
    """Return the samples of a micro-batch, >= 1."""
    batch = (entry.name for entry in graph.inputs if entry.kind is InputKind.BATCH)
    shapes = [graph.tensor(name).shape for name in batch if graph.is_tensor(name)]
    return max((shape[0] for shape in shapes if shape and shape[0]), default=1)


def _signatures(graph: LogicalGraph, node: Node) -> tuple[Signature1d, ...]:
    """Return the signatures of a node; none of an operator that has no rule."""
    try:
        return derivation(OpCall.of(graph, node)).legal
    except SignatureError:
        return ()


def varying_values(graph: LogicalGraph) -> set[str]:
    """Return the inputs and values that differ between the micro-batches of a step."""
    carried = {
        out.name
        for out in graph.outputs
        if out.kind is OutputKind.STATE and graph.rate_of(out.value) is Rate.MICRO
    }
    found = {
        entry.name
        for entry in graph.inputs
        if entry.kind in (InputKind.BATCH, InputKind.RNG)
        or (entry.kind is not InputKind.OPTIMIZER_STATE and entry.name in carried)
    }
    for node in graph.nodes:
        # Factories read no tensors, but the host scalars that count random numbers.
        blind = node.kind in TRAITS.factories
        read = (value for value in node.inputs() if not (blind and graph.is_tensor(value)))
        if any(value in found for value in read):
            found.update(node.outputs)
    return found
