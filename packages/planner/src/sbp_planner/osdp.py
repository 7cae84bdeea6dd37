"""The planner `osdp`: each parameter replicated (DP) or sharded (ZDP), fastest that fits.

    choose      sharded, a subset of the parameters
    minimise    predicted time of a step, of the compiled plan                              [s]
    such that   exact memory of the compiled plan (`sbp_core.memory.predict_memory`) <= limit [B]

Two strategies are inferred from pins on parameters, states, gradients and updates, with the batch
split: everything replicated, everything sharded. Another choice takes what is decided on each
parameter, and on what its gradient and update alone depend on, from one of them. Its time is that
of a replay of the compiled plan (`sbp_core.simulate`), so boxing that overlaps with
compute costs only what it delays.

Neither is a sum over parameters, so the search goes in two parts:

1. `guide` says roughly what each parameter costs either way, and `knapsack` solves that exactly.
   Begin with the fastest choice of the guide, and lower or raise its limit by what the compiled
   plan holds more or less than the limit, until the last choice that fits is next to one that does
   not.
2. From there, take any change of a single parameter, to replicated or to sharded, that is faster
   and fits, until there is none. Then exchange one or two that are sharded for one or two that are
   not, the most promising of the guide first, and begin again if that is faster and fits.

What is guaranteed: the plan fits; it is the fastest of all that were looked at, and so no slower
than replicating everything or sharding everything, where they fit; and no change of a single
parameter both fits and is faster. Parameters that the guide cannot tell apart, such as those of
equal layers, are taken to change the time alike (with a thread for boxing they nearly do), but are
tried one by one for memory. Choices that differ in several parameters at once may be better.

Where no tensor library is installed, or it does not know how a result lies, memory is the bound of
`sbp_core.infer.predict_cost` in place of the exact number; the report says so.

Source: Jiang et al., "OSDP: Optimal Sharded Data Parallel for Distributed Deep Learning", IJCAI
2023, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import inf
from typing import Any

from sbp_core.compile import CompileOptions, PhysicalPlan, compile_plan
from sbp_core.errors import PlanError, SbpLookupError
from sbp_core.graph import LogicalGraph
from sbp_core.infer import PinValue, infer_strategy, predict_cost
from sbp_core.memory import CallLayouts, call_layouts, predict_memory
from sbp_core.placement import Placement
from sbp_core.plugins import PlanRequest
from sbp_core.simulate import simulate
from sbp_core.strategy import Strategy
from sbp_core.units import format_bytes, format_seconds
from sbp_planner.configs import OsdpConfig, check_only_axis
from sbp_planner.guide import (
    SHARDED,
    owners,
    parameter_options,
    shardable,
    states_of,
    update_values,
)
from sbp_planner.knapsack import KnapsackOption, KnapsackSolution, choose
from sbp_planner.no_fit import no_fit

DP, ZDP = "B", "S(0)"

#: Choices of the guide that are compiled; each lies between one that fits and one that does not.
MAX_TRIES = 12

#: Exchanges of parameters that are compiled before the search ends.
MAX_EXCHANGES = 16

#: Sums of equal times in another order differ by less than this share.
_TIE = 1e-9

#: For each shardable parameter, whether it is sharded.
Choice = tuple[bool, ...]

#: For each shardable parameter, its two options in the guide.
Items = tuple[tuple[KnapsackOption, KnapsackOption], ...]


@dataclass(frozen=True, slots=True)
class OsdpPlanner:
    """Plans data parallelism, sharding what has to be sharded, or is faster so."""

    config: OsdpConfig

    def plan(self, request: PlanRequest) -> Strategy:
        """Return the strategy of the module's docstring.

        Raises:
            ConfigError: the mesh has no such axis, or splits over other axes too; or neither
                replicating nor sharding everything fits `memory_bytes`, or the memory of the
                device: says what that needs, of which kinds of memory, and what would make it fit.
        """
        axis = _only_axis(request.mesh, self.config.axis)
        limit = self.config.memory_bytes or request.cluster.device.memory_bytes
        quiet = replace(request, progress=None)
        search = _Search(request=quiet, axis=self.config.axis, limit_bytes=limit)
        num = len(search.names)
        ends = (False,) * num, (True,) * num
        items = parameter_options(
            request.graph,
            search.names,
            request.mesh.mesh_shape[axis],
            request.cluster,
            replicated=search.strategy(ends[0]),
            sharded=search.strategy(ends[1]),
        )
        if request.progress:
            request.progress("choosing what to shard", 0.5)
        # What the guide led to, and both ends, are looked at in any case: so the result is no worse
        # than either end that fits.
        _follow(search, items)
        for choice in ends:
            search.fits(choice)
        if search.best is None:
            raise no_fit(
                search.plan(least := min(ends, key=search.memory)),
                request.graph,
                limit_bytes=limit,
                least_bytes=search.memory(least),
                num_sharded=sum(least),
                layouts=search.layouts,
                limit_key=f"{'planner' if self.config.memory_bytes else 'cluster'}.memory_bytes",
            )
        best = _improved(search, search.best, items)
        strategy = search.strategy(best)
        report = {
            **predict_cost(request.graph, strategy, request.cluster, request.options),
            "osdp": _report(search, best),
            "explanation": _explanation(search, best),
        }
        return replace(strategy, report={**strategy.report, **report})


@dataclass(slots=True, kw_only=True)
class _Search:
    """What is known of the choices that were looked at.

    Args:
        request: What to plan.
        axis: Mesh axis over which data are split.
        limit_bytes: Memory of one rank.
    """

    request: PlanRequest
    axis: str
    limit_bytes: float
    #: The fastest choice so far that fits; among equals the one with the least memory.
    best: Choice | None = None
    is_exact: bool = True
    #: What is known of how results lie, of all plans so far.
    layouts: CallLayouts | None = None
    _strategies: dict[Choice, Strategy] = field(default_factory=dict)
    _step_s: dict[Choice, float] = field(default_factory=dict)
    _memory: dict[Choice, int] = field(default_factory=dict)
    #: The choice that was compiled last, and its plan: plans are too large to keep them all.
    _compiled: tuple[Choice, PhysicalPlan] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return shardable(self.request.graph)

    def strategy(self, choice: Choice) -> Strategy:
        if choice not in self._strategies:
            self._strategies[choice] = self._made(choice)
        return self._strategies[choice]

    def _made(self, choice: Choice) -> Strategy:
        # All alike: an end, inferred. Everything else is mixed of the two ends, without inference,
        # so that a choice costs little more than its compilation.
        if len(set(choice)) < 2:
            return infer(self.request, self.axis, sharded=any(choice))
        num = len(choice)
        ends = self.strategy((False,) * num), self.strategy((True,) * num)
        chosen = {name for name, yes in zip(self.names, choice, strict=True) if yes}
        return mixed(self.request.graph, *ends, chosen=chosen)

    def plan(self, choice: Choice) -> PhysicalPlan:
        """Return the compiled plan of a choice."""
        if self._compiled is None or self._compiled[0] != choice:
            options = self.request.options or CompileOptions(cluster=self.request.cluster)
            plan = compile_plan(self.request.graph, self.strategy(choice), options)
            self._compiled = choice, plan
        return self._compiled[1]

    def step_s(self, choice: Choice) -> float:
        """Return the predicted time of a step of the compiled plan."""
        if choice not in self._step_s:
            self._step_s[choice] = simulate(self.plan(choice)).step_s
        return self._step_s[choice]

    def memory(self, choice: Choice) -> int:
        """Return what the fullest rank holds at its peak, of the compiled plan, in bytes."""
        if choice not in self._memory:
            plan, request = self.plan(choice), self.request
            try:
                # Shared by all plans: most of their calls are alike.
                self.layouts = self.layouts or call_layouts()
                self._memory[choice] = predict_memory(plan, layouts=self.layouts).peak
            except (SbpLookupError, PlanError):
                self.is_exact = False
                found = predict_cost(
                    request.graph, self.strategy(choice), request.cluster, request.options
                )
                self._memory[choice] = found["predicted_memory_bytes_per_rank"]
        return self._memory[choice]

    def fits(self, choice: Choice) -> bool:
        """Whether a choice keeps to the limit; the best one that does is remembered."""
        does = self.memory(choice) <= self.limit_bytes
        if does and (self.best is None or self._rank(choice) < self._rank(self.best)):
            self.best = choice
        return does

    @property
    def num_compiled(self) -> int:
        """How many choices were compiled."""
        return len({*self._step_s, *self._memory})

    def _rank(self, choice: Choice) -> tuple[float, int]:
        return self.step_s(choice), self.memory(choice)


def _follow(search: _Search, items: Items) -> None:
    """Look at choices of the guide, from the fastest one to the last that fits."""
    most = choose(items, inf)
    assert most is not None, "without a limit everything fits"
    above, below = most.memory_bytes + 1.0, 0.0  # of the guide: does not fit, fits
    asked = most
    for _ in range(MAX_TRIES):
        choice = _choice(asked)
        if search.fits(choice):
            # The fastest choice of the guide fits: there is nothing to look for.
            if asked == most:
                return
            below = asked.memory_bytes
        else:
            above = asked.memory_bytes
        # What the compiled plan holds beside what the guide counts changes little.
        wanted = asked.memory_bytes + search.limit_bytes - search.memory(choice)
        # The guide's limit is corrected by how far the plan is from its own, and kept between what
        # is known to fit and what is known not to; where the correction leads out of that, halve.
        if not below <= wanted < above:
            wanted = (below + above) / 2
        found = choose(items, wanted)
        if found is None or found.memory_bytes <= below:
            return
        asked = found


def _choice(solution: KnapsackSolution) -> Choice:
    return tuple(index == SHARDED for index in solution.chosen)


def _improved(search: _Search, best: Choice, items: Items) -> Choice:
    """Change single parameters of a choice while that is faster and fits."""
    before = None
    while best != before:
        before = best
        for alike in _alike(items):
            for is_sharded in (True, False):
                best = _improved_alike(search, best, alike, is_sharded=is_sharded)
        if best == before:
            best = _exchanged(search, best, items)
    return best


def _exchanged(search: _Search, best: Choice, items: Items) -> Choice:
    """Shard one or two parameters for one or two others, where that is faster and fits."""
    # What a parameter frees depends on which others are sharded, so that near the limit a single
    # change is often too large, where two or three that make up for each other are not.
    for changes in _exchanges(search, best, items)[:MAX_EXCHANGES]:
        changed = tuple(not one if at in changes else one for at, one in enumerate(best))
        if search.step_s(changed) < search.step_s(best) * (1 - _TIE) and search.fits(changed):
            return changed
    return best


def _exchanges(search: _Search, best: Choice, items: Items) -> list[tuple[int, ...]]:
    """Return exchanges that are faster by the guide, by their parameters.

    Those that fit by the guide come first, then those that gain more.
    """
    alike = _alike(items)
    room_bytes = search.limit_bytes - search.memory(best)
    found = []
    for num_out, num_into in ((1, 1), (2, 1), (1, 2)):
        for out in combinations(_first_of_each(alike, best, is_sharded=True), num_out):
            for into in combinations(_first_of_each(alike, best, is_sharded=False), num_into):
                gain_s, more_bytes = 0.0, 0.0
                for at, sign in (*((at, 1) for at in out), *((at, -1) for at in into)):
                    replicated, sharded = items[at]
                    gain_s += sign * (sharded.seconds - replicated.seconds)
                    more_bytes += sign * (replicated.resident_bytes - sharded.resident_bytes)
                if gain_s > 0:
                    found.append((more_bytes > room_bytes, -gain_s, (*out, *into)))
    return [changes for _, _, changes in sorted(found)]


def _first_of_each(
    alike: Sequence[Sequence[int]], choice: Choice, *, is_sharded: bool
) -> Iterator[int]:
    """Yield of each class of equal parameters the first that is sharded, or is not."""
    for indices in alike:
        found = next((index for index in indices if choice[index] is is_sharded), None)
        if found is not None:
            yield found


def _improved_alike(
    search: _Search, best: Choice, alike: Sequence[int], *, is_sharded: bool
) -> Choice:
    """Change those of equal parameters that are sharded, or are not."""
    for index in alike:
        if best[index] is is_sharded:
            changed = (*best[:index], not is_sharded, *best[index + 1 :])
            # Alike parameters change the time of one thread alike. With a thread for boxing they
            # nearly do; asking for each would compile a plan for each.
            if search.step_s(changed) >= search.step_s(best) * (1 - _TIE):
                break
            if search.fits(changed):
                best = changed
    return best


def _alike(items: Items) -> list[list[int]]:
    """Return the parameters that the guide cannot tell apart, those that matter most first."""
    classes: dict[tuple[KnapsackOption, KnapsackOption], list[int]] = {}
    for index, options in enumerate(items):
        classes.setdefault(options, []).append(index)
    return [
        classes[options]
        for options in sorted(classes, key=lambda two: -abs(two[0].seconds - two[1].seconds))
    ]


def _report(search: _Search, best: Choice) -> dict[str, Any]:
    """Return what was chosen and what it was chosen among, as plain values."""
    num = len(best)
    return {
        "limit_bytes": search.limit_bytes,
        "binds": _binding(search, best),
        "memory_is_exact": search.is_exact,
        "num_compiled": search.num_compiled,
        "modes": {
            name: "ZDP" if sharded else "DP"
            for name, sharded in zip(search.names, best, strict=True)
        },
        **{
            name: {
                "plan_step_s": search.step_s(choice),
                "plan_memory_bytes_per_rank": search.memory(choice),
                "num_sharded": sum(choice),
                "fits": search.memory(choice) <= search.limit_bytes,
            }
            for name, choice in (
                ("chosen", best),
                ("all_dp", (False,) * num),
                ("all_zdp", (True,) * num),
            )
        },
    }


def _explanation(search: _Search, best: Choice) -> list[str]:
    """Return what was chosen and why, as lines for people."""
    num = len(best)
    how = "" if search.is_exact else " (memory is a bound: how results lie is not known)"
    lines = [
        f"osdp: {sum(best)} of {num} parameters sharded, under a limit of "
        f"{format_bytes(search.limit_bytes)} a rank{how}"
    ]
    for name, choice in (
        ("all replicated", (False,) * num),
        ("chosen", best),
        ("all sharded", (True,) * num),
    ):
        seconds, size = search.step_s(choice), search.memory(choice)
        lines.append(f"  {name}: {format_seconds(seconds)} a step, {format_bytes(size)}")
    return lines


def _binding(search: _Search, best: Choice) -> str:
    """Return what keeps the choice from being another."""
    replicated = (False,) * len(best)
    short = search.memory(replicated) - search.limit_bytes
    if short > 0:
        return f"memory: replicating everything needs {short:.0f} B more than the limit"
    if best == replicated:
        return "time: replicating everything is fastest, and fits"
    return "time: replicating everything fits, and sharding these is faster"


def _only_axis(mesh: Placement, name: str) -> int:
    check_only_axis(name, mesh.mesh_shape, mesh.axes)
    return mesh.axes.index(name)


def infer(request: PlanRequest, axis: str, *, sharded: bool) -> Strategy:
    """Return the strategy in which all parameters are sharded on the axis, or none is."""
    graph = request.graph
    pins: dict[str, PinValue] = {
        "batch": {axis: "S(0)"},
        "use:batch": {axis: "S(0)"},
        "activations": {axis: "S(0)"},
        "parameters": {axis: DP},
        "optimizer_states": {axis: DP},
        "gradients": {axis: DP},
        "updates": {axis: DP},
    }
    if sharded:
        owned = update_values(graph)
        for name in shardable(graph):
            states = [entry.name for entry in states_of(graph, name)]
            for tensor in (name, *states, *owned.get(name, ())):
                pins[tensor] = {axis: ZDP}
    return infer_strategy(request, planner="osdp", pins=pins)


def mixed(
    graph: LogicalGraph, replicated: Strategy, sharded: Strategy, *, chosen: Set[str]
) -> Strategy:
    """Return the strategy that shards some parameters; boxing joins what is decided apart.

    Args:
        graph: The step.
        replicated: The strategy that shards none.
        sharded: The strategy that shards all.
        chosen: Those that it is to shard.
    """
    owner = owners(graph, shardable(graph))
    nodes = dict(replicated.nodes)
    # What a node is decided for: the parameters whose gradients or updates it makes, if need be
    # through others that are decided one way or the other, too.
    decided_for: dict[str, set[str]] = {}
    # Backwards, as what a node serves is what its users serve. A node is taken from the sharded
    # strategy only if it serves nothing but sharded parameters: one that serves both kinds, such as
    # the norm of all gradients, stays as the replicated strategy has it.
    for node in reversed(graph.nodes):
        if node.name not in nodes or nodes[node.name] == sharded.nodes[node.name]:
            continue
        found: set[str] = set()
        for value in node.outputs:
            found |= {owner[value]} if value in owner else set()
            for user in graph.users[value]:
                found |= decided_for.get(user.name, set())
        decided_for[node.name] = found
        if found and found <= chosen:
            nodes[node.name] = sharded.nodes[node.name]
    storage = {
        name: (sharded if owner.get(name) in chosen else replicated).storage[name]
        for name in replicated.storage
    }
    return replace(replicated, nodes=nodes, storage=storage)


def build(config: OsdpConfig) -> OsdpPlanner:
    """Make the planner."""
    return OsdpPlanner(config)
