"""Turn a one-device training step into a checked plan: capture, passes, planner, compiler, checks.

This module does not read the config of a run: both `sbp-train` and `parallelize` use it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from sbp_aten.pass_options import LossMeaning
from sbp_aten.passes import prepare_step
from sbp_core.boxing import StepKind
from sbp_core.cluster import Cluster
from sbp_core.compile import CompileOptions, LoweredItems, PhysicalPlan, lower
from sbp_core.errors import ConfigError, MemoryLimitError, PlanError, SbpError
from sbp_core.graph import LogicalGraph, rename_outputs, rename_uses
from sbp_core.memory import (
    KeptPlans,
    MemoryReport,
    check_memory,
    memory_bound,
    offloaded_bytes,
    predict_memory,
)
from sbp_core.passes import allow_unknown
from sbp_core.placement import Placement
from sbp_core.plan_check import CheckReport, check
from sbp_core.planning import PlanRequest
from sbp_core.plugins import GraphPass
from sbp_core.sbp import P
from sbp_core.signatures import UnknownOperator
from sbp_core.simulation import Simulation, simulate
from sbp_core.strategy import Strategy
from sbp_launch.compile_config import CompileConfig
from sbp_launch.planning.rows import ModuleRow, OpRow, module_rows, op_rows
from sbp_launch.settings.patterns import check_patterns
from sbp_torch.graph_capture import NO_NUMBERS, NumberPlace, capture, without_unused
from sbp_torch.proof import StepProof
from sbp_torch.update_options import UpdateOptions


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A graph, its strategy, and the checked plan with its simulation.

    `known_memory` is the memory that the planner has predicted, if it has; `proof` is the result
    of the proof, if one was requested.
    """

    settings: PlanSettings
    graph: LogicalGraph
    strategy: Strategy
    plan: PhysicalPlan
    checked: CheckReport
    simulation: Simulation
    known_memory: MemoryReport | None = None
    proof: StepProof | None = None

    @cached_property
    def memory(self) -> MemoryReport | str:
        """The contents of each rank's memory, predicted on first use; or why it is not known."""
        if self.known_memory is not None:
            return self.known_memory
        try:
            return predict_memory(self.plan)
        except PlanError as error:
            return error.what

    @property
    def knows_memory(self) -> bool:
        """Whether `memory` has been predicted already, so that reading it takes no time."""
        return "memory" in vars(self)

    @cached_property
    def lowered(self) -> LoweredItems:
        """The ops with their boxing, before small tensors are merged into buckets."""
        return lower(self.graph, self.strategy)

    @property
    def num_steps(self) -> Mapping[StepKind, int]:
        """Number of boxing steps that send data in a training step, by kind, before merging."""
        found: Counter[StepKind] = Counter()
        for item in self.lowered.items:
            if item.step is not None and item.step.size_bytes:
                found[item.step.kind] += self.graph.repetitions[item.rate]
        return found

    @cached_property
    def module_rows(self) -> tuple[ModuleRow, ...]:
        """The rows of the printed plan."""
        return module_rows(self.graph, self.strategy, self.lowered, self.settings.cluster)

    @cached_property
    def op_rows(self) -> tuple[OpRow, ...]:
        """The rows of `plan.txt`."""
        return tuple(op_rows(self.graph, self.strategy, self.lowered))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """Settings for planning training steps and evaluations.

    Args:
        mesh: All ranks, with named axes.
        cluster: The machine.
        compile: Settings of passes and compiler.
        passes: Passes of plugins, in the order in which they are applied.
        micro_batches: Parts of one step.
        loss: The meaning of the loss of several micro-batches.
        micro_batches_per_update: Micro-batches of one update, if `loss` implies several updates.
        update: Operations once a step in addition to the optimizer.
    """

    mesh: Placement
    cluster: Cluster
    compile: CompileConfig = field(default_factory=CompileConfig)
    passes: tuple[GraphPass, ...] = ()
    micro_batches: int = 1
    loss: LossMeaning = LossMeaning.WHOLE_BATCH
    micro_batches_per_update: int = 1
    update: UpdateOptions = field(default_factory=lambda: UpdateOptions(fused=True))

    @property
    def captured_parts(self) -> int:
        """The number of parts into which a step is cut before it is captured.

        1 means that the whole batch is captured, which defines what micro-batches must compute.
        """
        return 1 if self.loss is LossMeaning.WHOLE_BATCH else self.micro_batches

    @property
    def options(self) -> CompileOptions:
        """The options of the compiler."""
        return CompileOptions(
            overlap=self.compile.overlap,
            boxing_thread=self.compile.boxing_thread,
            bucket_bytes=self.compile.bucket_bytes,
            cluster=self.cluster,
            prefetch=self.compile.prefetch,
            in_place_states=self.compile.in_place_states,
            offload_in_flight=self.compile.offload_in_flight,
            input_gradients_first=self.compile.input_gradients_first,
        )

    def without_tied_counters(self) -> PlanSettings:
        """Return these settings with a step counter for each state, for counters that differ."""
        passes = replace(self.compile.passes, counters_apart=True)
        return replace(self, compile=replace(self.compile, passes=passes))

    def request(
        self, graph: LogicalGraph, pins: Mapping[str, str | Mapping[str, str]] | None = None
    ) -> PlanRequest:
        """Return the request to a planner."""
        return PlanRequest(
            graph=graph,
            mesh=self.mesh,
            cluster=self.cluster,
            pins=pins or {},
            options=self.options,
            regather=self.compile.regather,
        )


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A captured step, prepared for planning in one or two versions.

    Args:
        graph: The version in which softmaxes over very many classes are in parts, so that classes
            can be split.
        original: The captured graph.
        settings: Settings of the preparation.
        numbers: Places of Python numbers that may be inputs of it, by the names of the inputs.
        left_out: Unused inputs, which are not planned.
    """

    graph: LogicalGraph
    original: LogicalGraph
    settings: PlanSettings
    numbers: Mapping[str, NumberPlace] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        captured: LogicalGraph,
        settings: PlanSettings,
        numbers: Mapping[str, NumberPlace] = NO_NUMBERS,
    ) -> Captured:
        """Prepare a graph that `capture_step` returned for planning.

        Raises:
            GraphError: the loss of the whole batch is wanted, and does not follow from the losses
                of its micro-batches.
        """
        graph = prepare(captured, settings)
        return cls(graph=graph, original=captured, settings=settings, numbers=numbers)

    @cached_property
    def whole(self) -> LogicalGraph | None:
        """The version in which each softmax is one operator; None if that is `graph` already.

        It is faster, but only for plans that split no classes.
        """
        if _num_softmaxes(self.graph) == _num_softmaxes(self.original):
            return None
        passes = replace(self.settings.compile.passes, split_classes=None)
        settings = replace(self.settings, compile=replace(self.settings.compile, passes=passes))
        return without_unused(prepare(self.original, settings), self.left_out)

    def drop_unused_inputs(self, names: Collection[str]) -> Captured:
        """Return the step without those of the named inputs that nothing uses."""
        graph = without_unused(self.graph, names)
        return replace(self, graph=graph, left_out=frozenset(names))

    def planned(self, plan: Callable[[LogicalGraph], Strategy]) -> tuple[LogicalGraph, Strategy]:
        """Return the better version for the planner's strategy, and the strategy.

        A planner that has chosen among the variants of the step has chosen the version, too.

        Args:
            plan: Returns a strategy for a version. A strategy from a file fits one of them only.

        Raises:
            SbpError: `plan` raised it for `graph`.
        """
        try:
            found = plan(self.graph)
        except SbpError:
            if self.whole is not None:
                with suppress(SbpError):
                    return self.whole, plan(self.whole)
            raise
        if found.variant is None and self.whole is not None and not _has_partial_maxima(found):
            with suppress(SbpError):  # for example, a pin of a value that only `graph` has
                return self.whole, plan(self.whole)
        return self.graph, found


def _num_softmaxes(graph: LogicalGraph) -> int:
    return sum(node.kind == "_log_softmax" for node in graph.nodes)


def _has_partial_maxima(strategy: Strategy) -> bool:
    """Whether ranks hold partial maxima: of logits whose classes are split."""
    return any(
        part == P("max")
        for assignment in strategy.nodes.values()
        for made in assignment.signature.outputs
        for part in made
    )


def capture_training(
    model: nn.Module,
    loss: Any,
    batch: Any,
    optimizer: torch.optim.Optimizer,
    settings: PlanSettings,
) -> Captured:
    """Capture a training step and prepare it for planning; see `capture_step`.

    Raises:
        CaptureError: it cannot be captured.
        GraphError: the loss of the whole batch is wanted, and does not follow from the losses of
            its micro-batches.
        ConfigError: a pattern of mixed precision matches nothing.
    """
    return Captured.of(capture_step(model, loss, batch, optimizer, settings), settings)


def capture_step(
    model: nn.Module,
    loss: Any,
    batch: Any,
    optimizer: torch.optim.Optimizer,
    settings: PlanSettings,
    numbers: Mapping[str, NumberPlace] = NO_NUMBERS,
) -> LogicalGraph:
    """Capture a training step, without preparing it for planning.

    Args:
        model: See `capture`.
        loss: See `capture`.
        batch: An example of the whole batch, or of one of `settings.captured_parts` parts of it.
        optimizer: See `capture`.
        settings: Settings of the capture.
        numbers: See `capture`.

    Raises:
        CaptureError: it cannot be captured.
        ConfigError: a pattern of mixed precision matches nothing.
    """
    captured = capture(
        model,
        loss,
        batch,
        optimizer,
        update=settings.update,
        autocast=settings.compile.autocast,
        per_shard_random=settings.compile.random == "per_shard",
        device=settings.mesh.device,
        numbers=numbers,
    )
    check_precision(settings.compile, captured)
    return captured


def capture_forward(
    model: nn.Module, loss: Any, batch: Any, settings: PlanSettings, name: str
) -> LogicalGraph:
    """Capture forward and loss, as one micro-batch, in the present mode of the model."""
    captured = capture(
        model,
        loss,
        batch,
        name=name,
        autocast=settings.compile.autocast,
        per_shard_random=settings.compile.random == "per_shard",
        device=settings.mesh.device,
    )
    return prepare(captured, replace(settings, micro_batches=1, micro_batches_per_update=1))


def with_averages(graph: LogicalGraph, train: LogicalGraph) -> LogicalGraph:
    """Return a forward step that reads averages in place of parameters that have one in training.

    before: y = linear(x, head.weight)
    after:  y = linear(x, head.weight.ema)

    Args:
        graph: A graph of `capture_forward`.
        train: The training step, over the same model; its averages are states `<parameter>.ema`.
    """
    averages = {entry.of: entry.name for entry in train.inputs if entry.name == f"{entry.of}.ema"}
    names = {one.name: averages[one.name] for one in graph.inputs if one.name in averages}
    if not names:
        return graph
    types = {names.get(value, value): kind for value, kind in graph.types.items()}
    return graph.with_nodes(
        tuple(rename_uses(node, names) for node in graph.nodes),
        inputs=tuple(replace(one, name=names.get(one.name, one.name)) for one in graph.inputs),
        outputs=rename_outputs(graph.outputs, names),
        types=types,
    )


def prepare(captured: LogicalGraph, settings: PlanSettings) -> LogicalGraph:
    """Return a captured step, prepared for planning by passes.

    Args:
        captured: See `capture_step`.
        settings: Settings of planning.

    Raises:
        SbpError: a pass fails.
    """
    unknown = UnknownOperator(settings.compile.unknown_ops)
    extra = [*settings.passes, partial(allow_unknown, unknown=unknown)]
    options = settings.compile.passes
    if settings.mesh.size == 1:  # nothing is split, so PyTorch's own softmax stays one operator
        options = replace(options, split_classes=None)
    if options.split_backward is None:
        options = replace(options, split_backward="pipe" in settings.mesh.axes)
    return prepare_step(
        captured,
        settings.micro_batches,
        extra,
        options=options,
        loss=settings.loss,
        micro_batches_per_update=settings.micro_batches_per_update,
    )


def check_precision(config: CompileConfig, graph: LogicalGraph) -> None:
    """Check the patterns of mixed precision, which may also match operators.

    Raises:
        ConfigError: a pattern matches nothing.
    """
    how = config.passes.mixed_precision
    if how is None:
        return
    kinds = sorted({node.kind for node in graph.nodes})
    modules = sorted({node.module for node in graph.nodes if node.module})
    key = "compile.passes.mixed_precision"
    check_patterns(f"{key}.keep", how.keep, [*modules, *kinds], "module and no operator")
    check_patterns(f"{key}.lower", how.lower, kinds, "operator")


def compiled(
    graph: LogicalGraph, strategy: Strategy, settings: PlanSettings, kept: KeptPlans | None = None
) -> Planned:
    """Compile a strategy, check the plan, and simulate it.

    The simulated time replaces the planner's estimate, which may be without a plan or its options.

    Args:
        graph: The step.
        strategy: Its strategy.
        settings: Settings of the compiler.
        kept: Plans that the planner has compiled, if it was given a store for them.
    """
    kept = kept or KeptPlans()
    plan = kept.plan(graph, strategy, settings.options)
    checked, simulation = check(plan, types=False), kept.asked(simulate, plan)
    report = {**strategy.report, "predicted_step_s": simulation.step_s}
    return Planned(
        settings=settings,
        graph=graph,
        strategy=replace(strategy, report=report),
        plan=plan,
        checked=checked,
        simulation=simulation,
        known_memory=kept.known_memory(plan),
    )


def regathering(strategy: Strategy, config: CompileConfig) -> Strategy:
    """Return the strategy with the config's `regather`, unless that has its default value."""
    chosen = config.regather
    return strategy if chosen == CompileConfig().regather else replace(strategy, regather=chosen)


def check_fits(planned: Planned, cluster: Cluster) -> None:
    """Check that a plan fits the memory of its ranks and of their hosts.

    Predicting the exact memory takes as long as planning, so it happens only if a bound is not
    sufficient.

    Raises:
        MemoryLimitError: a rank would not fit its memory.
        ConfigError: a rank would not fit its share of the memory of its host.
    """
    limit_bytes = cluster.device.memory_bytes
    if memory_bound(planned.plan, planned.graph) <= limit_bytes and not offloaded_bytes(
        planned.plan
    ):
        return
    if isinstance(planned.memory, str):
        return
    try:
        check_memory(planned.memory, limit_bytes, cluster.device.host_memory_bytes)
    except PlanError as error:
        host_bytes = cluster.device.host_memory_bytes or 0
        of_host = planned.memory.host_peak > host_bytes
        kind = ConfigError if of_host else MemoryLimitError
        where = (*error.where, f"cluster.{'host_' * of_host}memory_bytes")
        raise error.replaced(kind, where=where) from error


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode inside the `with` block, and restore its mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
