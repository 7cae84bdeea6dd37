"""Cases of the conformance suite of runtimes: plans for the training step of a small MLP.

`CASES` lists them; `compile_case` returns the plan of a case, and `reference_run` its results under
the reference runtime. `testing.runtime` has the suite, which compares other runtimes with these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor

from sbp_aten.pass_options import LossMeaning
from sbp_core.boxing import BoxingBackend
from sbp_core.compile import (
    CompileOptions,
    PhysicalPlan,
    compile_plan,
    offloadable,
)
from sbp_core.graph import InputKind
from sbp_core.infer import PinValue, infer_strategy, pipelined
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.planning import PlanRequest
from sbp_core.runtime import BatchPart, Number, Runtime, Session, StatePiece, state_slots
from sbp_torch.boxing.execute import shard
from sbp_torch.boxing.local import LocalBackend
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceRuntime
from sbp_torch.runtime.single import run_graph
from sbp_torch.testing.programs import (
    OneDeviceStep,
    assert_equal,
    assert_near,
    capture_tiny,
    capture_tiny_forward,
    small_cluster,
)

__all__ = [
    "CASES",
    "RuntimeCase",
    "RuntimeSuitePart",
    "assert_pieces",
    "check_shards",
    "compile_case",
    "compile_forward",
    "forward_loss",
    "local_batch",
    "reference_run",
    "run_steps",
    "shards_of",
]

_REPLICATED: Mapping[str, PinValue] = {
    "batch": "S(0)",
    "activations": "S(0)",
    "parameters": "B",
    "optimizer_states": "B",
    "gradients": "B",
    "updates": "B",
}
_SHARDED = dict.fromkeys(_REPLICATED, "S(0)")
#: `up` split by rows, `down` by columns: a partial sum leaves `down`.
_TENSOR: Mapping[str, PinValue] = {
    "batch": {"*": "S(0)", "tensor": "B"},
    "up.*": {"tensor": "S(0)"},
    "down.weight*": {"tensor": "S(1)"},
    "use:up.weight": {"tensor": "S(0)"},
    "use:down.weight": {"tensor": "S(1)"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeCase:
    """One way to run the step.

    Args:
        mesh_shape, axes: The mesh of ranks 0, 1, 2, ...; positions on the axis `pipe` are stages.
        pins: Fixed layouts (pins): pattern of names, or kind -> SBP; the rest is inferred.
        num_micro_batches, micro_batch_size: Number and size of the micro-batches of a step.
        in_flight: Micro-batches in flight in each stage; None: according to the schedule.
        pipeline: The schedule of stages, which determines the number of chunks.
        stage_ranks: Number of ranks of each stage, if they are not equal.
        boxing_thread: Whether boxing has a separate thread on every rank.
        overlap: Whether collectives are begun early, and waited for when their results are used.
        has_statistics: Whether the model has a batch norm.
        num_rows: Number of rows of the model's embedding; 0 for none.
        num_blocks: Number of residual blocks of the model.
        loss: How the loss of several micro-batches is defined.
        micro_batches_per_update: See `prepare_step`.
        offloads: Whether all states that can be offloaded are in host memory.
    """

    mesh_shape: tuple[int, ...]
    axes: tuple[str, ...]
    pins: Mapping[str, PinValue] = field(default_factory=lambda: _REPLICATED)
    num_micro_batches: int = 1
    micro_batch_size: int = 6
    in_flight: tuple[int, ...] | None = None
    pipeline: str = "1f1b"
    stage_ranks: tuple[int, ...] = ()
    boxing_thread: bool = False
    overlap: bool = False
    has_statistics: bool = False
    num_rows: int = 0
    num_blocks: int = 0
    loss: LossMeaning = LossMeaning.MEAN_OF_MICRO_BATCHES
    micro_batches_per_update: int = 1
    offloads: bool = False

    @property
    def step(self) -> OneDeviceStep:
        """The training step and its batches."""
        return capture_tiny(
            self.num_micro_batches,
            self.micro_batch_size,
            has_statistics=self.has_statistics,
            num_rows=self.num_rows,
            num_blocks=self.num_blocks,
            loss=self.loss,
            micro_batches_per_update=self.micro_batches_per_update,
        )


CASES: Mapping[str, RuntimeCase] = {
    "one rank": RuntimeCase(mesh_shape=(1,), axes=("data",)),
    "data parallel": RuntimeCase(mesh_shape=(2,), axes=("data",)),
    "uneven batch": RuntimeCase(mesh_shape=(4,), axes=("data",), micro_batch_size=5),
    "tensor parallel": RuntimeCase(mesh_shape=(2,), axes=("tensor",), pins=_TENSOR),
    "data and tensor parallel": RuntimeCase(
        mesh_shape=(2, 2), axes=("data", "tensor"), pins=_TENSOR
    ),
    "sharded states": RuntimeCase(mesh_shape=(4,), axes=("data",), pins=_SHARDED),
    "accumulation": RuntimeCase(mesh_shape=(2,), axes=("data",), num_micro_batches=3),
    "pipeline, GPipe": RuntimeCase(
        mesh_shape=(2,), axes=("pipe",), pins={}, num_micro_batches=4, in_flight=(4, 4)
    ),
    "pipeline, 1F1B": RuntimeCase(
        mesh_shape=(2,), axes=("pipe",), pins={}, num_micro_batches=4, in_flight=(2, 1)
    ),
    "pipeline of data parallel stages": RuntimeCase(
        mesh_shape=(2, 2), axes=("pipe", "data"), num_micro_batches=4
    ),
    "boxing threads": RuntimeCase(
        mesh_shape=(2, 2), axes=("data", "tensor"), pins=_TENSOR, boxing_thread=True
    ),
    "pipeline with boxing threads": RuntimeCase(
        mesh_shape=(2, 2), axes=("pipe", "data"), num_micro_batches=4, boxing_thread=True
    ),
    "overlap": RuntimeCase(mesh_shape=(2, 2), axes=("data", "tensor"), pins=_TENSOR, overlap=True),
    "sharded states and overlap": RuntimeCase(
        mesh_shape=(4,), axes=("data",), pins=_SHARDED, num_micro_batches=3, overlap=True
    ),
    "pipeline with overlap": RuntimeCase(
        mesh_shape=(2, 2), axes=("pipe", "data"), num_micro_batches=4, overlap=True
    ),
    "pipeline of chunks": RuntimeCase(
        mesh_shape=(2, 2),
        axes=("pipe", "data"),
        num_micro_batches=4,
        num_blocks=4,
        pipeline="interleaved",
    ),
    "pipeline with weight gradients apart": RuntimeCase(
        mesh_shape=(4,),
        axes=("pipe",),
        pins={},
        num_micro_batches=8,
        num_blocks=4,
        pipeline="zero_bubble",
    ),
    "pipeline that turns back": RuntimeCase(
        mesh_shape=(2, 2),
        axes=("pipe", "tensor"),
        pins=_TENSOR,
        num_micro_batches=4,
        num_blocks=4,
        pipeline="zbv",
    ),
    "pipeline in both directions": RuntimeCase(
        mesh_shape=(2,),
        axes=("pipe",),
        pins={},
        num_micro_batches=4,
        num_blocks=4,
        pipeline="dualpipev",
        overlap=True,
    ),
    "asynchronous pipeline": RuntimeCase(
        mesh_shape=(3, 2),
        axes=("pipe", "data"),
        num_micro_batches=6,
        num_blocks=4,
        pipeline="pipedream",
        has_statistics=True,
        loss=LossMeaning.EACH_MICRO_BATCH,
    ),
    "asynchronous pipeline with overlap": RuntimeCase(
        mesh_shape=(2, 2),
        axes=("pipe", "data"),
        pins={**_REPLICATED, "parameters": "S(0)"},
        num_micro_batches=5,
        num_blocks=4,
        pipeline="pipedream",
        loss=LossMeaning.EACH_MICRO_BATCH,
        overlap=True,
    ),
    "two versions of parameters": RuntimeCase(
        mesh_shape=(2, 2),
        axes=("pipe", "data"),
        num_micro_batches=8,
        num_blocks=4,
        pipeline="2bw",
        has_statistics=True,
        loss=LossMeaning.EACH_MICRO_BATCH,
        micro_batches_per_update=2,
    ),
    "two versions of parameters with overlap": RuntimeCase(
        mesh_shape=(2, 2),
        axes=("pipe", "data"),
        pins={**_REPLICATED, "parameters": "S(0)"},
        num_micro_batches=6,
        num_blocks=4,
        pipeline="2bw",
        loss=LossMeaning.EACH_MICRO_BATCH,
        micro_batches_per_update=2,
        overlap=True,
    ),
    "pipeline of unequal stages": RuntimeCase(
        mesh_shape=(4,), axes=("data",), num_micro_batches=4, num_blocks=4, stage_ranks=(3, 1)
    ),
    "offloaded states": RuntimeCase(
        mesh_shape=(2, 2),
        axes=("pipe", "data"),
        pins=_SHARDED,
        num_micro_batches=2,
        offloads=True,
    ),
    # 16 MB and two states of it: its copies take longer than forward and backward.
    "large table": RuntimeCase(mesh_shape=(1,), axes=("data",), num_rows=350_000),
    "running statistics": RuntimeCase(
        mesh_shape=(2,), axes=("data",), num_micro_batches=3, has_statistics=True
    ),
    "running statistics and boxing threads": RuntimeCase(
        mesh_shape=(2, 2),
        axes=("pipe", "data"),
        pins={**_REPLICATED, "norm.running_*": "S(0)"},
        num_micro_batches=4,
        boxing_thread=True,
        has_statistics=True,
    ),
}


@cache
def compile_case(name: str, in_place_states: bool = True) -> PhysicalPlan:
    """Return the checked plan of a case of `CASES`."""
    case = CASES[name]
    mesh = Placement.grid(case.mesh_shape, case.axes)
    request = PlanRequest(graph=case.step.graph, mesh=mesh, cluster=small_cluster(mesh.size))
    stages = pipelined(
        mesh,
        case.pipeline,
        case.num_micro_batches,
        stage_ranks=case.stage_ranks,
        num_updates=case.step.graph.num_updates,
    )
    strategy = infer_strategy(
        request,
        planner="conformance",
        pins=case.pins,
        stages=stages.stages,
        in_flight=case.in_flight or stages.in_flight,
        orders=stages.orders,
        staleness=stages.staleness,
    )
    if case.offloads:
        names = set(offloadable(case.step.graph))
        storage = {
            name: replace(one, offloaded=name in names) for name, one in strategy.storage.items()
        }
        strategy = replace(strategy, storage=storage)
    options = CompileOptions(
        boxing_thread=case.boxing_thread,
        overlap=case.overlap,
        # Without a lower limit, because the steps of these cases are short.
        piece_s=0.0 if case.overlap else CompileOptions().piece_s,
        in_place_states=in_place_states,
    )
    plan = compile_plan(case.step.graph, strategy, options)
    check(plan)
    return plan


@cache
def compile_forward(name: str, *, batch_size: int, stored_as: str = "") -> PhysicalPlan:
    """Return a plan of forward and loss that stores states as a case of one stage does.

    Args:
        name: Name of the case.
        batch_size: Number of samples in a batch.
        stored_as: Another SBP of all states; empty to store them as in the case.
    """
    case, graph = CASES[name], capture_tiny_forward(batch_size)
    slots = state_slots(compile_case(name))
    pins: dict[str, PinValue] = {
        entry.name: stored_as or str(slots[entry.name].sbp)
        for entry in graph.inputs
        if entry.kind.is_state
    }
    mesh = Placement.grid(case.mesh_shape, case.axes)
    request = PlanRequest(graph=graph, mesh=mesh, cluster=small_cluster(mesh.size))
    plan = compile_plan(graph, infer_strategy(request, planner="conformance", pins=pins))
    check(plan)
    return plan


@cache
def reference_run(name: str) -> tuple[list[Tensor], dict[tuple[str, int], Tensor | Number]]:
    """Return the reference runtime's losses, and every shard after the last step."""
    session = ReferenceRuntime(ReferenceConfig()).start(
        compile_case(name), CASES[name].step.states, LocalBackend()
    )
    return run_steps(session, CASES[name].step), shards_of(session, compile_case(name))


