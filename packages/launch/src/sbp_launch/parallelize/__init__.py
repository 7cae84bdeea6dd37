"""`parallelize`: the training step of one device, on many, in a loop of one's own.

    with parallelize(model, loss, batch, optimizer, planner="osdp") as step:
        for batch in loader:
            print(float(step(batch)))

Alone, the ranks are threads of the process; under `torchrun`, `mpiexec` or `srun`, each process is
a rank. `docs/how-to/parallelize.md` shows it next to `DistributedDataParallel` and `fully_shard`.

Stability: provisional.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sbp_core.boxing import BoxingBackend
from sbp_core.cluster import Cluster
from sbp_core.collection import collection_paused
from sbp_core.exports import make_callable
from sbp_core.planning import Planner
from sbp_core.runtime import BatchIs, Runtime
from sbp_core.strategy import Strategy
from sbp_launch.compile_config import CompileConfig
from sbp_launch.parallelize.arguments import (
    LossIs,
    checked_batch_is,
    compile_config,
    in_arguments,
    make_settings,
    sample_dims,
    update_options,
)
from sbp_launch.parallelize.choices import Choice, Choices
from sbp_launch.parallelize.parallel_step import ParallelStep
from sbp_launch.parallelize.ranks import backend_of, mesh_of
from sbp_launch.planning.one_at_a_time import one_at_a_time
from sbp_launch.step.buckets import LengthBuckets, make_padding
from sbp_launch.step.comparison import OneDeviceComparison
from sbp_launch.step.engine import Engine
from sbp_launch.step.following import Following
from sbp_launch.step.neutral import prove_padding
from sbp_launch.step.planning import plan_program
from sbp_launch.step.program import OneDeviceProgram
from sbp_launch.step.program_step import ProgramStep
from sbp_launch.step.step_output import StepOutput
from sbp_launch.step.step_planner import Pins, PlanChoice
from sbp_launch.step.training import Training
from sbp_launch.world import World
from sbp_torch.capture import UpdateOptions
from sbp_torch.deferred_init import DeferredModel

__all__ = ["LengthBuckets", "ParallelStep", "ProgramStep", "StepOutput", "parallelize"]


@in_arguments()
@one_at_a_time()
@collection_paused(plans=True)
def parallelize(
    model: nn.Module | DeferredModel,
    loss: Callable[[nn.Module, Any], Any],
    batch: Any,
    optimizer: torch.optim.Optimizer,
    *,
    mesh: int | Sequence[int] | None = None,
    axes: str | Sequence[str] | None = None,
    planner: Choice | Planner | Strategy = "propagate",
    pins: Pins | None = None,
    cluster: Choice | Cluster = "local",
    micro_batches: int | Literal["auto"] = 1,
    loss_is: LossIs = "whole_batch",
    micro_batches_per_update: int = 1,
    batch_is: BatchIs = "global",
    batch_dim: int | Mapping[str, int] = 0,
    pad_to: LengthBuckets | Mapping[str, Any] | None = None,
    clip_norm: float | None = None,
    update: UpdateOptions | None = None,
    autocast: str | torch.dtype | None = None,
    compile: CompileConfig | Mapping[str, Any] | None = None,  # noqa: A002 - as of sbp-train
    runtime: Choice | Runtime = "actor",
    boxing: Choice | BoxingBackend | None = None,
    states: Mapping[str, Tensor] | None = None,
    seed: int = 0,
    prove: bool = True,
    compare_steps: int = 0,
) -> ParallelStep:
    """Plan a training step for many ranks; `with` starts them, and calling it takes a step.

    What is chosen by name is an option of `sbp-train`: `"osdp"`, or with settings
    `{"name": "osdp", "memory_bytes": 4e9}`; or it is the object itself.

    Args:
        model: As one device would run it. While the step runs, and after it, its tensors read as
            what was trained; what is written to them between steps is taken over. They may be on
            the device `meta`; a `DeferredModel` makes each rank its own part only.
        loss: `loss(model, batch)` returns a 0-d tensor, or that and a mapping of metrics.
        batch: An example of what one step takes: only shapes and dtypes matter.
        optimizer: Over `model.parameters()`. Its groups say the learning rates of each step; its
            `state` reads as that of the ranks.
        mesh: Ranks along each axis: `4`, `(2, 2)`. By default one for each process, on one axis.
        axes: Name of each axis; by default `data`; `data, tensor`; or `pipe, data, tensor`.
        planner: Decides how tensors are split: `propagate`, `osdp`, `manual/tensor_parallel`,
            ...; or a strategy.
        pins: How you decide on tensors by name, over what the planner says.
        cluster: The machine that is planned for: `local`, `measured`.
        micro_batches: Parts of one step, whose gradients are accumulated; `auto` takes as few as
            fit the memory of the ranks, or as many as the planner chooses.
        loss_is: What gradients of several micro-batches are of: `whole_batch`, the loss of the
            batch as if it were one; `mean_of_micro_batches`, the mean of theirs; or
            `each_micro_batch`, its own, with an update after each, or after every few.
        micro_batches_per_update: With `each_micro_batch`: after so many there is an update, by the
            mean of their losses; divides `micro_batches`.
        batch_is: What each process passes, here and to a step: `global`, the whole batch; `local`,
            the part of its own rank, as loaders with a `DistributedSampler` make it.
        batch_dim: Along which dim of the batch's tensors its samples lie: 1 where dim 0 is time, of
            all tensors that have so many dims; or by names: `{"x": 1}`. Ranks and micro-batches
            divide it.
        pad_to: Sizes to which batches of many lengths are padded, all planned before the first
            step; in which padding is proved to change neither loss nor gradients of the example.
        clip_norm: Largest norm of the gradients of what the optimizer trains, together.
        update: What else happens once a step, besides the optimizer.
        autocast: Run the forward under `torch.autocast` to `bfloat16` or `float16`.
        compile: Settings of `sbp-train`'s group `compile`.
        runtime: Runs the plan.
        boxing: Moves tensors between ranks. By default threads of this process; `torch` under
            torchrun and srun, `mpi` under mpiexec.
        states: Values to begin with, whole tensors by name: as `step.state_dict()` or
            `model.state_dict()` return them. By default those of the model and the optimizer.
        seed: Of random numbers in the step, such as those of dropout.
        prove: Compare the planned step with the captured one, on small random data, and refuse it
            if it computes something else; `report` says what was proved. See `compile.prove`. With
            `pad_to`, also run the example padded, and refuse padding that changes it.
        compare_steps: First steps that also run on one device, with copies of model and optimizer;
            `report` says how far their losses are off.

    Raises:
        ConfigError: something cannot be meant, or does not fit the world of processes.
        CaptureError: the step cannot be captured; says at which line of your code.
        GraphError: the loss of the whole batch does not follow from those of its micro-batches;
            says at which line samples meet each other. Or the planned step computes something
            else than the captured one; says what, and at which line.
    """
    world, choices = World.of_environment(), Choices()
    shape = mesh_of(world, mesh, axes)
    own = {"mesh": list(shape.mesh_shape), "axes": list(shape.axes)}
    machine = choices.chosen("cluster", cluster, **own)
    chosen_planner = choices.chosen("planner", planner)
    chosen_runtime = choices.chosen("runtime", runtime)
    choices.check_combination()

    config = compile_config(compile, autocast)
    settings = make_settings(
        choices.registry,
        shape,
        machine if isinstance(machine, Cluster) else machine(shape.size),
        config if prove else replace(config, prove=False),
        micro_batches,
        loss_is,
        micro_batches_per_update,
        update_options(update, clip_norm),
    )

    samples = sample_dims(batch_dim, batch)
    program = OneDeviceProgram.of(model, loss, optimizer, settings.update, samples)
    training = Training(program.model, has_states=states is not None)
    training.optimizer_calls.watch(optimizer)
    following = Following(program)
    if not program.counts_alike(states):
        settings = settings.without_tied_counters()

    def make_backend() -> BoxingBackend:
        return backend_of(world, boxing, choices, settings.mesh)

    make_backend()  # before anything takes long, because it may be refused
    engine = Engine(
        settings=settings,
        runtime=chosen_runtime,
        make_backend=make_backend,
        world=world,
        registry=choices.registry,
        seed=seed,
        batch_is=checked_batch_is(batch_is),
    )
    padding = make_padding(pad_to, batch, world, samples)
    example = padding.largest(batch)
    choice = PlanChoice(
        planner=chosen_planner, pins=pins or {}, chooses_micro_batches=micro_batches == "auto"
    )
    planned = plan_program(program, example, choice, engine, following, training)
    prove_padding(program, padding, settings, states)
    compared = (
        OneDeviceComparison(program, planned.planned, engine, compare_steps)
        if compare_steps
        else None
    )
    return ParallelStep(planned, choice, engine, following, training, padding, states, compared)


make_callable(__name__)
