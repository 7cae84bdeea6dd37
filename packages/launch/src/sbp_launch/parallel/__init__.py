"""`parallelize`: run a one-device training step on many ranks, in your own training loop.

    with parallelize(model, loss, batch, optimizer, planner="osdp") as step:
        for batch in loader:
            print(float(step(batch)))

In a single process, ranks are threads; under `torchrun`, `mpiexec` or `srun`, each process is a
rank. `docs/how-to/parallelize.md` shows it next to `DistributedDataParallel` and `fully_shard`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from sbp_aten.pass_options import LossMeaning
from sbp_core.boxing import BoxingBackend
from sbp_core.cluster import Cluster
from sbp_core.collection import collection_paused
from sbp_core.placement import Placement
from sbp_core.planning import Planner
from sbp_core.plugins import GraphPass
from sbp_core.runtime import BatchIs, Runtime
from sbp_core.strategy import Strategy
from sbp_launch.compile_config import CompileConfig
from sbp_launch.parallel.arguments import (
    checked_batch_is,
    compile_config,
    in_arguments,
    sample_dims,
    takes_former,
    update_options,
)
from sbp_launch.parallel.choices import Choice, Choices
from sbp_launch.parallel.micro_batches import MicroBatches
from sbp_launch.parallel.parallel_step import ParallelStep
from sbp_launch.parallel.ranks import backend_of, mesh_of
from sbp_launch.planning.flow import PlanSettings
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
from sbp_torch.deferred_init import DeferredModel
from sbp_torch.graph_capture import UpdateOptions

__all__ = [
    "LengthBuckets",
    "MicroBatches",
    "ParallelStep",
    "ProgramStep",
    "StepOutput",
    "parallelize",
]


@takes_former
@in_arguments()
@one_at_a_time()
@collection_paused(plans=True)
def parallelize(
    model: nn.Module | DeferredModel,
    loss: Callable[[nn.Module, Any], Any],
    batch: Any,
    optimizer: torch.optim.Optimizer,
    *,
    mesh: int | Sequence[int] | Mapping[str, int] | None = None,
    planner: Choice | Planner | Strategy = "propagate",
    pins: Pins | None = None,
    cluster: Choice | Cluster = "local",
    micro_batches: MicroBatches | int | Literal["auto"] = 1,
    batch_is: BatchIs = "global",
    batch_dim: int | Mapping[str, int] = 0,
    pad_to: LengthBuckets | Mapping[str, Any] | None = None,
    update: UpdateOptions | Mapping[str, Any] | None = None,
    compile: CompileConfig | Mapping[str, Any] | None = None,  # noqa: A002 - as of sbp-train
    runtime: Choice | Runtime = "actor",
    boxing: Choice | BoxingBackend | None = None,
    states: Mapping[str, Tensor] | None = None,
    seed: int = 0,
    compare_steps: int = 0,
) -> ParallelStep:
    """Plan a training step for many ranks; `with` starts them, and each call takes one step.

    Planner, cluster, runtime and boxing are chosen by the name of an option of `sbp-train`
    (`"osdp"`), by name and settings (`{"name": "osdp", "memory_bytes": 4e9}`), or as an object.

    Args:
        model: The model as one device would run it. Reading its tensors, during training and
            after it, gives the trained values; values written between steps are copied to the
            ranks. Its tensors may be on the device `meta`. With a `DeferredModel`, each rank makes
            only its own part.
        loss: A function `loss(model, batch)`, which returns a 0-d tensor, or a pair of that and a
            mapping of metrics.
        batch: An example of the batch of one step: only shapes and dtypes matter.
        optimizer: An optimizer over `model.parameters()`. Steps read learning rates from its
            groups; reading its `state` gives the states of the ranks.
        mesh: Ranks along each axis: `{"data": 2, "tensor": 2}`, where -1 stands for as many as
            there are processes. `4` and `(2, 2)` take the usual names: `data`; `data, tensor`; or
            `pipe, data, tensor`. By default one rank for each process, on the axis `data`.
        planner: Decides how tensors are split: `propagate`, `osdp`, `manual/tensor_parallel`,
            ...; or a strategy.
        pins: Your decisions on tensors by name, which the planner keeps.
        cluster: The machine to plan for: `local`, `measured`.
        micro_batches: Parts of one step, whose gradients are accumulated: a number, `auto`, or
            `MicroBatches`, which also defines the loss of several micro-batches.
        batch_is: The batch that each process passes, here and to a step: `global`, the whole batch;
            `local`, the part of its own rank, as loaders with a `DistributedSampler` make it.
        batch_dim: The sample dim of the batch's tensors, which ranks and micro-batches divide: 1
            if dim 0 is time (for tensors with that many dims); or by names: `{"x": 1}`.
        pad_to: Sizes to which batches of many lengths are padded; all are planned before the first
            step. Padding the example is proved to change neither its loss nor its gradients.
        update: Operations once a step in addition to the optimizer: `{"clip_norm": 1.0}`, or
            `UpdateOptions`.
        compile: Settings of `sbp-train`'s group `compile`, such as `{"autocast": "bfloat16"}`. By
            default the planned step is compared with the captured one on small random data, and
            refused if their results differ; `report` prints the result. With `pad_to`, the padded
            example is run as well. `{"prove": False}` skips these checks.
        runtime: Runs the plan.
        boxing: Moves tensors between ranks. By default threads of this process; `torch` under
            torchrun and srun, `mpi` under mpiexec.
        states: Initial values, whole tensors by name, as returned by `step.state_dict()` or
            `model.state_dict()`. By default the values of the model and the optimizer.
        seed: The seed of random numbers in the step, such as those of dropout.
        compare_steps: Number of first steps that also run on one device, with copies of model and
            optimizer; `report` prints the differences of their losses.

    Raises:
        ConfigError: an argument is invalid, or does not fit the world of processes.
        CaptureError: the step cannot be captured; names the line of your code.
        GraphError: the loss of the whole batch does not follow from the losses of its
            micro-batches, and the error names the line that mixes samples; or the planned step
            computes something else than the captured one, and the error names value and line.
    """
    world, choices = World.of_environment(), Choices()
    shape, cut = mesh_of(world, mesh), MicroBatches.of(micro_batches)
    own = {"mesh": list(shape.mesh_shape), "axes": list(shape.axes)}
    machine = choices.resolve("cluster", cluster, **own)
    chosen_planner = choices.resolve("planner", planner)
    chosen_runtime = choices.resolve("runtime", runtime)
    choices.check_combination()

    profile = machine if isinstance(machine, Cluster) else machine(shape.size)
    config = compile_config(compile)
    settings = PlanSettings(
        mesh=Placement.grid(shape.mesh_shape, shape.axes, profile.device.kind),
        cluster=profile,
        compile=config,
        passes=tuple(
            cast(GraphPass, choices.registry.make("pass", name)) for name in config.plugins
        ),
        micro_batches=cut.known_count,
        loss=LossMeaning(cut.loss),
        micro_batches_per_update=cut.per_update,
        update=update_options(update),
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

    make_backend()  # first, because it may be refused, and the rest takes long
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
    choice = PlanChoice(planner=chosen_planner, pins=pins or {}, chooses_micro_batches=cut.is_auto)
    planned = plan_program(program, example, choice, engine, following, training)
    prove_padding(program, padding, settings, states)
    compared = (
        OneDeviceComparison(program, planned.planned, engine, compare_steps)
        if compare_steps
        else None
    )
    return ParallelStep(planned, choice, engine, following, training, padding, states, compared)
