"""What the search decides on some mesh axes at once: variables, their options, and what they cost.

Variables
    signature of each node            its options on these axes, given those on the axes before
    storage of each tensor input      S(d) or B; one value if pinned; a state without a pin shares
                                      the variable of its parameter if their shapes are equal

Costs, in seconds of one step (a micro-batch's cost counts once for each micro-batch)
    node        time of the op on the rank with the largest shard
    conversion  for each value and each *distinct* target that its users ask for: the route from
                what it is made as; users that ask for the same share one. New states are asked for
                as they are stored, loss and metrics as B. What the compiler lets travel in buckets
                takes a share of one (`infer.companions`)
    copies      of a state in host memory: its bytes over the link to the host, once, as what is
                fetched and what is stored go on in parallel with each other
    tie-break   so small that it only decides among equals: fewer bytes, then B, then low dims;
                views of gradients rather pass partial values on

Conversions are priced when they are first asked for; where they would be too many, values are left
out before (`restrict`).

Slices of an operator (`sbp_aten.passes.operator_slicing`) are boxed as the whole would be: a slice
costs its share of that, not the latency of a message of its own, for which a larger tensor might be
gathered.
A slice of an input (`sbp.piece`) is cut from the input as it is stored, if it can be.

Pins remove values from the variables: a pinned input has one storage, and the users of a pinned
value keep only the signatures that take it so; a view of it is pinned to what it then must be.
What is kept of an earlier strategy has one value, too, unless a pin says another.

On one axis this is what `infer.axis` solves, axis after axis; on all axes it is the joint problem.
Searches nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from sbp_core.compile.bucket_price import Companions
from sbp_core.compile.levels import is_gathered_on_use
from sbp_core.cost import host_copy_time_s
from sbp_core.graph.ir import GraphInput, InputKind, Node, TensorType
from sbp_core.graph.primitives import PIECE
from sbp_core.infer.conversion_group import (
    NO_VARIABLE,
    ConversionEnd,
    ConversionGroup,
    ConversionRequest,
    Entries,
    Numbers,
    Table,
)
from sbp_core.infer.equal_layers import EqualLayers
from sbp_core.infer.least_prices import PriceTable
from sbp_core.infer.pinned_options import PinnedOptions
from sbp_core.infer.pins import Pins
from sbp_core.infer.tie_break import TIE_S_PER_BYTE, SignatureTieBreaks, entry_tie_break
from sbp_core.infer.work import (
    Decision,
    FixedDecisions,
    Options,
    OptionTable,
    StepWork,
    shard_shape,
    smaller_shape,
)
from sbp_core.sbp import B, Sbp, Split
from sbp_core.signatures.signature import Signature1d

#: Seconds that stand for "not possible" in tables: far above any step, and finite, so that sums
#: of tables stay numbers.
FORBIDDEN_S = 1e9


class StepProblem:
    """The variables and costs of a step on some mesh axes, given those on the axes before.

    Args:
        work: The step.
        decision: What is decided on the axes before `axes`; the problem starts from what it says of
            `axes` themselves, if it says that too.
        axes: Successive mesh axes, such as `range(1, 2)`.
        pins: What is decided already.
        kept: What stays as an earlier strategy has it, where pins allow.
        prices: Of conversions; those of the router if None.
        layers: What is alike, and posed once: one variable each, with the costs of all of them.
            What is decided on the axes before is alike, too. Nothing if None.

    Raises:
        PlanError: a pin asks for what an operator cannot take.
        SignatureError: an operator has no signatures.
    """

    def __init__(
        self,
        work: StepWork,
        decision: Decision,
        axes: range,
        pins: Pins,
        kept: FixedDecisions | None = None,
        prices: PriceTable | None = None,
        layers: EqualLayers | None = None,
    ) -> None:
        self.work, self.decision, self.axes, self.pins = work, decision, axes, pins
        self.kept, self.layers = kept or FixedDecisions(), layers
        self.prices: PriceTable = work.prices(axes) if prices is None else prices
        #: Seconds of each value of each variable, by itself.
        self.unary: list[Table] = []
        #: A value of each variable.
        self.start: list[int] = []
        #: By node, the signature on each of the axes for each value of its variable.
        self.parts: dict[str, tuple[tuple[Signature1d, ...], ...]] = {}
        self.node_variable: dict[str, int] = {}
        self.storage_variable: dict[str, int] = {}
        #: The input that a variable is of; a state may share that of its parameter.
        self.storage_owner: dict[str, str] = {}
        self.storage_entries: dict[str, tuple[Entries, ...]] = {}
        # Repeated layers ask for the same under other names, so what is made once is kept: options
        # by their call and pins, entries by options, costs and targets by entries. Ids tell these
        # apart, as everything that has one lives as long as this.
        self._whole: tuple[Entries, ...] = ((B,) * len(axes),)
        self._storages: dict[tuple[Entries, ...], tuple[Entries, ...]] = {}
        self._kept: dict[tuple[int, tuple[int, ...]], tuple[tuple[Signature1d, ...], ...]] = {}
        self._restricted: list[object] = []
        self._found_entries: dict[tuple[int, str, int], tuple[Entries, ...]] = {}
        self._distinct: dict[int, tuple[object, tuple[Entries, ...], Numbers]] = {}
        self._costs: dict[object, tuple[Table, tuple[Numbers, ...]]] = {}
        self._add_storage()
        self._add_nodes()

    @cached_property
    def groups(self) -> list[ConversionGroup]:
        """The conversions, priced when they are first asked for."""
        return [group for value, count in self._values for group in self._groups_of(value, count)]

    @cached_property
    def _values(self) -> Sequence[tuple[str, int]]:
        """The tensors, of those that are alike the first, and how many are."""
        graph = self.work.graph
        if self.layers is not None:
            return self.layers.values
        return [(value, 1) for value in graph.types if graph.is_tensor(value)]

    @property
    def num_prices(self) -> int:
        """How many conversions of tensors that are alike there are to price, at most."""
        found: dict[object, int] = {}
        for value, _ in self._values:
            source = self._source(value)
            targets = {id(end.entries): end.entries for end in self._targets(value, source)}
            key = (self.work.unsliced(value), id(source.entries), *targets)
            if key not in found:
                asked = {one for of in targets.values() for one in self._different(of)[0]}
                found[key] = len(self._different(source.entries)[0]) * len(asked)
        return sum(found.values())

    def restrict(self, kept: Sequence[Numbers]) -> None:
        """Leave out values of variables, before conversions are priced.

        Args:
            kept: For each variable the places of the values that stay, ascending; what it starts
                from is among them.
        """
        assert "groups" not in vars(self), "conversions are priced already"
        places = [tuple(of.tolist()) for of in kept]
        for name, parts in self.parts.items():
            at = places[self.node_variable[name]]
            key = (id(parts), at)
            # What is left out stays alive, as ids tell options apart.
            self._restricted.append(parts)
            if key not in self._kept:
                self._kept[key] = tuple(parts[place] for place in at)
            self.parts[name] = self._kept[key]
        for name, entries in self.storage_entries.items():
            left = tuple(entries[place] for place in places[self.storage_variable[name]])
            self.storage_entries[name] = self._storages.setdefault(left, left)
        self.unary = [table[of] for table, of in zip(self.unary, kept, strict=True)]
        self.start = [of.index(start) for of, start in zip(places, self.start, strict=True)]

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many values each variable has."""
        return tuple(map(len, self.unary))

    def cost(self, values: Sequence[int]) -> float:
        """Return what a value of each variable costs, in seconds of a step.

        `FORBIDDEN_S` or more means that it cannot be.
        """
        seconds = sum(float(table[value]) for table, value in zip(self.unary, values, strict=True))
        return seconds + sum(group.cost(values) for group in self.groups)

    def decided(self, values: Sequence[int]) -> Decision:
        """Return the decision on the axes up to these that a value of each variable means."""
        first, before, found = self.axes.start, self.decision, Decision()
        for node in self.work.nodes:
            chosen = self.parts[node.name][values[self.node_variable[node.name]]]
            found.nodes[node.name] = (*before.nodes.get(node.name, ())[:first], *chosen)
        for entry in self.work.inputs:
            stored = self.storage_entries[entry.name][values[self.storage_variable[entry.name]]]
            found.storage[entry.name] = (*self._stored(entry.name)[:first], *stored)
        return found

    def _variable(self, unary: Sequence[float], start: int = 0) -> int:
        self.start.append(start)
        self.unary.append(np.array(unary, dtype=np.float64))
        return len(self.unary) - 1

    # Variables

    def _before(self, of: Sequence[Sbp] | None) -> tuple[Sbp, ...]:
        return tuple(of or ())[: self.axes.start]

    def _decided(self, of: Sequence[object] | None) -> tuple[object, ...] | None:
        """Return what was decided on the axes of the problem already, if it was."""
        found = tuple(of or ())[self.axes.start : self.axes.stop]
        return found if len(found) == len(self.axes) else None

    def _add_storage(self) -> None:
        # Parameters first: a state without a pin takes the variable of its parameter.
        ordered = sorted(
            self.work.inputs, key=lambda entry: entry.name in self.work.parameter_of_state
        )
        counts: Counter[str] = Counter()
        like = self.layers.inputs if self.layers is not None else {}
        for entry in ordered:
            pinned = any((entry.name, axis) in self.pins.storage for axis in self.axes)
            parameter = self.work.parameter_of_state.get(entry.name)
            kept = entry.name in self.kept.storage
            if not pinned and not kept and parameter is not None:
                self._store_as(entry.name, parameter)
                self.storage_owner[entry.name] = parameter
                continue
            self.storage_owner[entry.name] = entry.name
            if (first := like.get(entry.name, entry.name)) != entry.name:
                self._store_as(entry.name, first)
                counts[first] += 1
                continue
            entries = tuple(self._storable(entry, self._before(self._stored(entry.name))))
            entries = self._storages.setdefault(entries, entries)
            self.storage_entries[entry.name] = entries
            decided = self._decided(self._stored(entry.name))
            start = entries.index(decided) if decided in entries else 0
            self.storage_variable[entry.name] = self._variable(
                [sum(map(entry_tie_break, of)) for of in entries], start
            )
        for name, count in counts.items():
            self.unary[self.storage_variable[name]] *= 1 + count
        for entry in ordered:
            if entry.name in self.work.offloaded:
                self._add_copies(entry.name)

    def _store_as(self, name: str, other: str) -> None:
        self.storage_variable[name] = self.storage_variable[other]
        self.storage_entries[name] = self.storage_entries[other]

    def _add_copies(self, name: str) -> None:
        """Add to the storage of a state what it takes to fetch it from the host, and back."""
        work, before = self.work, self._before(self._stored(name))
        tensor, mesh_shape = work.graph.tensor(name), work.mesh_shape(work.stages.inputs[name])
        seconds = []
        for entries in self.storage_entries[name]:
            shard = replace(tensor, shape=shard_shape(tensor, (*before, *entries), mesh_shape))
            seconds.append(host_copy_time_s(shard.size_bytes, work.cluster.device))
        variable = self.storage_variable[name]
        self.unary[variable] = self.unary[variable] + np.array(seconds)

    def _stored(self, name: str) -> tuple[Sbp, ...]:
        return self.decision.storage.get(name, ())

    def _storable(self, entry: GraphInput, before: tuple[Sbp, ...]) -> Iterator[Entries]:
        """Yield the ways in which an input may be stored on the axes, given those before."""
        if len(before) == self.axes.stop:
            yield before[self.axes.start :]
            return
        pin = self.pins.storage.get((entry.name, len(before)))
        kept = self.kept.storage.get(entry.name)
        if pin is not None:
            possible: tuple[Sbp, ...] = (pin.entry,)
        elif kept is not None:
            possible = (kept[len(before)],)
        elif entry.kind is InputKind.RNG or not self.work.has_ranks(len(before)):
            # The state of a generator is no tensor of elements: half of it draws nothing.
            possible = (B,)
        else:
            possible = (B, *self._splits(entry.name, before))
        for one in possible:
            yield from self._storable(entry, (*before, one))

    def _splits(self, name: str, before: tuple[Sbp, ...]) -> list[Sbp]:
        """Return the splits that leave no rank of the next axis without elements."""
        tensor = self.work.graph.tensor(name)
        mesh_shape = self.work.mesh_shape(self.work.stages.inputs[name])
        shape, ranks = shard_shape(tensor, before, mesh_shape), mesh_shape[len(before)]
        return [Split(dim) for dim, extent in enumerate(shape) if extent >= ranks]

    def _add_nodes(self) -> None:
        table = OptionTable(self.work, self.axes)
        pinned = PinnedOptions(self.work, self.axes, self.pins, self.kept)
        breaks = SignatureTieBreaks()
        like = self.layers.nodes if self.layers is not None else {}
        seconds: dict[tuple[int, tuple[int, ...], int, bool], Table] = {}
        # What one node costs; of nodes that are alike by how many there are.
        own: dict[int, Counter[tuple[int, tuple[int, ...], int, bool]]] = defaultdict(Counter)
        options: dict[str, Options] = {}
        chosen: dict[str, tuple[int, ...]] = {}
        for node in self.work.nodes:
            first = like.get(node.name, node.name)
            if first == node.name:
                decided = self.decision.nodes.get(first, ())
                options[first] = table.options(node, decided[: self.axes.start])
                chosen[first] = pinned.left(node, options[first].parts)
                key = (id(options[first].parts), chosen[first])
                if key not in self._kept:
                    self._kept[key] = tuple(options[first].parts[at] for at in chosen[first])
                parts, found = self._kept[key], self._decided(decided)
                start = parts.index(found) if found in parts else 0
                self.node_variable[first] = self._variable([0.0] * len(parts), start)
            else:
                pinned.follow(node, self.work.graph.by_name[first])
                parts, key = self.parts[first], (id(options[first].parts), chosen[first])
            self.parts[node.name] = parts
            self.node_variable[node.name] = variable = self.node_variable[first]
            times = self.work.executions(node.rate)
            passes_on = node.name in self.work.views_of_gradients
            if (*key, times, passes_on) not in seconds:
                seconds[*key, times, passes_on] = np.array(
                    [
                        times * options[first].seconds[at] + breaks.of(parts[place], passes_on)
                        for place, at in enumerate(chosen[first])
                    ],
                    dtype=np.float64,
                )
            own[variable][*key, times, passes_on] += 1
        for variable, counts in own.items():
            self.unary[variable] = sum(
                (count * seconds[key] for key, count in counts.items()), self.unary[variable]
            )

    # Ends of conversions

    def _entries(
        self, parts: tuple[tuple[Signature1d, ...], ...], side: str, at: int
    ) -> tuple[Entries, ...]:
        """Return the SBP of one argument, or of one output, under each option."""
        key = (id(parts), side, at)
        if key not in self._found_entries:
            self._found_entries[key] = tuple(
                tuple(getattr(part, side)[at] for part in option) for option in parts
            )
        return self._found_entries[key]

    def _different(self, entries: tuple[Entries, ...]) -> tuple[tuple[Entries, ...], Numbers]:
        """Return the different ones of some SBPs, in order, and the place of each among these."""
        found = self._distinct.get(id(entries))
        if found is None:
            number: dict[Entries, int] = {}
            places = [number.setdefault(one, len(number)) for one in entries]
            found = entries, tuple(number), np.array(places, dtype=np.int64)
            self._distinct[id(entries)] = found
        return found[1], found[2]

    def _source(self, value: str) -> ConversionEnd:
        work = self.work
        node = work.graph.producers.get(value)
        if node is None:
            return self._storage_end(value)
        at = node.outputs.index(value)
        return ConversionEnd(
            variable=self.node_variable[node.name],
            entries=self._entries(self.parts[node.name], "outputs", at),
            stage=work.stages.nodes[node.name],
            before=self._before(
                self.decision.value(work.graph, value) if self.axes.start else None
            ),
        )

    def _storage_end(self, name: str) -> ConversionEnd:
        return ConversionEnd(
            variable=self.storage_variable[name],
            entries=self.storage_entries[name],
            stage=self.work.stages.inputs[name],
            before=self._before(self._stored(name)),
        )

    def _argument_ends(self, node: Node, value: str) -> list[ConversionEnd]:
        names = self.work.calls[node.name].tensor_names
        before = self.decision.nodes.get(node.name, ())[: self.axes.start]
        again = is_gathered_on_use(self.work.graph, value)
        return [
            ConversionEnd(
                variable=self.node_variable[node.name],
                entries=self._entries(self.parts[node.name], "inputs", at),
                stage=self.work.stages.nodes[node.name],
                before=tuple(part.inputs[at] for part in before),
                phase=node.phase.value if again else "",
                rate=node.rate if again else None,
                as_stored=node.op == PIECE and value in self.storage_variable,
            )
            for at, name in enumerate(names)
            if name == value
        ]

    def _targets(self, value: str, source: ConversionEnd) -> list[ConversionEnd]:
        ends = [
            end
            for user in self.work.graph.users[value]
            if not user.is_host
            for end in self._argument_ends(user, value)
        ]
        ends += [self._storage_end(state) for state in self.work.states_by_value.get(value, ())]
        if value in self.work.reported_values:
            ends.append(
                ConversionEnd(
                    variable=NO_VARIABLE,
                    entries=self._whole,
                    stage=source.stage,
                    before=(B,) * self.axes.start,
                )
            )
        return ends

    # Conversions

    def _groups_of(self, value: str, count: int) -> Iterator[ConversionGroup]:
        source = self._source(value)
        together: dict[tuple[int, tuple[Sbp, ...], str, bool], list[ConversionEnd]] = {}
        for end in self._targets(value, source):
            key = (end.stage, end.before, end.phase, end.as_stored)
            together.setdefault(key, []).append(end)
        tensor, slices = self.work.unsliced(value)
        for ends in together.values():
            times = self.work.executions(ends[0].rate or self.work.graph.rate_of(value))
            made = (id(source.entries), source.stage, source.before)
            asked = (ends[0].stage, ends[0].before, ends[0].as_stored)
            companions = self.work.companions.of(value, ends[0].phase)
            alike = (
                *(tensor, slices, times, count, companions, *made, *asked),
                *(id(end.entries) for end in ends),
            )
            if alike not in self._costs:
                different = [self._different(end.entries) for end in ends]
                number: dict[Entries, int] = {}
                numbers = tuple(
                    np.array([number.setdefault(one, len(number)) for one in of], dtype=np.int64)[
                        at
                    ]
                    for of, at in different
                )
                costs = self._target_costs(tensor, source, ends[0], tuple(number), companions)
                self._costs[alike] = count * (times / slices * costs), numbers
            costs, numbers = self._costs[alike]
            if costs.any():
                yield ConversionGroup(
                    value=value,
                    source=source.variable,
                    costs=costs,
                    requests=tuple(
                        ConversionRequest(end.variable, of)
                        for end, of in zip(ends, numbers, strict=True)
                    ),
                )

    def _target_costs(
        self,
        tensor: TensorType,
        source: ConversionEnd,
        end: ConversionEnd,
        targets: tuple[Entries, ...],
        companions: Companions | None,
    ) -> Table:
        """Return the cost of each target (columns) from each value of the source (rows)."""
        stage, before = end.stage, end.before
        shape = smaller_shape(
            shard_shape(tensor, source.before, self.work.mesh_shape(source.stage)),
            shard_shape(tensor, before, self.work.mesh_shape(stage)),
        )
        # By SBP, as many signatures of a node differ in its arguments only and make the same.
        sources, places = self._different(source.entries)
        prices = self.prices.table(
            shape,
            tensor.dtype,
            [(source.stage, entry) for entry in sources],
            [(stage, target) for target in targets],
            companions,
        )
        both = np.array(prices, dtype=np.float64).reshape(len(sources), len(targets), 2)
        found: Table = both[..., 0] + TIE_S_PER_BYTE * both[..., 1]
        found[np.isinf(found)] = FORBIDDEN_S
        if end.as_stored:
            for row, entry in enumerate(sources):
                if entry in targets:
                    found[row, [target != entry for target in targets]] = FORBIDDEN_S
        return found[places]
