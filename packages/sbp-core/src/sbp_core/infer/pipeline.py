"""Place the stages of a pipeline on ranks, and order their work, by a named schedule.

Planners of pipelines call `pipelined`. An example:

planner.pipeline=interleaved planner.chunks=2 on two positions of the axis `pipe`:

position 0    stages 0 and 2        position 1    stages 1 and 3
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from sbp_core.errors import ConfigError
from sbp_core.infer.pins import PIPE_AXIS
from sbp_core.infer.solve import one_forward_one_backward, stage_placements
from sbp_core.pipeline import Action, ActionKind, PipelineSchedule, pipeline_schedule
from sbp_core.placement import Placement

#: Schedules that continue while an update is under way.
ASYNCHRONOUS = ("pipedream", "2bw")

#: What to do about schedules that do not end a step with its update.
_TODO = {
    "pipedream": "set trainer.loss=each_micro_batch, or planner.pipeline=1f1b",
    "2bw": "set trainer.loss=each_micro_batch and trainer.micro_batches_per_update=N, N at least "
    "the number of stages; or planner.pipeline=1f1b",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipelined:
    """The fields of a strategy that a schedule decides; see `Strategy` for their meaning."""

    name: str
    stages: tuple[Placement, ...]
    in_flight: tuple[int, ...]
    orders: tuple[str, ...] = ()
    staleness: tuple[int, ...] = ()


def pipelined(
    mesh: Placement,
    name: str,
    num_micro_batches: int,
    num_chunks: int | None = None,
    stage_ranks: Sequence[int] = (),
    *,
    num_updates: int = 1,
    vertical_sync: bool = False,
) -> Pipelined:
    """Return the stages, quotas and orders of a schedule on a mesh.

    Args:
        mesh: The mesh, whose positions on the axis `pipe` are the ranks of the pipeline; or a mesh
            without that axis.
        name: Name of the schedule; see `sbp_core.pipeline.SCHEDULES`.
        num_micro_batches: Micro-batches of a step.
        num_chunks: Stages on each position; None for as many as the schedule needs.
        stage_ranks: Instead of equal positions on the axis `pipe`: how many positions of the first
            axis of the mesh each rank of the pipeline takes.
        num_updates: Updates of a step, each by equally many of its micro-batches.
        vertical_sync: Only for the schedule `pipedream`: whether all stages compute a micro-batch
            with the parameters of one update, chosen by the first stage, instead of each stage's
            newest parameters.

    Raises:
        ConfigError: there is no such schedule for these numbers; or it does not update the
            parameters as often; or `stage_ranks` does not add up to the positions of the mesh.

    Source for `pipedream`: Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN
        training", SOSP 2019, section 3.3 (weight stashing, vertical sync); for `2bw`: Narayanan et
        al., "Memory-efficient pipeline-parallel DNN training", ICML 2021, section 3.1. A step is
        drained, so its first micro-batches use newer versions than in the middle of a longer run.
    """
    meshes = unequal_placements(mesh, stage_ranks) if stage_ranks else stage_placements(mesh)
    if len(meshes) == 1 and (num_chunks or 1) == 1:
        # One stage takes its micro-batches one after another, whatever the schedule is called.
        return Pipelined(name=name, stages=meshes, in_flight=(1,))
    if num_micro_batches == 1 and name in ASYNCHRONOUS:
        name = "1f1b"  # one update a step, of parameters that are not stale
    if num_updates > 1:
        return _asynchronous(
            meshes, name, num_micro_batches, num_updates, num_chunks, vertical_sync=vertical_sync
        )
    # These two follow from their quotas, so they need no order and continue where one would wait.
    if (num_chunks or 1) == 1 and name in ("gpipe", "1f1b"):
        quotas = one_forward_one_backward(len(meshes), num_micro_batches)
        if name == "gpipe":
            quotas = (num_micro_batches,) * len(meshes)
        return Pipelined(name=name, stages=meshes, in_flight=quotas)
    schedule = pipeline_schedule(name, len(meshes), num_micro_batches, num_chunks=num_chunks)
    if not schedule.flushes:
        raise ConfigError(
            f"the schedule {name!r} updates parameters between the micro-batches of a step, and "
            "this step has one update",
            accepted="schedules that end a step with its update",
            todo=_TODO[name],
        )
    ranks, splits = schedule.rank_of(), schedule.splits_backward
    return Pipelined(
        name=name,
        stages=tuple(meshes[rank] for rank in ranks),
        in_flight=quotas_of(schedule),
        orders=tuple(" ".join(map(str, _in_turn(order, splits))) for order in schedule.orders),
    )


def _asynchronous(
    meshes: tuple[Placement, ...],
    name: str,
    num_micro_batches: int,
    num_updates: int,
    num_chunks: int | None,
    *,
    vertical_sync: bool,
) -> Pipelined:
    """Return a schedule that continues while updates are under way, with versions of parameters.

    A stage followed by k more stages has k + 1 micro-batches in work. With updates by n
    micro-batches each, at most ceil(k / n) updates are between the first and the last of these:

        n = 1   F4 B1 | F5 B2 | F6 B3 |     k = 3: F4 before the updates by 1, 2, 3
        n = 3   F4 B1   F5 B2   F6 B3 |     k = 3: F4 before the update by 1, 2 and 3

    With that staleness no micro-batch waits for an update. `2bw` has a staleness of 1 everywhere.

    Raises:
        ConfigError: another schedule is asked for, or several chunks; or `2bw` has fewer
            micro-batches per update than it needs.
    """
    count, each = len(meshes), num_micro_batches // num_updates
    if name not in ASYNCHRONOUS or (num_chunks or 1) > 1:
        chunks = f" of {num_chunks} chunks a rank" if (num_chunks or 1) > 1 else ""
        raise ConfigError(
            f"a step has {num_updates} updates, for which the schedule {name!r}{chunks} would wait "
            "before the next micro-batch",
            accepted=f"{', '.join(ASYNCHRONOUS)}, of one chunk a rank",
            todo="set planner.pipeline=pipedream, or trainer.loss=whole_batch for one update a "
            "step",
        )
    if name == "2bw" and each < count - 1:
        raise ConfigError(
            f"2bw has two versions of the parameters, too few for {count} stages with an update "
            f"of every {each} micro-batches",
            accepted=f"updates of at least {count - 1} micro-batches; {count} or more are usual",
            todo=f"set trainer.micro_batches_per_update={count}, or planner.pipeline=pipedream, "
            "which has as many versions as it takes",
        )
    behind = [count - 1 - (0 if vertical_sync else stage) for stage in range(count)]
    return Pipelined(
        name=name,
        stages=meshes,
        in_flight=one_forward_one_backward(count, num_micro_batches),
        staleness=tuple(1 if name == "2bw" else -(-number // each) for number in behind),
    )


def unequal_placements(mesh: Placement, sizes: Sequence[int]) -> tuple[Placement, ...]:
    """Return the mesh in parts along its first axis.

    >>> [part.ranks for part in unequal_placements(Placement.grid((4,), ("data",)), (3, 1))]
    [[0, 1, 2], [3]]

    Args:
        mesh: A mesh without an axis `pipe`.
        sizes: Positions of the first axis that each part takes.

    Raises:
        ConfigError: the sizes do not add up to the positions of the mesh.
    """
    if PIPE_AXIS in mesh.axes or min(sizes) < 1 or sum(sizes) != mesh.mesh_shape[0]:
        raise ConfigError(
            f"planner.stage_ranks={list(sizes)} on the mesh "
            f"{dict(zip(mesh.axes, mesh.mesh_shape, strict=True))}",
            accepted=f"positive numbers whose sum is the size of the first axis, "
            f"{mesh.axes[0]!r}, of a mesh without the axis {PIPE_AXIS!r}",
            todo=f"say cluster.mesh=[{sum(sizes)}] cluster.axes=[data]",
        )
    rows = mesh.ranks
    assert not isinstance(rows, int), "a mesh has at least one axis"
    ends = list(accumulate(sizes))
    return tuple(
        Placement(rows[end - size : end], mesh.axes, mesh.device)
        for size, end in zip(sizes, ends, strict=True)
    )


def _in_turn(order: Sequence[Action], splits_backward: bool) -> Iterator[Action]:
    """Yield the actions with the micro-batches of each stage in turn, as actors fire them.

    Some schedules go back through the micro-batches in the backward phase. Any order is correct, as
    long as all stages use the same, so the order of the forward phase takes no more time:

        published    0F0 0F1 0F2 0B2 0B1 0B0
        here         0F0 0F1 0F2 0B0 0B1 0B2

    Where some backward is split, a whole backward is the next input gradient and the next weight
    gradient, which may belong to an earlier micro-batch.
    """
    seen: Counter[tuple[int, ActionKind]] = Counter()
    halves = (ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
    for action in order:
        is_whole = action.kind is ActionKind.BACKWARD
        for kind in halves if is_whole and splits_backward else (action.kind,):
            yield Action(action.stage, kind, seen[action.stage, kind])
            seen[action.stage, kind] += 1


def quotas_of(schedule: PipelineSchedule) -> tuple[int, ...]:
    """Return, for each stage, how many micro-batches are between forward and backward at once.

    A micro-batch counts from its forward to the end of its backward, weight gradients included.

    Source: Kahn networks need no more credit than the marking of one of their schedules has; see
        Lee and Messerschmitt, "Synchronous Data Flow", Proc. IEEE 75 (1987), section III.
    """
    most: Counter[int] = Counter()
    for order in schedule.orders:
        alive: Counter[int] = Counter()
        for action in order:
            if action.kind is ActionKind.FORWARD:
                alive[action.stage] += 1
                most[action.stage] = max(most[action.stage], alive[action.stage])
            elif action.kind is not ActionKind.INPUT_GRADIENT:
                alive[action.stage] -= 1
    return tuple(most[stage] for stage in range(schedule.num_stages))