def run_steps(session: Session, step: OneDeviceStep) -> list[Tensor]:
    """Run every batch and return the losses."""
    return [session.step(batch, step.scalars).loss.clone() for batch in step.batches]


def shards_of(session: Session, plan: PhysicalPlan) -> dict[tuple[str, int], Tensor | Number]:
    """Return a copy of every state's shard by (state, rank)."""
    found: dict[tuple[str, int], Tensor | Number] = {}
    for part in plan.ranks:
        for slot in part.slots:
            if InputKind(slot.kind).is_state:
                value = session.shard(slot.name, part.rank)
                found[(slot.name, part.rank)] = (
                    value.clone() if isinstance(value, Tensor) else value
                )
    return found


def assert_pieces(pieces: Iterable[StatePiece], states: Mapping[str, Tensor]) -> None:
    """Check that the pieces of all ranks have every element once, with the values of `states`."""
    found = {name: torch.empty_like(value) for name, value in states.items()}
    times = {name: torch.zeros(value.shape) for name, value in states.items()}
    for piece in pieces:
        place = tuple(slice(start, stop) for start, stop in piece.bounds)
        whole = states[piece.name]
        assert (piece.shape, f"torch.{piece.dtype}") == (tuple(whole.shape), str(whole.dtype))
        found[piece.name][place] = piece.value
        times[piece.name][place] += 1
    for name, value in states.items():
        assert bool((times[name] == 1).all()), f"elements of {name} are owned never or twice"
        assert_equal(name, found[name], value)


