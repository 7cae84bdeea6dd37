"""`PartCalls`: writes the operator calls of one micro-batch, given a call on the whole batch.

The pass `whole_batch_loss` does so for each call, by the same signatures (ways to shard a call) and
localisers (functions that adapt it to a shard) that ranks use: see `layout`. This module adds cases
that ranks do not have, because parts need not be sent: samples in several blocks (`cat` of two
views of a batch), and indices that number the samples, which in a part number its own samples
(`x[arange(len(x)), lengths - 1]`).

A tensor made of numbers alone, such as `zeros(len(x))`, is made in the size of a part if it is
combined with parts. A micro-batch does not know its position among the micro-batches, so results
that depend on positions of samples are not supported: `err[0]`, `linspace(0, 1, len(x))`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sbp_aten.passes.whole_batch.layout import (
    SAME,
    Layout,
    PartValue,
    SamplePiece,
    Samples,
    Total,
    divides,
    layout_of,
    part_shape,
    part_type,
    reshaped,
    sbp_of,
)
from sbp_aten.passes.whole_batch.micro_batch import RANDOM, MicroBatchBuilder
from sbp_aten.passes.whole_batch.pieces import of_pieces, taken_apart
from sbp_aten.passes.whole_batch.rearranged import (
    RESHAPES,
    WAYS,
    Found,
    as_numbered,
    as_reshaped,
    in_blocks,
    is_zero,
)
from sbp_aten.traits import TRAITS
from sbp_core.errors import SignatureError
from sbp_core.graph import Argument, LogicalGraph, Node, Ref, TensorType, map_refs
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp, Split
from sbp_core.signatures import LocalProgram, OpCall, Signature1d, derive, localize
from sbp_core.strategy import Signature

_SCALED = "aten.mul.Scalar"


@dataclass(slots=True)
class PartCalls(MicroBatchBuilder):
    """Writes the calls of one micro-batch."""

    _cuts: dict[tuple[str, Samples, bool], str | None] = field(default_factory=dict)

    def call(
        self, node: Node, given: Sequence[PartValue], label: str = ""
    ) -> list[PartValue] | None:
        """Write the call of a micro-batch for a call on the whole batch.

        Args:
            node: The call on the whole batch.
            given: A part for each of its tensors, in their order.
            label: Suffix of the names of results; empty for the names of the whole.

        Returns:
            The parts that it makes; None, and nothing is written, if that is impossible.
        """
        if any(isinstance(one.layout, SamplePiece) for one in given):
            return of_pieces(self, node, given)
        samples = [one.layout for one in given if isinstance(one.layout, Samples)]
        if len({layout.blocks for layout in samples}) == 1 or node.kind == "cat":
            for way in WAYS:
                found = way(self, node, given)
                if found is not None:
                    return self._write(node, *found, label)
        signature = self._signature(node, given)
        if signature is None:
            return taken_apart(self, node, given)
        return self._write(node, *signature, label)

    def _signature(self, node: Node, given: Sequence[PartValue]) -> Found | None:
        """Return the program of a part by the first fitting signature of a call."""
        blocks = {one.layout.blocks for one in given if isinstance(one.layout, Samples)}
        if len(blocks) > 1:
            return None
        count = next(iter(blocks), 1)
        found: list[tuple[int, int, Signature1d]] = []
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
        self, given: Sequence[PartValue], signature: Signature1d, blocks: int
    ) -> list[Ref] | None:
        """Return the parts in the layouts of a signature; None if theirs differ."""
        refs = []
        for one, sbp in zip(given, signature.inputs, strict=True):
            part: str | None = one.name
            if one.layout == SAME and isinstance(sbp, Split):
                # Made of numbers alone, so a part of it can be made.
                part = self.slice_constant(one.name, Samples(sbp.dim, blocks))
            elif sbp_of(one.layout) != sbp and not (
                one.layout == SAME and sbp == sbp_of(Total()) and is_zero(self.graph, one.name)
            ):
                part = None
            if part is None:
                return None
            refs.append(Ref(part))
        return refs

    def _program(self, node: Node, signature: Signature1d) -> LocalProgram | None:
        """Return the program of each part; None if they run different programs."""
        call = OpCall.of(self.graph, node)
        whole = Signature(
            inputs=tuple(NdSbp(sbp) for sbp in signature.inputs),
            outputs=tuple(NdSbp(sbp) for sbp in signature.outputs),
        )
        mesh = Placement(ranks=list(range(self.num_parts)), axes=("micro_batch",))
        first = localize(call, whole, mesh, 0)
        # Compare all: a call that reads one sample is the same in all parts except one.
        others = (localize(call, whole, mesh, at) for at in range(1, self.num_parts))
        return first if all(other == first for other in others) else None

    def _write(
        self,
        node: Node,
        program: LocalProgram,
        refs: Sequence[Ref],
        layouts: Sequence[Layout],
        label: str,
    ) -> list[PartValue] | None:
        """Write a program on parts; None if the types of intermediate values are unknown."""
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
                    tags=(
                        *(node.tags if call.op == node.op else ("pointwise",)),
                        *(("term",) if label == "term" else ()),
                    ),
                ),
                [between[name] for name in inner] if inner else made,
            )
        return [PartValue(name, layout) for name, layout in zip(names, layouts, strict=True)]

    def _types_between(
        self, node: Node, program: LocalProgram, made: Sequence[TensorType]
    ) -> dict[str, TensorType] | None:
        """Return the types of the results of a program's calls; None if they are unknown.

        Known are parts of means: means that are scaled, before or afterwards. Other programs of
        several calls differ between ranks.
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
                    if at.shape:  # a part, whose layout is unknown here
                        return None
                    found[name] = at
                found.setdefault(name, found.get(source, made[0]))
            else:
                return None
        return found

    # Values that are the same in every micro-batch, cut like samples.

    def slice_constant(self, value: str, layout: Samples, *, numbers: bool = False) -> str | None:
        """See `MicroBatchBuilder.slice_constant`."""
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
        if node.op.startswith(RANDOM) or node.kind == "arange":
            counts = numbers or node.kind != "arange"
            return self._counted_part(node, layout, shape) if counts else None
        if node.kind in ("new_full", "new_ones", "new_zeros"):  # of any tensor
            name = self.fresh(f"{value}.part")
            # A part of the tensor it is modelled on, which has another name in the whole batch.
            written = next(one for one in reversed(self.nodes) if value in one.outputs)
            args = (written.args[0], shape, *node.args[2:])
            made = replace(node, name=name, args=args, outputs=(name,))
            self.add(made, [TensorType(shape, self.graph.tensor(value).dtype)])
            return name
        if node.kind in RESHAPES:
            source = node.args[0].name
            before = self.graph.tensor(source).shape
            inner = reshaped(layout, whole, before, self.num_parts)
            part = None if inner is None else self.slice_constant(source, inner, numbers=numbers)
            if part is None or inner is None:
                return None
            return self._found_part(node, as_reshaped(self, node, [PartValue(part, inner)]), layout)
        if node.kind == "index":
            return self._cut_index(node, layout)
        if node.kind == "slice" and (taken := self._cut_slice(node, layout)):
            return taken
        at = node.outputs.index(value)
        for signature in signatures_of(self.graph, node, self.num_parts):
            if signature.outputs[at] != sbp_of(layout):
                continue
            refs = self._cut_arguments(node, signature, layout.blocks, numbers)
            program = None if refs is None else self._program(node, signature)
            layouts = [layout_of(sbp, layout.blocks) for sbp in signature.outputs]
            if refs is not None and program is not None and self._divide(node, layouts):
                parts = self._write(node, program, refs, layouts, "part")
                return parts[at].name if parts else None
        return None

    def _cut_index(self, node: Node, layout: Samples) -> str | None:
        """Read a tensor of numbers by the number of each sample."""
        source, *indices = self.graph.tensor_inputs(node)
        same = [PartValue(name) for name in indices]
        for at, index in enumerate(node.args[1]):
            part = None if index is None else self.slice_constant(source, Samples(at))
            found = part and as_numbered(self, node, [PartValue(part, Samples(at)), *same])
            if found and found[2] == [layout]:
                return self._found_part(node, found, layout)
        return None

    def _cut_slice(self, node: Node, layout: Samples) -> str | None:
        """Take some of the blocks of a tensor of numbers whose blocks are all cut."""
        source, dim = node.args[0].name, layout.dim
        run = self.graph.tensor(node.outputs[0]).shape[dim] // layout.blocks
        extent = self.graph.tensor(source).shape[dim]
        inner = Samples(dim, extent // run)
        part = None if extent % run else self.slice_constant(source, inner)
        found = in_blocks(self, node, [PartValue(part, inner)]) if part else None
        return self._found_part(node, found, layout)

    def _found_part(self, node: Node, found: Found | None, layout: Samples) -> str | None:
        """Write the program for a part of a node's only output, if it has the wanted layout."""
        made = self._write(node, *found, "part") if found and found[2] == [layout] else None
        return made[0].name if made else None

    def _cut_arguments(
        self, node: Node, signature: Signature1d, blocks: int, numbers: bool
    ) -> list[Ref] | None:
        if numbers and node.kind not in TRAITS.copies:
            return None
        refs = []
        for name, sbp in zip(self.graph.tensor_inputs(node), signature.inputs, strict=True):
            part: str | None = name
            if isinstance(sbp, Split):
                part = self.slice_constant(name, Samples(sbp.dim, blocks), numbers=numbers)
            elif sbp != sbp_of(SAME) or name not in self.same:
                return None
            if part is None:
                return None
            refs.append(Ref(part))
        return refs

    def _counted_part(self, node: Node, layout: Samples, shape: tuple[int, ...]) -> str | None:
        """Write a counted value (random numbers, `arange`) for the samples of a micro-batch.

        Random numbers equal the ones that the whole batch draws for these samples. Numbers of
        samples (`arange`) begin at 0 in each micro-batch.
        """
        if layout.blocks > 1:
            return None
        (value,) = node.outputs
        whole, name = self.graph.tensor(value), self.fresh(f"{value}.part")
        if node.kind == "arange":
            step = node.args[2] if node.op.endswith("start_step") and len(node.args) > 2 else 1
            named = {"start", "end", "step"}
            op, args = "aten.arange.start_step", (0, step * shape[0], step)
            kwargs = {key: one for key, one in node.kwargs.items() if key not in named}
        else:
            op, args = node.op, (shape, *node.args[1:])
            kwargs = {
                **node.kwargs,
                "start": (0,) * len(shape),
                "logical": whole.shape,
                "micro_batches": self.num_parts,
                "micro_batch_dim": layout.dim,
            }
        made = replace(node, name=name, op=op, args=args, kwargs=kwargs, outputs=(name,))
        self.add(made, [TensorType(shape, whole.dtype)])
        return name


def signatures_of(graph: LogicalGraph, node: Node, num_parts: int) -> tuple[Signature1d, ...]:
    """Return the signatures of a node; none for an operator without a rule."""
    try:
        return derive(OpCall.of(graph, node), num_parts)
    except SignatureError:
        return ()
