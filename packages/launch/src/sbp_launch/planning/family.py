"""`StepFamily`: makes the variants of a captured step among which a planner may choose.

    field of a variant         corresponding setting of `compile.passes`, or of the trainer
    num_micro_batches          trainer.micro_batches, if that is left to the planner
    recompute_bytes            recompute.memory_bytes, unless recompute selects operators
    slices                     slices, unless they are set
    splits_classes             split_classes

A planner does not choose what the user has set: the family has only variants that agree with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from sbp_aten.pass_options import Slicing
from sbp_core.errors import ConfigError
from sbp_core.graph import LogicalGraph
from sbp_core.graph_variant import GraphVariant
from sbp_core.passes import RecomputeOptions
from sbp_launch.planning.flow import PlanSettings, prepare


@dataclass(frozen=True, kw_only=True)
class StepFamily:
    """Implements `sbp_core.graph_variant.GraphFamily`.

    Args:
        settings: Settings that the user has chosen.
        captured: Returns the step, captured on a given number of samples.
        batch_size: Number of samples of a step.
        chooses_micro_batches: Whether the number of micro-batches is left to the planner.
        known: The graph of `variant`, if it exists already.
    """

    settings: PlanSettings
    captured: Callable[[int], LogicalGraph]
    batch_size: int
    chooses_micro_batches: bool = False
    known: LogicalGraph | None = None
    _graphs: dict[GraphVariant, LogicalGraph] = field(default_factory=dict)

    @property
    def variant(self) -> GraphVariant:
        """The variant that the settings describe."""
        return GraphVariant(
            num_micro_batches=self.settings.micro_batches,
            splits_classes=self.settings.compile.passes.split_classes is not None,
        )

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """The numbers of micro-batches that a planner may choose."""
        if not self.chooses_micro_batches:
            return (self.settings.micro_batches,)
        size = self.batch_size
        return tuple(n for n in range(1, size + 1) if size % n == 0)

    def with_batch(self, batch_size: int) -> StepFamily:
        """Return the variants of the step for another number of samples.

        Raises:
            ConfigError: the samples do not divide into the given number of micro-batches.
        """
        count = self.settings.micro_batches
        if batch_size % count:
            raise ConfigError(
                f"{batch_size} samples do not divide into {count} micro-batches",
                accepted=f"multiples of {count}",
                todo="set trainer.micro_batches=auto",
            )
        return replace(self, batch_size=batch_size, known=None, _graphs={})

    @property
    def may_recompute(self) -> bool:
        """Whether the user has left recomputation to the planner."""
        chosen = self.settings.compile.passes.recompute
        return chosen is not None and chosen.memory_bytes is None and not chosen.modules

    @property
    def may_slice(self) -> bool:
        """Whether the user has left slices to the planner."""
        return self.settings.compile.passes.slices is None

    def settings_of(self, variant: GraphVariant) -> PlanSettings:
        """Return the settings that make a variant."""
        passes = self.settings.compile.passes
        if variant.recompute_bytes is not None:
            how = passes.recompute or RecomputeOptions()
            how = replace(how, memory_bytes=variant.recompute_bytes)
            passes = replace(passes, recompute=how)
        if variant.slices:
            slices = {
                one.pattern: Slicing(count=one.count, along=one.along) for one in variant.slices
            }
            passes = replace(passes, slices=slices)
        if not variant.splits_classes:
            passes = replace(passes, split_classes=None)
        return replace(
            self.settings,
            micro_batches=variant.num_micro_batches,
            compile=replace(self.settings.compile, passes=passes),
        )

    def graph(self, variant: GraphVariant) -> LogicalGraph:
        """Return the graph of a variant.

        Raises:
            SbpError: it cannot be made, for example because its memory budget is too small.
        """
        if self.known is not None and variant == self.variant:
            return self.known
        if variant not in self._graphs:
            settings = self.settings_of(variant)
            captured = self.captured(self.batch_size // settings.captured_parts)
            self._graphs[variant] = prepare(captured, settings)
        return self._graphs[variant]