def forward_loss(states: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    """Return the loss of the forward of `compile_forward` on one device."""
    size = len(next(iter(batch.values())))
    with torch.no_grad():
        found, _ = run_graph(capture_tiny_forward(size), states, [batch], {})
    return found["loss"]


def local_batch(batch: Mapping[str, Tensor], parts: Mapping[str, BatchPart]) -> dict[str, Tensor]:
    """Return the parts of a batch that some ranks hold."""
    return {
        name: batch[name][[sample for span in part.samples for sample in span]]
        for name, part in parts.items()
    }


def check_shards(
    plan: PhysicalPlan,
    found: Mapping[tuple[str, int], Tensor | Number],
    states: Mapping[str, Tensor | Number],
    tolerance: float,
) -> None:
    """Compare every rank's shard with its slice of the one-device state."""
    for part in plan.ranks:
        for slot in part.slots:
            if not InputKind(slot.kind).is_state:
                continue
            whole = states[slot.name]
            if slot.sbp is not None:
                assert isinstance(whole, Tensor), slot.name
                whole = shard(whole, plan.stages[slot.stage], slot.sbp)[part.rank]
            what = f"{slot.name} of rank {part.rank}"
            assert_near(what, found[(slot.name, part.rank)], whole, tolerance)


class RuntimeSuitePart(ABC):
    """Base class of the parts of the suite: starts sessions of the tested runtime."""

    @abstractmethod
    def make_runtime(self) -> Runtime:
        """Return the runtime; called for every session."""

    def make_backend(self) -> BoxingBackend:
        """Return a backend of one process, not yet open."""
        return LocalBackend()

    def start(
        self, name: str, backend: BoxingBackend | None = None, plan: PhysicalPlan | None = None
    ) -> Session:
        """Start a session with the initial states of a case, and its plan or another plan."""
        return self.make_runtime().start(
            plan or compile_case(name), CASES[name].step.states, backend or self.make_backend()
        )
