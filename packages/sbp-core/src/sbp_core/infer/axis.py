"""The search on one mesh axis, as a min-sum problem.

Variables
    signature of each node            its options on this axis, given those on the axes before
    storage of each tensor input      S(d) or B; one value if pinned; a state without a pin shares
                                      the variable of its parameter if their shapes are equal
    targets of a value                only for values of many users: the set of SBPs it is boxed to

Costs, in seconds of one step (a micro-batch's cost counts once for each micro-batch)
    node        time of the op on the rank with the largest shard
    conversion  for each value and each *distinct* target that its users ask for: the route from
                what it is made as; users that ask for the same share one. New states are asked for
                as they are stored, loss and metrics as B
    tie-break   so small that it only decides among equals: fewer bytes, then B, then low dims;
                views of gradients rather pass partial values on

Slices of an operator (`sbp_aten.passes.operator_slicing`) are boxed as the whole would be: a slice
costs its share of that, not the latency of a message of its own, for which a larger tensor might be
gathered.
A slice of an input (`sbp.piece`) is cut from the input as it is stored, if it can be.

Pins remove values from the variables: a pinned input has one storage, and the users of a pinned
value keep only the signatures that take it so; a view of it is pinned to what it then must be.
What is kept of an earlier strategy has one value, too, unless a pin says another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isinf, prod

import numpy as np
from numpy.typing import NDArray

from sbp_core.compile.levels import is_gathered_on_use
from sbp_core.errors import PlanError
from sbp_core.graph.ir import InputKind, Node, Rate, TensorType
from sbp_core.graph.primitives import PIECE
from sbp_core.infer.minsum import Factor, Table, minimise
from sbp_core.infer.pins import PINS, Pin, Pins
from sbp_core.infer.prices import AxisPrices
from sbp_core.infer.work import (
    Decision,
    Kept,
    OptionTable,
    StepWork,
    replicated,
    shard_shape,
    smaller_shape,
)
from sbp_core.sbp import B, Broadcast, Partial, Sbp, Split
from sbp_core.signatures.signature import Signature1d

#: Seconds that stand for "not possible" in tables: far above any step, and finite, so that sums
#: of tables stay numbers.
FORBIDDEN_S = 1e9

#: Weights of the tie-break: seconds for each byte, and for each step away from B.
_TIE_S_PER_BYTE = 1e-18
_TIE_S_PER_RANK = 1e-15

#: Values with more users than this, or with larger tables, get a variable of their targets.
_MAX_DIRECT_USERS = 3
_MAX_DIRECT_ENTRIES = 20_000

Masks = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ConversionEnd:
    """One end of conversions: what a tensor is made as, or asked for as.

    Args:
        variable: The variable that decides it; -1 if it is always the first of `entries`.
        entries: The SBP on this axis for each value of the variable.
        stage: Where.
        before: The entries on the axes before.
        phase: For the use of a value that each phase boxes for itself, that phase; else empty.
        rate: For such a use, how often it is boxed; else None, as often as it is made.
        as_stored: Whether it is not boxed at all, if it can be used as it is stored.
    """

    variable: int
    entries: tuple[Sbp, ...]
    stage: int
    before: tuple[Sbp, ...]
    phase: str = ""
    rate: Rate | None = None
    as_stored: bool = False


class AxisProblem:
    """The problem of one mesh axis, given what is decided on the axes before."""

    def __init__(
        self, work: StepWork, decision: Decision, axis: int, pins: Pins, kept: Kept
    ) -> None:
        self.work, self.decision, self.axis, self.pins = work, decision, axis, pins
        self.kept = kept
        self.use = {value: pin for (value, at), pin in pins.use.items() if at == axis}
        self.prices = AxisPrices(work.placements, axis, work.cluster)
        self.sizes: list[int] = []
        self.start: list[int] = []
        self.factors: list[Factor] = []
        self.unary: list[Table] = []
        self.parts: dict[str, tuple[Signature1d, ...]] = {}
        self.node_variable: dict[str, int] = {}
        self.storage_variable: dict[str, int] = {}
        self.storage_entries: dict[str, tuple[Sbp, ...]] = {}
        self._costs: dict[object, Table] = {}
        self._add_storage()
        self._add_nodes()
        self._start_greedily()
        for value in work.graph.types:
            if work.graph.is_tensor(value):
                self._add_conversions(value)

    def solve(self) -> bool:
        """Decide this axis in `decision`; return whether the choice is proved to be the best.

        Raises:
            PlanError: the pins leave nothing that can be boxed.
        """
        unary = [Factor((v,), table) for v, table in enumerate(self.unary)]
        found = minimise(self.sizes, [*unary, *self.factors], self.start)
        if found.cost >= FORBIDDEN_S:
            raise PlanError(
                f"no plan on mesh axis {self.work.axes[self.axis]!r} fulfils the pins",
                where=PINS,
                todo="remove a pin of this axis",
            )
        for node in self.work.nodes:
            part = self.parts[node.name][found.values[self.node_variable[node.name]]]
            before = self.decision.nodes.get(node.name, ())
            self.decision.nodes[node.name] = (*before, part)
        for entry in self.work.inputs:
            value = found.values[self.storage_variable[entry.name]]
            before_storage = self.decision.storage.get(entry.name, ())
            chosen = self.storage_entries[entry.name][value]
            self.decision.storage[entry.name] = (*before_storage, chosen)
        return found.exact

    # Variables

    def _variable(self, unary: Sequence[float], start: int = 0) -> int:
        self.sizes.append(len(unary))
        self.start.append(start)
        self.unary.append(np.array(unary, dtype=np.float64))
        return len(self.sizes) - 1

    def _add_storage(self) -> None:
        # Parameters first: a state without a pin takes the variable of its parameter.
        ordered = sorted(
            self.work.inputs, key=lambda entry: entry.name in self.work.parameter_of_state
        )
        for entry in ordered:
            pin = self.pins.storage.get((entry.name, self.axis))
            parameter = self.work.parameter_of_state.get(entry.name)
            kept = self.kept.storage.get(entry.name) if pin is None else None
            if pin is None and kept is None and parameter is not None:
                self.storage_variable[entry.name] = self.storage_variable[parameter]
                self.storage_entries[entry.name] = self.storage_entries[parameter]
                continue
            if pin is not None:
                entries: tuple[Sbp, ...] = (pin.entry,)
            elif kept is not None:
                entries = (kept[self.axis],)
            elif entry.kind is InputKind.RNG:
                # The state of a generator is no tensor of elements: half of it draws nothing.
                entries = (B,)
            else:
                entries = (B, *self._splits(entry.name))
            self.storage_entries[entry.name] = entries
            self.storage_variable[entry.name] = self._variable(
                [_entry_tie_break(e) for e in entries]
            )

    def _splits(self, name: str) -> list[Sbp]:
        """Return the splits that leave no rank of this axis without elements."""
        tensor = self.work.graph.tensor(name)
        before = self.decision.storage.get(name, ())
        mesh_shape = self.work.mesh_shape(self.work.stages.inputs[name])
        shape, ranks = shard_shape(tensor, before, mesh_shape), mesh_shape[self.axis]
        return [Split(dim) for dim, extent in enumerate(shape) if extent >= ranks]

    def _add_nodes(self) -> None:
        table = OptionTable(self.work, self.axis)
        for node in self.work.nodes:
            options = table.options(node, self.decision.nodes.get(node.name, ()))
            kept = self._unpinned(node, options.parts)
            kept = self._as_kept(node, options.parts, kept) or kept
            times = self.work.executions(node.rate)
            passes_on = node.name in self.work.views_of_gradients
            self.parts[node.name] = tuple(options.parts[at] for at in kept)
            self.node_variable[node.name] = self._variable(
                [
                    times * options.seconds[at] + _signature_tie_break(passes_on, options.parts[at])
                    for at in kept
                ]
            )

    def _unpinned(self, node: Node, parts: Sequence[Signature1d]) -> list[int]:
        """Return which options take the node's arguments as they are pinned."""
        pinned = [
            (at, value, self.use[value])
            for at, value in enumerate(self.work.calls[node.name].tensor_names)
            if value in self.use
        ]
        kept = list(range(len(parts)))
        # Firm pins first. A pin that is not firm then chooses among what they leave, and gives way
        # where they leave nothing that it fits.
        for at, value, pin in sorted(pinned, key=lambda entry: not entry[2].firm):
            fits = [index for index in kept if parts[index].inputs[at] == pin.entry]
            if not fits and pin.firm:
                raise self._untakable(node, value, pin, {parts[index].inputs[at] for index in kept})
            kept = fits or kept
        # What a view of a pinned value must be is pinned for its users too.
        if len(kept) == 1 and pinned and self.work.is_free(node) and pinned[0][2].firm:
            for value, entry in zip(node.outputs, parts[kept[0]].outputs, strict=True):
                self.use.setdefault(value, replace(pinned[0][2], entry=entry))
        return kept

    def _as_kept(self, node: Node, parts: Sequence[Signature1d], among: list[int]) -> list[int]:
        """Return which options are what an earlier strategy has; none if it has nothing of it."""
        found = self.kept.nodes.get(node.name)
        if found is None:
            return []
        inputs, outputs = (
            tuple(sbp[self.axis] for sbp in of) for of in (found.inputs, found.outputs)
        )
        return [at for at in among if (parts[at].inputs, parts[at].outputs) == (inputs, outputs)]

    def _untakable(self, node: Node, value: str, pin: Pin, possible: set[Sbp]) -> PlanError:
        axis = self.work.axes[self.axis]
        return PlanError(
            f"the pin '{pin.text}' asks that {value!r} is used as {pin.entry!r} on mesh axis "
            f"{axis!r}, which {node.op} cannot take",
            where=(*node.where(), PINS),
            accepted=", ".join(sorted(map(repr, possible))),
            todo="pin what is accepted, or pin another value on the way",
        )

    # Ends of conversions

    def _source(self, value: str) -> _ConversionEnd:
        work = self.work
        node = work.graph.producers.get(value)
        if node is None:
            return self._storage_end(value)
        at = node.outputs.index(value)
        return _ConversionEnd(
            variable=self.node_variable[node.name],
            entries=tuple(part.outputs[at] for part in self.parts[node.name]),
            stage=work.stages.nodes[node.name],
            before=self.decision.value(work.graph, value) if self.axis else (),
        )

    def _storage_end(self, name: str) -> _ConversionEnd:
        return _ConversionEnd(
            variable=self.storage_variable[name],
            entries=self.storage_entries[name],
            stage=self.work.stages.inputs[name],
            before=self.decision.storage.get(name, ()),
        )

    def _argument_ends(self, node: Node, value: str) -> list[_ConversionEnd]:
        names = self.work.calls[node.name].tensor_names
        before = self.decision.nodes.get(node.name, ())
        again = is_gathered_on_use(self.work.graph, value)
        return [
            _ConversionEnd(
                variable=self.node_variable[node.name],
                entries=tuple(part.inputs[at] for part in self.parts[node.name]),
                stage=self.work.stages.nodes[node.name],
                before=tuple(part.inputs[at] for part in before),
                phase=node.phase.value if again else "",
                rate=node.rate if again else None,
                as_stored=node.op == PIECE and value in self.storage_variable,
            )
            for at, name in enumerate(names)
            if name == value
        ]

    def _targets(self, value: str, source: _ConversionEnd) -> list[_ConversionEnd]:
        ends = [
            end
            for user in self.work.graph.users[value]
            if not user.is_host
            for end in self._argument_ends(user, value)
        ]
        ends += [self._storage_end(state) for state in self.work.states_by_value.get(value, ())]
        if value in self.work.reported_values:
            whole_before = (B,) * self.axis
            ends.append(
                _ConversionEnd(variable=-1, entries=(B,), stage=source.stage, before=whole_before)
            )
        return ends

    # Conversions

    def _add_conversions(self, value: str) -> None:
        source = self._source(value)
        groups: dict[tuple[int, tuple[Sbp, ...], str, bool], list[_ConversionEnd]] = {}
        for end in self._targets(value, source):
            key = (end.stage, end.before, end.phase, end.as_stored)
            groups.setdefault(key, []).append(end)
        for ends in groups.values():
            self._add_group(value, source, ends)

    def _add_group(self, value: str, source: _ConversionEnd, ends: list[_ConversionEnd]) -> None:
        """Add the cost of boxing one value to what its users on one stage ask for.

        A set of targets is a bit mask; `costs[state of the source, mask]` prices all sets.
        """
        # One factor over the variable that makes the value, s, and those of its users, u and v:
        #
        #     mm (s) ---- x ---- relu (u)       table[s, u, v] = costs[s, mask(u) | mask(v)]
        #                  \---- mul (v)
        #
        #     u asks for S(0), v for B          mask 0b01 | 0b10: two conversions
        #     u and v both ask for S(0)         mask 0b01 | 0b01: one, which they share
        targets = tuple(dict.fromkeys(entry for end in ends for entry in end.entries))
        costs = self._target_set_costs(value, source, ends[0], targets)
        if not costs.any():
            return
        # What is asked for by the source's own variable (the storage that an input shares with a
        # state), or by none (an output): it has no dim of its own in the table.
        own: Masks = np.zeros(self.sizes[source.variable], dtype=np.int64)
        asked: dict[int, Masks] = {}
        for end in ends:
            masks = np.array([1 << targets.index(entry) for entry in end.entries], dtype=np.int64)
            if end.variable in (-1, source.variable):
                own = own | masks
            else:
                asked[end.variable] = asked.get(end.variable, 0) | masks
        entries = prod(self.sizes[v] for v in (source.variable, *asked))
        if len(asked) > _MAX_DIRECT_USERS or entries > _MAX_DIRECT_ENTRIES:
            asked = self._through_target_variable(asked)
        # An outer "or": dim i of `together` has the states of the i-th user, its entries are sets.
        together = np.zeros((), dtype=np.int64)
        for masks in asked.values():
            together = np.bitwise_or.outer(together, masks)
        # The source's states come first, beside which `own` and `costs` are broadcast.
        states = np.arange(len(own)).reshape(-1, *(1,) * together.ndim)
        table = costs[states, own.reshape(states.shape) | together]
        self.factors.append(Factor((source.variable, *asked), table))

    def _through_target_variable(self, asked: dict[int, Masks]) -> dict[int, Masks]:
        """Put one variable, the set of targets, between a value and its many users."""
        # A table over n users would have a dim for each. Instead a variable t, the set of targets
        # that are made, stands between, and n tables of two dims say which sets do for a user:
        #
        #     s -- costs[s, t] -- t -- u1, t -- u2, t -- u3 ..     forbidden where u asks beyond t
        #
        # More targets cost no less, so the best t has what is asked for, and no more.
        sets = {0}
        for masks in asked.values():
            sets = {a | int(mask) for a in sets for mask in masks}
        domain = np.array(sorted(sets), dtype=np.int64)
        # The set of the first assignment: what the users' first states ask for together.
        present = 0
        for variable, masks in asked.items():
            present |= int(masks[self.start[variable]])
        between = self._variable([0.0] * len(domain), int(np.searchsorted(domain, present)))
        for variable, masks in asked.items():
            missing = (masks[None, :] & ~domain[:, None]) != 0
            self.factors.append(Factor((between, variable), np.where(missing, FORBIDDEN_S, 0.0)))
        return {between: domain}

    def _target_set_costs(
        self,
        value: str,
        source: _ConversionEnd,
        end: _ConversionEnd,
        targets: tuple[Sbp, ...],
    ) -> Table:
        tensor, slices = self._unsliced(value)
        stage, before = end.stage, end.before
        times = self.work.executions(end.rate or self.work.graph.rate_of(value))
        made = (source.entries, source.stage, source.before)
        # Repeated layers ask the same, under other names.
        key = (tensor, slices, times, *made, stage, before, targets, end.as_stored)
        if key not in self._costs:
            single = times / slices * self._target_costs(tensor, source, end, targets)
            # Row m has the targets of mask m, so the product sums the conversions of each set.
            bits = np.arange(1 << len(targets))[:, None] >> np.arange(len(targets)) & 1
            self._costs[key] = single @ bits.T.astype(np.float64)
        return self._costs[key]

    def _unsliced(self, value: str) -> tuple[TensorType, int]:
        """Return the tensor that a value is a slice of, and of how many; else itself and 1."""
        tensor, node = self.work.graph.tensor(value), self.work.graph.producers.get(value)
        slices = 1 if node is None else node.num_slices
        if slices == 1:
            return tensor, 1
        return replace(tensor, shape=(*tensor.shape[:-1], tensor.shape[-1] * slices)), slices

    def _target_costs(
        self,
        tensor: TensorType,
        source: _ConversionEnd,
        end: _ConversionEnd,
        targets: tuple[Sbp, ...],
    ) -> Table:
        """Return the cost of each target (columns) from each state of the source (rows)."""
        stage, before = end.stage, end.before
        shape = smaller_shape(
            shard_shape(tensor, source.before, self.work.mesh_shape(source.stage)),
            shard_shape(tensor, before, self.work.mesh_shape(stage)),
        )
        # By SBP, as many signatures of a node differ in its arguments only and make the same.
        rows: dict[Sbp, list[float]] = {}
        for entry in source.entries:
            if entry not in rows:
                stays = end.as_stored and entry in targets
                rows[entry] = [
                    FORBIDDEN_S
                    if stays and target != entry
                    else self._cost(shape, tensor.dtype, (source.stage, entry), (stage, target))
                    for target in targets
                ]
        return np.array([rows[entry] for entry in source.entries], dtype=np.float64)

    def _cost(
        self, shape: tuple[int, ...], dtype: str, source: tuple[int, Sbp], target: tuple[int, Sbp]
    ) -> float:
        seconds, size_bytes = self.prices.price(shape, dtype, source, target)
        return FORBIDDEN_S if isinf(seconds) else seconds + _TIE_S_PER_BYTE * size_bytes

    # A first assignment

    def _start_greedily(self) -> None:
        """Let each node in turn take the option that is cheapest after those before it."""
        for node in self.work.nodes:
            variable = self.node_variable[node.name]
            # Later nodes are not looked at: they follow this one, as minimising goes on from here.
            cost = self.unary[variable].copy()
            for value in dict.fromkeys(self.work.calls[node.name].tensor_names):
                source = self._source(value)
                for end in self._argument_ends(node, value):
                    cost += self._current_choice(value, source, end)
            self.start[variable] = int(cost.argmin())

    def _current_choice(self, value: str, source: _ConversionEnd, end: _ConversionEnd) -> Table:
        targets = tuple(dict.fromkeys(end.entries))
        costs = self._target_set_costs(value, source, end, targets)
        masks = [1 << targets.index(entry) for entry in end.entries]
        found: Table = costs[self.start[source.variable], masks]
        return found


