"""`parallelize`: the training step of one device, on many, in a loop of one's own.

    with parallelize(model, loss, batch, optimizer, planner="osdp") as step:
        for batch in loader:
            print(float(step(batch)))

Alone, the ranks are threads of the process; under `torchrun`, `mpiexec` or `srun`, each process is
a rank. `docs/how-to/parallelize.md` shows it next to `DistributedDataParallel` and `fully_shard`.
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
        mesh: Ranks along each axis: `{"data": 2, "tensor": 2}`, where -1 stands for as many as
            there are processes. `4` and `(2, 2)` take the usual names: `data`; `data, tensor`; or
            `pipe, data, tensor`. By default one rank for each process, on the axis `data`.
        planner: Decides how tensors are split: `propagate`, `osdp`, `manual/tensor_parallel`,
            ...; or a strategy.
        pins: How you decide on tensors by name, over what the planner says.
        cluster: The machine that is planned for: `local`, `measured`.
        micro_batches: Parts of one step, whose gradients are accumulated: a number, `auto`, or
            `MicroBatches`, which says what the loss of several of them is.
        batch_is: What each process passes, here and to a step: `global`, the whole batch; `local`,
            the part of its own rank, as loaders with a `DistributedSampler` make it.
        batch_dim: Along which dim of the batch's tensors its samples lie: 1 where dim 0 is time, of
            all tensors that have so many dims; or by names: `{"x": 1}`. Ranks and micro-batches
            divide it.
        pad_to: Sizes to which batches of many lengths are padded, all planned before the first
            step; in which padding is proved to change neither loss nor gradients of the example.
        update: What else happens once a step, besides the optimizer: `{"clip_norm": 1.0}`, or
            `UpdateOptions`.
        compile: Settings of `sbp-train`'s group `compile`, such as `{"autocast": "bfloat16"}`. By
            default the planned step is compared with the captured one on small random data, and
            refused if it computes something else; `report` says what was proved. With `pad_to`,
            the example is run padded as well. `{"prove": False}` leaves that out.
        runtime: Runs the plan.
        boxing: Moves tensors between ranks. By default threads of this process; `torch` under
            torchrun and srun, `mpi` under mpiexec.
        states: Values to begin with, whole tensors by name: as `step.state_dict()` or
            `model.state_dict()` return them. By default those of the model and the optimizer.
        seed: Of random numbers in the step, such as those of dropout.
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
    choice = PlanChoice(planner=chosen_planner, pins=pins or {}, chooses_micro_batches=cut.is_auto)
    planned = plan_program(program, example, choice, engine, following, training)
    prove_padding(program, padding, settings, states)
    compared = (
        OneDeviceComparison(program, planned.planned, engine, compare_steps)
        if compare_steps
        else None
    )
    return ParallelStep(planned, choice, engine, following, training, padding, states, compared)
