"""What one micro-batch runs of a call on the whole batch.

A call of the whole batch becomes calls of its parts by the signatures and localisers that ranks go
by: see `batch_layout`. Here stands what goes beyond them, as parts need not be sent: samples in
several blocks (`cat` of two views of a batch), and indices that number the samples, which in a part
number its own (`x[arange(len(x)), lengths - 1]`).

A tensor that is made of numbers alone, such as `zeros(len(x))`, is made in the size of a part where
it meets parts. A micro-batch knows nothing of its place among the others, so what depends on the
places of samples is not followed: `err[0]`, `linspace(0, 1, len(x))`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod

from sbp_aten.passes.batch_layout import (
    SAME,
    Layout,
    Samples,
    Total,
    divides,
    layout_of,
    part_shape,
    part_type,
    reshaped,
    sbp_of,
)
from sbp_aten.traits import TRAITS
from sbp_core.errors import SignatureError
from sbp_core.graph import Argument, LogicalGraph, Node, Ref, TensorType, ValueType, map_refs
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp, Split
from sbp_core.signatures import (
    LocalCall,
    LocalProgram,
    OpCall,
    Signature1d,
    argument,
    derive,
    localize,
    wrap_dim,
)
from sbp_core.strategy import Signature

#: Operators that keep all elements, in their order.
RESHAPES = ("_unsafe_view", "reshape", "squeeze", "unsqueeze", "view")

_ZEROS = ("new_zeros", "zeros", "zeros_like")

#: Operators that fill a tensor with a number, and where they take it.
_FILLS = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}

_RANDOM = "sbp.random_"

_BAGS = ("_embedding_bag", "_embedding_bag_forward_only")

#: Where their gradients are told to count how often a row is named, and the mode.
_BAG_GRADIENTS = {"_embedding_bag_backward": (7, 8), "_embedding_bag_dense_backward": (6, 7)}

#: The mode of a bag whose gradient is that of its largest rows.
_LARGEST = 2

_SCALED = "aten.mul.Scalar"


@dataclass(frozen=True, slots=True)
class Part:
    """A value of one micro-batch: its name in the graph that is written, and what it is part of."""

    name: str
    layout: Layout = SAME


@dataclass(slots=True)
class PartCalls:
    """Writes the calls of one micro-batch.

    Args:
        graph: A step on the whole batch.
        num_parts: Micro-batches, >= 2.
    """

    graph: LogicalGraph
    num_parts: int
    nodes: list[Node] = field(default_factory=list)
    #: Of what is written.
    types: dict[str, ValueType] = field(default_factory=dict)
    #: Values of the whole graph that are the same in every micro-batch.
    same: set[str] = field(default_factory=set)
    _cuts: dict[tuple[str, Samples, bool], str | None] = field(default_factory=dict)
    _taken: set[str] = field(default_factory=set)
    producers: dict[str, Node] = field(init=False)
    whole_types: dict[str, ValueType] = field(init=False)

    def __post_init__(self) -> None:
        # A copy of its own: `declare` adds to what it knows.
        self.whole_types = dict(self.graph.types)
        self.graph = replace(self.graph, types=self.whole_types)
        self.producers = dict(self.graph.producers)
        self.graph.__dict__["producers"] = self.producers  # the cached property
        self._taken = {node.name for node in self.graph.nodes} | set(self.graph.types)

    def fresh(self, name: str) -> str:
        """Return a name that nothing else has."""
        count, found = 0, name
        while found in self._taken:
            count += 1
            found = f"{name}_{count}"
        self._taken.add(found)
        return found

    def add(self, node: Node, made: Sequence[ValueType]) -> None:
        """Write a node as it is."""
        self.nodes.append(node)
        self.types.update(zip(node.outputs, made, strict=True))

    def declare(self, node: Node, kind: TensorType) -> None:
        """Write a node that the whole graph does not have, and does the same in every micro-batch.

        The whole graph knows it from now on, so that what it makes is cut where it meets samples.
        """
        (value,) = node.outputs
        self.producers[value] = node
        self.whole_types[value] = kind
        self.as_it_is(node)

    def as_it_is(self, node: Node) -> None:
        """Write a node that does the same in every micro-batch."""
        if node.op.startswith(_RANDOM):
            node = replace(node, kwargs={**node.kwargs, "micro_batches": self.num_parts})
        self.add(node, [self.graph.types[value] for value in node.outputs])
        self.same.update(node.outputs)

    # Calls.

    def call(self, node: Node, given: Sequence[Part], label: str = "") -> list[Part] | None:
        """Write what a micro-batch runs of a call.

        Args:
            node: The call on the whole batch.
            given: A part for each of its tensors, in their order.
            label: What names of what is made end in; empty: they are those of the whole.

        Returns:
            The parts that it makes; None, and nothing is written, if these are no parts.
        """
        samples = [one.layout for one in given if isinstance(one.layout, Samples)]
        if len({layout.blocks for layout in samples}) == 1 or node.kind == "cat":
            for way in (_reshaped, _in_blocks, _numbered, _of_bags):
                found = way(self, node, given)
                if found is not None:
                    return self._write(node, *found, label)
        signature = self._signature(node, given)
        return None if signature is None else self._write(node, *signature, label)

    def _signature(
        self, node: Node, given: Sequence[Part]
    ) -> tuple[LocalProgram, list[Ref], list[Layout]] | None:
        """Return what a part runs by one of the signatures of a call."""
        blocks = {one.layout.blocks for one in given if isinstance(one.layout, Samples)}
        if len(blocks) > 1:
            return None
        count = next(iter(blocks), 1)
        found = []
        for signature in signatures_of(self.graph, node, self.num_parts):
            cuts = sum(
                isinstance(sbp, Split) and one.layout == SAME
                for sbp, one in zip(signature.inputs, given, strict=True)
            )
            found.append((cuts, len(found), signature))
        for _, _, signature in sorted(found, key=lambda entry: entry[:2]):
            refs = self._fitting(given, signature, count)
            if refs is None:
                continue
            program = self._program(node, signature)
            layouts = [layout_of(sbp, count) for sbp in signature.outputs]
            if program is not None and self._divide(node, layouts):
                return program, refs, layouts
        return None

    def _divide(self, node: Node, layouts: Sequence[Layout]) -> bool:
        shapes = [self.graph.tensor(value).shape for value in node.outputs]
        return all(
            not isinstance(layout, Samples) or divides(shape, layout, self.num_parts)
            for shape, layout in zip(shapes, layouts, strict=True)
        )

    def _fitting(
        self, given: Sequence[Part], signature: Signature1d, blocks: int
    ) -> list[Ref] | None:
        """Return the parts as a signature asks for them; None if they are others."""
        refs = []
        for one, sbp in zip(given, signature.inputs, strict=True):
            part: str | None = one.name
            if one.layout == SAME and isinstance(sbp, Split):
                # A cut of what is the same is made last: it may be the only thing that does not fit.
                part = self.cut(one.name, Samples(sbp.dim, blocks))
            elif sbp_of(one.layout) != sbp and not (
                one.layout == SAME and sbp == sbp_of(Total()) and is_zero(self.graph, one.name)
            ):
                part = None
            if part is None:
                return None
            refs.append(Ref(part))
        return refs

    def _program(self, node: Node, signature: Signature1d) -> LocalProgram | None:
        """Return what each part runs; None if they run different programs."""
        call = OpCall.of(self.graph, node)
        whole = Signature(
            inputs=tuple(NdSbp(sbp) for sbp in signature.inputs),
            outputs=tuple(NdSbp(sbp) for sbp in signature.outputs),
        )
        mesh = _mesh(self.num_parts)
        first, *others = (
            localize(call, whole, mesh, at) for at in sorted({0, 1, self.num_parts - 1})
        )
        return first if all(other == first for other in others) else None

    def _write(
        self,
        node: Node,
        program: LocalProgram,
        refs: Sequence[Ref],
        layouts: Sequence[Layout],
        label: str,
    ) -> list[Part] | None:
        """Write a program on parts; None if nobody knows the types of what it makes between."""
        made = [
            part_type(self.graph.tensor(value), layout, self.num_parts)
            for value, layout in zip(node.outputs, layouts, strict=True)
        ]
        renamed: dict[str, Ref] = {}
        for name, ref in zip(self.graph.tensor_inputs(node), refs, strict=True):
            if renamed.setdefault(name, ref) != ref:
                return None  # one tensor, given twice, in two layouts
        between = self._types_between(node, program, made)
        if between is None:
            return None
        names = [self.fresh(f"{v}.{label}") if label else v for v in node.outputs]
        outputs = dict(zip((ref.name for ref in program.results), names, strict=False))

        def change(ref: Ref) -> Argument:
            return renamed.get(ref.name, ref)

        for at, call in enumerate(program.calls):
            inner = call.outputs
            if inner:
                for name in inner:
                    if name not in outputs:
                        outputs[name] = self.fresh(f"{node.name}.{label or 'part'}{name}")
                    renamed[name] = Ref(outputs[name])
            last = at == len(program.calls) - 1
            self.add(
                replace(
                    node,
                    name=(self.fresh(f"{node.name}.{label}") if label else node.name)
                    if last
                    else self.fresh(f"{node.name}.{call.op.split('.')[1]}"),
                    op=call.op,
                    args=map_refs(call.args, change),
                    kwargs={key: map_refs(value, change) for key, value in call.kwargs.items()},
                    outputs=tuple(outputs[name] for name in inner) if inner else tuple(names),
                    tags=node.tags if call.op == node.op else ("pointwise",),
                ),
                [between[name] for name in inner] if inner else made,
            )
        return [Part(name, layout) for name, layout in zip(names, layouts, strict=True)]

    def _types_between(
        self, node: Node, program: LocalProgram, made: Sequence[TensorType]
    ) -> dict[str, TensorType] | None:
        """Return the types of what the calls of a program make; None if they are not known.

        Parts of means are means that are scaled, before or afterwards; other programs are of ranks
        that differ.
        """
        found: dict[str, TensorType] = {}
        for ref, kind in zip(program.results, made, strict=False):
            found[ref.name] = kind
        for call in program.calls:
            if not call.outputs:
                continue
            if call.op == node.op:
                found.update(zip(call.outputs, made, strict=True))
            elif call.op == _SCALED and isinstance(call.args[0], Ref):
                (name,), source = call.outputs, call.args[0].name
                if source not in found and source in self.graph.types:
                    at = self.graph.tensor(source)
                    if at.shape:  # of a part, whose layout is not known here
                        return None
                    found[name] = at
                found.setdefault(name, found.get(source, made[0]))
            else:
                return None
        return found

    # What is the same in every micro-batch, cut as samples are.

    def cut(self, value: str, layout: Samples, *, numbers: bool = False) -> str | None:
        """Return a part of a tensor that is made of numbers alone; None if parts would differ.

        Args:
            value: Of the whole graph, the same in every micro-batch.
            layout: What it is cut to.
            numbers: Whether it is an index of the samples, which in a part are its own.
        """
        key = (value, layout, numbers)
        if key not in self._cuts:
            shape = self.graph.tensor(value).shape
            node = self.graph.producers.get(value)
            fits = node is not None and value in self.same
            self._cuts[key] = None
            if fits and node is not None and divides(shape, layout, self.num_parts):
                self._cuts[key] = self._cut(node, value, layout, numbers)
        return self._cuts[key]

    def _cut(self, node: Node, value: str, layout: Samples, numbers: bool) -> str | None:
        whole = self.graph.tensor(value).shape
        shape = part_shape(whole, layout, self.num_parts)
        if node.op.startswith(_RANDOM):
            return self._random_part(node, layout, shape)
        if node.kind == "arange":
            return self._numbers_part(node, layout, shape) if numbers else None
        label = "part"
        if node.kind in ("new_full", "new_ones", "new_zeros"):  # whatever they are made like
            name = self.fresh(f"{value}.part")
            args = (node.args[0], shape, *node.args[2:])
            made = replace(node, name=name, args=args, outputs=(name,))
            self.add(made, [TensorType(shape, self.graph.tensor(value).dtype)])
            return name
        if node.kind in RESHAPES:
            source = node.args[0].name
            before = self.graph.tensor(source).shape
            inner = reshaped(layout, whole, before, self.num_parts)
            part = None if inner is None else self.cut(source, inner, numbers=numbers)
            if part is None or inner is None:
                return None
            found = _reshaped(self, node, [Part(part, inner)])
            view = None if found is None else self._write(node, *found, label)
            return view[0].name if view and view[0].layout == layout else None
        at = node.outputs.index(value)
        for signature in signatures_of(self.graph, node, self.num_parts):
            if signature.outputs[at] != sbp_of(layout):
                continue
            refs = self._cut_arguments(node, signature, layout.blocks, numbers)
            program = None if refs is None else self._program(node, signature)
            layouts = [layout_of(sbp, layout.blocks) for sbp in signature.outputs]
            if refs is not None and program is not None and self._divide(node, layouts):
                parts = self._write(node, program, refs, layouts, label)
                return parts[at].name if parts else None
        return None

    def _cut_arguments(
        self, node: Node, signature: Signature1d, blocks: int, numbers: bool
    ) -> list[Ref] | None:
        if numbers and node.kind not in TRAITS.copies:
            return None
        refs = []
        for name, sbp in zip(self.graph.tensor_inputs(node), signature.inputs, strict=True):
            part: str | None = name
            if isinstance(sbp, Split):
                part = self.cut(name, Samples(sbp.dim, blocks), numbers=numbers)
            elif sbp != sbp_of(SAME) or name not in self.same:
                return None
            if part is None:
                return None
            refs.append(Ref(part))
        return refs

    def _random_part(self, node: Node, layout: Samples, shape: tuple[int, ...]) -> str | None:
        """Draw the numbers that the whole batch draws for the samples of a micro-batch."""
        if layout.blocks > 1:
            return None
        (value,) = node.outputs
        whole = self.graph.tensor(value)
        kwargs = {
            **node.kwargs,
            "start": (0,) * len(shape),
            "logical": whole.shape,
            "micro_batches": self.num_parts,
            "micro_batch_dim": layout.dim,
        }
        name = self.fresh(f"{value}.part")
        args = (shape, *node.args[1:])
        made = replace(node, name=name, args=args, kwargs=kwargs, outputs=(name,))
        self.add(made, [TensorType(shape, whole.dtype)])
        return name

    def _numbers_part(self, node: Node, layout: Samples, shape: tuple[int, ...]) -> str | None:
        """Number the samples of a micro-batch as those of the whole batch, from 0 on."""
        if layout.blocks > 1:
            return None
        step = node.args[2] if node.op.endswith("start_step") and len(node.args) > 2 else 1
        (value,) = node.outputs
        named = {"start", "end", "step"}
        name = self.fresh(f"{value}.part")
        made = replace(
            node,
            name=name,
            op="aten.arange.start_step",
            args=(0, step * shape[0], step),
            kwargs={key: one for key, one in node.kwargs.items() if key not in named},
            outputs=(name,),
        )
        self.add(made, [part_type(self.graph.tensor(value), layout, self.num_parts)])
        return name


_Found = tuple[LocalProgram, list[Ref], list[Layout]]


def _single(node: Node, args: tuple[Argument, ...], op: str = "") -> LocalProgram:
    return LocalProgram(calls=(LocalCall(op=op or node.op, args=args, kwargs=node.kwargs),))


def _reshaped(parts: PartCalls, node: Node, given: Sequence[Part]) -> _Found | None:
    """Return a view of samples: the same in the shape of a part."""
    if node.kind not in RESHAPES or not isinstance(given[0].layout, Samples):
        return None
    (value,) = node.outputs
    before = parts.graph.tensor(node.args[0].name).shape
    after = parts.graph.tensor(value).shape
    layout = reshaped(given[0].layout, before, after, parts.num_parts)
    if layout is None:
        return None
    args = (node.args[0], part_shape(after, layout, parts.num_parts))
    # A dim of a single sample looks like one that is to be squeezed, or was inserted.
    op = "aten.reshape.default" if node.kind == "squeeze" else node.op
    program = _single(node, node.args if node.kind == "unsqueeze" else args, op)
    return program, [Ref(given[0].name)], [layout]


def _in_blocks(parts: PartCalls, node: Node, given: Sequence[Part]) -> _Found | None:
    """Return what puts blocks of all samples together, or takes them apart again.

    cat([a, b]), repeat(a, 2)                 of a, b: one block each, to two blocks
    slice(x, 0, B, 2 * B), split(x, B)        one block of two
    slice_backward(g, [2 * B, ..], 0, B, 2 * B)
    """
    graph, count = parts.graph, parts.num_parts
    layouts = [one.layout for one in given]
    first = layouts[0]
    if not isinstance(first, Samples) or node.kind not in _BLOCKS:
        return None
    refs = [Ref(one.name) for one in given]
    shapes = [graph.tensor(value).shape for value in graph.tensor_inputs(node)]
    shape, at = shapes[0], first.dim
    run = shape[at] // first.blocks
    call = OpCall.of(graph, node)
    if node.kind == "cat":
        dim = wrap_dim(argument(call, 1, "dim", 0), len(shape))
        blocks = 0
        for layout, one in zip(layouts, shapes, strict=True):
            if not isinstance(layout, Samples) or layout.dim != at or one[at] % run:
                return None
            if one[at] // layout.blocks != run:
                return None
            blocks += layout.blocks
        if dim != at:
            return None
        return _single(node, node.args), refs, [Samples(at, blocks)]
    if node.kind == "repeat":
        repeats = tuple(node.args[1])
        dim = at + len(repeats) - len(shape)
        return _single(node, node.args), refs, [Samples(dim, first.blocks * repeats[dim])]
    if node.kind == "slice_backward":
        sizes, dim, start, stop, step = node.args[1:]
        dim = wrap_dim(dim, len(sizes))
        bounds = _whole_runs(sizes[dim], start, stop, run)
        if dim != at or step != 1 or bounds is None:
            return None
        local = part_shape(tuple(sizes), first, count)
        args = (node.args[0], local, dim, *(one // count for one in bounds), step)
        return _single(node, args), refs, [Samples(at, sizes[at] // run)]
    dim = wrap_dim(argument(call, 1 if node.kind == "slice" else 2, "dim", 0), len(shape))
    if dim != at or node.kwargs:
        return None
    if node.kind == "slice":
        start, stop = argument(call, 2, "start", None), argument(call, 3, "end", None)
        bounds = _whole_runs(shape[at], start, stop, run)
        if bounds is None or argument(call, 4, "step", 1) != 1:
            return None
        args = (node.args[0], dim, *(one // count for one in bounds))
        return _single(node, args), refs, [Samples(at, (bounds[1] - bounds[0]) // run)]
    sizes = [graph.tensor(value).shape[at] for value in node.outputs]
    if any(one % run for one in sizes):
        return None
    op = "aten.split_with_sizes.default"
    args = (node.args[0], tuple(one // count for one in sizes), dim)
    return _single(node, args, op), refs, [Samples(at, one // run) for one in sizes]


_BLOCKS = ("cat", "repeat", "slice", "slice_backward", "split", "split_with_sizes")


def _whole_runs(extent: int, start: int | None, stop: int | None, run: int) -> list[int] | None:
    """Return the bounds of a slice; None if it cuts a block of samples."""
    first, last, _ = slice(start, stop).indices(extent)
    return [first, last] if first % run == 0 and last % run == 0 and first < last else None


def _numbered(parts: PartCalls, node: Node, given: Sequence[Part]) -> _Found | None:
    """Return indexing by the number of each sample: `x[arange(B), i]`, and writing in such places.

    A part reads its own samples, whose numbers begin anew.
    """
    if node.kind not in ("index", "index_put", "_unsafe_index_put"):
        return None
    graph, count = parts.graph, parts.num_parts
    names = graph.tensor_inputs(node)
    layout = given[0].layout
    writes = node.kind != "index"
    places = [at for at, one in enumerate(node.args[1]) if one is not None]
    indices = [node.args[1][at].name for at in places]
    if writes and layout == SAME and is_zero(graph, names[0]):
        layout = Samples(places[0])
    if not isinstance(layout, Samples) or layout.blocks > 1 or layout.dim not in places:
        return None
    if any(graph.tensor(name).dtype == "bool" for name in indices):
        return None
    wide = max(len(graph.tensor(name).shape) for name in indices)
    numbers = names[1 + places.index(layout.dim)]
    extent = graph.tensor(names[0]).shape[layout.dim]
    # The dim of the numbers among those of all indices, from behind: that with an entry a sample.
    shape = graph.tensor(numbers).shape
    found = [at - len(shape) for at, one in enumerate(shape) if one == extent and prod(shape) == one]
    if len(found) != 1 or numbers not in parts.same or not _is_count(graph, numbers, extent):
        return None
    refs: list[Ref] = []
    for name, one in zip(names, given, strict=True):
        dims = len(graph.tensor(name).shape)
        part: str | None = one.name
        at = dims + found[0]
        if name == numbers:
            part = parts.cut(name, Samples(at), numbers=True)
        elif name in indices and one.layout == SAME and at >= 0:
            if graph.tensor(name).shape[at] != 1:
                part = parts.cut(name, Samples(at))
        elif name in indices and one.layout != SAME and one.layout != Samples(at):
            return None
        elif name == names[0] and one.layout == SAME:
            part = parts.cut(name, layout)
        if part is None:
            return None
        refs.append(Ref(part))
    dense = places == list(range(places[0], places[-1] + 1))
    made = Samples((places[0] if dense else 0) + wide + found[0])
    if not writes:
        return _single(node, node.args), refs, [made]
    # Values may have fewer dims than the places that they go to, or one entry for all of them.
    shape = graph.tensor(names[-1]).shape
    at = made.dim - (len(graph.tensor(names[0]).shape) - len(places) + wide) + len(shape)
    alike = at < 0 or shape[at] == 1
    part = refs[-1].name
    if given[-1].layout == SAME and not alike:
        part = parts.cut(part, Samples(at))
    elif given[-1].layout != (SAME if alike else Samples(at)):
        return None
    if part is None:
        return None
    return _single(node, node.args), [*refs[:-1], Ref(part)], [layout]


def _is_count(graph: LogicalGraph, value: str, extent: int, each: int = 1) -> bool:
    """Whether a value is 0, 1, 2, ... to an extent, times a number, in another form or dtype."""
    node = graph.producers.get(value)
    while node is not None and (node.kind in RESHAPES or node.kind in TRAITS.copies):
        value = graph.tensor_inputs(node)[0]
        node = graph.producers.get(value)
    if node is None or node.kind != "arange":
        return False
    start, step = 0, 1
    call = OpCall.of(graph, node)
    if node.op != "aten.arange.default":
        start = argument(call, 0, "start")
    if node.op.endswith("start_step"):
        step = argument(call, 2, "step", 1)
    return start == 0 and step == each and graph.tensor(value).shape == (extent,)


def _of_bags(parts: PartCalls, node: Node, given: Sequence[Part]) -> _Found | None:
    """Return bags of equally many places a sample, or the gradient of their table."""
    names = parts.graph.tensor_inputs(node)
    shapes = [parts.graph.tensor(name).shape for name in names]
    if node.kind in _BAGS:
        offsets, fixed = names[2], {0}
        bags, places = shapes[2][0], shapes[1][0]
    elif node.kind in _BAG_GRADIENTS:
        scaled, mode = _BAG_GRADIENTS[node.kind]
        if node.args[scaled] or node.args[mode] == _LARGEST:
            return None
        offsets, fixed = names[2] if "dense" not in node.kind else "", set()
        bags, places = shapes[0][0], shapes[1][0]
    else:
        return None
    if not bags or places % bags:
        return None
    refs = []
    for at, (name, one, shape) in enumerate(zip(names, given, shapes, strict=True)):
        part: str | None = one.name
        if name == offsets:
            numbered = _is_count(parts.graph, name, bags, places // bags)
            part = parts.cut(name, Samples(0), numbers=True) if numbered else None
        elif one.layout != (SAME if at in fixed or not prod(shape) else Samples(0)):
            part = None
        if part is None:
            return None
        refs.append(Ref(part))
    if node.kind in _BAG_GRADIENTS:
        return _single(node, node.args), refs, [Total()]
    made = [parts.graph.tensor(value).shape for value in node.outputs]
    layouts: list[Layout] = [Samples(0) if prod(shape) else SAME for shape in made]
    return _single(node, node.args), refs, layouts


def _mesh(num_parts: int) -> Placement:
    return Placement(ranks=list(range(num_parts)), axes=("micro_batch",))


def signatures_of(graph: LogicalGraph, node: Node, num_parts: int) -> tuple[Signature1d, ...]:
    """Return the signatures of a node; none of an operator that has no rule."""
    try:
        return derive(OpCall.of(graph, node), num_parts)
    except SignatureError:
        return ()


def is_zero(graph: LogicalGraph, value: str) -> bool:
    """Whether a value is a tensor of zeros."""
    node = graph.producers.get(value)
    if node is None:
        return False
    number = _FILLS.get(node.kind)
    return node.kind in _ZEROS or (
        number is not None and len(node.args) > number and node.args[number] == 0
    )