def decide_axis(
    work: StepWork, decision: Decision, axis: int, pins: Pins, kept: Kept | None = None
) -> bool:
    """Decide one mesh axis; return whether the choice is proved to be the best on that axis.

    On an axis of one rank all SBPs are the same thing; it is written as B.

    Args:
        work: The step.
        decision: What is decided on the axes before; this one is added.
        axis: Which.
        pins: What must hold.
        kept: What stays as an earlier strategy has it, where pins allow; nothing if None.
    """
    if any(stage.mesh_shape[axis] > 1 for stage in work.placements):
        return AxisProblem(work, decision, axis, pins, kept or Kept()).solve()
    for node in work.nodes:
        part = replicated(work.calls[node.name])
        decision.nodes[node.name] = (*decision.nodes.get(node.name, ()), part)
    for entry in work.inputs:
        decision.storage[entry.name] = (*decision.storage.get(entry.name, ()), B)
    return True


def _signature_tie_break(passes_on: bool, part: Signature1d) -> float:
    """Return the tie-break of a signature; views of gradients pass partial values on.

    What only the optimizer reduces can then travel together (`compile.buckets`).

    before: g@(B) = all-reduce(g); view(g@(B)); update(..)      g of the backward phase
    after:  view(g); view@(B) = all-reduce(view); update(..)
    """
    entries = (*part.inputs, *part.outputs)
    if not passes_on:
        return sum(map(_entry_tie_break, entries))
    return sum(
        0.0 if isinstance(e, Partial) else _TIE_S_PER_RANK + _entry_tie_break(e) for e in entries
    )


def _entry_tie_break(entry: Sbp) -> float:
    """Return the tie-break of one entry: B before low dims before partial values."""
    if isinstance(entry, Broadcast):
        return 0.0
    return _TIE_S_PER_RANK * (1 + entry.dim if isinstance(entry, Split) else 20)
