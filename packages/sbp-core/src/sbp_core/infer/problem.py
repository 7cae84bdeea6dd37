"""Pose the choice of all shardings on some mesh axes as a problem: variables, options and costs.

Variables
    signature of each node            its options on these axes, given those on the axes before
    storage of each tensor input      S(d) or B; one value if pinned; a state without a pin shares
                                      the variable of its parameter if their shapes are equal

Costs, in seconds of one step (a micro-batch's cost counts once for each micro-batch)
    node        time of the op on the rank with the largest shard
    conversion  for each value and each *distinct* target that its users ask for: the route from
                the SBP that it is made in; users that ask for the same target share one. New states
                are asked for as they are stored, loss and metrics as B. A conversion that the
                compiler lets travel in a bucket takes a share of it (`infer.companions`)
    copies      of a state in host memory: its bytes over the link to the host, once, because
                fetching and storing go on in parallel
    tie-break   so small that it only decides among equals: fewer bytes, then B, then low dims;
                views of gradients prefer to pass partial values on

Conversions are priced when they are first asked for. Where they would be too many, some values of
variables are excluded beforehand (`restrict`).

Slices of an operator (`sbp_aten.passes.operator_slicing`) are boxed like the whole operator: a
slice costs its share of that boxing, without the latency of a separate message. Such a latency
could make it look better to gather a larger tensor.
A slice of an input (`sbp.piece`) is cut from the input as it is stored, if possible.

Pins remove values from the variables: a pinned input has one storage, and the users of a pinned
value keep only the signatures that take the pinned SBP; a view of it is pinned to the SBP that
follows. A decision kept from an earlier strategy also has one value, unless a pin overrides it.

On one axis, `infer.axis` solves this problem, axis after axis; on all axes it is the joint problem.
This module does not search.
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
    """The variables and costs of a step on some mesh axes, given the decisions on earlier axes.

    Args:
        work: The step.
        decision: The decisions on the axes before `axes`; if it also has `axes`, the problem starts
            from those decisions.
        axes: Successive mesh axes, such as `range(1, 2)`.
        pins: The pins.
        kept: Decisions of an earlier strategy that stay where pins allow.
        prices: Prices of conversions; the router's if None.
        layers: Equal layers, which are posed once: one variable each, with the costs of all layers.
            Their decisions on earlier axes are equal, too. No layers if None.

    Raises:
        PlanError: a pin asks for an SBP that an operator cannot take.
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
        #: Seconds of each value of each variable, without conversions.
        self.unary: list[Table] = []
        #: A value of each variable.
        self.start: list[int] = []
        #: By node, the signature on each of the axes, for each value of its variable.
        self.parts: dict[str, tuple[tuple[Signature1d, ...], ...]] = {}
        self.node_variable: dict[str, int] = {}
        self.storage_variable: dict[str, int] = {}
        #: The input that a variable belongs to; a state may share its parameter's.
        self.storage_owner: dict[str, str] = {}
        self.storage_entries: dict[str, tuple[Entries, ...]] = {}
        # Repeated layers ask for the same results under other names, so results are kept: options
        # by call and pins, entries by options, costs and targets by entries. Ids serve as keys,
        # because every object with a key lives as long as this.
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
        """The first of each class of equal tensors, and the size of the class."""
        graph = self.work.graph
        if self.layers is not None:
            return self.layers.values
        return [(value, 1) for value in graph.types if graph.is_tensor(value)]

    @property
    def num_prices(self) -> int:
        """How many conversions have to be priced at most, equal tensors counted once."""
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
        """Remove values of variables, before conversions are priced.

        Args:
            kept: For each variable the ascending indices of the remaining values, including the
                value that it starts from.
        """
        assert "groups" not in vars(self), "conversions are priced already"
        places = [tuple(of.tolist()) for of in kept]
        for name, parts in self.parts.items():
            at = places[self.node_variable[name]]
            key = (id(parts), at)
            # Removed options stay alive, because ids identify options.
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
        """Return the cost of a value of each variable, in seconds of a step.

        `FORBIDDEN_S` or more means that the combination is impossible.
        """
        seconds = sum(float(table[value]) for table, value in zip(self.unary, values, strict=True))
        return seconds + sum(group.cost(values) for group in self.groups)

    def decided(self, values: Sequence[int]) -> Decision:
        """Return the decision on all axes up to these that the values of the variables mean."""
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
        """Return an earlier decision on the axes of the problem, if there is one."""
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
        """Add to the storage of a state the time to fetch it from the host and to store it."""
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
        """Yield the possible storages of an input on the axes, given the earlier entries."""
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
            # The state of a generator cannot be split: a part of it draws nothing.
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
        # The costs of a node; nodes that are alike are counted.
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
        """Return the distinct SBPs of some, in order, and the place of each among these."""
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
        # By SBP, because many signatures of a node differ only in its arguments.
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
