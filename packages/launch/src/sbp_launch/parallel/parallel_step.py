"""`ParallelStep`: a training step on all ranks, which `parallelize` returns to a user's loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sbp_core.collection import collection_paused
from sbp_core.errors import ConfigError, RunError
from sbp_core.planning import Planner
from sbp_core.plugins import warn_renamed
from sbp_launch.parallel.arguments import (
    in_arguments,
    sample_dims,
    takes_former,
    update_options,
)
from sbp_launch.parallel.choices import Choice, Choices
from sbp_launch.parallel.micro_batches import MicroBatches
from sbp_launch.planning.one_at_a_time import one_at_a_time
from sbp_launch.step.buckets import LengthBuckets, make_padding
from sbp_launch.step.missing_attributes import OF_STEPS, missing_attribute
from sbp_launch.step.program_step import ProgramStep
from sbp_launch.step.step_planner import Pins
from sbp_launch.step.training_step import TrainingStep
from sbp_torch.graph_capture import UpdateOptions


class ParallelStep(TrainingStep):
    """A training step on all ranks: call it with a batch, inside a `with` block.

    Made by `parallelize`. Several processes, one a rank, make the same calls in the same order.

    Attributes:
        world: This process among all: `step.world.rank == 0` is where one prints.
    """

    if not TYPE_CHECKING:  # type checkers see only the real attributes

        def __getattr__(self, name: str) -> Any:
            return missing_attribute(self, name, OF_STEPS)

    # Programs.

    @takes_former
    @in_arguments()
    @one_at_a_time()
    @collection_paused()
    def add_step(
        self,
        loss: Callable[[nn.Module, Any], Any],
        batch: Any,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        planner: Choice | Planner | None = None,
        pins: Pins | None = None,
        micro_batches: int | None = None,
        batch_dim: int | Mapping[str, int] | None = None,
        pad_to: LengthBuckets | Mapping[str, Any] | None = None,
        update: UpdateOptions | Mapping[str, Any] | None = None,
    ) -> ProgramStep:
        """Plan another training step of the model, on the same states: a second loss or optimizer.

        For example, a critic next to an actor, or a discriminator next to a generator. Every state
        stays where it is; states that only the other optimizer has are added. Both steps may be
        called in any order, but in the same order in all processes. Checkpoints, `steps_done` and
        `state_dict` cover both, and belong to this step. All else is as in `parallelize`.

        Args:
            loss: A function `loss(model, batch)`, as `parallelize` takes it.
            batch: An example of the batch of one step; its structure may differ from the first.
            optimizer: An optimizer over parameters that the first one does not have; by default
                the first one. Parameters without an optimizer in a step do not change in it.
            planner: Decides how new states are split; by default the planner of the first program.
                Existing states stay as they are.
            pins: Your decisions on tensors by name, which the planner keeps.
            micro_batches: Parts of one step; by default as many as in the first program.
            batch_dim: The sample dim of the batch's tensors; by default as in the first program.
            pad_to: Sizes to which batches of many lengths are padded.
            update: Operations once a step in addition to the optimizer.

        Raises:
            ConfigError: an argument is invalid, or conflicts with the programs that are there; or
                another optimizer has states of the same parameters.
            CaptureError: the step cannot be captured; names the line of your code.
            GraphError: see `parallelize`.
            RunError: this step is over; or the runtime supports steps of one form only.
        """
        own, engine, first = self._program, self._engine, self._planned
        if self._comparison is not None:
            raise ConfigError(
                "compare_steps compares the steps of one program with one device",
                where="the argument compare_steps of parallelize",
                accepted="one program",
                todo="leave out compare_steps, or compare the first program by itself",
            )
        if self._is_over:
            raise RunError(
                "this parallel step is over",
                todo="call step.add_step inside of its `with` block, or before",
            )
        choice = replace(self._choice, pins=pins or {}, chooses_micro_batches=False)
        if planner is not None:
            choice = replace(choice, planner=Choices(engine.registry).resolve("planner", planner))
        count = first.settings.micro_batches if micro_batches is None else micro_batches
        settings = replace(
            engine.settings,
            update=update_options(update),
            micro_batches=MicroBatches(count).known_count,
        ).without_tied_counters()
        samples = sample_dims(own.samples.given if batch_dim is None else batch_dim, batch)
        program = replace(
            own,
            loss=loss,
            optimizer=own.optimizer if optimizer is None else optimizer,
            update=settings.update,
            samples=samples,
        )
        padding = make_padding(pad_to, batch, self.world, samples)
        return self._add_program(
            program, batch, padding, choice, replace(engine, settings=settings)
        )

    def beside(self, *args: Any, **settings: Any) -> ProgramStep:
        """Call `add_step`; this is its former name."""
        warn_renamed("step.beside", "step.add_step")
        return self.add_step(*args, **settings)
